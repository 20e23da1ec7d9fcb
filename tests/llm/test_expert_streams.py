"""Streams beside a request that waits for experts: they wait for no read but their own."""

import errno
import os
import threading
import time
from collections import Counter

import numpy as np
import pytest

from cpuserve import LLM
from cpuserve.base import fault_points
from cpuserve.config.options import EngineOptions
from cpuserve.engine.ipc import Abort
from cpuserve.loader import packed_files
from cpuserve.prepare import model_facts
from cpuserve.runtime import native
from tests.helpers.patience import wait_until
from tests.helpers.tiny import tiny_model
from tests.llm.test_expert_pool import (
    PROMPTS,
    Slow,
    add,
    config_of,
    of_experts,
    parts,
    run,
    with_engine,
    without_layers,
)

STEPS = 12
LATE_S = 60.0  # a blocked read ends after this time, so that a step that waits for it ends


pytestmark = pytest.mark.usefixtures("folder")


class Disk:
    """A hook of fault points: reads of experts wait until `open` is set, and `error` fails them."""

    def __init__(self):
        self.open, self.error = threading.Event(), 0
        self.open.set()
        self.waiting, self.done, self.late = 0, 0, False
        self.seconds, self.one = 0.0, threading.Lock()
        self.look, self.seen = time.monotonic, []  # what each slow read sees when it ends

    def slowly(self, seconds):
        """Let one read end after the other, each after this time."""
        self.seconds = seconds
        self.open.set()

    def __call__(self, point, size):
        if point != "expert.read":
            return size
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        if not self.open.is_set():
            self.waiting += 1
            self.late |= not self.open.wait(LATE_S)
        if self.seconds:
            with self.one:
                time.sleep(self.seconds)
                self.done += 1
                self.seen.append(self.look())
        return size


@pytest.fixture
def disk(monkeypatch):
    found = Disk()
    monkeypatch.setattr(fault_points, "_hook", found)
    yield found
    found.open.set()


def of_half(tmp_path, share=0.5, **options):
    """Return the configuration of a mixture that routes each token alike at all places."""
    path = without_layers(tmp_path)
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    with LLM(str(path), executor="native", weights_on_disk="64MiB", **sizes) as llm:
        config = llm.config
    sizes = with_engine(config, parts)
    return config, of_experts(config, sizes, share)


def stream(core, number, token, tokens=1):
    """Add a request that reads and writes only `token`: it needs the same experts in each step."""
    add(core, number, [token] * tokens, max_tokens=3 * STEPS, logit_bias={token: 100.0})


def steps(core, count):
    """Return the tokens and errors of each request in `count` steps."""
    tokens, errors = Counter(), {}
    for _ in range(count):
        for output in core.step().outputs:
            tokens[output.id] += len(output.tokens)
            if output.error:
                errors[output.id] = output.error
    return tokens, errors


def until_read(core):
    """Run steps until one needs no read."""
    before = -1
    while core.stats.expert_misses != before:
        before = core.stats.expert_misses
        steps(core, 3)


@pytest.mark.parametrize("prompt", [1, 40])
def test_a_stream_goes_on_while_the_experts_of_another_request_are_read(tmp_path, disk, prompt):
    whole, half = of_half(tmp_path)

    def alone(core):
        stream(core, 2, 300, prompt)
        return run(core)[2]

    def use(core):
        stream(core, 1, 5)
        until_read(core)
        disk.open.clear()
        stream(core, 2, 300, prompt)
        tokens, _ = steps(core, STEPS)
        assert tokens == {1: STEPS}  # a token in each step, although no read has ended
        wait_until(lambda: disk.waiting > 0)
        assert not disk.late
        disk.open.set()
        return run(core)

    found = with_engine(half, use)
    assert found[2] == with_engine(whole, alone)  # later: it keeps the use of experts for a start
    assert found[1][1] is None


class Steady:
    """A hook of fault points: reads of experts wait until a step has ended, then a few may go on.

    So a disk is as slow as wanted, in reads a step, on a machine of any speed.
    """

    def __init__(self):
        self.permits, self.limited, self.late = threading.Semaphore(0), False, False
        self.came, self.gone = 0, 0

    def __call__(self, point, size):
        if point == "expert.read" and self.limited:
            self.came += 1
            self.late |= not self.permits.acquire(timeout=LATE_S)
            self.gone += 1
        return size

    def let(self, core, reads):
        """Let at most so many reads go on, and wait until they have ended."""
        for _ in range(200):  # without reads, the request can go on already
            if self.came > self.gone:
                break
            time.sleep(0.002)
        ended, reads = core.executor.progress()[1], min(reads, self.came - self.gone)
        if reads:
            self.permits.release(reads)
        wait_until(lambda: core.executor.progress()[1] >= ended + reads, poll_s=0.001)


READS = 2  # of experts, in a step


def test_gaps_are_bounded_by_the_reads_of_the_stream_itself(tmp_path, monkeypatch):
    """Two streams have their experts in memory, and one after another begins without."""
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    whole, half = of_half(tmp_path, 0.6, max_num_seqs=6)
    disk = Steady()

    def use(core):
        stream(core, 1, 5)
        stream(core, 2, 5, 2)
        until_read(core)
        disk.limited = True
        monkeypatch.setattr(fault_points, "_hook", disk)
        gaps = {}
        for number, token in ((3, 300), (4, 99)):
            before = core.stats.expert_misses
            stream(core, number, token)
            gap, tokens = -1, {}
            while not tokens.get(number):
                tokens, _ = steps(core, 1)
                assert tokens[1] == tokens[2] == 1  # in each step, whatever others read
                disk.let(core, READS)
                gap += 1
            gaps[number] = gap, core.stats.expert_misses - before
            core.handle(Abort([number]))
        disk.limited = False
        disk.permits.release(1000)
        return gaps, run(core)

    def alone(core):
        stream(core, 1, 5)
        stream(core, 2, 5, 2)
        return run(core)

    gaps, found = with_engine(half, use)
    assert not disk.late
    for gap, own in gaps.values():
        assert 0 < gap <= own / READS + 8  # two steps more for each of four layers
    expected = with_engine(whole, alone)
    for number, (tokens, error) in found.items():
        assert error is None
        assert tokens == expected[number][0][-len(tokens) :]


def test_a_parked_request_that_is_aborted_leaves_nothing_behind(tmp_path, disk):
    whole, half = of_half(tmp_path)

    def both(core):
        stream(core, 1, 5)
        stream(core, 2, 300, 40)
        return run(core)

    def use(core):
        stream(core, 9, 5)
        until_read(core)
        for _ in range(3):
            disk.open.clear()
            stream(core, 2, 300, 40)
            steps(core, 2)
            core.handle(Abort([2]))
            disk.open.set()
            steps(core, 2)
        core.handle(Abort([9]))
        assert parts(core)["held"] == 0
        return both(core)

    assert with_engine(half, use) == with_engine(whole, both)


def test_an_unreadable_expert_ends_one_of_several_streams(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    whole, half = of_half(tmp_path)

    def streams(core):
        stream(core, 1, 5)
        stream(core, 3, 5, 2)
        return run(core)

    def use(core):
        stream(core, 1, 5)
        stream(core, 3, 5, 2)
        until_read(core)
        disk.error = errno.EIO
        stream(core, 2, 300)
        before = parts(core)["misses"]
        tokens, errors = steps(core, 1)
        if not errors:  # the first step does not wait for the reads
            missing = parts(core)["misses"] - before
            wait_until(lambda: parts(core)["errors"] == missing)  # each has failed
            more, errors = steps(core, 1)
            tokens += more
        assert set(errors) == {2}
        assert tokens[1] == tokens[3] > 0
        assert not tokens[2]
        disk.error = 0
        assert parts(core)["held"] == 0
        return errors[2], run(core)

    error, found = with_engine(half, use)
    expected = with_engine(whole, streams)
    assert error == "the model's weights cannot be read from the disk: Input/output error"
    for number, (tokens, why) in found.items():
        assert why is None
        assert tokens == expected[number][0][-len(tokens) :]


def test_a_step_with_all_experts_in_memory_has_no_more_phases(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    whole, half = of_half(tmp_path)

    def use(core):
        stream(core, 1, 5)
        stream(core, 2, 5, 2)
        until_read(core)
        before, _ = core.executor.progress()
        tokens, _ = steps(core, STEPS)
        assert tokens == {1: STEPS, 2: STEPS}
        return core.executor.progress()[0] - before

    assert with_engine(half, use) == with_engine(whole, use)


def test_a_step_ends_where_its_prompt_waits_and_another_request_can_go_on(
    tmp_path, disk, monkeypatch
):
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    whole, half = of_half(tmp_path, 0.9)

    def both(core):
        stream(core, 2, 300, 40)
        stream(core, 3, 99)
        return run(core)

    def use(core):
        """Return the tokens, and whether a step ended where both requests have to wait."""
        stream(core, 1, 5)
        until_read(core)
        disk.open.clear()
        disk.waiting = disk.done = 0
        stream(core, 2, 300, 40)
        steps(core, 1)
        core.handle(Abort([1]))
        wait_until(lambda: disk.waiting > 0)
        disk.slowly(0.005)
        wait_until(lambda: disk.done >= disk.waiting)
        # The prompt can go on from the first layer, and this request cannot.
        stream(core, 3, 99)
        before = core.stats.steps
        tokens, _ = steps(core, 1)
        ended = not tokens and core.scheduler.parked.ids == {2, 3}
        assert core.stats.steps == before + (not ended)  # no request came to the last layer
        disk.seconds = 0.0
        return run(core), ended

    expected = with_engine(whole, both)
    for _ in range(20):  # which read ends first is up to the system
        for heat in tmp_path.rglob("*.heat"):  # the pool begins without these experts
            heat.unlink()
        found, ended = with_engine(half, use)
        assert found == expected
        if ended:  # the prompt has not gone through all layers alone
            return
    pytest.fail("no step ended before its prompt had gone through all layers")


def test_a_step_that_waits_for_reads_advances_with_each(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(native, "with_guesses", lambda program: program)
    _, half = of_half(tmp_path, 0.9)

    def use(core):
        stream(core, 2, 300, 40)
        stream(core, 3, 99)
        disk.look = core.executor.progress
        disk.slowly(0.02)
        steps(core, 1)
        disk.seconds = 0.0
        return run(core)

    with_engine(half, use)
    assert len(set(disk.seen[:4])) > 1  # no request has all experts of its first layer before


def open_later(disk):
    """Let reads go on when one has waited for a while."""
    wait_until(lambda: disk.waiting > 0)
    time.sleep(0.5)
    disk.open.set()


def test_prompts_that_share_a_block_in_chunks_of_one_token_are_at_one_layer(tmp_path, disk):
    _, half = of_half(tmp_path, long_prefill_token_threshold=1)

    def use(core):
        stream(core, 1, 5)
        until_read(core)
        core.handle(Abort([1]))
        prompt = [5] * 31 + [300] + [5] * 4  # token 31 fills a block
        add(core, 2, prompt)
        while core.scheduler.requests[2].num_computed < 31:
            steps(core, 1)
        disk.open.clear()
        add(core, 3, prompt)
        threading.Thread(target=open_later, args=(disk,)).start()
        steps(core, 1)
        assert not core.scheduler.parked.ids
        computed = [core.scheduler.requests[n].num_computed for n in (2, 3)]
        run(core)
        return computed

    assert with_engine(half, use) == [32, 33]
    assert disk.waiting > 0
    assert not disk.late


def test_prompts_that_share_a_prefix_and_arrive_together_keep_their_bits(monkeypatch):
    config, sizes = config_of()
    prefix = [(7 * i) % 300 + 5 for i in range(32)]
    prompts = [[*prefix, *range(first, first + 3)] for first in (11, 40, 77)]

    def use(core):
        add(core, 9, PROMPTS[0], max_tokens=16)
        for number, prompt in enumerate(prompts):
            add(core, number, prompt)
        return run(core)

    expected = with_engine(config, use)
    monkeypatch.setattr(fault_points, "_hook", Slow(0.002))
    for share in (0.3, 0.6):
        assert with_engine(of_experts(config, sizes, share), use) == expected


def test_streams_whose_experts_all_are_read_keep_their_bits_in_any_order(monkeypatch):
    config, sizes = config_of(family="gpt-oss")

    def use(core):
        found = {}
        for number, prompt in enumerate(PROMPTS):
            add(core, number, prompt, temperature=0.8, seed=number, logprobs=2)
            for output in core.step().outputs:  # the requests do not begin together
                found.setdefault(output.id, []).extend(output.tokens)
        return found, run(core)

    def whole(core):
        for number, prompt in enumerate(PROMPTS):
            add(core, number, prompt, temperature=0.8, seed=number, logprobs=2)
        return run(core)

    expected = with_engine(config, whole)
    monkeypatch.setattr(fault_points, "_hook", Slow(0.002))
    for share in (0.3, 0.6):
        first, rest = with_engine(of_experts(config, sizes, share), use)
        for number, (tokens, error) in expected.items():
            assert error is None
            assert first.get(number, []) + rest[number][0] == tokens


def test_a_later_start_is_told_how_earlier_requests_used_experts(monkeypatch, tmp_path):
    monkeypatch.setattr(packed_files, "cache_dir", lambda: tmp_path)
    path = tiny_model("qwen3-moe", dtype="bfloat16")
    options = EngineOptions(model=str(path))
    assert model_facts(options, path)[1].expert_misses == ()
    assert packed_files.earlier_use(str(path)) == {}
    config, sizes = config_of()

    def use(core):
        for number, prompt in enumerate(PROMPTS):
            add(core, number, prompt)
        run(core)
        return np.array(core.executor.native.expert_heat)

    heat = np.sort(with_engine(of_experts(config, sizes, 0.4), use))[::-1]
    facts = model_facts(options, path)[1]
    assert facts.expert_rate > 0
    assert len(facts.expert_misses) == 101
    assert facts.expert_misses[0] == 1.0
    assert facts.expert_misses[100] == pytest.approx(0, abs=1e-5)
    assert facts.expert_misses[25] == pytest.approx(
        1 - heat[: heat.size // 4].sum() / heat.sum(), abs=0.05
    )
    (record,) = (tmp_path / packed_files.FOLDER).glob("*.use.json")
    record.write_text("{}")
    assert model_facts(options, path)[1].expert_misses == ()
    record.write_text('{"model": "another", "rate": 1}')
    assert model_facts(options, path)[1].expert_misses == ()
