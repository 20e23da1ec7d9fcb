"""Resident pages of a mapped file after its parts have been released."""

import mmap
from pathlib import Path

import pytest

from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.mapped import FAULT_AROUND, MappedFile
from tests.helpers.gguf_file import ARRAY, STRING, gguf
from tests.helpers.patience import wait_until

PAGEMAP = Path("/proc/self/pagemap")
PRESENT = 1 << 63
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux's pagemap")


def resident(file, begin, end):
    """Number of resident pages in this process's mapping of `file`, from byte `begin` to `end`."""
    first = (file.view(0, 1).ctypes.data + begin) // PAGE
    count = -(-(end - begin) // PAGE)
    with PAGEMAP.open("rb") as pages:
        pages.seek(8 * first)
        data = pages.read(8 * count)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(bool(word & PRESENT) for word in words)


def test_a_tensor_goes_with_the_neighbours_that_were_mapped_along(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    file = MappedFile(path, "file")
    begin, end = 300_000, 500_000
    view = file.view(begin, end - begin)

    def all_is_there():
        return int(view.sum()) > 0 and resident(file, begin, end) == -(-(end - begin) // PAGE)

    wait_until(all_is_there, "pages do not stay in memory")  # the system may take some at any time
    file.release(begin, end - begin)
    assert resident(file, begin - FAULT_AROUND, end + FAULT_AROUND) == 0
    assert view[0] == begin % 256
    file.release(0, file.size)
    assert resident(file, 0, file.size) == 0


def test_an_opened_gguf_keeps_nothing_of_its_vocabulary(tmp_path):
    path = tmp_path / "model.gguf"
    words = [f"word number {i}" for i in range(20_000)]
    path.write_bytes(gguf([("tokenizer.ggml.tokens", ARRAY, (STRING, words))]))
    file = GgufFile(path)
    assert resident(file.file, 0, file.file.size) == 0
    assert file.value("tokenizer.ggml.tokens") == words
