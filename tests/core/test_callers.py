"""Callers get equal shares of the engine: no caller waits for all prompts or streams of another."""

import pytest

from cpuserve.core.callers import GENERATED, CallerShares
from tests.core.scheduling import computed_in, first_tokens, make, prompt_seconds, request, step
from tests.helpers.fake_executor import reference


def by(caller, number, num_prompt=3, max_tokens=2, **more):
    """A request of this caller; requests with different numbers share no prefixes."""
    prompt = [(number * 31 + 7 * place) % 99991 for place in range(num_prompt)]
    return request(number, num_prompt, max_tokens, prompt=prompt, caller=caller, **more)


def finished_in(scheduler, model):
    return [d.request.id for d in computed_in(scheduler, model)[1] if d.finish]


def server(seqs=8, *, num_blocks=4000):
    """A scheduler with the settings of a server."""
    return make(
        num_blocks=num_blocks, budget=2048, block_size=32, max_num_seqs=seqs, itl_target_s=0.05
    )


def run(scheduler, model):
    """Run one step on a machine with a speed that never changes."""
    batch = scheduler.schedule()
    deltas = scheduler.update(model.run(batch))
    scheduler.cost.observe(scheduler.work, prompt_seconds(scheduler.work))
    scheduler.check_invariants()
    return deltas


def until_first_token(scheduler, model, wanted):
    """Return (steps, prompt tokens) that run until the first token of `wanted`."""
    steps = tokens = 0
    while not wanted.num_output:
        run(scheduler, model)
        steps, tokens = steps + 1, tokens + scheduler.work.tokens
    return steps, tokens


# --- the order of turns -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_callers_take_turns_and_each_keeps_its_order(policy):
    scheduler, model = make(max_num_seqs=1, policy=policy)
    for number, caller in enumerate("aaaabbc"):
        scheduler.add(by(caller, number, arrival=number))
    assert finished_in(scheduler, model) == [0, 4, 6, 1, 5, 2, 3]


def test_priority_decides_first_and_callers_take_turns_within_it():
    scheduler, model = make(max_num_seqs=1, policy="priority")
    for number, (caller, priority) in enumerate([("a", 1), ("a", 1), ("b", 1), ("a", 0), ("a", 0)]):
        scheduler.add(by(caller, number, priority=priority))
    assert finished_in(scheduler, model) == [3, 4, 2, 0, 1]


def test_a_long_queue_does_not_delay_a_new_caller():
    scheduler, model = make(max_num_seqs=1)
    for number in range(5):
        scheduler.add(by("a", number))
    step(scheduler, model)  # the first one runs
    scheduler.add(by("b", 5))
    scheduler.add(by("a", 6))
    assert finished_in(scheduler, model) == [0, 5, 1, 2, 3, 4, 6]


def test_a_caller_that_paused_is_neither_preferred_nor_delayed():
    scheduler, model = make(max_num_seqs=1)
    for number in range(4):
        scheduler.add(by("a", number))
    assert finished_in(scheduler, model) == [0, 1, 2, 3]
    for number, caller in enumerate("babab", 4):
        scheduler.add(by(caller, number))
    assert finished_in(scheduler, model) == [4, 5, 6, 7, 8]


def test_a_turn_costs_its_prompt_tokens():
    scheduler, model = make(max_num_seqs=1)
    for number in range(3):
        scheduler.add(by("long", number, 60, 1))
    for number in range(3, 12):
        scheduler.add(by("short", number, 20, 1))
    assert finished_in(scheduler, model) == [0, 3, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11]


def test_a_turn_costs_the_tokens_that_it_generates():
    scheduler, model = make(max_num_seqs=1, num_blocks=200)
    for number in range(2):
        scheduler.add(by("long", number, 4, 41, ignore_eos=True))
    for number in range(2, 40):
        scheduler.add(by("short", number, 4, 1))
    order = finished_in(scheduler, model)
    between = order.index(1) - order.index(0) - 1
    assert between == (4 + GENERATED * 41) / (4 + GENERATED * 1)


def test_prompt_tokens_in_the_prefix_cache_cost_nothing():
    scheduler, model = make(max_num_seqs=1, num_blocks=200)
    system = list(range(5000, 5096))
    scheduler.add(request(100, 0, 1, prompt=[*system, 1], caller="x"))
    computed_in(scheduler, model)
    for number in range(12):  # 4 tokens and what they generate, instead of 100
        prompt = [*system, *[number] * 4]
        scheduler.add(request(number, 0, 1, prompt=prompt, caller="cached"))
    for number in range(12, 15):
        scheduler.add(by("new", number, 20, 1))
    order = finished_in(scheduler, model)
    assert order.index(14) - order.index(13) - 1 == 3


def test_an_aborted_prompt_costs_what_was_computed():
    scheduler, model = make(max_num_seqs=1, budget=16)
    scheduler.add(by("a", 0, 200, 1))
    step(scheduler, model)
    assert scheduler.abort(0)
    for number in range(1, 3):
        scheduler.add(by("a", number, 16, 1))
    for number in range(3, 5):
        scheduler.add(by("b", number, 16, 1))
    assert finished_in(scheduler, model) == [1, 3, 2, 4]


def test_callers_without_requests_are_forgotten():
    scheduler, model = make(max_num_seqs=1)
    for number in range(1000):
        scheduler.add(by(f"c{number}", number))
        while scheduler.has_work:
            step(scheduler, model)
    assert len(scheduler.callers) < 100


def test_a_caller_with_requests_is_remembered_however_many_come():
    callers = CallerShares()
    kept = by("kept", 0)
    callers.came(kept)
    for number in range(1, 1000):
        one = by(f"c{number}", number)
        callers.came(one)
        callers.ended(one)
    assert callers.place(kept) == (False, 0.0)
    callers.check([], [kept])


# --- long prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [0, 4])
@pytest.mark.parametrize(("length", "others"), [(30, 600), (300, 300), (900, 700), (700, 900)])
def test_many_prompts_of_a_caller_do_not_double_the_work_before_anothers(length, others, streams):
    counted = []
    for crowd in (0, 100):
        scheduler, model = server(8 + streams)
        for number in range(streams):
            scheduler.add(by(f"stream {number}", number, 8, 10**6, ignore_eos=True))
        for number in range(crowd):
            scheduler.add(by("greedy", 100 + number, others, 1))
        for _ in range(20):  # the cost model learns, as it would in a server
            if scheduler.has_work:
                run(scheduler, model)
        modest = by("modest", 99, length, 1)
        scheduler.add(modest)
        counted.append(until_first_token(scheduler, model, modest)[1])
    alone, beside = counted
    assert beside <= 2 * alone


@pytest.mark.parametrize("others", [60, 240, 500, 900])
@pytest.mark.parametrize("length", [30, 250, 900])
@pytest.mark.parametrize("arrival", [0.6, 1.7])
def test_a_prompt_that_comes_during_a_step_of_another_caller_never_takes_twice_its_time(
    length, others, arrival
):
    took = []
    for crowd in (0, 40):
        scheduler, model = server()
        requests = [(0.0, by("greedy", number, others, 1)) for number in range(crowd)]
        requests.append((arrival, by("modest", 200, length, 1)))
        took.append(first_tokens(requests, prompt_seconds, scheduler, model, until=200)[200])
    assert took[1] <= 2 * took[0]


def test_two_callers_with_long_queues_get_equal_shares():
    scheduler, model = server(4)
    for number in range(8):
        scheduler.add(by("long", number, 1000, 1))
    for number in range(40, 80):
        scheduler.add(by("short", number, 200, 1))
    computed = {"long": 0, "short": 0}
    for _ in range(60):
        batch = scheduler.schedule()
        for one, chunk in zip(scheduler.batch_requests, batch.chunks, strict=True):
            computed[one.params.caller] += len(chunk.token_ids)
        scheduler.update(model.run(batch))
    assert min(computed.values()) > 2000
    assert 0.8 <= computed["long"] / computed["short"] <= 1.25


def test_single_prompts_of_a_caller_do_not_get_more_than_a_share():
    """A caller that always sends the next prompt at once passes others with the first one only."""
    scheduler, model = server(4)
    for number in range(60):
        scheduler.add(by("many", number, 300, 1))
    number, ended = 1000, {"many": 0, "single": 0}
    scheduler.add(by("single", number, 300, 1))
    while ended["single"] < 20:
        for delta in run(scheduler, model):
            caller = delta.request.params.caller
            ended[caller] += delta.finish is not None
            if delta.finish and caller == "single":
                number += 1
                scheduler.add(by("single", number, 300, 1))
    assert 15 <= ended["many"] <= 25


# --- many streams -------------------------------------------------------------------------------


def test_a_caller_whose_streams_hold_all_slots_makes_way_for_another():
    counted = []
    for crowd in (7, 20):
        scheduler, model = server(8)
        streams = [by("greedy", number, 20, 90, ignore_eos=True) for number in range(crowd)]
        for one in streams:
            scheduler.add(one)
        for _ in range(50):
            run(scheduler, model)
        modest = by("modest", 99, 100, 5, ignore_eos=True)
        scheduler.add(modest)
        counted.append(until_first_token(scheduler, model, modest)[0])
    alone, beside = counted
    assert beside <= alone + 1
    assert scheduler.num_preemptions == 1
    assert sum(one.is_running for one in streams) == 7
    computed_in(scheduler, model, 10_000)
    for one in [*streams, modest]:
        prompt, output = one.token_ids[: one.num_prompt], one.token_ids[one.num_prompt :]
        assert output == reference(prompt, one.params, one.seed, one.max_tokens, frozenset())


def test_no_stream_is_preempted_for_the_second_request_of_a_caller():
    scheduler, model = server(4)
    for number in range(4):
        scheduler.add(by("greedy", number, 10, 500, ignore_eos=True))
    for _ in range(10):
        run(scheduler, model)
    for number in range(10, 13):
        scheduler.add(by("modest", number, 10, 500, ignore_eos=True))
    for _ in range(50):
        run(scheduler, model)
    assert scheduler.num_preemptions == 1
    assert sorted(r.params.caller for r in scheduler.running) == ["greedy"] * 3 + ["modest"]


def test_callers_with_one_stream_each_are_never_preempted_for_another():
    scheduler, model = server(4)
    for number in range(12):
        scheduler.add(by(f"caller {number}", number, 10, 30, ignore_eos=True))
    computed_in(scheduler, model)
    assert scheduler.num_preemptions == 0


def test_a_caller_whose_streams_hold_all_blocks_makes_way_for_another():
    scheduler, model = make(num_blocks=40, max_num_seqs=16, block_size=4)
    streams = [by("greedy", number, 14, 60, ignore_eos=True) for number in range(9)]
    for one in streams:
        scheduler.add(one)
    for _ in range(12):
        step(scheduler, model)
    modest = by("modest", 99, 30, 4, ignore_eos=True)
    scheduler.add(modest)
    step(scheduler, model)
    assert modest.is_running, "it waits for blocks that one caller holds"
    computed_in(scheduler, model, 10_000)
    assert all(one.num_output == 60 for one in streams)


def test_a_prompt_that_needs_more_than_its_share_of_the_blocks_preempts_no_one():
    scheduler, model = make(num_blocks=40, max_num_seqs=16, block_size=4)
    for number in range(4):
        scheduler.add(by("greedy", number, 14, 20, ignore_eos=True))
    step(scheduler, model)
    scheduler.add(by("modest", 99, 100, 1))  # 25 of 40 blocks
    step(scheduler, model)
    assert scheduler.num_preemptions == 0
    assert 99 in finished_in(scheduler, model)


def test_the_caller_with_the_most_blocks_gives_one_up_and_no_other():
    scheduler, model = make(num_blocks=32, max_num_seqs=8, block_size=4)
    for number in range(4):
        scheduler.add(by("greedy", number, 20, 40, ignore_eos=True))
    step(scheduler, model)
    modest = by("modest", 99, 8, 30, ignore_eos=True)
    scheduler.add(modest)
    while scheduler.has_work:
        step(scheduler, model)
        scheduler.check_invariants()
        assert not modest.num_preemptions, "the last caller that came lost its blocks"
    assert scheduler.num_preemptions > 0


# --- batches ------------------------------------------------------------------------------------


def test_a_batch_that_keeps_eight_lines_running_does_not_delay_another_caller():
    """The lines of a batch come one by one: each that ends is followed by the next one."""
    counted = []
    for crowd in (0, 8):
        scheduler, model = server(8)
        for number in range(crowd):
            scheduler.add(by("batch", number, 300, 12, priority=1, ignore_eos=True))
        number = crowd
        for _ in range(30 if crowd else 0):
            for delta in run(scheduler, model):
                if delta.finish:
                    scheduler.add(by("batch", number, 300, 12, priority=1, ignore_eos=True))
                    number += 1
        modest = by("modest", 9999, 300, 1)
        scheduler.add(modest)
        counted.append(until_first_token(scheduler, model, modest)[1])
    alone, beside = counted
    assert beside <= 2 * alone
