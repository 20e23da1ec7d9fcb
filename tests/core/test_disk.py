"""DiskCache returns the blocks that were written, and never other or damaged data."""

import errno
import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.core.kv import disk
from cpuserve.core.kv.block_file import HEAD, SEED_BYTES
from cpuserve.core.kv.cache_folder import FOLDER, MARK, MARK_TEXT, claim, lock_file
from cpuserve.core.kv.prefix import PrefixChain
from tests.core.disk_caches import (
    DATA,
    FINGERPRINT,
    ONE,
    entries_of,
    files,
    fill,
    found,
    load,
    open_cache,
)
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.special_files import replace_with

pytestmark = pytest.mark.usefixtures("patient_closes")


@pytest.fixture
def made(tmp_path):
    """Return a cache directory with three blocks, and their chain."""
    cache = open_cache(tmp_path / "cache")
    chain = fill(cache, list(range(12)))
    cache.close()
    return tmp_path / "cache", chain


def test_blocks_come_back_after_a_restart(made):
    directory, chain = made
    cache = open_cache(directory)
    again, _ = entries_of(cache, list(range(12)))
    assert again.keys == chain.keys
    assert len(cache) == 3
    assert [load(cache, again, i) for i in range(3)] == DATA[:3]
    assert cache.num_bytes == sum(path.stat().st_size for path in files(directory))
    cache.close()


def test_names_depend_on_tokens_salt_and_directory(made, tmp_path):
    directory, _ = made
    cache = open_cache(directory)
    for tokens, salt in (([1, *range(1, 12)], ""), (list(range(12)), "tenant")):
        chain, entries = entries_of(cache, tokens, salt)
        assert not any(found(cache, chain))
        assert all(cache.wants(entry, 0) for entry in entries)
    elsewhere = open_cache(tmp_path / "elsewhere")
    chain, _ = entries_of(elsewhere, list(range(12)))
    assert not any(found(cache, chain))


def test_a_block_of_another_salt_or_other_tokens_is_refused_even_under_its_name(made):
    """This is what a hash collision would look like."""
    directory, chain = made
    for index, (field, value) in enumerate((("salt", "x"), ("contents", [b"?" * 16] * 3))):
        cache = open_cache(directory)
        before, other = len(cache), PrefixChain()
        other.keys, other.contents = chain.keys, chain.contents
        setattr(other, field, value)
        assert load(cache, other, index) is None
        assert len(cache) == before - 1
        cache.close()


@pytest.mark.parametrize("place", [0, 9, 45, 80, 110, 140, 155, 160, 175, 200, -1])
def test_a_changed_byte_anywhere_is_a_miss_and_the_file_goes(made, caplog, place):
    directory, chain = made
    path = next(p for p in files(directory) if p.stem == chain.keys[1].hex())
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    cache = open_cache(directory)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        assert load(cache, chain, 1) is None
        assert load(cache, chain, 1) is None
    assert len(caplog.records) == 1
    assert not path.exists()
    assert load(cache, chain, 0) == DATA[0]
    assert not cache.find(chain, 1, 0)


@pytest.mark.parametrize("length", [0, 1, HEAD.size - 1, HEAD.size, HEAD.size + 20, -1])
def test_a_torn_file_is_a_miss(made, length):
    directory, chain = made
    for path in files(directory):
        path.write_bytes(path.read_bytes()[:length])
    cache = open_cache(directory)
    assert all(load(cache, chain, i) is None for i in range(3))
    assert not files(directory)
    assert cache.num_bytes == 0


def test_only_the_first_broken_file_is_reported(made, caplog):
    directory, chain = made
    for path in files(directory):
        path.write_bytes(b"?")
    cache = open_cache(directory)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        assert all(load(cache, chain, i) is None for i in range(3))
    assert len(caplog.records) == 1


def test_files_of_another_model_are_kept_and_count(made):
    directory, chain = made
    other = open_cache(directory, fingerprint=bytes(32))
    assert len(other) == 0
    assert not other.find(chain, 0, 0)
    assert other.num_bytes > 300
    assert len(open_cache(directory)) == 3


def test_a_foreign_file_under_a_good_name_is_a_miss(made):
    directory, chain = made
    foreign = directory / FOLDER / FINGERPRINT.hex()[:32]
    other = open_cache(directory, fingerprint=FINGERPRINT[:16] + bytes(16))
    assert other._directory == foreign  # the folder has only half of the fingerprint in its name
    assert load(other, chain, 0) is None


def test_a_block_that_another_process_removed_is_a_miss(made):
    directory, chain = made
    cache = open_cache(directory)
    for path in files(directory):
        path.unlink()
    assert cache.find(chain, 0, 0)
    assert load(cache, chain, 0) is None
    assert not cache.find(chain, 0, 0)


def test_a_directory_that_was_emptied_is_filled_again(made, caplog):
    directory, chain = made
    cache = open_cache(directory)
    shutil.rmtree(directory)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        fill(cache, [1] * 4)
        cache.close()
    assert not caplog.records
    again = open_cache(directory)
    assert (len(again), again.seed) == (1, cache.seed)
    assert not again.find(chain, 0, 0)
    assert cache.num_bytes == again.num_bytes == files(directory)[0].stat().st_size


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("cpuserve.core.kv.disk.os.link", link)
    cache = open_cache(tmp_path)
    chain = fill(cache, [1] * 4)
    cache.close()
    assert load(open_cache(tmp_path), chain, 0) == DATA[0]
    names = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert names == {FINGERPRINT.hex()[:32], "seed", MARK}


def test_directory_and_files_are_for_the_owner_only(made):
    directory, _ = made
    folder = directory / FOLDER
    for path in [folder, folder / MARK, folder / "seed", *folder.iterdir(), *files(directory)]:
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "link"])
def test_what_is_no_block_file_is_neither_waited_for_nor_read(made, kind):
    directory, chain = made
    cache, path = open_cache(directory), directory / FOLDER / FINGERPRINT.hex()[:32]
    path /= f"{chain.keys[1].hex()}.kv"
    replace_with(path, kind)
    results = []
    reader = threading.Thread(target=lambda: results.append(load(cache, chain, 1)), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert results == [None]
    assert not os.path.lexists(path)
    assert [load(cache, chain, index) for index in (0, 2)] == [DATA[0], DATA[2]]


@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
@pytest.mark.parametrize("name", ["seed", MARK])
def test_what_is_no_seed_or_mark_is_neither_waited_for_nor_read(made, name, kind):
    directory, _ = made
    path = directory / FOLDER / name
    replace_with(path, kind)
    results = []

    def start():
        try:
            results.append(open_cache(directory).seed)
        except ConfigError as error:
            results.append(error)

    starter = threading.Thread(target=start, daemon=True)
    starter.start()
    starter.join(PATIENCE_S)
    (result,) = results
    if name == MARK:
        assert "contains files of another program" in str(result)
    else:
        assert result == path.read_bytes()
        assert len(result) == SEED_BYTES


@pytest.mark.parametrize("torn", [b"", b"short"])
def test_a_torn_seed_is_replaced_and_an_old_temporary_file_removed(made, caplog, torn):
    directory, _ = made
    (directory / FOLDER / "seed").write_bytes(torn)
    left = directory / FOLDER / FINGERPRINT.hex()[:32] / ".1-0123abcd.tmp"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    with caplog.at_level(logging.WARNING, "cpuserve"):
        cache = open_cache(directory)
    assert len(cache.seed) == SEED_BYTES
    assert "torn" in caplog.text
    assert not left.exists()
    assert open_cache(directory).seed == cache.seed


@pytest.mark.parametrize("holds", [False, True])
def test_a_scan_before_a_new_file_is_locked_costs_no_block(made, monkeypatch, holds):
    """The other process has removed the file, or is about to: `holds`, it has locked it."""
    directory, _ = made
    cache = open_cache(directory)
    opened, scans = os.open, []

    def scanned(path, flags, mode=0o777):
        fd = opened(path, flags, mode)
        if not scans and str(path).endswith(".tmp"):
            scans.append(path)
            if holds:
                other = opened(path, os.O_WRONLY)
                assert lock_file(other)
                threading.Timer(0.1, lambda: (path.unlink(), os.close(other))).start()
            else:
                monkeypatch.setattr("cpuserve.core.kv.disk.os.open", opened)
                open_cache(directory).close()
                assert not path.exists()
        return fd

    monkeypatch.setattr("cpuserve.core.kv.disk.os.open", scanned)
    chain = fill(cache, list(range(50, 58)))
    cache.close()
    assert len(scans) == 1
    assert found(cache, chain) == [True, True]
    assert not list(directory.glob("**/*.tmp"))


def test_the_file_of_a_writer_that_was_killed_is_removed_at_the_next_start(made):
    directory, _ = made
    left = directory / FOLDER / FINGERPRINT.hex()[:32] / ".1-0123abcd.tmp"
    left.write_bytes(b"x")
    open_cache(directory)
    assert not left.exists()


def test_an_unusable_directory_is_an_oserror(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_cache(tmp_path / "file" / "cache")


def test_a_file_that_cannot_be_read_just_now_still_counts(made, monkeypatch):
    directory, chain = made
    cache = open_cache(directory)
    before = cache.num_bytes

    def fail(path, flags):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("os.open", fail)
        assert load(cache, chain, 0) is None
    assert cache.num_bytes == before
    assert load(cache, chain, 0) == DATA[0]


def test_what_goes_while_others_files_are_looked_for_is_not_found_again(made, monkeypatch):
    directory, chain = made
    cache = open_cache(directory)
    scan = cache._files._scan

    def meanwhile():
        found = list(scan())
        next(path for path in files(directory) if path.stem == chain.keys[1].hex()).unlink()
        assert load(cache, chain, 1) is None
        return found

    monkeypatch.setattr(cache._files, "_scan", meanwhile)
    cache._rescan()
    assert found(cache, chain) == [True, False, True]
    assert len(cache) == cache.num_blocks == 2
    assert cache.num_bytes == sum(path.stat().st_size for path in files(directory))


def test_the_engine_waits_for_no_lock_while_files_are_looked_for_or_removed(made, monkeypatch):
    cache = open_cache(made[0])
    lock, scan, unlink = cache._files._lock, cache._files._scan, Path.unlink
    seen = []

    def look(place):
        seen.append(place)
        assert not lock.locked()

    def scanned():
        for item in scan():
            look("scan")
            yield item

    def gone(path, **options):
        look("unlink")
        unlink(path, **options)

    def in_order(items):
        for item in disk._unhurried(sorted(items)):
            look("list")
            yield item

    monkeypatch.setattr(cache._files, "_scan", scanned)
    monkeypatch.setattr(disk, "_in_order", in_order)
    monkeypatch.setattr(Path, "unlink", gone)
    cache._rescan()
    cache._files.trim(ONE)
    assert seen == ["scan"] * 3 + ["list"] * 3 + ["unlink"] * 2
    assert len(cache) == 1


def test_what_is_read_while_files_are_looked_for_is_the_most_recently_used(made, monkeypatch):
    directory, chain = made
    cache = open_cache(directory)
    scan = cache._files._scan

    def meanwhile():
        found = list(scan())
        assert load(cache, chain, 0) == DATA[0]
        assert cache.find(chain, 0, 0)
        return found

    monkeypatch.setattr(cache._files, "_scan", meanwhile)
    cache._rescan()
    cache._files.trim(ONE)
    assert found(cache, chain) == [True, False, False]


def test_long_lists_of_files_are_sorted_in_parts():
    rng = random.Random(0)
    items = [(rng.randrange(900), i, Path(f"{i}"), 1) for i in range(5000)]
    rng.shuffle(items)
    assert list(disk._in_order(iter(items))) == sorted(items)
    assert list(disk._in_order(iter([]))) == []


def test_own_blocks_are_counted_as_they_come_and_go(made):
    directory, chain = made
    other = open_cache(directory, fingerprint=bytes(32))
    fill(other, [1] * 4)
    other.close()
    cache = open_cache(directory)
    assert (len(cache), cache.num_blocks) == (3, 4)
    fill(cache, [5] * 8)
    cache.close()
    assert (len(cache), cache.num_blocks) == (5, 6)
    next(path for path in files(directory) if path.stem == chain.keys[0].hex()).write_bytes(b"?")
    assert load(cache, chain, 0) is None
    assert (len(cache), cache.num_blocks) == (4, 5)


def test_reporting_sizes_looks_at_no_file(made):
    """The engine thread reports sizes between steps, so it must not wait for the disk."""
    cache = open_cache(made[0])
    cache._files._sizes = None
    assert len(cache) == 3
    assert cache.num_bytes > 300


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU masks on this system")
def test_a_cache_made_by_a_compute_thread_does_not_write_on_its_cpu(tmp_path):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        cache = open_cache(tmp_path, cpus=sorted(allowed))
        wait_until(lambda: os.sched_getaffinity(cache._thread.native_id) == allowed)
    finally:
        os.sched_setaffinity(0, allowed)


FOREIGN = ("draft.tmp", "store.kv", ".1-0123abcd.tmp", "ab" * 32 + ".kv", "seed", "notes")


def write_foreign(folder, names=FOREIGN):
    """Old files of another program, 2 MB each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"?" * 2_000_000)
        os.utime(folder / name, (1, 1))
    return [folder / name for name in names]


def fill_beyond_its_size(directory):
    """Write eight blocks to a cache that holds at most two."""
    cache = open_cache(directory, max_bytes=2 * ONE)
    fill(cache, list(range(32)))
    cache.close()
    cache = open_cache(directory, max_bytes=2 * ONE)
    cache._rescan()
    assert (cache.num_blocks, cache.num_bytes) == (2, 2 * ONE)
    cache.close()


def test_files_of_other_programs_beside_the_cache_are_left_alone(tmp_path):
    model = FINGERPRINT.hex()[:32]
    folders = [".", "work", model, "replica-0", f"replica-0/{model}", f"replica-0/{FOLDER}/{model}"]
    foreign = [path for folder in folders for path in write_foreign(tmp_path / folder)]
    fill_beyond_its_size(tmp_path)
    assert all(path.stat().st_size == 2_000_000 for path in foreign)


def test_files_of_other_programs_in_the_caches_folder_are_left_alone(tmp_path):
    model = claim(tmp_path) / FINGERPRINT.hex()[:32]
    foreign = write_foreign(tmp_path / FOLDER, ["draft.tmp", "store.kv", "notes"])
    foreign += write_foreign(model, ["draft.tmp", "store.kv", "notes"])
    foreign += write_foreign(tmp_path / FOLDER / "work")
    outside = write_foreign(tmp_path / "outside")
    (tmp_path / FOLDER / ("0" * 32)).symlink_to(tmp_path / "outside")
    link = model / ("cd" * 32 + ".kv")
    link.symlink_to(outside[0])
    fill_beyond_its_size(tmp_path)
    assert all(path.stat().st_size == 2_000_000 for path in (*foreign, *outside))
    assert link.is_symlink()


def test_a_folder_with_foreign_files_where_the_cache_would_be_is_refused(tmp_path):
    foreign = write_foreign(tmp_path / FOLDER)
    with pytest.raises(
        ConfigError, match=r"files of another program .*--prefix-cache-dir to another directory"
    ):
        open_cache(tmp_path)
    (tmp_path / FOLDER / MARK).write_text("Signature: of another program")
    with pytest.raises(ConfigError, match="another program"):
        open_cache(tmp_path)
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {MARK, *FOREIGN}
    assert all(path.stat().st_size == 2_000_000 for path in foreign)


def test_a_file_where_the_cache_would_be_is_refused(tmp_path):
    (tmp_path / FOLDER).write_text("mine")
    with pytest.raises(ConfigError, match="not a directory"):
        open_cache(tmp_path)
    assert (tmp_path / FOLDER).read_text() == "mine"


def test_an_empty_folder_is_taken_also_while_others_take_it(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f".mark-{'0' * 16}.tmp").write_bytes(MARK_TEXT[:3])
    assert claim(tmp_path) == claim(tmp_path) == tmp_path / FOLDER
    assert (tmp_path / FOLDER / MARK).read_bytes() == MARK_TEXT


def test_the_mark_tells_backup_programs_that_this_is_a_cache(tmp_path):
    """The Cache Directory Tagging Specification defines the first 43 bytes of CACHEDIR.TAG."""
    tag = (claim(tmp_path) / "CACHEDIR.TAG").read_bytes()
    assert tag[:43] == b"Signature: 8a477f597d28d172789f06886806bc55"


def test_foreign_files_in_a_directory_that_was_emptied_end_the_writing(made, caplog):
    directory, _ = made
    cache = open_cache(directory)
    shutil.rmtree(directory)
    foreign = write_foreign(directory / FOLDER)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        fill(cache, [1] * 4)
        cache.close()
    assert len(caplog.records) == 1
    assert "another program" in caplog.text
    assert all(path.stat().st_size == 2_000_000 for path in foreign)
