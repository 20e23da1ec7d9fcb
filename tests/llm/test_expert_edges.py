"""Pools of experts at their edges: the least and the most memory, bad records, slow and bad reads.

What a pool does inside its limits is in test_expert_pool.py.
"""

import errno
import json
import math
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from cpuserve import LLM
from cpuserve.base import fault_points
from cpuserve.base.errors import StartupError
from cpuserve.engine.ipc import Abort
from cpuserve.loader import packed_files
from cpuserve.runtime import native, packed_cache
from tests.helpers.patience import wait_until
from tests.helpers.tiny import tiny_model
from tests.llm.test_expert_pool import (
    add,
    all_prompts,
    config_of,
    of_experts,
    parts,
    remove_heat,
    run,
    with_engine,
)
from tests.llm.test_expert_streams import disk, of_half, steps, stream, until_read

__all__ = ["disk"]  # a fixture


pytestmark = pytest.mark.usefixtures("folder")


# --- the memory of a pool -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_one_expert_of_each_kind_is_enough_and_a_byte_less_is_not(family):
    config, sizes = config_of(family)
    expected = with_engine(config, all_prompts)
    least = sizes["others"] + sizes["least"]

    def use(core):
        return all_prompts(core), parts(core)

    found, counts = with_engine(replace(config, weight_memory_bytes=least), use)
    assert found == expected
    assert counts["bytes"] == sizes["least"]
    with pytest.raises(StartupError, match=r"is too little.*; give at least [\d.]+$") as refused:
        with_engine(replace(config, weight_memory_bytes=least - 1), parts)
    assert "\n" not in str(refused.value)
    named = float(str(refused.value).rsplit(" ", 1)[1])
    assert least <= named * 2**30 < least + 2**30 / 1000  # as exact as the option is shown


def test_the_memory_that_a_refusal_names_is_enough():
    """The experts of this model are much larger than the rest of it."""
    path = tiny_model("qwen3-moe", dtype="bfloat16", moe_intermediate_size=16384)
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}

    def config(size):
        with LLM(str(path), executor="native", weights_on_disk=size, **sizes) as llm:
            return llm.config

    with pytest.raises(StartupError, match=r"give at least --weights-on-disk [\d.]+$") as refused:
        config("1KiB")
    named = config(str(refused.value).rsplit(" ", 1)[1])
    found = with_engine(named, parts)
    least = found["others"] + found["least"]
    assert named.weight_memory_bytes < least * 1.1 + (2 << 20)


def test_memory_for_more_than_the_file_holds_each_expert_once():
    config, sizes = config_of()
    expected = with_engine(config, all_prompts)

    def use(core):
        return all_prompts(core), all_prompts(core), parts(core)

    found, again, counts = with_engine(replace(config, weight_memory_bytes=1 << 50), use)
    assert found == again == expected
    assert counts["slots"] == counts["units"] == sizes["units"]
    assert counts["bytes"] == sizes["bytes"]
    assert counts["misses"] <= counts["units"]


# --- the records of earlier starts ----------------------------------------------------------------

BAD = ("empty", "cut", "of another model", "not numbers", "below zero", "huge", "fifo", "folder")


def spoil(file, kind):
    """Put something else in the place of the record of an earlier start."""
    heat = np.frombuffer(file.read_bytes(), np.float32)
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":
        with file.open("wb") as stream:
            stream.truncate(1 << 40)  # a hole
    else:
        content = {
            "empty": b"",
            "cut": heat.tobytes()[:-3],
            "of another model": np.ones(heat.size + 1, np.float32).tobytes(),
            "not numbers": np.full(heat.size, math.nan, np.float32).tobytes(),
            "below zero": (-1 - heat).tobytes(),
        }
        file.write_bytes(content[kind])


@pytest.mark.parametrize("kind", BAD)
def test_a_start_ignores_a_record_of_uses_that_is_not_one(folder, kind):
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.5)
    expected = with_engine(config, all_prompts)
    (file,) = folder.glob("*.heat")
    spoil(file, kind)
    if kind != "of another model":
        assert packed_files.earlier_use(config.model_path) == {}

    def use(core):
        cold = not core.executor.native.expert_heat.any()
        return cold, all_prompts(core)

    assert with_engine(config, use) == (True, expected)
    if kind != "folder":  # the next start has a record again
        assert file.stat().st_size == 4 * sizes["units"]


@pytest.mark.parametrize("bad", ["rate", "fifo", "huge"])
def test_a_record_of_a_model_that_is_not_one_is_ignored(folder, bad):
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.5)
    with_engine(config, all_prompts)
    assert packed_files.earlier_use(config.model_path)["expert_rate"] > 0
    (file,) = folder.glob("*.use.json")
    if bad == "rate":
        file.write_text(json.dumps({"model": config.model_path, "rate": math.inf}))
    elif bad == "huge":
        with file.open("ab") as stream:
            stream.truncate(1 << 40)
    else:
        file.unlink()
        os.mkfifo(file)
    assert packed_files.earlier_use(config.model_path) == {}


# --- reads ----------------------------------------------------------------------------------------


def test_a_file_that_can_never_be_read_back_is_written_once(monkeypatch):
    """For example because the file system opens files for direct reads, and then refuses these."""
    config, sizes = config_of()
    written = []

    def hook(point, size):
        written.extend([1] * (point == "packed.allocate"))
        assert len(written) < 4
        if point == "expert.read":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return size

    monkeypatch.setattr(fault_points, "_hook", hook)
    with pytest.raises(StartupError, match=r"cannot be read back: .*Invalid argument.*CPUSERVE_CA"):
        with_engine(of_experts(config, sizes, 0.3), parts)
    assert len(written) == 1  # the file of the start before was not readable either


def damage(file, at):
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"other")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("unreadable", "Permission denied"),
        ("header", "its header is damaged"),
        ("content", "its content is damaged"),
    ],
)
def test_a_file_that_can_be_neither_used_nor_replaced_ends_the_start(folder, monkeypatch, bad, why):
    """For example because another user owns it in a directory that both may write to."""
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.3)
    with_engine(config, parts)
    (file,) = folder.glob("*.weights")
    if bad != "unreadable":
        damage(file, 4 if bad == "header" else packed_files.HEADER_BYTES)
    opened, unlink = [], Path.unlink

    def hook(point, size):
        opened.extend([1] * (point == "packed.open"))
        assert len(opened) < 5
        if point == "packed.open" and bad == "unreadable":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return size

    def of_another_user(path, **options):
        if path == file:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **options)

    monkeypatch.setattr(fault_points, "_hook", hook)
    monkeypatch.setattr(Path, "unlink", of_another_user)
    with pytest.raises(StartupError, match=rf"neither used nor made anew: .*{why}.*CPUSERVE_CACHE"):
        with_engine(config, parts)
    assert len(opened) == 1 + packed_cache.MOST_UNUSABLE


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_a_read_that_the_system_cannot_do_now_ends_requests_with_the_reason(
    folder, monkeypatch, number
):
    # A guess that cannot be read costs nothing: it is read again when it is needed.
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.2)
    expected = with_engine(config, all_prompts)
    remove_heat(folder)  # reads of a warm start may go on, and cost nothing if they fail
    fails = []

    def hook(point, size):
        if point == "expert.read" and fails:
            raise OSError(number, os.strerror(number))
        return size

    monkeypatch.setattr(fault_points, "_hook", hook)

    def use(core):
        # A read that fails before its step needs it is tried again, and on a busy machine any may.
        fails.append(True)
        found = all_prompts(core)
        fails.clear()
        return found, all_prompts(core)

    found, again = with_engine(config, use)
    assert again == expected
    why = f"the model's weights cannot be read from the disk: {os.strerror(number)}"
    assert {error for _, error in found.values()} == {why}


@pytest.mark.parametrize("number", [errno.EINTR, 0])
def test_reads_that_are_interrupted_or_one_sector_long_change_no_bit(monkeypatch, number):
    config, sizes = config_of()
    config = of_experts(config, sizes, 0.2)
    expected = with_engine(config, all_prompts)
    calls = []

    def hook(point, size):
        if point != "expert.read":
            return size
        calls.append(size)
        if number and len(calls) % 2:
            raise OSError(number, os.strerror(number))
        return min(size, 4096)

    monkeypatch.setattr(fault_points, "_hook", hook)
    assert with_engine(config, all_prompts) == expected
    assert max(calls) > 4096


# --- ends while reads go on -----------------------------------------------------------------------


def test_an_engine_closes_after_the_reads_in_progress_and_begins_no_more(tmp_path, disk):
    _, half = of_half(tmp_path)

    def use(core):
        stream(core, 1, 5)
        until_read(core)
        disk.open.clear()
        stream(core, 2, 300, 40)
        steps(core, 2)
        wait_until(lambda: disk.waiting > 0)
        disk.before = disk.waiting
        disk.timer = threading.Timer(1.0, disk.open.set)
        disk.timer.start()

    with_engine(half, use)
    disk.timer.join()
    assert not disk.late
    assert 0 < disk.before <= disk.waiting <= 8  # the readers of a pool


@pytest.mark.parametrize("same", [False, True])
def test_the_slot_of_a_parked_request_goes_to_one_with_another_beginning(
    tmp_path, disk, monkeypatch, same
):
    """Both have the same tokens at the same places in this chunk, after blocks of the cache."""
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    path = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3-moe", num_hidden_layers=4), path)
    for file in path.glob("*.safetensors"):  # tokens attend, and experts add nothing
        weights = load_file(file)
        for name in weights:
            weights[name][...] *= "down_proj" not in name
        save_file(weights, file)
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(str(path), executor="native", weights_on_disk="64MiB", **sizes) as llm:
        whole = llm.config
    half = of_experts(whole, with_engine(whole, parts), 0.5)
    beginnings = [[7 + 2 * n] * 32 for n in range(2)]  # nothing of the stream below
    parked, other = ([*beginning, *[300] * 4] for beginning in beginnings)
    asked = parked if same else other

    def use(core):
        for number, beginning in enumerate(beginnings):
            add(core, 20 + number, [*beginning, 11], max_tokens=1)
        run(core)
        stream(core, 1, 5)
        until_read(core)
        disk.open.clear()
        add(core, 2, parked)
        steps(core, 1)
        slot = core.scheduler.requests[2].slot
        assert core.scheduler.parked.ids == {2}
        core.handle(Abort([2]))
        add(core, 3, asked)
        tokens, _ = steps(core, 1)
        assert not tokens[3]  # it waits for the same experts
        assert core.scheduler.requests[3].slot == slot
        assert core.scheduler.requests[3].cached_tokens == 32
        disk.open.set()
        core.handle(Abort([1]))
        found = run(core)[3]
        assert parts(core)["held"] == 0
        return found

    def alone(core):
        add(core, 3, asked)
        return run(core)[3]

    assert with_engine(half, use) == with_engine(whole, alone)
