"""Why a request waits: each cause with the real scheduler, and seconds that add up to the wait."""

import random
from types import SimpleNamespace

import pytest

from cpuserve.base.waits import CAUSES, Intervals, main_cause
from cpuserve.sampling.structured import StructuredOutputs
from tests.core.scheduling import big, make, request, step

FORM = StructuredOutputs(regex="a*")


@pytest.fixture
def clock(monkeypatch):
    """The time of the scheduler, which only the test moves."""
    time = SimpleNamespace(now=100.0)
    fake = SimpleNamespace(monotonic=lambda: time.now, perf_counter=lambda: time.now)
    monkeypatch.setattr("cpuserve.core.scheduler.time", fake)
    return time


def steps(scheduler, model, clock, count, seconds=1.0):
    """Run steps that take `seconds` each."""
    for _ in range(count):
        batch = scheduler.schedule()
        clock.now += seconds
        scheduler.update(model.run(batch) if batch.chunks else [])
        scheduler.check_invariants()


def queued(one):
    """What a request waited for before it ran; the sum is its time in the queue."""
    assert sum(one.wait.queued.values()) == pytest.approx(one.scheduled - one.arrival)
    return {cause: pytest.approx(s) for cause, s in one.wait.queued.items() if s > 1e-9}


def test_a_request_that_comes_during_a_step_waits_for_its_end(clock):
    scheduler, model = make()
    scheduler.add(request(0, 3))
    steps(scheduler, model, clock, 1)
    scheduler.schedule()
    clock.now += 0.5
    scheduler.add(one := request(1, 3, arrival=clock.now - 0.25))
    clock.now += 0.5
    scheduler.fail("")
    steps(scheduler, model, clock, 1)
    assert queued(one) == {"step": 0.75}


def test_without_a_free_slot_it_waits_for_slots(clock):
    scheduler, model = make(max_num_seqs=1)
    scheduler.add(request(0, 3, max_tokens=4))
    steps(scheduler, model, clock, 1)
    scheduler.add(one := request(1, 3, arrival=clock.now))
    steps(scheduler, model, clock, 4)
    assert queued(one) == {"slots": 3.0}


def test_without_free_blocks_it_waits_for_blocks(clock):
    scheduler, model = make(num_blocks=8)
    scheduler.add(request(0, 20, max_tokens=4))
    steps(scheduler, model, clock, 1)
    scheduler.add(one := request(1, 20, arrival=clock.now))
    steps(scheduler, model, clock, 4)
    assert queued(one) == {"blocks": 3.0}


def test_beside_prompts_that_use_up_the_steps_it_waits_for_them(clock):
    scheduler, model = make(budget=16)
    scheduler.add(request(0, 12, arrival=clock.now))
    scheduler.add(one := request(1, 30, arrival=clock.now))
    scheduler.add(last := request(2, 40, arrival=clock.now))
    steps(scheduler, model, clock, 12)
    assert queued(last) == {"prompts": last.scheduled - last.arrival}
    assert last.scheduled > last.arrival
    assert set(one.wait.held) <= {"prompts"}


def test_a_grammar_that_is_compiled_holds_back_its_request_only(clock):
    scheduler, model = make()
    one = request(0, 3, arrival=clock.now, structured_outputs=FORM)
    one.ready = False
    scheduler.add(one)
    scheduler.add(other := request(1, 3, arrival=clock.now))
    steps(scheduler, model, clock, 3)
    scheduler.make_ready(one)
    clock.now += 0.5
    scheduler.schedule()
    assert queued(one) == {"grammar": 3.0, "step": 0.5}
    assert queued(other) == {}


def test_late_bitmasks_hold_back_only_requests_with_a_grammar(clock):
    scheduler, model = make(max_num_seqs=2)
    scheduler.masks_late = True
    scheduler.add(request(0, 3, max_tokens=3))
    scheduler.add(one := request(1, 3, arrival=clock.now, structured_outputs=FORM))
    scheduler.add(request(2, 3, max_tokens=3))
    steps(scheduler, model, clock, 2)
    scheduler.masks_late = False
    steps(scheduler, model, clock, 1)
    scheduler.schedule()
    assert queued(one) == {"grammar": 2.0, "slots": 1.0}


@pytest.mark.parametrize(
    ("policy", "later", "cause"),
    [
        ("fcfs", {"caller": "b"}, "share"),
        ("priority", {"caller": "b", "priority": -1}, "share"),
        ("priority", {"caller": "a", "priority": -1}, "priority"),
        ("fcfs", {"caller": "a"}, "slots"),
    ],
)
def test_a_request_that_a_later_one_passes_waits_for_that(clock, policy, later, cause):
    scheduler, model = make(max_num_seqs=2, policy=policy)
    for number, caller, most in ((0, "a", 30), (1, "b", 4)):
        scheduler.add(request(number, 3, max_tokens=most, caller=caller, priority=-9))
    steps(scheduler, model, clock, 1)
    scheduler.add(one := request(2, 3, caller="a", arrival=clock.now))
    scheduler.add(other := request(3, 3, max_tokens=5, arrival=clock.now, **later))
    steps(scheduler, model, clock, 12)
    if cause == "slots":
        assert queued(one) == {"slots": 3.0}
        return
    assert queued(one) == {"slots": 3.0, cause: 5.0}
    assert queued(other) == {"slots": 3.0}


def test_a_prompt_that_loses_its_slot_to_another_client_waits_for_its_share(clock):
    scheduler, model = make(max_num_seqs=2)
    own = [request(n, 3, max_tokens=40, caller="a", arrival=clock.now) for n in range(2)]
    for one in own:
        scheduler.add(one)
    steps(scheduler, model, clock, 2)
    scheduler.add(request(3, 3, max_tokens=3, caller="b"))
    steps(scheduler, model, clock, 8)
    (victim,) = [one for one in own if one.num_preemptions]
    assert victim.wait.held["share"] >= 1.0


def test_a_parked_prompt_waits_for_experts(clock):
    scheduler, model = make()
    scheduler.add(one := request(0, 3, arrival=clock.now))
    for _ in range(3):
        scheduler.schedule()
        clock.now += 1.0
        assert scheduler.park([0], []) == []
        scheduler.update([])
    steps(scheduler, model, clock, 1)
    assert queued(one) == {}
    assert one.wait.held == {"experts": pytest.approx(3.0)}
    assert one.num_output == 1


def test_what_holds_a_running_prompt_back_ends_with_its_first_token(clock):
    scheduler, model = big(itl_target_s=0.01)
    scheduler.add(one := request(0, 64, arrival=clock.now, max_tokens=9))
    steps(scheduler, model, clock, 4)
    held = dict(one.wait.held)
    steps(scheduler, model, clock, 3)
    assert one.num_output > 3
    assert one.wait.held == held


@pytest.mark.parametrize("seed", range(8))
def test_seconds_of_all_causes_are_the_time_in_the_queue(clock, seed):
    chance = random.Random(seed)
    policy = chance.choice(["fcfs", "priority"])
    scheduler, model = make(num_blocks=24, max_num_seqs=4, budget=16, policy=policy)
    added, unready = [], []
    for number in range(60):
        ends = random.Random(number)
        one = request(
            number,
            ends.randint(1, 30),
            max_tokens=ends.randint(1, 20),
            arrival=clock.now - chance.random(),
            priority=chance.randint(-2, 2),
            caller=chance.choice("abc"),
        )
        one.ready = chance.random() < 0.8
        unready += [] if one.ready else [one]
        scheduler.add(one)
        added.append(one)
        steps(scheduler, model, clock, chance.randint(0, 3), chance.random())
        if unready and chance.random() < 0.5:
            scheduler.make_ready(unready.pop())
        if chance.random() < 0.1:
            scheduler.abort(chance.choice(added).id)
            unready = [r for r in unready if r.id in scheduler.requests]
    for one in unready:
        scheduler.make_ready(one)
    for _ in range(3000):
        if not scheduler.has_work:
            break
        steps(scheduler, model, clock, 1, chance.random())
    assert not scheduler.has_work
    ran = [one for one in added if one.scheduled]
    assert len(ran) > 30
    for one in ran:
        assert set(queued(one)) | set(one.wait.held) <= set(CAUSES)
    seen = set().union(*(one.wait.queued for one in ran))
    assert {"step", "slots", "grammar"} & seen


def test_a_busy_step_without_a_queue_notes_nothing(clock, monkeypatch):
    scheduler, model = make()
    scheduler.add(request(0, 3))
    steps(scheduler, model, clock, 1)
    monkeypatch.setattr(scheduler, "_note_waits", None)
    assert step(scheduler, model)[0] == [1]


def test_waits_at_the_same_time_count_once():
    waits = Intervals()
    waits.add("thread", 10.0, 12.0)
    waits.add("thread", 11.0, 13.0)
    waits.add("model", 12.5, 12.75)
    waits.add("body", 14.0, 15.0)
    waits.add("loop", 16.0, 16.0005)  # too short
    assert waits.seconds() == {"thread": 3.0, "body": 1.0}


def test_the_main_cause_is_the_longest():
    assert main_cause({"slots": 1.0, "share": 2.0}) == "share"
    assert main_cause({}) == "step"
