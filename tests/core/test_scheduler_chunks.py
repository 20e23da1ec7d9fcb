"""Scheduler: chunks of prompts beside streams, and the cost model that gives their sizes."""

import itertools
import re
from pathlib import Path

import pytest

from cpuserve.core.cost import COARSE, FINE, LEAST_CHUNK, CostModel, StepWork, rounded_chunk
from cpuserve.sampling.structured import StructuredOutputs
from tests.core.scheduling import big, make, request, step
from tests.helpers.fake_executor import reference


def test_chunks_end_where_blocks_and_attention_chunks_of_the_kernels_end():
    header = Path(__file__).parents[2] / "csrc" / "kernels" / "table" / "attention.h"
    found = dict(re.findall(r"constexpr int (kBlock|kChunk) = (\d+);", header.read_text()))
    assert {"kBlock": str(FINE), "kChunk": str(COARSE)} == found


def machine_seconds(work):
    """Step time: 20 ms for the weights, 0.25 ms/decode row, 0.5 ms/prompt token, attention."""
    attention = 2e-7 * work.keys + 2e-8 * work.pairs
    return 0.02 + 0.00025 * work.rows + 0.0005 * work.tokens + attention


def run_streams(scheduler, model, seconds_of, steps=80):
    """Run `steps` steps; return the seconds of those with both decode rows and prompt tokens."""
    mixed = []
    for _ in range(steps):
        batch = scheduler.schedule()
        work = scheduler.work
        seconds = seconds_of(work)
        if work.rows and work.tokens:
            mixed.append((seconds, work.tokens))
        scheduler.update(model.run(batch) if batch.chunks else [])
        scheduler.cost.observe(work, seconds)
    return mixed


def start_streams(scheduler, count=8):
    for number in range(count):
        scheduler.add(request(number, 40, max_tokens=900, ignore_eos=True))


def test_streams_keep_their_latency_while_a_long_prompt_runs():
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    run_streams(scheduler, model, machine_seconds, 30)
    long = request(99, 4096, max_tokens=5)
    scheduler.add(long)
    mixed = run_streams(scheduler, model, machine_seconds, 200)
    assert long.num_output == 5
    assert max(seconds for seconds, _ in mixed) < 0.055
    # And the target is used: 20 ms of 50 are what decoding takes, so 20 and more are the prompt's.
    late = [tokens for _, tokens in mixed[10:-1]]
    assert sum(late) / len(late) > 25
    assert len(mixed) < 4096 / 25


def roofline_seconds(work):
    """A machine whose products hide behind its weights, or those behind them; logits apart."""
    linear = max(0.016, 0.00084 * (work.rows + work.tokens))
    logits = 0.006 if work.rows else 0.0
    return linear + logits + 1e-7 * work.keys + 1.4e-7 * work.pairs


def test_prompt_beside_streams_takes_little_longer_than_alone_in_such_chunks():
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    for number in (98, 99):  # the first run trains the cost model
        run_streams(scheduler, model, roofline_seconds, 30)
        before = roofline_seconds(StepWork(8, sum(r.num_computed for r in scheduler.running)))
        scheduler.add(request(number, 4096, max_tokens=1))
        mixed = run_streams(scheduler, model, roofline_seconds, 180)
    times = sorted(seconds for seconds, _ in mixed)
    assert times[-1] < 0.05
    assert times[-1] < 4 * before
    position = alone = 0
    for _, tokens in mixed:
        work = StepWork()
        work.add_prompt(position, tokens)
        position, alone = position + tokens, alone + roofline_seconds(work)
    assert position == 4096
    assert sum(times) < 1.6 * alone


def test_streams_of_a_fast_model_do_not_pause_for_a_prompt():
    def fast(work):
        return 0.1 * machine_seconds(work)

    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    run_streams(scheduler, model, fast, 30)
    decode = fast(scheduler.work)
    scheduler.add(request(99, 4096, max_tokens=5))
    times = [seconds for seconds, _ in run_streams(scheduler, model, fast, 300)]
    assert max(times) < 3 * decode, "a step took the time of more than three tokens"
    assert max(times) > 2 * decode, "the chunks are smaller than three tokens' time allows"


@pytest.mark.deep
def test_one_slow_step_in_twenty_costs_a_prompt_little():
    def run(slow):
        scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
        start_streams(scheduler)
        steps = itertools.count()

        def seconds(work):
            return machine_seconds(work) * (slow if next(steps) % 20 == 0 else 1.0)

        run_streams(scheduler, model, seconds, 30)
        scheduler.add(request(99, 4096, max_tokens=1))
        return len(run_streams(scheduler, model, seconds, 400))

    assert run(3.0) < 1.04 * run(1.0)


def test_without_target_a_prompt_takes_the_whole_step():
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.0)
    start_streams(scheduler)
    run_streams(scheduler, model, machine_seconds, 5)
    scheduler.add(request(99, 4096, max_tokens=5))
    assert scheduler.schedule().num_tokens >= 2016


def test_without_streams_short_prompts_run_together_and_long_ones_in_parts():
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    for number in range(6):
        scheduler.add(request(number, 200, max_tokens=1))
    assert step(scheduler, model)[0] == [200] * 6
    for num_prompt, part in [(4096, 256), (900, 128), (300, 64)]:
        scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
        scheduler.add(request(99, num_prompt, max_tokens=1))
        assert step(scheduler, model)[0] == [part]


def test_where_decoding_alone_misses_the_target_prompts_still_advance():
    def slow(work):
        return 10 * machine_seconds(work)

    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    run_streams(scheduler, model, slow, 30)
    long = request(99, 1000, max_tokens=5)
    scheduler.add(long)
    mixed = run_streams(scheduler, model, slow, 100)
    assert long.num_output == 5
    decode = slow(scheduler.work)
    assert max(seconds for seconds, _ in mixed) < 2.2 * decode


def test_prompt_advances_however_slow_the_model_says_it_is():
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    run_streams(scheduler, model, machine_seconds, 3)
    scheduler.add(request(99, 1000))
    scheduler.cost.token = 1e9
    assert step(scheduler, model)[0][8:] == [LEAST_CHUNK]


def test_threshold_lets_a_short_prompt_pass_a_long_one():
    scheduler, model = make(num_blocks=200, budget=64, long_prefill_token_threshold=32)
    scheduler.add(request(0, 500))
    scheduler.add(request(1, 20))
    assert step(scheduler, model)[0] == [20, 32]
    assert step(scheduler, model)[0] == [1, 32]


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_cost_model_learns_a_machine_and_follows_it(speed):
    cost = CostModel()

    def run(speed):
        for i in range(60):
            mixed = i % 3 == 0
            work = StepWork(rows=8, keys=8 * (500 + i))
            if mixed:
                work.add_prompt(64 * i, 64)
            cost.observe(work, speed * machine_seconds(work))

    for now in (speed, 2 * speed):  # then other programs use the machine, too
        run(now)
        for work in (StepWork(8, 4500), StepWork(8, 4500, 64, 64 * 3000.0)):
            said = cost.decode_seconds(work.rows, work.keys)
            said += cost.prompt_seconds(work.tokens, work.pairs)
            assert said == pytest.approx(now * machine_seconds(work), rel=0.15)


@pytest.mark.deep
def test_cost_model_tells_what_scores_take_from_what_prompts_take():
    def seconds(work):
        return machine_seconds(work) + 0.002 * work.scores

    scheduler, model = big(itl_target_s=0.05)
    for number in range(6):
        scored = {"prompt_logprobs": 0} if number % 2 else {}
        scheduler.add(request(number, 3000, max_tokens=1, **scored))
        run_streams(scheduler, model, seconds, 12)
    for scores in (0, 255):
        work = StepWork(scores=scores)
        work.add_prompt(1000, 256)
        said = scheduler.cost.decode_seconds(0, 0)
        said += scheduler.cost.prompt_seconds(work.tokens, work.pairs, work.scores)
        assert said == pytest.approx(seconds(work), rel=0.2)


@pytest.mark.parametrize("slow", [0.3, 3.0])
def test_a_machine_that_changes_while_prompts_never_end_is_learned_again(slow):
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    run_streams(scheduler, model, lambda work: slow * machine_seconds(work), 30)
    prompts = itertools.count(100)

    def busy(steps):
        times = []
        for _ in range(steps):
            if not any(r.num_output == 0 for r in scheduler.running) and not scheduler.waiting:
                scheduler.add(request(next(prompts), 1500, max_tokens=1))
            times += run_streams(scheduler, model, machine_seconds, 1)
        return times

    busy(200)
    late = busy(60)
    assert len(late) == 60, "no step without a prompt measured the time of decoding"
    assert max(seconds for seconds, _ in late) < 0.05
    usual = sorted(tokens for _, tokens in late)
    assert usual[len(usual) // 2] > 20
    assert usual.count(LEAST_CHUNK) <= 4, "measuring it delayed the prompts too often"


def test_one_step_that_was_held_up_does_not_stop_prompts():
    cost, work = CostModel(), StepWork(rows=8, keys=4000)
    work.add_prompt(0, 64)
    for _ in range(40):
        cost.observe(StepWork(8, 4000), machine_seconds(StepWork(8, 4000)))
        cost.observe(work, machine_seconds(work))
    before = cost.chunk(0, 0.03)
    cost.observe(work, 5.0)
    cost.observe(work, machine_seconds(work))
    assert cost.chunk(0, 0.03) > before / 4


def test_chunk_is_what_fits_the_seconds():
    cost = CostModel()
    cost.longest_chunk = 10_000
    for start in (0, 5000):
        count = cost.chunk(start, 1.0)
        work = StepWork()
        work.add_prompt(start, count)
        assert cost.prompt_seconds(work.tokens, work.pairs) == pytest.approx(1.0, rel=0.02)
    assert cost.chunk(5000, 1.0) < cost.chunk(0, 1.0)
    assert cost.chunk(0, 0.0) == 0


def test_prompt_rate_is_that_of_long_chunks_though_a_short_one_came_first():
    cost = CostModel()
    cost.observe(StepWork(tokens=5), 0.1)
    assert cost.prompt_rate == pytest.approx(50.0)
    cost.observe(StepWork(tokens=512), 0.512)
    assert cost.prompt_rate == pytest.approx(1000.0, rel=0.05)
    cost.observe(StepWork(tokens=5), 0.1)
    assert cost.prompt_rate == pytest.approx(1000.0, rel=0.05)


@pytest.mark.parametrize(
    ("start", "count", "rounded"),
    [(0, 2040, 2016), (0, 2050, 2048), (300, 1000, 980), (0, 14, 14), (31, 14, 14), (33, 300, 287)],
)
def test_chunks_end_where_kernels_like_it_if_that_costs_little(start, count, rounded):
    assert rounded_chunk(start, count) == rounded


def test_a_parked_chunk_leaves_room_for_streams_whose_bitmasks_were_late():
    scheduler, model = make(budget=32)
    form = StructuredOutputs(regex="a*")
    for n in range(3):
        scheduler.add(request(n, 2, max_tokens=9, structured_outputs=form))

    def run(steps):
        for _ in range(steps):
            batch = scheduler.schedule()
            for row in (row for chunk in batch.chunks for row in chunk.rows):
                row.mask = -1  # as with a bitmask that allows all ids
            scheduler.update(model.run(batch))  # which has at most 32 tokens

    run(1)
    scheduler.masks_late = True
    scheduler.add(long := request(9, 64, max_tokens=2))
    (chunk,) = scheduler.schedule().chunks
    assert len(chunk.token_ids) == 32
    assert scheduler.park([0], []) == []
    scheduler.update([])
    scheduler.masks_late = False
    run(6)
    assert long.token_ids[-2:] == reference([10] * 64, long.params, 9, 2)


def test_a_parked_chunk_takes_its_time_from_the_prompts_of_the_next_step():
    scheduler, model = big(max_num_seqs=16, itl_target_s=0.05)
    start_streams(scheduler)
    run_streams(scheduler, model, machine_seconds, 30)
    scheduler.add(request(98, 4096, max_tokens=1))
    run_streams(scheduler, model, machine_seconds, 60)
    batch = scheduler.schedule()
    parked = batch.chunks[-1].token_ids
    assert len(parked) > 25
    scheduler.update(scheduler.park([len(batch.chunks) - 1], model.run(batch)))
    scheduler.add(request(99, 4096, max_tokens=1))
    batch = scheduler.schedule()
    *streams, new, resumed = batch.chunks
    assert [len(streams), resumed.token_ids] == [8, parked]
    assert 0 < len(new.token_ids) <= 2 * LEAST_CHUNK
    scheduler.work.add_prompt(resumed.start, len(parked))
    assert machine_seconds(scheduler.work) < 0.055


def test_a_prompt_that_reads_experts_from_the_disk_is_one_chunk_beside_no_stream():
    scheduler, _ = big(itl_target_s=0.05)
    scheduler.cost.reads_experts = True
    scheduler.add(request(1, 1024, max_tokens=1))
    (chunk,) = scheduler.schedule().chunks
    assert len(chunk.token_ids) == 1024
