"""Scheduler: which requests go first, by priority, by age, and short prompts before long ones."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cpuserve.core.cost import LEAST_CHUNK
from cpuserve.core.queue import rank_of
from tests.core.scheduling import (
    big,
    computed_in,
    first_tokens,
    make,
    prompt_seconds,
    request,
    step,
)


def test_priority_goes_first_and_equal_ones_by_arrival():
    scheduler, model = make(max_num_seqs=1, policy="priority")
    for number, priority in enumerate([5, 0, -1, 0]):
        scheduler.add(request(number, 3, max_tokens=2, priority=priority, arrival=number))
    finished = [d.request.id for d in computed_in(scheduler, model)[1] if d.finish]
    assert finished == [2, 1, 3, 0]


def test_priority_is_ignored_first_come_first_served():
    scheduler, model = make(max_num_seqs=1)
    for number, priority in enumerate([5, 0, -1]):
        scheduler.add(request(number, 3, max_tokens=2, priority=priority, arrival=number))
    assert [d.request.id for d in computed_in(scheduler, model)[1] if d.finish] == [0, 1, 2]


@pytest.mark.parametrize("scarce", ["blocks", "slots"])
def test_higher_priority_preempts_lower_when_nothing_else_is_left(scarce):
    num_blocks, seqs = (9, 4) if scarce == "blocks" else (64, 2)
    scheduler, model = make(num_blocks=num_blocks, max_num_seqs=seqs, policy="priority")
    low = [request(n, 12, max_tokens=4, priority=1, arrival=n) for n in range(2)]
    for one in low:
        scheduler.add(one)
    step(scheduler, model)
    urgent = request(2, 12, max_tokens=4, arrival=2.0)
    scheduler.add(urgent)
    step(scheduler, model)
    assert urgent.is_running
    assert low[0].is_running
    assert not low[1].is_running, "the youngest request of the lower priority was not preempted"
    computed_in(scheduler, model)
    assert all(one.num_output == 4 for one in [*low, urgent])


def test_equal_priority_never_preempts():
    scheduler, model = make(max_num_seqs=1, policy="priority")
    scheduler.add(request(0, 3, max_tokens=9, priority=1, arrival=5.0))
    step(scheduler, model)
    scheduler.add(request(1, 3, max_tokens=2, priority=1, arrival=0.0))
    computed_in(scheduler, model)
    assert scheduler.num_preemptions == 0


def test_urgent_prompt_is_not_held_up_by_a_long_one_that_runs():
    scheduler, model = make(num_blocks=200, budget=16, policy="priority")
    scheduler.add(request(0, 400, priority=3))
    step(scheduler, model)
    scheduler.add(request(1, 10, arrival=1.0))
    assert step(scheduler, model)[0] == [10, 6]


def test_waiting_makes_up_for_any_priority():
    ranks = {}
    for priority in (-(2**31), -1, 0, 1, 3, 2**31 - 1):
        one = request(0, 1, priority=priority, arrival=1000.0)
        one.order = 0
        ranks[priority] = rank_of(one, "priority")[0]
    assert list(ranks.values()) == sorted(set(ranks.values()))
    assert ranks[1] - ranks[0] == pytest.approx(30)
    assert ranks[3] - ranks[0] == pytest.approx(60)
    assert max(ranks.values()) - min(ranks.values()) < 3600 * 0.6


def test_stream_of_urgent_requests_does_not_starve_a_patient_one():
    scheduler, model = make(max_num_seqs=1, policy="priority")
    patient = request(0, 3, max_tokens=2, priority=7, arrival=0.0)
    scheduler.add(patient)
    for number in range(1, 200):  # one a second, each takes two steps
        scheduler.add(request(number, 3, max_tokens=2, arrival=float(number)))
        step(scheduler, model)
        step(scheduler, model)
        if patient.num_output == 2:
            break
    assert 85 <= number <= 100


@pytest.mark.deep
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(200, 1500),
    shorts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    seconds=st.lists(st.sampled_from([1e-4, 0.02, 0.2, 5.0]), min_size=1, max_size=7),
    threshold=st.sampled_from([0, 24]),
    policy=st.sampled_from(["fcfs", "priority"]),
    seqs=st.integers(2, 8),
)
def test_long_prompt_advances_every_step_however_many_come_after_it(
    length, shorts, seconds, threshold, policy, seqs
):
    scheduler, model = make(
        num_blocks=600,
        budget=64,
        max_num_seqs=seqs,
        itl_target_s=0.05,
        long_prefill_token_threshold=threshold,
        policy=policy,
    )
    scheduler.add(request(1000, 4, max_tokens=900, ignore_eos=True))
    step(scheduler, model)
    long = request(0, length, max_tokens=1, arrival=0.0)
    scheduler.add(long)
    most = -(-length // (LEAST_CHUNK // 4)) + 2
    for number in range(1, most + 1):
        num_prompt, max_tokens = shorts[number % len(shorts)]
        scheduler.add(request(number, num_prompt, max_tokens, arrival=float(number)))
        before = long.num_computed
        step(scheduler, model)
        scheduler.cost.observe(scheduler.work, seconds[number % len(seconds)])
        if long.num_output:
            return
        # A quarter of the step where shorter ones are in hand: beside streams of the least chunk,
        # and at least a third of what they have.
        assert long.num_computed >= before + min(LEAST_CHUNK // 4, length - before)
    raise AssertionError("the long prompt starves")


def alone(num_prompt):
    scheduler, model = big(itl_target_s=0.05)
    return first_tokens([(0.0, request(0, num_prompt, 1))], prompt_seconds, scheduler, model)[0]


@pytest.mark.deep
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    long=st.integers(1000, 6000),
    short=st.integers(1, 128),
    arrival=st.floats(0.0, 2.0),
)
def test_short_prompt_passes_a_long_one_and_both_have_their_first_token_soon(long, short, arrival):
    scheduler, model = big(itl_target_s=0.05)
    requests = [(0.0, request(0, long, 1)), (arrival, request(1, short, 1))]
    took = first_tokens(requests, prompt_seconds, scheduler, model)
    if arrival < alone(long):
        assert took[1] <= 3.0 * alone(short)
    assert took[0] <= 1.3 * alone(long)


def test_many_short_prompts_delay_a_long_one_by_no_more_than_their_work_and_a_sixth():
    scheduler, model = big(itl_target_s=0.05, max_num_seqs=4)
    shorts = [(0.1 + 0.5 * number, request(number + 1, 20, 1)) for number in range(20)]
    took = first_tokens([(0.0, request(0, 4000, 1)), *shorts], prompt_seconds, scheduler, model)
    assert took[0] <= (1.0 + 1.0 / 6.0) * alone(4000) + 20 * alone(20)


def test_long_prompt_is_not_starved_by_short_ones_that_fill_the_machine():
    scheduler, model = big(itl_target_s=0.05, max_num_seqs=4)
    rate = alone(32)
    shorts = [(0.1 + rate * number, request(number + 1, 32, 1)) for number in range(900)]
    took = first_tokens([(0.0, request(0, 2000, 1)), *shorts], prompt_seconds, scheduler, model)
    assert took[0] <= 5.0 * alone(2000)


def test_short_prompt_behind_a_queue_of_long_ones_starts_at_once():
    scheduler, model = big(itl_target_s=0.05, max_num_seqs=8)
    longs = [(0.0, request(number, 3000, 1)) for number in range(4)]
    took = first_tokens([*longs, (1.0, request(9, 30, 1))], prompt_seconds, scheduler, model)
    assert took[9] <= 3.0 * alone(30)


def test_waiting_request_does_not_take_room_that_one_before_it_needs():
    scheduler, model = make(num_blocks=20, budget=16, itl_target_s=0.05)
    scheduler.add(request(0, 32, max_tokens=1))  # 8 of 20 blocks
    step(scheduler, model)
    scheduler.add(request(1, 60, max_tokens=1))  # 15: it waits for the first
    scheduler.add(request(2, 4, max_tokens=1))
    step(scheduler, model)
    assert [r.id for r in scheduler.running] == []  # the first has finished
    assert step(scheduler, model)[1][0].request.id == 2, "there are free blocks for both now"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rewound_step_leaves_its_prompts_where_they_were(prefix_caching):
    scheduler, model = make(num_blocks=64, budget=16, itl_target_s=0.05)
    scheduler.kv.prefix_caching = prefix_caching
    scheduler.add(request(0, 0, 3, prompt=list(range(100, 140)), prompt_logprobs=1))
    step(scheduler, model)
    (long,) = scheduler.running
    model.spoil(scheduler.schedule())
    assert scheduler.rewind(1e-3) == []
    scheduler.check_invariants()
    assert (long.num_computed, len(long.prompt_rows), long.num_preemptions) == (16, 17, 0)
    assert 0 < long.num_lost <= 16
    scheduler.add(request(1, 0, 1, prompt=list(range(100, 130))))
    _, deltas = computed_in(scheduler, model)
    assert {d.request.id for d in deltas if d.finish} == {0, 1}


@pytest.mark.parametrize("why", ["streams", "no target", "late", "no slot", "no blocks", "urgent"])
def test_step_is_not_ended_for_a_request_that_gains_nothing_or_costs_too_much(why):
    scheduler, model = make(
        num_blocks=128,
        budget=64,
        max_num_seqs=1 if why == "no slot" else 8,
        itl_target_s=0.0 if why == "no target" else 0.05,
        policy="priority",
    )
    if why == "streams":
        scheduler.add(request(7, 2))
        step(scheduler, model)
    scheduler.add(request(0, 400, priority=-1 if why == "urgent" else 0))
    scheduler.schedule()
    short = request(1, 120 if why == "no blocks" else 2)
    assert not scheduler.ends_for(short, 100.0 if why == "late" else 0.0)
    if why in ("late", "no blocks"):
        assert scheduler.ends_for(request(1, 2), 1e-3)
        scheduler.running[0].num_lost = 400 / 6
        assert not scheduler.ends_for(request(1, 2), 1e-3), "it has lost too much work already"
