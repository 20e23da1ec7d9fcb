"""Scheduler: the contents and order of a step, and which request is preempted."""

import pytest

from cpuserve.core.callers import CallerShares
from cpuserve.core.queue import WaitingQueue
from tests.core.scheduling import make, request, step


def test_long_prompt_is_chunked_while_streams_go_on():
    scheduler, model = make(budget=16)
    scheduler.add(request(0, 3))
    scheduler.add(request(1, 3))
    assert step(scheduler, model)[0] == [3, 3]
    scheduler.add(request(2, 50))
    sizes = [step(scheduler, model)[0] for _ in range(5)]
    assert sizes == [[1, 1, 14], [1, 1, 14], [1, 1, 14], [1, 1, 8], [1, 1, 1]]


def test_a_step_does_not_look_through_an_empty_queue(monkeypatch):
    scheduler, model = make(budget=16)
    scheduler.add(request(0, 3))
    step(scheduler, model)
    looks = []
    monkeypatch.setattr(WaitingQueue, "__iter__", lambda _: looks.append("all") or iter(()))
    assert not scheduler.waiting
    assert step(scheduler, model)[0] == [1]
    assert not looks


def test_prompts_go_by_what_they_have_left_and_the_oldest_always_gets_a_part():
    scheduler, model = make(budget=10)
    for number, length in enumerate([30, 12, 3]):
        scheduler.add(request(number, length))
    sizes = [3, 5, 2]  # the shortest whole, the next what is left but a quarter, the oldest that
    assert step(scheduler, model)[0] == sizes
    assert step(scheduler, model)[0] == [1, 7, 2]  # a stream; then the second, and the oldest


def test_a_request_that_is_not_ready_is_passed_over_and_keeps_its_place():
    scheduler, model = make(max_num_seqs=1)
    late = request(0, 3, max_tokens=1)
    late.ready = False
    scheduler.add(late)
    for number in (1, 2):
        scheduler.add(request(number, 3, max_tokens=1))
    assert [d.request.id for d in step(scheduler, model)[1]] == [1]
    scheduler.make_ready(late)
    assert [d.request.id for d in step(scheduler, model)[1]] == [0]
    assert [d.request.id for d in step(scheduler, model)[1]] == [2]
    assert not scheduler.has_work


def test_requests_that_are_not_ready_are_no_work_and_can_be_aborted():
    scheduler, model = make()
    for number in (0, 1):
        waiting = request(number, 3)
        waiting.ready = False
        scheduler.add(waiting)
    assert not scheduler.has_work
    assert scheduler.abort(0)
    assert not scheduler.has_work
    scheduler.make_ready(waiting)
    assert scheduler.has_work
    assert step(scheduler, model)[0] == [3]
    scheduler.check_invariants()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_is_not_ready_takes_nothing_from_those_behind_it(policy):
    scheduler, model = make(num_blocks=8, max_num_seqs=2, policy=policy)
    scheduler.add(request(0, 4, max_tokens=12))
    step(scheduler, model)
    large = request(1, 28, priority=-5)
    large.ready = False
    scheduler.add(large)  # its blocks would be all there are, and its priority comes first
    scheduler.add(request(2, 4, max_tokens=4))
    assert step(scheduler, model)[0] == [1, 4]
    assert scheduler.num_preemptions == 0
    assert not scheduler.ends_for(large, 0.0)


def test_requests_beyond_the_slots_wait_their_turn():
    scheduler, model = make(max_num_seqs=2)
    for number in range(4):
        scheduler.add(request(number, 2, max_tokens=2))
    finished = []
    while scheduler.has_work:
        assert len(scheduler.running) <= 2
        finished += [d.request.id for d in step(scheduler, model)[1] if d.finish]
    assert finished == [0, 1, 2, 3]


def test_every_decode_row_fits_a_budget_smaller_than_the_slots():
    scheduler, model = make(max_num_seqs=8, budget=3)
    for number in range(6):
        scheduler.add(request(number, 4, max_tokens=5))
    while scheduler.has_work:
        step(scheduler, model)
    assert model.largest_step <= 3


def test_preemption_takes_the_youngest_and_the_oldest_never_loses():
    scheduler, model = make(num_blocks=10, max_num_seqs=4)
    requests = [request(number, 7, max_tokens=25) for number in range(3)]
    for one in requests:
        scheduler.add(one)
    finished = []
    while scheduler.has_work:
        finished += [d.request.id for d in step(scheduler, model)[1] if d.finish]
        scheduler.check_invariants()
    assert finished == [0, 1, 2]
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions >= requests[1].num_preemptions
    assert scheduler.num_preemptions == sum(r.num_preemptions for r in requests) > 0


def test_preempted_request_is_readmitted_before_later_ones_with_its_output():
    scheduler, model = make(num_blocks=9, max_num_seqs=3)
    first, second = request(0, 13, max_tokens=15), request(1, 13, max_tokens=15)
    scheduler.add(first)
    scheduler.add(second)
    while scheduler.has_work and not scheduler.num_preemptions:
        step(scheduler, model)
    output = second.token_ids[13:]
    assert output
    began = second.scheduled
    scheduler.add(request(2, 2, max_tokens=1))
    assert [r.id for r in scheduler.waiting] == [1, 2]
    while scheduler.has_work and not second.is_running:
        step(scheduler, model)
    slot = model.slots[second.slot]
    assert (slot.seed, slot.prompt_ids) == (1, second.token_ids[:13])
    assert second.scheduled == began > 0.0, "it was first scheduled before"
    assert slot.output_ids[: len(output)] == output


def test_a_preempted_request_keeps_the_state_of_mirostat():
    scheduler, model = make(num_blocks=9, max_num_seqs=3)
    plain = request(0, 13, max_tokens=15)
    scheduler.add(plain)
    scheduler.add(request(1, 13, max_tokens=15, mirostat=2))
    while not scheduler.num_preemptions:
        step(scheduler, model)
    preempted = next(iter(scheduler.waiting))
    generated = preempted.num_output  # the state of the fake executor
    assert preempted.params.mirostat_mu == generated > 0
    while not preempted.is_running:
        step(scheduler, model)
    assert model.slots[preempted.slot].mirostat_mu == generated
    assert plain.params.mirostat_mu is None


def test_tight_pool_admits_only_what_leaves_room_to_decode():
    scheduler, model = make(num_blocks=6)
    for number in range(3):
        scheduler.add(request(number, 8, max_tokens=4))
    step(scheduler, model)
    # 2 blocks each: the third would leave no spare block for the first two.
    assert len(scheduler.running) == 2
    assert scheduler.num_preemptions == 0


def test_step_must_be_finished_before_the_next():
    scheduler, _ = make()
    scheduler.add(request(0, 3))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="not finished"):
        scheduler.schedule()


def test_results_that_do_not_fit_the_step_are_refused():
    scheduler, _ = make()
    scheduler.add(request(0, 3))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="result per row"):
        scheduler.update([])


def test_failed_step_ends_its_requests_only():
    scheduler, model = make(max_num_seqs=1)
    scheduler.add(request(0, 3))
    scheduler.add(request(1, 3, max_tokens=1))
    scheduler.schedule()
    (delta,) = scheduler.fail("broken")
    assert (delta.request.id, delta.finish, delta.error) == (0, "error", "broken")
    scheduler.check_invariants()
    assert [d.finish for d in step(scheduler, model)[1]] == ["length"]
    assert not scheduler.has_work


@pytest.mark.parametrize("damage", ["slot", "block", "order", "lost"])
def test_check_invariants_sees_damage(damage):
    scheduler, model = make()
    for number in range(3):
        scheduler.add(request(number, 6))
    step(scheduler, model)
    scheduler.check_invariants()
    if damage == "slot":
        scheduler.running[0].slot = scheduler.running[1].slot
    elif damage == "block":
        scheduler.running[0].tables[0].pop()
    elif damage == "order":
        scheduler.running.reverse()
    else:
        scheduler.running.pop()
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_queue_keeps_order_and_finds_any_request_at_once():
    callers = CallerShares()
    queue = WaitingQueue(callers, "fcfs", lambda request: 1)
    requests = [request(number, 1) for number in range(4)]
    for number, one in enumerate(requests):
        one.rank = (0.0, number)
        callers.came(one)
    for one in requests[1:]:
        queue.push(one)
    queue.push(requests[0])
    queue.remove(requests[2])
    assert [r.id for r in queue] == [0, 1, 3]
    assert requests[2] not in queue
    assert requests[3] in queue
    assert next(iter(queue)) is requests[0]
    assert len(queue) == 3
