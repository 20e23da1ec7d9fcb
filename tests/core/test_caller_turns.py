"""CallerTurns: the next item belongs to the caller that has had the least work."""

import pytest

from cpuserve.core.turns import CallerTurns


def taken(turns):
    return [turns.take()[1] for _ in range(len(turns))]


def filled(items, work=1.0):
    turns = CallerTurns()
    for item in items:
        turns.put(item[0], item, work)
    return turns


def test_callers_take_turns_and_the_items_of_each_keep_their_order():
    assert taken(filled(["a1", "a2", "a3", "b1", "b2", "c1"])) == [
        "a1", "b1", "c1", "a2", "b2", "a3",
    ]  # fmt: skip


def test_a_turn_costs_its_work():
    turns = CallerTurns()
    for item, work in [("a1", 30), ("a2", 30), ("b1", 10), ("b2", 10), ("b3", 10), ("b4", 10)]:
        turns.put(item[0], item, work)
    assert taken(turns) == ["a1", "b1", "b2", "b3", "a2", "b4"]


def test_work_that_is_known_later_counts():
    turns = filled(["a1", "a2", "b1", "b2", "b3"], work=0.0)
    order = []
    while turns:
        caller, item = turns.take()
        turns.charge(caller, 2.5 if caller == "a" else 1.0)
        order.append(item)
    assert order == ["a1", "b1", "b2", "b3", "a2"]
    turns.charge("unknown", 1.0)


@pytest.mark.parametrize("idle", ["long", "never"])
def test_a_caller_that_comes_back_is_owed_nothing_and_waits_for_one_item(idle):
    turns = filled([f"a{number}" for number in range(100)])
    if idle == "long":
        turns.put("b", "b0", 1.0)
    for _ in range(50):
        turns.take()
    for number in range(1, 4):
        turns.put("b", f"b{number}", 1.0)
    assert [turns.take()[0] for _ in range(6)] in (list("ababab"), list("bababa"))


def test_an_item_is_removed_before_its_turn():
    turns = filled(["a1", "a2", "b1"])
    assert turns.remove("a1")
    assert not turns.remove("a1")
    assert (len(turns), turns.count("a"), turns.count("c")) == (2, 1, 0)
    assert turns.first() == "a2"
    assert taken(turns) == ["a2", "b1"]
    assert not turns


def test_callers_without_items_are_forgotten():
    turns = CallerTurns()
    for number in range(1000):
        turns.put(f"c{number}", number, 1.0)
        turns.take()
    assert len(turns._of) < 100
