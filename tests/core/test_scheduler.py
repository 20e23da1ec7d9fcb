"""Scheduler: what one step holds, in which order, and who is preempted."""

import pytest

from cpuserve.core.admission import Limits, check_request, output_limit
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.queue import WaitingQueue
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import FakeModel


def make(num_blocks=64, max_num_seqs=8, budget=32, block_size=4):
    model = FakeModel(num_blocks, block_size, max_num_seqs, budget)
    kv = KvManager(num_blocks, block_size)
    scheduler = Scheduler(kv, model, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return scheduler, model


def request(number, num_prompt, max_tokens=20, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(number, [number + 1] * num_prompt, sampling, max_tokens, seed=number)


def step(scheduler, model):
    """(tokens per slot in batch order, deltas) of one step."""
    batch = scheduler.schedule()
    sizes = [len(c.token_ids) for c in batch.chunks]
    return sizes, scheduler.update(model.run(batch) if batch.chunks else [])


def test_long_prompt_is_chunked_while_streams_go_on():
    scheduler, model = make(budget=16)
    scheduler.add(request(0, 3))
    scheduler.add(request(1, 3))
    assert step(scheduler, model)[0] == [3, 3]
    scheduler.add(request(2, 50))
    sizes = [step(scheduler, model)[0] for _ in range(5)]
    assert sizes == [[1, 1, 14], [1, 1, 14], [1, 1, 14], [1, 1, 8], [1, 1, 1]]


def test_budget_left_by_one_prompt_goes_to_the_next_in_order():
    scheduler, model = make(budget=10)
    for number, length in enumerate([6, 12, 3]):
        scheduler.add(request(number, length))
    assert step(scheduler, model)[0] == [6, 4]
    assert step(scheduler, model)[0] == [1, 8, 1]
    assert step(scheduler, model)[0] == [1, 1, 2]


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
    scheduler.add(request(2, 2, max_tokens=1))
    assert [r.id for r in scheduler.waiting] == [1, 2]
    while scheduler.has_work and not second.is_running:
        step(scheduler, model)
    _, seed, prompt, readmitted, _ = model.slots[second.slot]
    assert (seed, prompt) == (1, second.token_ids[:13])
    assert readmitted[: len(output)] == output


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
        scheduler.running[0].block_table.pop()
    elif damage == "order":
        scheduler.running.reverse()
    else:
        scheduler.running.pop()
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_queue_keeps_order_and_finds_any_request_at_once():
    queue = WaitingQueue()
    requests = [request(number, 1) for number in range(4)]
    for one in requests[1:]:
        queue.push(one)
    queue.push_front(requests[0])
    queue.remove(requests[2])
    assert [r.id for r in queue] == [0, 1, 3]
    assert requests[2] not in queue
    assert requests[3] in queue
    assert queue.head() is requests[0]
    assert len(queue) == 3


LIMITS = Limits(max_model_len=100, kv_tokens=64, vocab=50)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "ok"),
    [
        (64, 0, True),
        (65, 0, False),
        (64, 1, True),
        (64, 2, False),
        (10, 55, True),
        (10, 56, False),
        (64, None, True),
        (65, None, False),
        (99, 1, False),
        (100, 0, False),
    ],
)
def test_request_that_alone_does_not_fit_is_refused(num_prompt, max_tokens, ok):
    params = SamplingParams(max_tokens=max_tokens)
    if ok:
        check_request([1] * num_prompt, params, LIMITS)
        assert output_limit(num_prompt, params, LIMITS) >= (max_tokens != 0)
    else:
        with pytest.raises(InvalidRequest):
            check_request([1] * num_prompt, params, LIMITS)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "limit"), [(10, 5, 5), (10, None, 55), (10, 0, 0), (60, None, 5)]
)
def test_output_limit_is_cut_to_context_and_cache(num_prompt, max_tokens, limit):
    assert output_limit(num_prompt, SamplingParams(max_tokens=max_tokens), LIMITS) == limit


def test_full_context_may_be_scored_but_not_continued():
    limits = Limits(max_model_len=100, kv_tokens=1000, vocab=50)
    check_request([1] * 100, SamplingParams(max_tokens=0), limits)
    check_request([1] * 99, SamplingParams(max_tokens=500), limits)
    assert output_limit(99, SamplingParams(max_tokens=500), limits) == 1
    with pytest.raises(InvalidRequest, match="context length"):
        check_request([1] * 100, SamplingParams(max_tokens=1), limits)
