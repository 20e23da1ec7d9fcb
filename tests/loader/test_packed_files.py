"""Files of packed weights: complete or absent, bounded, and never removed while in use."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from cpuserve.base import fault_points
from cpuserve.loader import packed_files
from cpuserve.loader.packed_files import NoRoom, PackedFiles, keep_use
from cpuserve.runtime.expert_memory import ExpertHeat
from tests.helpers.once import Once

SIZE = 3 << 20
LAYOUT = "a" * 64
SOURCES = [f"{number:064x}"[::-1] for number in range(1, 6)]
LIMIT = 3 * SIZE


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch):
    monkeypatch.setattr(packed_files, "FREE_BYTES", 0)


@pytest.fixture
def files(tmp_path):
    return PackedFiles(tmp_path / "cache", LIMIT, LAYOUT, SIZE)


def make(files, source, digest=7, at=None):
    """Make a file that was last used `at` seconds."""
    file = files.create(source, wait=False)
    os.pwrite(file.fd, b"content", SIZE - 7)
    files.commit(file, source, digest)
    file.close()
    if at is not None:
        os.utime(file.path, (at, at))
    return file.path


def test_a_file_is_found_once_it_is_complete(files):
    assert not files.any()
    file = files.create(SOURCES[0], wait=False)
    assert files.open(SOURCES[0]) is None
    files.commit(file, SOURCES[0], 2**64 - 1)
    file.close()
    assert files.any()
    found = files.open(SOURCES[0])
    assert found.digest == 2**64 - 1
    assert os.fstat(found.fd).st_size == SIZE
    found.close()
    assert files.open(SOURCES[1]) is None
    assert files.create(SOURCES[0], wait=False) is None  # it exists


@pytest.mark.parametrize("action", ["EMFILE", "EIO"])
def test_a_file_that_cannot_be_opened_is_reported_and_kept(files, action, monkeypatch):
    path = make(files, SOURCES[0])
    monkeypatch.setattr(fault_points, "_hook", Once("packed.open", action))
    with pytest.raises(OSError, match=os.strerror(getattr(errno, action))):
        files.open(SOURCES[0])
    assert path.exists()
    files.open(SOURCES[0]).close()


def test_another_layout_or_size_finds_nothing(files):
    path = make(files, SOURCES[0])
    other = PackedFiles(files.folder, LIMIT, "b" * 64, SIZE)
    assert not other.any()
    assert other.open(SOURCES[0]) is None
    # The names have only the beginnings of digests.
    alike = PackedFiles(files.folder, LIMIT, LAYOUT[:24] + "b" * 40, SIZE)
    with pytest.raises(OSError, match="other weights"):
        alike.open(SOURCES[0])
    assert not path.exists()


@pytest.mark.parametrize("damage", ["cut", "header", "text", "empty"])
def test_a_damaged_file_is_reported_and_removed(files, damage):
    path = make(files, SOURCES[0])
    with path.open("r+b") as stream:
        if damage in ("cut", "empty"):
            stream.truncate(SIZE - 1 if damage == "cut" else 0)
        else:
            stream.seek(3 if damage == "header" else 80)
            stream.write(b"~")
    with pytest.raises(OSError, match=r"its header is damaged|instead of"):
        files.open(SOURCES[0])
    assert not path.exists()
    assert files.open(SOURCES[0]) is None


def test_the_least_recently_used_files_make_room_but_none_in_use(files):
    paths = [make(files, source, at=100 + n) for n, source in enumerate(SOURCES[:3])]
    files.open(SOURCES[0]).close()  # which is a use
    used = files.open(SOURCES[1])
    os.utime(paths[1], (50, 50))
    make(files, SOURCES[3])
    assert [path.exists() for path in paths] == [True, True, False]
    used.close()


def test_a_file_that_has_no_room_is_refused_with_the_limit(files):
    small = PackedFiles(files.folder, SIZE - 1, LAYOUT, SIZE)
    kept = make(files, SOURCES[0])
    with pytest.raises(NoRoom, match=r"give at least 0\.003"):
        small.create(SOURCES[1], wait=False)
    assert kept.exists()
    users = []
    for source in SOURCES[:3]:
        if source != SOURCES[0]:
            make(files, source)
        users.append(files.open(source))
    with pytest.raises(NoRoom, match=r"files in use take 9\.00 MiB"):
        files.create(SOURCES[4], wait=False)
    assert not list(files.folder.glob(".*"))


def test_a_full_disk_is_left_some_room(files, monkeypatch):
    monkeypatch.setattr(packed_files, "FREE_BYTES", 1 << 60)
    with pytest.raises(NoRoom, match="stays free"):
        files.create(SOURCES[0], wait=False)


def test_one_process_makes_a_file_and_a_dead_ones_rest_is_removed(files):
    file = files.create(SOURCES[0], wait=False)
    assert files.create(SOURCES[0], wait=False) is None  # another one makes it
    rest = file.path
    os.close(file.fd)  # as at the end of its process
    assert rest.exists()
    make(files, SOURCES[1])
    assert not rest.exists()
    assert make(files, SOURCES[0]).exists()


def test_only_our_files_are_removed(files):
    files.folder.mkdir()
    other = files.folder / "notes.weights"
    other.write_bytes(b"x" * LIMIT)
    os.utime(other, (1, 1))
    for source in SOURCES:
        make(files, source)
    assert other.exists()


def write_heat(path, number):
    ExpertHeat(path.with_suffix(".heat")).write(np.full(1000 + number, number, np.float32))


def write_use(path, number):
    keep_use(path, str(number), 1e9)


@pytest.mark.parametrize(
    ("write", "record", "begin"),
    [(write_heat, "heat", b"\0\0\x80?"), (write_use, "use.json", b'{"')],
    ids=["heat", "use"],
)
def test_servers_with_one_file_may_write_its_records_at_once(
    files, write, record, begin, monkeypatch
):
    """Another one writes its whole record just before the first one gives its own its name."""
    path, replace, meanwhile = make(files, SOURCES[0]), Path.replace, [2]

    def after_another(self, target):
        if meanwhile:
            write(path, meanwhile.pop())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", after_another)
    write(path, 1)
    assert not meanwhile
    (found,) = (each for each in files.folder.iterdir() if each != path)
    assert found == path.with_suffix(f".{record}")
    assert found.read_bytes().startswith(begin)


def test_what_a_killed_server_has_written_of_a_record_goes_with_the_file(files, monkeypatch):
    path = make(files, SOURCES[0], at=100)

    def killed(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as death:
        death.setattr(Path, "replace", killed)
        death.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            write_heat(path, 1)
    assert len(list(files.folder.iterdir())) == 2
    for source in SOURCES[1:4]:
        make(files, source)
    assert len(list(files.folder.iterdir())) == 3  # of files of weights


def test_a_full_disk_leaves_the_old_record_and_no_other_file(files, monkeypatch):
    path = make(files, SOURCES[0])
    write_heat(path, 1)

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_heat(path, 2)
    assert ExpertHeat(path.with_suffix(".heat")).read().tolist() == [1.0] * 1001
    assert len(list(files.folder.iterdir())) == 2
