"""Requests that are aborted at any moment, beside drafts, preemption, tiers and parked experts."""

import random
import threading
import time

import pytest

from cpuserve import LLM
from cpuserve.base import fault_points
from cpuserve.base.errors import StartupError
from cpuserve.engine.ipc import Abort
from tests.helpers.depth import deep_but
from tests.helpers.drafters import drafter_for
from tests.llm.test_expert_pool import add, of_experts, parts, with_engine

REQUESTS = 20
# What guesses tokens: n-grams by themselves, beside which requests are parked, or a head.
KINDS = {"auto": "qwen3-moe", "mtp": "glm4-moe"}


pytestmark = pytest.mark.usefixtures("folder")


class Uneven:
    """A hook of fault points: reads of experts take no time, or up to 3 ms."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def __call__(self, point, size):
        if point == "expert.read":
            time.sleep(max(0.0, self.random.uniform(-0.003, 0.003)))
        return size


def configs(kind, directory):
    """Return configurations of a tiny mixture: all in memory, and little room for anything."""
    drafter = drafter_for(kind if kind == "mtp" else "none", directory, KINDS[kind])
    sizes = {"max_model_len": 192, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    sizes |= {"executor": "native", "weights_on_disk": "64MiB"}
    with LLM(str(drafter.model), speculate="off", **sizes) as llm:
        whole = llm.config
    sizes["speculate"] = "auto"
    if kind == "mtp":
        sizes["speculative_config"] = {**drafter.asked, "num_speculative_tokens": 3}
    for step in range(40):
        space = f"{5e-5 * 1.2**step:.6f}"  # GiB
        try:
            with LLM(str(drafter.model), kv_cache_space=space, swap_space="0.01", **sizes) as llm:
                tight = llm.config
        except StartupError:  # no room for one request of the greatest length
            continue
        return whole, of_experts(tight, with_engine(whole, parts), 0.5)
    raise AssertionError("no engine")


def requests_of(numbers):
    """Return random prompts, some with a common beginning, and their sampling."""
    begin = [numbers.randrange(5, 300) for _ in range(64)]
    found = []
    for n in range(REQUESTS):
        period = numbers.randrange(3, 9)
        text = [(7 * i) % period + 5 + n for i in range(numbers.randrange(3, 34))]
        prompt = begin[: numbers.choice([0, 0, 32, 64])] + text
        params = {"max_tokens": numbers.randrange(60, 90), "seed": n, "logprobs": 2}
        found.append((prompt, params | {"temperature": numbers.choice([0, 0.8])}))
    return found


class Run:
    """Steps of an engine, and what each request gets."""

    def __init__(self, core):
        self.core = core
        self.tokens, self.ended, self.parked = {}, {}, 0

    def step(self):
        for output in self.core.step().outputs:
            tokens = self.tokens.setdefault(output.id, [])
            tokens += [(token, exact(output, i)) for i, token in enumerate(output.tokens)]
            assert output.error is None
            if output.finish is not None:
                self.ended[output.id] = output.finish
        self.core.after_sending()
        self.parked += len(self.core.scheduler.parked.ids)


def exact(output, place):
    """Return the logprobs of a token of an output, exactly."""
    found = output.logprobs[place] if output.logprobs else None
    return repr(found)


def alone(core, requests):
    found = Run(core)
    for number, (prompt, params) in enumerate(requests):
        add(core, number, prompt, **params)
        while core.has_work:
            found.step()
    return found.tokens, found.ended


def aborting(core, requests, numbers):
    """Run all requests, abort some between steps and some in a step; return what came."""
    found, waiting, aborted = Run(core), list(enumerate(requests)), set()
    running, ends, step, all_at = set(), {}, 0, numbers.randrange(4, 9)
    while waiting or core.has_work:
        if waiting and (not core.has_work or numbers.random() < 0.6):
            number, (prompt, params) = waiting.pop(0)
            add(core, number, prompt, **params)
            running.add(number)
            if numbers.random() < 0.4:
                ends[number] = step + numbers.randrange(40)
        running -= found.ended.keys()
        # If all are aborted, the step ends early.
        chosen = [n for n in sorted(running) if step == all_at or ends.get(n, step + 1) <= step]
        step += 1
        timer = threading.Timer(numbers.uniform(0, 0.004), core.interrupt.see, [Abort(chosen)])
        if chosen:
            timer.start()
        found.step()
        if chosen:
            timer.join()
            core.handle(Abort(chosen))
            aborted |= {n for n in chosen if n not in found.ended}
            running -= set(chosen)
    return found, aborted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", deep_but([1], [1, 2, 3]))
def test_aborts_at_any_moment_leave_nothing_and_change_no_bit(
    hasty, patient_offload, tmp_path, monkeypatch, kind, seed
):
    whole, tight = configs(kind, tmp_path)
    requests = requests_of(random.Random(seed))
    tokens, ended = with_engine(whole, lambda core: alone(core, requests))
    monkeypatch.setattr(fault_points, "_hook", Uneven(seed))

    def use(core):
        found, aborted = aborting(core, requests, random.Random(seed))
        assert core.check() == {"ok": True}
        assert core.kv.num_free == core.kv.num_blocks
        assert parts(core)["held"] == 0
        if core._proposer is not None:
            assert core._proposer.texts.kv.num_free == core._proposer.texts.kv.num_blocks
        again = alone(core, requests[:3])
        return found, aborted, core.stats, again

    found, aborted, stats, again = with_engine(tight, use)
    for number in range(REQUESTS):
        got = found.tokens.get(number, [])
        assert got == tokens[number][: len(got)], number
        if number not in aborted:
            assert found.ended[number] == ended[number]
            assert len(got) == len(tokens[number])
    assert again[0] == {n: tokens[n] for n in range(3)}
    assert 0 < len(aborted) < REQUESTS
    assert stats.preemptions > 0
    assert stats.tiers["swap"].hits > 0
    assert stats.draft_tokens > 0
    assert stats.expert_misses > 0
    assert (found.parked > 0) == (kind == "auto")
