"""Block pool, KV manager and prefix hashes."""

import pytest

from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.pool import BlockPool
from cpuserve.core.kv.prefix import PrefixMatch, chain_hashes


def test_pool_gives_low_ids_first_and_reuses_the_block_freed_last():
    pool = BlockPool(8)
    assert pool.take(3) == [0, 1, 2]
    pool.release([2, 0])
    assert pool.take(2) == [0, 2]


def test_shared_block_is_free_after_its_last_release():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.check_invariants(blocks)
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check_invariants([])


@pytest.mark.parametrize(
    "misuse",
    [lambda p: p.take(5), lambda p: p.release([0]), lambda p: p.share([0])],
    ids=["take too many", "release free", "share free"],
)
def test_misuse_of_the_pool_is_caught(misuse):
    with pytest.raises(AssertionError):
        misuse(BlockPool(4))


@pytest.mark.parametrize(
    "uses", [[], [0], [0, 1, 1], [0, 1, 2]], ids=["none", "lost", "twice", "more"]
)
def test_check_invariants_sees_any_wrong_count(uses):
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.check_invariants(uses)
    pool.check_invariants([0, 1])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert KvManager(4, 32).blocks_for(tokens) == blocks


def test_grow_takes_what_is_missing_or_nothing():
    kv, table = KvManager(4, 32), []
    assert kv.grow(table, 40)
    assert len(table) == 2
    assert kv.grow(table, 64)
    assert len(table) == 2
    assert not kv.grow(table, 32 * 5)
    assert not kv.grow(table, 32 * 4, spare=1)
    assert (len(table), kv.num_free, kv.usage) == (2, 2, 0.5)
    assert kv.grow(table, 32 * 4)
    kv.check_invariants([table])
    kv.free(table)
    assert (table, kv.num_free, kv.usage) == ([], 4, 0.0)
    kv.check_invariants([])


def test_adopted_blocks_are_shared_until_both_tables_are_freed():
    kv, first, second = KvManager(4, 32), [], []
    kv.grow(first, 64)
    kv.adopt(second, PrefixMatch(first[:1], 32))
    assert kv.grow(second, 64)
    assert (second[0], len(second), kv.num_free) == (first[0], 2, 1)
    kv.check_invariants([first, second])
    kv.free(first)
    kv.check_invariants([second])
    kv.free(second)
    assert kv.num_free == 4


def test_match_prefix_finds_nothing_yet():
    kv = KvManager(4, 2)
    kv.grow([], 4)
    assert kv.match_prefix([1, 2, 3, 4]) == PrefixMatch([], 0)


def test_chain_hashes_name_a_block_by_all_tokens_up_to_its_end():
    one = chain_hashes([1, 2, 3, 4, 5], 2, b"salt")
    assert len(one) == len(set(one)) == 2  # the block of 5 is not full
    assert chain_hashes([1, 2, 3, 4, 5, 6], 2, b"salt")[:2] == one
    changed = chain_hashes([9, 2, 3, 4], 2, b"salt")
    assert changed[0] != one[0]
    assert changed[1] != one[1], "the same tokens after another prefix are another block"
    assert chain_hashes([1, 2], 2, b"other") != one[:1]
