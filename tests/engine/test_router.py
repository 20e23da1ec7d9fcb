"""Router, without processes: prefix affinity, overload and deaths."""

import random

import pytest

from cpuserve.engine.router import SEQUENCE_TOKENS, SLACK, Router
from tests.helpers.media_items import picture_item

BLOCK = 32


def tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def grow(prompt, turns, seed):
    """The prompts of a conversation: each begins with the one before."""
    prompts = [prompt]
    for turn in range(turns - 1):
        prompts.append(prompts[-1] + tokens(100, (seed, turn).__hash__()))
    return prompts


def test_every_turn_of_a_conversation_goes_where_the_first_went():
    router = Router(4, BLOCK)
    homes = {}
    for turn in range(5):
        for seed in range(20):
            prompt = grow(tokens(100, seed), 5, seed)[turn]
            homes.setdefault(seed, set()).add(router.choose(prompt, [0.0] * 4))
    assert all(len(replicas) == 1 for replicas in homes.values())
    spread = [sum(home == {i} for home in homes.values()) for i in range(4)]
    assert spread == [5, 5, 5, 5]


def test_agents_with_a_common_beginning_stay_where_they_are_while_they_overlap():
    router, homes, loads = Router(2, BLOCK), {}, [0.0, 0.0]
    tools = tokens(8000, "tools")
    agents = [grow(tools + tokens(12_000, agent), 10, agent) for agent in range(3)]
    for turn in range(10):
        for agent, prompts in enumerate(agents):
            home = router.choose(prompts[turn], loads)
            homes.setdefault(agent, set()).add(home)
            # The prompt is new in the first turn, and a running sequence in the others.
            loads[home] += 20_000 / SEQUENCE_TOKENS if turn == 0 else 1.0
        loads = [0.0, 0.0]
    assert all(len(found) == 1 for found in homes.values())
    assert set.union(*homes.values()) == {0, 1}, "a busy replica gets no more new agents"


def test_new_prompts_go_to_the_least_loaded():
    router = Router(3, BLOCK)
    assert router.choose(tokens(64, 1), [2.0, 0.5, 1.0]) == 1
    assert router.choose(tokens(64, 2), [0.0, 0.5, 1.0]) == 0


def test_an_overloaded_home_is_left_and_both_are_home_afterwards():
    router = Router(2, BLOCK)
    prompt = tokens(2 * BLOCK)
    assert router.choose(prompt, [0.0, 0.0]) == 0
    most = SLACK + 2 * BLOCK / SEQUENCE_TOKENS
    assert router.choose(prompt, [most, 0.0]) == 0
    assert router.choose(prompt, [most + 0.01, 0.0]) == 1
    assert router.choose(prompt, [1.0, 0.5]) == 1
    assert router.choose(prompt, [0.5, 1.0]) == 0


def test_a_longer_prefix_is_worth_a_longer_wait():
    short, long = tokens(BLOCK, 1), tokens(64 * BLOCK, 2)
    for prompt, stays in ((short, False), (long, True)):
        router = Router(2, BLOCK)
        assert router.choose(prompt, [0.0, 1.0]) == 0
        assert (router.choose(prompt, [6.0, 0.0]) == 0) == stays


def test_the_longest_prefix_wins_over_a_shared_beginning():
    router = Router(2, BLOCK)
    system = tokens(4 * BLOCK)
    one, two = system + tokens(2 * BLOCK, 1), system + tokens(2 * BLOCK, 2)
    assert router.choose(one, [0.0, 1.0]) == 0
    assert router.choose(two, [9.0, 0.0]) == 1
    for _ in range(3):
        assert router.choose([*one, 5], [1.0, 0.0]) == 0
        assert router.choose([*two, 5], [0.0, 1.0]) == 1


def test_a_difference_in_the_first_block_or_salt_is_another_conversation():
    router = Router(2, BLOCK)
    prompt = tokens(8 * BLOCK)
    assert router.choose(prompt, [0.0, 0.5]) == 0
    assert router.choose([prompt[0] + 1, *prompt[1:]], [0.5, 0.0]) == 1
    assert router.choose(prompt, [0.5, 0.0], salt="a") == 1
    assert router.choose(prompt, [0.5, 0.0]) == 0


@pytest.mark.parametrize(("block", "length"), [(0, 8 * BLOCK), (BLOCK, BLOCK - 1)])
def test_without_a_block_to_share_only_load_counts(block, length):
    router = Router(2, block)
    prompt = tokens(length)
    assert router.choose(prompt, [0.0, 0.1]) == 0
    assert router.choose(prompt, [0.1, 0.0]) == 1


def test_a_dead_replica_gets_nothing_and_comes_back_without_its_prefixes():
    router = Router(2, BLOCK)
    prompt = tokens(4 * BLOCK)
    assert router.choose(prompt, [0.0, 1.0]) == 0
    assert router.choose(prompt, [None, 50.0]) == 1
    router.forget(0)
    assert router.choose(prompt, [0.0, 1.0]) == 1
    router.forget(1)
    assert router.choose(prompt, [0.0, 1.0]) == 0


def test_what_it_remembers_is_bounded_and_the_oldest_goes_first():
    router = Router(2, BLOCK, max_prefixes=10)
    old, recent = tokens(5 * BLOCK, 1), tokens(5 * BLOCK, 2)
    assert router.choose(old, [0.0, 1.0]) == 0
    assert router.choose(recent, [0.0, 1.0]) == 0
    router.choose(tokens(3 * BLOCK, 3), [1.0, 0.0])
    assert router.choose(recent, [1.0, 0.0]) == 0
    router.choose(tokens(20 * BLOCK, 4), [1.0, 0.0])
    assert len(router._homes) == 10
    assert router.choose(old, [1.0, 0.0]) == 1


def test_a_prompt_with_another_picture_is_another_prompt():
    """Without the digest, the second picture would go to a replica that has not computed it."""
    router, prompt = Router(2, BLOCK), [9] * (8 * BLOCK)
    one, other = (picture_item(bytes([i]) * 32, [(0, len(prompt))], []) for i in range(2))
    home = router.choose(prompt, [0.0, 0.0], media=[one])
    assert router.choose(prompt, [0.5, 0.5], media=[other]) == 1 - home
    busy = [0.5, 0.5]
    busy[home] = 1.0
    assert router.choose(prompt, busy, media=[one]) == home
    assert router.choose(prompt, busy, media=[other]) == 1 - home
