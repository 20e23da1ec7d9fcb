"""EngineCore: steps, their failures, and that every ended request frees its blocks."""

import itertools
import logging
import math
from array import array

import pytest

from cpuserve.engine.ipc import Abort, AddRequest, Ask, Shutdown
from cpuserve.engine.loop import run_loop
from cpuserve.engine.lora import AdapterSlots
from cpuserve.runtime.executor import StepOutputs
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, fake_core, reference, score

PROMPT = [11, 12, 13, 14, 15]


def add(core, number, prompt=PROMPT, **params):
    message = AddRequest(
        number, array("i", prompt).tobytes(), SamplingParams(**{"seed": 1, **params}), 0.0
    )
    core.handle(message)


def run(core, steps=1000):
    """Run until all requests have ended; return their outputs by request id."""
    outputs = {}
    for _ in range(steps):
        if not core.has_work:
            break
        for output in core.step().outputs:
            outputs.setdefault(output.id, []).append(output)
    return outputs


def tokens(outputs):
    return list(itertools.chain.from_iterable(o.tokens for o in outputs))


def assert_idle(core):
    assert not core.has_work
    assert core.check() == {"ok": True}
    assert core.kv.num_free == core.kv.num_blocks
    assert not core.executor.model.slots


def test_step_of_several_requests_gives_each_its_reference_tokens():
    core = fake_core(eos_ids=[7])
    for number in range(12):
        add(core, number, [number + 1] * (3 + 5 * number), max_tokens=20, ignore_eos=True)
    outputs = run(core)
    for number in range(12):
        prompt = [number + 1] * (3 + 5 * number)
        want = reference(prompt, SamplingParams(max_tokens=20), 1, 20)
        assert tokens(outputs[number]) == want
        assert [o.finish for o in outputs[number]] == [None] * 19 + ["length"]
        assert outputs[number][0].scheduled > 0
    assert_idle(core)
    assert core.stats.generation_tokens == 12 * 20
    assert core.stats.prompt_tokens == sum(3 + 5 * n for n in range(12))


def test_step_of_a_pool_smaller_than_the_demand_preempts_and_keeps_the_tokens():
    core = fake_core(fake_config(kv_blocks=16, max_num_seqs=16))
    for number in range(16):
        add(core, number, [number + 1] * 9, max_tokens=40)
    outputs = run(core, 5000)
    for number in range(16):
        want = reference([number + 1] * 9, SamplingParams(max_tokens=40), 1, 40)
        assert tokens(outputs[number]) == want
    assert core.stats.preemptions > 10
    assert_idle(core)


def test_pool_of_16_blocks_serves_64_long_requests_without_livelock():
    core = fake_core(fake_config(kv_blocks=16, max_num_seqs=64, max_num_batched_tokens=64))
    for number in range(64):
        add(core, number, [number + 1] * 20, max_tokens=40)  # 15 of the 16 blocks each
    outputs = run(core, 20_000)
    assert all(len(tokens(outputs[number])) == 40 for number in range(64))
    # 64 x 40 tokens one after another would be 2,560 steps: recomputing must not exceed that.
    assert core.stats.steps < 4000
    assert_idle(core)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_logprobs_cover_the_prompt_over_chunks_and_are_sent_once(max_tokens):
    core = fake_core(fake_config(max_num_batched_tokens=8))
    prompt = list(range(100, 130))
    add(core, 1, prompt, max_tokens=max_tokens, prompt_logprobs=2)
    add(core, 2, prompt[:7], max_tokens=3)
    outputs = run(core)[1]
    scored = [o for o in outputs if o.prompt_logprobs is not None]
    assert len(scored) == 1
    rows = scored[0].prompt_logprobs
    assert rows[0] is None
    assert [r.token for r in rows[1:]] == prompt[1:]
    want = [score(prompt[:i], prompt[i]) for i in range(1, 30)]
    assert [r.logprob for r in rows[1:]] == pytest.approx(want)
    assert all(len(r.top) == 2 for r in rows[1:])
    assert len(tokens(outputs)) == max_tokens
    assert outputs[-1].finish == "length"
    assert_idle(core)


def test_prompt_of_one_token_is_scored_as_nothing():
    core = fake_core()
    add(core, 1, [5], max_tokens=0, prompt_logprobs=1)
    (output,) = run(core)[1]
    assert output.prompt_logprobs == [None]
    assert output.finish == "length"


def test_logprobs_of_outputs_come_with_each_token():
    core = fake_core()
    add(core, 1, max_tokens=4, logprobs=3)
    outputs = run(core)[1]
    history = list(PROMPT)
    for output in outputs:
        (row,) = output.logprobs
        assert row.logprob == pytest.approx(score(history, row.token))
        assert len(row.top) == 3
        history += output.tokens


def test_eos_ends_without_stop_id_and_stop_token_with_it():
    core = fake_core()
    output = reference(PROMPT, SamplingParams(), 1, 10)
    add(core, 1, max_tokens=10, stop_token_ids=[output[3]])
    last = run(core)[1][-1]
    assert (last.finish, last.stop_id, last.tokens) == ("stop", output[3], [output[3]])
    core = fake_core(eos_ids=[output[3]])
    add(core, 1, max_tokens=10)
    add(core, 2, max_tokens=10, ignore_eos=True)
    outputs = run(core)
    assert (outputs[1][-1].finish, outputs[1][-1].stop_id) == ("stop", None)
    assert tokens(outputs[1]) == output[:4]
    assert tokens(outputs[2]) == output


def test_min_tokens_bans_stops_before():
    core = fake_core(eos_ids=[reference(PROMPT, SamplingParams(), 1, 1)[0]])
    add(core, 1, max_tokens=10, min_tokens=5)
    assert len(tokens(run(core)[1])) > 5


def test_context_length_ends_a_request_without_max_tokens():
    core = fake_core(fake_config(max_model_len=40))
    add(core, 1, max_tokens=None)
    outputs = run(core)[1]
    assert len(tokens(outputs)) == 40 - len(PROMPT)
    assert outputs[-1].finish == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {}, "empty"),
        ([1] * 200, {}, "maximum context length is 200"),
        ([1] * 30, {"max_tokens": 100}, "KV cache"),
        ([1, 1000], {}, "1000"),
        ([-1], {}, "-1"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": []}, "allowed_token_ids"),
        ([1], {"logprobs": 21}, "at most 20"),
    ],
    ids=["empty", "long", "kv", "vocabulary", "negative", "bias", "allowed", "logprobs"],
)
def test_request_that_cannot_run_is_refused_and_others_go_on(prompt, params, text):
    core = fake_core(fake_config(kv_blocks=16))
    add(core, 1, prompt, **params)
    add(core, 2, max_tokens=3)
    outputs = run(core)
    assert [o.finish for o in outputs[1]] == ["error"]
    assert text in outputs[1][0].error
    assert len(tokens(outputs[2])) == 3
    assert_idle(core)


def test_nan_ends_its_request_only():
    def fault(step, outputs):
        if step == 3:
            outputs.tokens[1] = -1

    core = fake_core(fault=fault)
    add(core, 1, max_tokens=6)
    add(core, 2, max_tokens=6)
    outputs = run(core)
    assert len(tokens(outputs[1])) == 6
    assert (outputs[2][-1].finish, len(tokens(outputs[2]))) == ("error", 2)
    assert "NaN" in outputs[2][-1].error
    assert outputs[2][-1].fault is None, "the request is not the cause"
    assert_idle(core)


def test_fields_that_leave_no_token_end_their_request_with_their_names():
    def fault(step, outputs):
        outputs.tokens[0] = -1

    core = fake_core(fault=fault)
    add(core, 1, logit_bias={8: -math.inf}, stop_token_ids=[9], min_tokens=2)
    (output,) = run(core)[1]
    assert (output.finish, output.fault) == ("error", "logit_bias")
    assert "logit_bias and min_tokens" in output.error
    assert "NaN" not in output.error
    assert_idle(core)


def test_nan_in_a_prompt_score_is_no_fault_of_the_fields():
    def fault(step, outputs: StepOutputs):
        outputs.logprobs[2] = float("nan")

    core = fake_core(fault=fault)
    add(core, 1, prompt_logprobs=0, logit_bias={8: -math.inf}, stop_token_ids=[9], min_tokens=2)
    (output,) = run(core)[1]
    assert (output.finish, output.fault) == ("error", None)
    assert "NaN" in output.error


def test_nan_in_a_prompt_score_ends_its_request():
    def fault(step, outputs: StepOutputs):
        outputs.logprobs[2] = float("nan")

    core = fake_core(fault=fault)
    add(core, 1, max_tokens=0, prompt_logprobs=0)
    (output,) = run(core)[1]
    assert output.finish == "error"
    assert_idle(core)


def test_exception_in_a_step_ends_its_requests_and_the_engine_goes_on(caplog):
    def fault(step, outputs):
        if step == 2:
            msg = "boom"
            raise RuntimeError(msg)

    core = fake_core(fake_config(max_num_seqs=2), fault=fault)
    for number in range(3):
        add(core, number, max_tokens=5)
    with caplog.at_level(logging.CRITICAL):
        outputs = run(core)
    assert [outputs[n][-1].finish for n in range(3)] == ["error", "error", "length"]
    assert "boom" in outputs[0][-1].error
    assert tokens(outputs[2]) == reference(PROMPT, SamplingParams(), 1, 5)
    assert_idle(core)


def test_refusal_of_the_sampler_ends_its_request_only():
    core = fake_core()
    admit = core.executor.model.admit

    def refuse(slot, params, *rest):
        if params.temperature == 0.5:
            msg = "no such temperature"
            raise ValueError(msg)
        admit(slot, params, *rest)

    core.executor.model.admit = refuse
    add(core, 1, temperature=0.5)
    add(core, 2, max_tokens=4)
    outputs = run(core)
    assert outputs[1][0].error == "no such temperature"
    assert len(tokens(outputs[2])) == 4
    assert_idle(core)


@pytest.mark.parametrize(
    "steps", [0, 1, 3, 12], ids=["queued", "prefill", "late prefill", "decode"]
)
def test_abort_at_any_phase_frees_everything(steps):
    core = fake_core(fake_config(max_num_batched_tokens=8))
    add(core, 1, list(range(60)), max_tokens=50)
    add(core, 2, max_tokens=200 - len(PROMPT))
    for _ in range(steps):
        core.step()
    core.handle(Abort([1, 2, 99]))
    assert core.has_work, "the gauges go to zero"
    step = core.step()
    assert step.outputs == []
    assert (step.stats.running, step.stats.waiting, step.stats.kv_usage) == (0, 0, 0.0)
    assert_idle(core)


def test_abort_of_a_preempted_request_frees_everything():
    core = fake_core(fake_config(kv_blocks=8))
    for number in range(3):
        add(core, number, max_tokens=25)
    while not core.stats.preemptions:
        core.step()
    core.handle(Abort([r.id for r in core.scheduler.waiting]))
    outputs = run(core)
    assert all(o[-1].finish == "length" for o in outputs.values())
    assert_idle(core)


def test_seeds_of_requests_without_one_differ_and_follow_the_engines_seed():
    def first(seed, count):
        core = fake_core(fake_config(seed=seed))
        for number in range(count):
            add(core, number, max_tokens=8, seed=None)
        outputs = run(core)
        return [tokens(outputs[n]) for n in range(count)]

    assert first(0, 3) == first(0, 3)
    assert len({tuple(t) for t in [*first(0, 3), *first(1, 3)]}) == 6


def test_roofline_waits_until_the_engine_is_idle_and_reports_do_not():
    core = fake_core()
    add(core, 1, max_tokens=2)
    core.handle(Ask(1, "roofline"))
    core.handle(Ask(2, "report"))
    core.handle(Ask(3, "weather"))
    replies = {a.id: a.value for a in core.replies()}
    assert set(replies) == {2, 3}
    assert replies[2]["waiting"] == 1
    assert "weather" in replies[3]["error"]
    assert not core.replies()  # nothing is measured beside a request
    run(core)
    parts = 0
    while not (replies := core.replies()):
        parts += 1
        assert core.probing
    assert parts == 2
    assert [(a.id, a.value) for a in replies] == [(1, {"bytes_per_s": 1e9})]
    assert not core.probing
    assert core.replies() == []


def test_a_request_waits_for_one_part_of_the_roofline_only():
    core = fake_core()
    core.handle(Ask(1, "roofline"))
    assert core.replies() == []  # the first part
    add(core, 1, max_tokens=2)
    assert core.replies() == []
    assert tokens(run(core)[1])
    replies = []
    while not replies:
        replies = core.replies()
    assert replies[0].value == {"bytes_per_s": 1e9}


def test_progress_is_reported_after_each_part_of_the_prompt_but_the_last():
    core = fake_core(fake_config(max_num_batched_tokens=8))
    prompt = list(range(30))
    for number, progress in ((1, True), (2, False)):
        message = AddRequest(
            number, array("i", prompt).tobytes(), SamplingParams(seed=1, max_tokens=2), 0.0
        )
        message.progress = progress
        core.handle(message)
    outputs = run(core)
    assert [o.processed for o in outputs[1]] == [8, 16, 24, 0, 0]
    assert [len(o.tokens) for o in outputs[1]] == [0, 0, 0, 1, 1]
    assert all(o.scheduled > 0 for o in outputs[1][:4])
    assert [o.processed for o in outputs[2]] == [0, 0]
    assert core.stats.prompt_tokens == 60
    assert_idle(core)


def test_a_request_that_continues_a_response_counts_no_prompt_and_starts_first():
    core = fake_core(fake_config(max_num_seqs=1))
    prompt = list(range(70))
    add(core, 1, prompt, max_tokens=2)
    run(core)
    before = (core.stats.prompt_tokens, core.stats.prefix_queries, core.stats.prefix_hits)
    assert before[:2] == (70, 70)
    add(core, 2, [9] * 40, max_tokens=1)
    message = AddRequest(3, array("i", prompt).tobytes(), SamplingParams(max_tokens=1), 0.0)
    message.continues = True
    core.handle(message)
    outputs = run(core)
    assert list(outputs) == [3, 2]
    assert outputs[3][0].cached_tokens == 0
    after = (core.stats.prompt_tokens, core.stats.prefix_queries, core.stats.prefix_hits)
    assert after == (before[0] + 40, before[1] + 40, before[2])
    assert core.stats.generation_tokens == 4
    assert_idle(core)


def test_progress_is_not_reported_again_when_a_preempted_request_is_recomputed():
    core = fake_core(
        fake_config(kv_blocks=16, max_num_batched_tokens=16, enable_prefix_caching=False)
    )
    for number in range(16):
        message = AddRequest(
            number,
            array("i", [number + 1] * 21).tobytes(),
            SamplingParams(max_tokens=30, seed=1),
            0.0,
        )
        message.progress = True
        core.handle(message)
    outputs = run(core, 5000)
    assert core.stats.preemptions > 0
    for of_one in outputs.values():
        assert of_one[0].processed > 0
        kinds = [bool(o.processed) for o in of_one]
        assert kinds == sorted(kinds, reverse=True)
        assert sum(len(o.tokens) for o in of_one) == 30


class AnyAdapter:
    """Reads adapters that are nothing but names."""

    def __init__(self, name=""):
        self.name = name

    def copy(self, name, path):
        yield
        return AnyAdapter(f"{name} of {path}")

    def fingerprint(self):
        return self.name


def change(core, what, name, **details):
    core.handle(Ask(7, what, {"name": name, **details}))
    while core.changing:
        core.change_adapters()
    (reply,) = core.replies()
    return reply.value


def load(core, name):
    """Load an adapter, in place if there is one; returns its slot, or why it has none."""
    reply = change(core, "stage_adapter", name, path="/disk", in_place=True)
    if "error" in reply:
        return reply["error"]
    change(core, "use_adapter", name)
    return core.adapters.find(name).slot


def test_a_request_keeps_the_slot_of_its_unloaded_adapter_to_its_end():
    core = fake_core(adapters=AdapterSlots(2, lambda slot, adapter: iter(()), AnyAdapter()))
    assert load(core, "a") == 0
    add(core, 1, max_tokens=20, adapter="a", ignore_eos=True)
    first = core.step().outputs
    assert change(core, "unload_adapter", "a") == {}
    assert load(core, "b") == 1
    assert "no slot is free yet" in load(core, "b")
    add(core, 2, max_tokens=20, adapter="a")
    outputs = run(core)
    ((refused,), rest) = outputs[2], outputs[1]
    assert (refused.finish, refused.fault) == ("error", "model")
    assert "there is no adapter 'a', or no longer" in refused.error
    assert tokens([*first, *rest]) == reference(PROMPT, SamplingParams(max_tokens=20), 1, 20)
    assert load(core, "b") == 0
    assert_idle(core)


def test_the_loop_works_on_changes_of_adapters_while_it_is_idle():
    core = fake_core(adapters=AdapterSlots(2, lambda slot, adapter: iter(()), AnyAdapter()))
    channel = Asks(Ask(3, "stage_adapter", {"name": "a", "path": "/disk", "in_place": False}))
    run_loop(core, channel)
    assert [(a.id, a.value) for a in channel.sent] == [(3, {"fingerprint": "a of /disk"})]


class Asks:
    """A channel with one control message; it ends the engine loop after the reply."""

    def __init__(self, question):
        self.waiting, self.sent = [question], []

    def watch(self, interrupt):
        del interrupt

    def receive(self, *, block):
        messages, self.waiting = self.waiting, []
        assert messages or self.sent or not block, "the loop waits while there is work"
        return [Shutdown()] if self.sent else messages

    def send(self, message):
        self.sent.append(message)

    def wake(self):
        raise AssertionError


def test_threads_that_wait_outside_of_steps_do_not_count(monkeypatch):
    core = fake_core()
    waited_s = itertools.count(100)  # as after the load
    waits = property(lambda _: float(next(waited_s)))
    monkeypatch.setattr(type(core.executor), "barrier_wait_s", waits)
    add(core, 1, max_tokens=3, ignore_eos=True)
    seen = []
    while core.has_work:
        seen.append(core.step().stats.barrier_wait_s)
        next(waited_s)  # a probe between two steps
    assert seen == [1.0, 2.0, 3.0]
