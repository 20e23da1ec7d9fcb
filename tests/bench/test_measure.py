"""Records of `cpuserve bench` from a fake server and a fake machine with known speeds."""

from types import SimpleNamespace

import pytest

from cpuserve.bench import measure
from cpuserve.bench.driver import Target, Timing
from cpuserve.bench.measure import Bench, Work
from cpuserve.bench.schema import Where

WHERE = Where(host="h", isa="avx2", threads=2, model="m")
WORK = Work(vocab=1000, weight_bytes_per_token=10**9, linear_weights=5 * 10**8, dot="int8")
TTFT_S, GAP_S = 0.5, 0.125


class Machine:
    """A fake roofline of 10 GB/s and 4 TOP/s that records its probes."""

    def __init__(self):
        self.asked = []

    def bandwidth(self, seconds=0.25):
        self.asked.append("bandwidth")
        return 10e9

    def dot(self, kind, seconds=0.1):
        self.asked.append(kind)
        return 4e12

    def measure(self):
        dots = {"f32": 1e9, "bf16": 2e9, "int8": 3e9, "int4": 4e9}
        return {"read_bytes_per_s": 10e9, "dot_ops_per_s": dots, "barrier_s": 2e-6}


@pytest.fixture
def asked(monkeypatch):
    """(prompt, output tokens) of every request. Requests take TTFT_S, then GAP_S per token; the
    simultaneous ones take two seconds together."""
    seen = []

    async def complete(target, prompt, max_tokens):
        seen.append((list(prompt), max_tokens))
        stamps = [10 + TTFT_S + GAP_S * i for i in range(max_tokens)]
        return Timing(10.0, stamps, [1] * max_tokens, prompt_tokens=len(prompt))

    async def run_closed(jobs, concurrency):
        assert len(jobs) == concurrency
        return [await job() for job in jobs], 2.0

    monkeypatch.setattr(measure, "complete", complete)
    monkeypatch.setattr(measure, "run_closed", run_closed)
    return seen


def bench(roofline, **changes):
    sizes = {"rounds": 3, "prompt_tokens": 200, "output_tokens": 5, "concurrency": 4}
    return Bench(Target("http://x", "m"), WHERE, WORK, roofline, **{**sizes, **changes})


def by_metric(records):
    assert all((r.host, r.isa, r.threads, r.model) == ("h", "avx2", 2, "m") for r in records)
    return {r.metric: r for r in records}


def test_throughput_is_in_tokens_a_second_and_in_shares_of_a_probe_before_each_run(asked):
    machine, told = Machine(), []
    found = by_metric(measure.run(measure.throughput(bench(machine), told.append)))
    decode = found["decode_batch_1"]
    assert decode.samples == [1 / GAP_S] * 3
    assert decode.fraction == pytest.approx((1 / GAP_S) / (10e9 / 10**9))
    prefill = found["prefill"]
    assert prefill.median == 200 / TTFT_S
    # Each weight of a prompt token is multiplied and added: two operations.
    assert prefill.fraction == pytest.approx((200 / TTFT_S) / (4e12 / (2 * 5 * 10**8)))
    assert prefill.of == "int8 dot peak"
    assert found["ttft"].median == 1e3 * TTFT_S
    assert found["output_4_requests"].samples == [4 * 5 / 2.0] * 3
    assert found["tpot_4_requests"].median == 1e3 * GAP_S
    assert machine.asked == ["bandwidth"] * 3 + ["int8"] * 3
    phases = [text for text in told if not text.startswith(" ")]
    assert [text.partition(",")[0] for text in phases] == ["decode", "prefill", "decode"]
    assert told[1] == f"  1 of 3: {1 / GAP_S:.1f} tokens/s"
    assert len(told) == 3 + 3 * 3


def test_no_prompt_of_a_throughput_run_is_asked_twice(asked):
    measure.run(measure.throughput(bench(None), lambda _: None))
    prompts = [tuple(prompt) for prompt, _ in asked]
    assert len(set(prompts)) == len(prompts) == 2 + 3 + 3 + 3 * 4
    assert all(0 <= token < WORK.vocab for prompt in prompts for token in prompt)


def test_without_a_probe_there_are_rates_and_no_shares(asked):
    found = measure.run(measure.throughput(bench(None), lambda _: None))
    assert {r.fraction for r in found} == {None}
    assert {r.of for r in found} == {None}


def test_latency_leaves_the_warm_ups_out(asked):
    found = by_metric(measure.run(measure.latency(bench(None, warm_ups=1), lambda _: None)))
    assert len(asked) == (1 + 3) * 4
    assert found["ttft"].median == 1e3 * TTFT_S
    assert len(found["ttft"].samples) == 3 * 4
    assert found["batch_latency"].samples == [2000.0] * 3
    assert found["ttft"].parameters == {"prompt_tokens": 200, "output_tokens": 5, "batch_size": 4}


def test_the_machine_alone_is_bandwidth_peaks_and_barrier():
    found = by_metric(measure.roofline_records(Machine(), WHERE, 2))
    assert found["read_bandwidth"].samples == [10.0] * 2
    dots = {name: r.median for name, r in found.items() if name.startswith("dot_")}
    assert dots == {"dot_f32": 1.0, "dot_bf16": 2.0, "dot_int8": 3.0, "dot_int4": 4.0}
    assert (found["barrier"].median, found["barrier"].better) == (2.0, "less")


def test_requests_at_once_go_to_the_server_without_a_pause(monkeypatch):
    seen = SimpleNamespace()

    async def drive(target, asked, pace, *, each):
        seen.target, seen.asked, seen.pace = target, asked, pace
        for _ in asked:
            each()
        return "a run"

    monkeypatch.setattr(measure, "drive", drive)
    monkeypatch.setattr(measure, "records", lambda report: [report])
    told = []
    (report,) = measure.run(measure.at_once(bench(None), ["a talk"] * 7, told.append))
    assert told[0] == "7 requests sent at once"
    assert told[1:] == [f"{done} of 7 requests" for done in range(1, 8)]
    assert (seen.asked, report.run) == (["a talk"] * 7, "a run")
    assert report.parameters == {"requests": 7}
    assert seen.pace == report.pace == measure.Pace()
