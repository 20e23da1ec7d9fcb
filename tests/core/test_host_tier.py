"""Engines of one host find each other's blocks, in shared memory or in files of one directory."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cpuserve.core.kv import cache_folder
from cpuserve.core.kv.cache_folder import FOLDER, SharedMemory
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.tier import TierNeeds
from cpuserve.engine.launch import with_shared_memory
from tests.core.disk_caches import DATA, FINGERPRINT, ONE, entries_of, files, fill, found, load
from tests.helpers.children import child_options
from tests.helpers.fake_executor import fake_config
from tests.helpers.patience import PATIENCE_S
from tests.helpers.special_files import replace_with

pytestmark = pytest.mark.usefixtures("patient_closes")
TOKENS = list(range(32))


def open_tier(directory, *, name="host", finds_new=True, max_bytes=1 << 20):
    needs = TierNeeds((100,) * 8, FINGERPRINT)
    return DiskCache(directory, needs, max_bytes, 3200, name=name, finds_new=finds_new)


@pytest.mark.parametrize("name", ["host", "disk"])
def test_an_engine_finds_what_another_one_writes_later(tmp_path, monkeypatch, name):
    monkeypatch.setattr("cpuserve.core.kv.disk._ABSENT_S", 0.0)
    one, other = open_tier(tmp_path, name=name), open_tier(tmp_path, name=name)
    chain, entries = entries_of(other, TOKENS)
    assert found(other, chain) == [False] * 8
    fill(one, TOKENS)
    one.close()
    assert found(other, chain) == [True] * 8
    assert [bytes(load(other, chain, i)) for i in range(8)] == DATA
    assert not other.wants(entries[0], 0), "it is not written twice"
    salted, _ = entries_of(other, TOKENS, "salt")
    assert found(other, salted) == [False] * 8
    other.close()


def test_a_file_that_did_not_exist_is_not_looked_for_at_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.core.kv.disk._ABSENT_S", 3600.0)
    one, other = open_tier(tmp_path), open_tier(tmp_path)
    chain, _ = entries_of(other, TOKENS)
    assert not other.find(chain, 0, 0)
    fill(one, TOKENS)
    one.close()
    assert found(other, chain) == [False] + [True] * 7
    for index in range(5000):
        other._is_new(tmp_path / str(index))
    assert len(other._absent) <= 4096
    other.close()


def test_blocks_in_shared_memory_are_mapped_read_only_and_checked(tmp_path):
    tier = open_tier(tmp_path)
    chain = fill(tier, TOKENS)
    tier.close()
    data = load(tier, chain, 0)
    assert isinstance(data, memoryview)
    assert data.readonly
    (path,) = [each for each in files(tmp_path) if each.stem == chain.keys[1].hex()]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert load(tier, chain, 1) is None
    assert not path.exists()
    assert bytes(load(tier, chain, 2)) == DATA[2]


@pytest.mark.parametrize("kind", ["empty", "fifo", "large"])
def test_what_is_no_block_in_shared_memory_is_a_miss(tmp_path, kind):
    tier = open_tier(tmp_path)
    chain = fill(tier, TOKENS)
    tier.close()
    (path,) = [each for each in files(tmp_path) if each.stem == chain.keys[1].hex()]
    if kind == "empty":
        path.write_bytes(b"")
    else:
        replace_with(path, kind)
    results = []
    reader = threading.Thread(target=lambda: results.append(load(tier, chain, 1)), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert results == [None]
    assert bytes(load(tier, chain, 2)) == DATA[2]


def test_the_size_of_shared_memory_is_bounded_for_all_engines_together(tmp_path):
    tiers = [open_tier(tmp_path, max_bytes=32 * ONE) for _ in range(2)]
    for turn in range(20):
        for number, tier in enumerate(tiers):
            fill(tier, [number, turn] * 4)
    for tier in tiers:
        tier.close()
    assert 30 <= len(files(tmp_path)) <= 32 + 2 * 2


def test_the_directory_goes_with_its_server(tmp_path):
    memory = SharedMemory()
    path = memory.create(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o700
    tier = open_tier(path)
    fill(tier, TOKENS)
    tier.close()
    memory.clear()
    assert not (path / FOLDER).exists()
    again = open_tier(path)
    fill(again, TOKENS)
    again.close()
    assert len(files(path)) == 8
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_server_goes_at_the_next_start(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from cpuserve.core.kv.cache_folder import SharedMemory\n"
        "memory = SharedMemory(); print(memory.create(Path(sys.argv[1])), flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **child_options()) as server:
        left = server.stdout.readline().strip()
        foreign = tmp_path / "cpuserve-kv-of-another-program"
        foreign.mkdir()
        one = SharedMemory()
        one.create(tmp_path)
        assert Path(left).is_dir(), "its server is alive"
        server.send_signal(signal.SIGKILL)
        server.wait()
    other = SharedMemory()
    other.create(tmp_path)
    assert not Path(left).exists()
    assert foreign.is_dir()
    assert one.path.is_dir()
    assert other.path != one.path
    one.close()
    other.close()


def test_two_servers_that_start_together_keep_their_directories(tmp_path, monkeypatch):
    locks, other = cache_folder.lock_file, SharedMemory()

    def lock_after_the_other(fd, **how):
        monkeypatch.setattr(cache_folder, "lock_file", locks)
        other.create(tmp_path)  # this removes the directory, whose lock nobody has yet
        return locks(fd, **how)

    monkeypatch.setattr(cache_folder, "lock_file", lock_after_the_other)
    one = SharedMemory()
    one.create(tmp_path)
    assert {one.path, other.path} == set(tmp_path.iterdir())
    one.close()
    other.close()


def test_without_shared_memory_the_engines_share_nothing(tmp_path, monkeypatch, caplog):
    configs = [fake_config(shared_prefix_bytes=1 << 30, shares_prefixes=True)] * 2
    monkeypatch.setattr(cache_folder, "_MEMORY", tmp_path)
    memory, made = with_shared_memory(configs)
    assert made[0].shared_prefix_dir == made[1].shared_prefix_dir == str(memory.path)
    assert made[0].shared_prefix_bytes * 18 // 16 <= 1 << 30
    memory.close()
    monkeypatch.setattr("shutil.disk_usage", lambda _: (64 << 20, 60 << 20, 4 << 20))
    memory, made = with_shared_memory(configs)
    assert (memory.path, made) == (None, configs)
    assert "has" in caplog.text

    def refused(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    assert with_shared_memory(configs)[1] is configs
    assert "no space" in caplog.text
    alone = [fake_config()]
    assert with_shared_memory(alone)[1] is alone
