"""Which blocks the prefix cache loses first: short prompts, and not the agents' conversations."""

import random

import pytest

from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.pool import BlockPool, level_of
from cpuserve.core.kv.prefix import PrefixChain

BLOCK = 32


def run(kv, ids):
    """Compute a sequence; return how many of its tokens the cache had."""
    chain, tables = PrefixChain(), kv.new_tables()
    match = kv.match_prefix(chain, ids)
    assert kv.can_admit(match, len(ids))
    kv.adopt(tables, chain, match)
    assert kv.grow(tables, len(ids), match.num_tokens)
    kv.publish(tables, chain, ids, len(ids), computed=True)
    kv.free(tables, continues=chain.continues)
    kv.check_invariants([])
    return match.num_tokens


def new(chance, count):
    return [chance.randrange(1000, 30_000) for _ in range(count)]


def share_of_agents(cache_tokens, *, agents=3, size=4000, turns=12, short=0, grows=20):
    """The share of their prompts that agents find, who take turns; short: prompts in between."""
    chance, kv = random.Random(1), KvManager(cache_tokens // BLOCK, BLOCK)
    prompts = [new(chance, size) for _ in range(agents)]
    found = total = 0
    for number in range(turns):
        for prompt in prompts:
            cached = run(kv, prompt)
            if number > 1:
                found, total = found + cached, total + len(prompt)
            prompt += new(chance, grows)
            for _ in range(short):
                run(kv, new(chance, 200))
    return found / total


def test_agents_find_their_prompts_where_there_is_room_for_all():
    assert share_of_agents(14_000) >= 0.95


def test_short_prompts_between_the_turns_do_not_evict_agents():
    assert share_of_agents(14_000, short=8) >= 0.95


@pytest.mark.parametrize(
    ("cache_tokens", "least"), [(12_000, 0.8), (10_000, 0.45), (8800, 0.25)], ids=str
)
def test_agents_without_room_for_all_still_find_a_part(cache_tokens, least):
    assert share_of_agents(cache_tokens) >= least


@pytest.mark.deep
def test_many_agents_do_not_evict_each_other_completely():
    assert share_of_agents(17_000, agents=5, turns=20) >= 0.3


def test_a_conversation_that_has_ended_makes_room():
    chance, kv = random.Random(2), KvManager(8192 // BLOCK, BLOCK)
    old = new(chance, 4000)
    for _ in range(3):
        run(kv, old)
        old += new(chance, 20)
    for _ in range(60):
        run(kv, new(chance, 3000))
    assert run(kv, old) == 0


def test_a_longer_sequence_counts_more_and_a_continued_one_still_more():
    levels = [level_of(n, continued=c) for c in (False, True) for n in (1023, 1024, 8192, 65536)]
    assert levels == [0, 1, 2, 3, 3, 4, 5, 6]
    assert level_of(10**9, continued=True) == 6


def test_pool_evicts_by_age_and_level():
    evicted = []
    pool = BlockPool(6, evicted.append)
    blocks = pool.take(6)
    pool.keep(blocks)
    pool.release(blocks[:2], 3)  # 0 and 1 count 8 times
    pool.release(blocks[2:4])
    pool.release(blocks[4:], 1)
    taken = pool.take(4)
    assert evicted == blocks[2:6] == taken
    pool.release(taken)
    pool.share(blocks[:1])
    pool.release(blocks[:1])  # the level stays
    for _ in range(20):
        pool.release(pool.take(4))
    assert evicted == blocks[2:6]
    pool.keep(fresh := pool.take(4))
    pool.release(fresh)
    pool.take(1)
    assert evicted[4:] == [1], "an old conversation is evicted in the end"


def test_continuations_in_another_pool_are_left_to_it():
    evicted, after_4 = [], {5, 1, 9}  # 1 and 9 are blocks of other pools, such as states

    def evict(block):
        evicted.append(block)
        after_4.discard(block)

    pool = BlockPool(4, evict, lambda block: sorted(after_4) if block == 4 else (), first=4)
    blocks = pool.take(4)
    pool.keep(blocks)
    pool.release([4, 5, 6, 7])
    pool.take(2)
    assert evicted == [5, 4]


def test_vacate_evicts_none_of_the_prefix_that_is_about_to_be_used():
    evicted = []
    pool = BlockPool(4, evicted.append)
    blocks = pool.take(4)
    pool.keep(blocks)
    pool.release(reversed(blocks))
    assert pool.vacate(2, blocks[2:], lambda: True)
    assert evicted == [1, 0]
    pool.check_invariants([])
    assert pool.vacate(3, blocks[2:], lambda: True)
    assert evicted == [1, 0]
