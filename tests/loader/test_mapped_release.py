"""What a mapped file keeps resident after its parts have been let go."""

import re
from pathlib import Path

import pytest

from cpuserve.loader.gguf import GgufFile
from cpuserve.loader.mapped import MappedFile
from tests.helpers.gguf_file import ARRAY, STRING, gguf

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's smaps")


def resident(path):
    """Bytes of `path` that are mapped in memory."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss:\s+(\d+) kB", text)
    return 1024 * sum(map(int, found))


def test_a_tensor_goes_with_the_neighbours_that_were_mapped_along(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    file = MappedFile(path, "file")
    view = file.view(300_000, 200_000)
    assert int(view.sum()) > 0
    assert resident(path) >= 200_000
    file.release(300_000, 200_000)
    assert resident(path) == 0
    assert view[0] == 300_000 % 256
    file.release(0, file.size)
    assert resident(path) == 0


def test_an_opened_gguf_keeps_nothing_of_its_vocabulary(tmp_path):
    path = tmp_path / "model.gguf"
    words = [f"word number {i}" for i in range(20_000)]
    path.write_bytes(gguf([("tokenizer.ggml.tokens", ARRAY, (STRING, words))]))
    file = GgufFile(path)
    assert resident(path) == 0
    assert file.value("tokenizer.ggml.tokens") == words
