"""The simulation of routing: nothing is lost, and each policy finds the prefixes that it should."""

import pytest

from benchmarks.simulate_routing import BLOCK, POLICIES, Machine, Simulation, Workload, summary

WORKLOAD = Workload(
    system_prompts=2, system_tokens=320, turns=(3, 4), user_tokens=60, response_tokens=8
)
FAST = Machine(bandwidth=2e12, token_s=1e-5)


def simulated(policy, **changes):
    given = {"replicas": 4, "rate": 0.25, "seconds": 40, "machine": FAST, "workload": WORKLOAD}
    simulation = Simulation(policy, **{**given, **changes})
    return simulation, simulation.run()


@pytest.fixture(scope="module")
def runs():
    return {policy: simulated(policy) for policy in POLICIES}


def test_every_turn_ends_and_the_same_conversations_begin_with_every_policy(runs):
    begun = set()
    for simulation, counted in runs.values():
        assert all(turn.arrival < turn.first <= turn.end for turn in simulation.turns)
        assert all(turn.tokens and turn.cached < turn.prompt_tokens for turn in simulation.turns)
        assert all(not server.turns and server.batch is None for server in simulation.servers)
        for server in simulation.servers:
            server.scheduler.check_invariants()
        assert len(counted) > 40
        begun.add(frozenset({turn.conversation.number for turn in simulation.turns}))
    assert len(begun) == 1


def test_a_session_finds_all_its_earlier_tokens_and_round_robin_only_a_part(runs):
    """The cache holds everything here, so only the choice of the server decides."""
    simulation, _ = runs["session"]
    known = {}
    for turn in simulation.turns:
        before = known.get(turn.conversation.number)
        if before is not None:
            assert turn.cached >= (before - 1) // BLOCK * BLOCK
        known[turn.conversation.number] = turn.prompt_tokens + turn.tokens
    cached = {policy: summary(*run)["cached"] for policy, run in runs.items()}
    assert cached["prefix"] >= cached["session"] > cached["round_robin"] + 0.05


def test_one_server_is_the_same_with_every_policy():
    found = {str(summary(*simulated(policy, replicas=1, seconds=20))) for policy in POLICIES}
    assert len(found) == 1


def test_the_time_of_a_step_follows_from_its_work():
    """A single request on an idle server waits for the steps of its prompt."""
    alone = Workload(system_prompts=1, system_tokens=3200, turns=(1, 1), response_tokens=8)
    simulation, _ = simulated("prefix", replicas=1, rate=0.02, seconds=300, workload=alone)
    turn = simulation.turns[0]
    assert turn.cached == 0
    least = turn.prompt_tokens * FAST.token_s
    attention = turn.prompt_tokens**2 / 2 * FAST.pair_s
    assert turn.first - turn.arrival == pytest.approx(least + attention, rel=0.15)
