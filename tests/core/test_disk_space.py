"""The size of a DiskCache: what goes when it is reached, and what a full disk ends."""

import errno
import logging
import os
import threading
import time
from unittest import mock

import pytest

from cpuserve.core.kv.block_file import HEAD
from tests.core.disk_caches import DATA, ONE, entries_of, files, fill, found, load, open_cache
from tests.helpers.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("patient_closes")
FDOPEN = os.fdopen


def test_the_longest_unused_goes_when_the_size_is_reached(tmp_path):
    one = HEAD.size + 16 + 100
    cache = open_cache(tmp_path, max_bytes=4 * one)
    first = fill(cache, [1] * 8)
    cache.close()
    for age, key in zip((50, 90), first.keys, strict=True):
        path = next(p for p in files(tmp_path) if p.stem == key.hex())
        os.utime(path, (time.time() - age,) * 2)
    cache = open_cache(tmp_path, max_bytes=4 * one)
    fill(cache, [2] * 12)
    cache.close()
    assert found(cache, first) == [True, False]
    assert len(files(tmp_path)) == 4
    cache = open_cache(tmp_path, max_bytes=4 * one)
    assert load(cache, first, 0) == DATA[0]
    fill(cache, [3] * 12)
    cache.close()
    assert cache.find(first, 0, 0), "the most recently read block was removed"
    assert cache.num_bytes == 4 * one
    small = open_cache(tmp_path, max_bytes=one - 1)
    fill(small, [4] * 4)
    small.close()
    assert files(tmp_path) == []


def test_too_much_waiting_is_not_kept(tmp_path, monkeypatch):
    cache, go_on = open_cache(tmp_path), threading.Event()
    monkeypatch.setattr(cache, "_write", lambda *_: go_on.wait())
    _, entries = entries_of(cache, list(range(400)))
    taken = [cache.put(entry, 0, DATA[0]) for entry in entries]
    assert 32 <= sum(taken) <= 33
    assert taken[0]
    assert not taken[-1]
    assert not cache.ready(0)
    assert cache.wants(entries[-1], 0)
    assert not cache.wants(entries[0], 0)
    go_on.set()
    cache.close()


def test_a_block_larger_than_the_memory_to_wait_in_is_written(tmp_path):
    cache = open_cache(tmp_path, queue_bytes=99)
    chain = fill(cache, list(range(12)))
    cache.close()
    assert [load(cache, chain, i) for i in range(3)] == DATA[:3]


def test_a_full_disk_ends_writing_with_one_line(tmp_path, monkeypatch, caplog):
    cache = open_cache(tmp_path)
    before = fill(cache, [1] * 8)
    wait_until(lambda: cache.find(before, 1, 0))

    def full(fd, mode):
        if mode == "rb":  # a full disk can be read
            return FDOPEN(fd, mode)
        os.close(fd)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cpuserve.core.kv.disk.os.fdopen", full)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        _, entries = entries_of(cache, list(range(12)))
        for entry in entries:
            cache.put(entry, 0, DATA[0], 1.0)
        cache.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not cache.wants(entries[0], 0)
    assert not cache.find(before, 0, 0), "the oldest block was not removed to free space"
    assert load(cache, before, 1) == DATA[1]
    assert not list(tmp_path.glob("**/*.tmp"))


class FullDisk:
    """Replaces os.fdopen; the simulated disk is full when it has `room` block files."""

    def __init__(self, directory, room):
        self.directory, self.room, self.refused = directory, room, 0

    def __call__(self, fd, mode):
        if len(files(self.directory)) >= self.room:
            os.close(fd)
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return FDOPEN(fd, mode)


def test_a_disk_smaller_than_the_size_goes_on_with_the_latest(tmp_path, monkeypatch, caplog):
    disk = FullDisk(tmp_path, 3)
    cache = open_cache(tmp_path)
    monkeypatch.setattr("cpuserve.core.kv.disk.os.fdopen", disk)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        chain = fill(cache, list(range(20)))
        cache.close()
    assert not caplog.records
    assert found(cache, chain) == [False, False, True, True, True]
    assert disk.refused == 1, "the limit was not lowered to what fits on the disk"
    assert cache.num_bytes == sum(path.stat().st_size for path in files(tmp_path))
    _, entries = entries_of(cache, [9] * 4)
    assert cache.wants(entries[0], 0)


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.EIO])
def test_a_disk_full_of_other_things_or_broken_is_given_up(tmp_path, monkeypatch, caplog, error):
    cache = open_cache(tmp_path)

    def full(fd, mode):
        os.close(fd)
        raise OSError(error, "no")

    monkeypatch.setattr("cpuserve.core.kv.disk.os.fdopen", full)
    _, entries = entries_of(cache, [1] * 4)
    with caplog.at_level(logging.WARNING, "cpuserve"):
        cache.put(entries[0], 0, DATA[0])
        cache.close()
    assert len(caplog.records) == 1
    assert not cache.wants(entries[0], 0)


def test_a_failure_of_another_kind_ends_writing_and_nobody_waits_for_it(
    tmp_path, monkeypatch, caplog
):
    cache = open_cache(tmp_path, queue_bytes=1)  # room for one block at a time
    monkeypatch.setattr(type(cache._format), "pack", mock.Mock(side_effect=MemoryError))
    _, entries = entries_of(cache, list(range(12)))
    with caplog.at_level(logging.WARNING, "cpuserve"):
        assert all(cache.put(entry, 0, DATA[0], PATIENCE_S) for entry in entries)
        cache.close()
    assert [r.message for r in caplog.records if "(MemoryError)" in r.message]
    assert len(caplog.records) == 1
    assert not cache.wants(entries[0], 0)


def test_servers_on_one_directory_share_its_size(tmp_path):
    caches = [open_cache(tmp_path, max_bytes=32 * ONE) for _ in range(3)]
    for turn in range(20):
        for number, cache in enumerate(caches):
            fill(cache, [number, turn] * 4)
    for cache in caches:
        cache.close()
    assert 32 <= len(files(tmp_path)) <= 32 + 3 * 2


def test_what_is_too_much_goes_at_the_start_and_the_longest_unused_first(tmp_path):
    cache = open_cache(tmp_path)
    chain = fill(cache, list(range(32)))
    cache.close()
    for index, key in enumerate(chain.keys):
        path = next(p for p in files(tmp_path) if p.stem == key.hex())
        os.utime(path, (1000 + index,) * 2)
    cache = open_cache(tmp_path, max_bytes=3 * ONE + 5)
    assert found(cache, chain) == [False] * 5 + [True] * 3
    assert len(files(tmp_path)) == len(cache) == cache.num_blocks == 3
