"""Block pool, KV manager and the prefix index."""

import pytest

from cpuserve.config.cache_groups import CacheUse
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.pool import BlockPool
from cpuserve.core.kv.prefix import PrefixChain, PrefixIndex, PrefixMatch
from cpuserve.core.kv.table import BlockTable


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
    kv = KvManager(4, 32)
    tables = kv.new_tables()
    assert kv.grow(tables, 40)
    assert len(tables[0]) == 2
    assert kv.grow(tables, 64)
    assert len(tables[0]) == 2
    assert not kv.grow(tables, 32 * 5)
    assert not kv.can_admit(PrefixMatch(), 32 * 2, spare=1)
    assert kv.can_admit(PrefixMatch(), 32 * 2)
    assert (len(tables[0]), kv.num_free, kv.usage) == (2, 2, 0.5)
    assert kv.grow(tables, 32 * 4)
    kv.check_invariants([tables])
    kv.free(tables)
    assert (tables, kv.num_free, kv.usage) == ([[]], 4, 0.0)
    kv.check_invariants([])


def fill(kv, tokens, salt="", computed=True):
    """Return (block table, chain) of a sequence that has computed `tokens`."""
    tables, chain = kv.new_tables(), PrefixChain(salt)
    kv.adopt(tables, chain, kv.match_prefix(chain, tokens))
    assert kv.grow(tables, len(tokens))
    kv.publish(tables, chain, tokens, len(tokens), computed=computed)
    return tables[0], chain


def hit(kv, tokens, salt=""):
    """Return the cached blocks that a new sequence of `tokens` would share."""
    return kv.match_prefix(PrefixChain(salt), tokens).blocks


def test_pool_prefers_free_blocks_and_evicts_the_one_unused_for_longest():
    evicted = []
    pool = BlockPool(4, evicted.append)
    pool.take(3)
    pool.keep([0, 1])
    pool.release([1, 2, 0])
    assert (pool.num_free, pool.num_cached) == (4, 2)
    pool.check_invariants([])
    assert pool.take(2) == [2, 3]
    assert evicted == []
    assert pool.take(1) == [1]
    assert evicted == [1]
    pool.share([0])
    assert (pool.num_free, pool.num_cached) == (0, 0)
    pool.release([0])
    pool.drop(0)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.check_invariants([1, 2, 3])


def test_published_blocks_are_shared_and_outlive_their_sequence():
    kv = KvManager(8, 4)
    tokens = list(range(10))
    first, _ = fill(kv, tokens)
    second, _ = fill(kv, [*tokens[:8], 50, 51, 52])
    assert second[:2] == first[:2]
    assert second[2] != first[2], "the block of 8 and 9 is not full"
    kv.check_invariants([[first], [second]])
    kv.free([first])
    kv.free([second])
    assert (kv.num_free, kv.num_cached) == (8, 2)
    third, _ = fill(kv, tokens)
    assert third[:2] == [0, 1]
    kv.check_invariants([[third]])


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_left_to_run(length, blocks):
    kv = KvManager(8, 4)
    fill(kv, list(range(8)))
    assert len(hit(kv, list(range(length)))) == blocks


def test_a_block_is_known_by_all_tokens_up_to_its_end():
    kv = KvManager(16, 2)
    fill(kv, [1, 2, 3, 4])
    assert len(hit(kv, [1, 2, 3, 4, 5])) == 2
    assert len(hit(kv, [1, 2, 3, 9, 5])) == 1
    assert hit(kv, [9, 2, 3, 4, 5]) == []


def test_salts_share_with_themselves_only():
    kv = KvManager(16, 2)
    mine, _ = fill(kv, [1, 2, 3, 4], "tenant")
    assert hit(kv, [1, 2, 3, 4, 5], "tenant") == mine
    assert hit(kv, [1, 2, 3, 4, 5]) == hit(kv, [1, 2, 3, 4, 5], "other") == []


def test_names_differ_between_processes():
    def name():
        index, chain = PrefixIndex(2), PrefixChain()
        index.name(chain, [1, 2], 1)
        return chain.keys

    assert name() != name()


def test_caching_turned_off_shares_nothing():
    kv = KvManager(8, 2, prefix_caching=False)
    table, _ = fill(kv, [1, 2, 3, 4])
    assert hit(kv, [1, 2, 3, 4, 5]) == []
    kv.free([table])
    assert kv.num_cached == 0


def test_content_computed_twice_is_kept_once():
    kv = KvManager(8, 2)
    one, other, chain = BlockTable(), BlockTable(), PrefixChain()
    kv.grow([one], 4)
    kv.grow([other], 4)
    kv.publish([one], PrefixChain(), [1, 2, 3, 4], 4, computed=False)
    kv.publish([other], chain, [1, 2, 3, 4], 4, computed=False)
    assert other == [2, 3], "the sequence lost blocks that it still has to write"
    kv.publish([other], chain, [1, 2, 3, 4], 4, computed=True)
    assert one == other == [0, 1]
    assert kv.num_free == 6
    kv.check_invariants([[one], [other]])


def test_sequence_catches_up_with_what_was_published_after_it_started():
    kv = KvManager(16, 2)
    tokens = list(range(9))
    late, chain = BlockTable(), PrefixChain()
    kv.grow([late], 9)
    early, _ = fill(kv, tokens)
    assert kv.catch_up([late], chain, tokens, 1) == 0, "not at the end of a block"
    assert kv.catch_up([late], chain, tokens, 0) == 8
    assert late[:4] == early[:4]
    assert late[4] != early[4]
    kv.check_invariants([[early], [late]])


def test_evicted_prefix_is_not_found_and_the_end_goes_first():
    kv = KvManager(4, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table, _ = fill(kv, tokens)
    kv.free([table])
    kv.grow(kv.new_tables(), 2)
    assert len(hit(kv, [*tokens, 9])) == 3
    kv.grow(kv.new_tables(), 2)
    assert len(hit(kv, [*tokens, 9])) == 2


def test_admission_does_not_count_a_cached_block_twice():
    kv = KvManager(4, 2)
    table, _ = fill(kv, [1, 2, 3, 4])
    kv.free([table])
    match = kv.match_prefix(PrefixChain(), [1, 2, 3, 4, 5])
    assert (match.num_tokens, kv.num_free) == (4, 4)
    assert kv.can_admit(match, 8)
    assert not kv.can_admit(match, 8, spare=1)


def collide(data):
    """A digest with the same value for all inputs, so that all keys collide."""
    return b"x"


def test_forged_collision_shares_nothing():
    kv = KvManager(16, 2, digest=collide)
    fill(kv, [1, 2])
    assert hit(kv, [7, 8, 9]) == []
    assert hit(kv, [1, 2, 3], "salt") == []
    assert len(hit(kv, [1, 2, 3])) == 1


def test_colliding_parent_does_not_lend_its_children():
    # First blocks collide, second ones do not: [7, 8] must not lead to what follows [1, 2].
    firsts = []

    def digest(data):
        if len(data) > 32 + 8:  # seed and salt
            return b"root"
        if data.startswith(b"root"):
            firsts.append(data)
            return b"first"
        return data[-8:]

    kv = KvManager(16, 2, digest=digest)
    fill(kv, [1, 2, 3, 4], "salt " * 4)
    other, chain = fill(kv, [7, 8, 3, 4], "salt " * 4)
    assert len(set(firsts)) == 2
    assert chain.num_entries == 0, "a block whose parent has no entry got an entry"
    kv.check_invariants([[[0, 1]], [other]])
    assert len(hit(kv, [1, 2, 3, 4, 5], "salt " * 4)) == 2
    assert hit(kv, [7, 8, 3, 4, 5], "salt " * 4) == []


def test_block_is_not_found_after_another_parent_of_the_same_hash():
    kv = KvManager(16, 2, digest=lambda data: data[-8:])  # keys do not depend on the tokens before
    first, _ = fill(kv, [1, 2, 3, 4])
    other, _ = fill(kv, [7, 8])
    assert hit(kv, [1, 2, 3, 4, 5]) == first
    assert hit(kv, [7, 8, 3, 4, 5]) == other


def test_failed_step_unpublishes_and_nothing_follows_a_forgotten_block():
    kv = KvManager(16, 2)
    table, chain = fill(kv, [1, 2, 3, 4], computed=False)
    kv.published.unpublish(table[1:])
    assert hit(kv, [1, 2, 3, 4, 5]) == table[:1]
    assert chain.last.forgotten
    kv.grow([table], 6)
    kv.publish([table], chain, [1, 2, 3, 4, 5, 6], 6, computed=True)
    assert chain.num_entries == 2
    kv.check_invariants([[table]])
    kv.free([table])
    assert (kv.num_free, kv.num_cached) == (16, 1)


def test_after_clearing_nothing_is_found_and_running_sequences_keep_their_blocks():
    kv = KvManager(16, 2)
    ended, _ = fill(kv, [1, 2, 3, 4])
    kv.free([ended])
    table, chain = fill(kv, [7, 8, 9])
    kv.published.clear()
    assert hit(kv, [1, 2, 3, 4, 5]) == hit(kv, [7, 8, 9, 9]) == []
    kv.check_invariants([[table]])
    assert (kv.num_cached, kv.num_free) == (0, 14)
    assert kv.grow([table], 6)
    kv.publish([table], chain, [7, 8, 9, 9, 9, 9], 6, computed=True)
    fresh, _ = fill(kv, [7, 8, 9])
    assert fresh[0] != table[0], "the blocks of the cleared prefix are not shared"
    kv.check_invariants([[table], [fresh]])


def test_unpublishing_its_own_leaves_what_a_sequence_found():
    kv = KvManager(8, 2)
    found, _ = fill(kv, [1, 2])
    table, chain = fill(kv, [1, 2, 3, 4])
    assert table[0] == found[0]
    kv.published.unpublish_own(chain)
    assert hit(kv, [1, 2, 3, 4, 5]) == found
    kv.check_invariants([[found], [table]])


def test_unpublishing_its_own_leaves_what_is_in_its_old_block_now():
    kv = KvManager(2, 2)
    table, chain = fill(kv, [1, 2, 3, 4])
    kv.free([table])
    others, _ = fill(kv, [5, 6, 7, 8])
    kv.published.unpublish_own(chain)
    assert hit(kv, [5, 6, 7, 8, 9]) == others
    kv.check_invariants([[others]])


@pytest.mark.parametrize(
    ("num_tokens", "gone"),
    [(0, 0), (6, 0), (8, 0), (9, 1), (10, 1), (12, 1), (13, 2), (17, 3), (20, 3)],
)
def test_slide_frees_the_blocks_that_no_later_token_sees(num_tokens, gone):
    """Token n attends to keys n - 5 .. n; a block of 4 is freed when no later token needs it."""
    kv, table = KvManager(8, 4, use=CacheUse((6,), 0, 4)), BlockTable()
    assert all((4 * block + 3 < num_tokens - 5) == (block < gone) for block in range(5)), (
        "the case itself"
    )
    kv.grow([table], 20)
    kv.slide([table], num_tokens)
    assert table == [kv.gone] * gone + list(range(gone, 5))
    assert kv.num_free == 3 + gone
    kv.check_invariants([[table]])
    kv.slide([table], num_tokens)
    assert kv.num_free == 3 + gone, "blocks outside the window were freed twice"
    kv.free([table])
    kv.check_invariants([])


def test_without_a_window_nothing_slides():
    kv, table = KvManager(8, 4), BlockTable()
    kv.grow([table], 20)
    kv.slide([table], 20)
    assert table == [0, 1, 2, 3, 4]


def slid(kv, tokens):
    """Return (block table, chain) of a sequence that has computed `tokens` one by one."""
    table, chain = BlockTable(), PrefixChain()
    for count in range(1, len(tokens) + 1):
        assert kv.grow([table], count)
        kv.publish([table], chain, tokens, count, computed=True)
        kv.slide([table], count)
    return table, chain


def served(kv, tokens):
    """Return how many of `tokens` a new sequence of them, and one more, would find."""
    return kv.match_prefix(PrefixChain(), [*tokens, 99]).num_tokens


def test_a_window_serves_a_prefix_with_its_last_blocks():
    """What it has left is evicted first, and takes nothing from the end of the prefix."""
    kv = KvManager(8, 2, use=CacheUse((4,), 0, 2))
    tokens = list(range(16))
    table, _ = slid(kv, tokens)
    kv.free([table])
    assert hit(kv, [*tokens, 99]) == [6, 7]
    for _ in range(6):
        assert served(kv, tokens) == 16
        assert kv.pool.take(1)
        kv.index.check_invariants()
    assert served(kv, tokens) == 16
    assert kv.pool.take(1) == [7]
    assert served(kv, tokens) == 0, "the end of a prefix is evicted first"
    assert kv.pool.take(1) == [6]
    assert len(kv.index) == 0, "entries without blocks stay in the index"


def test_a_prefix_gets_back_the_blocks_that_it_has_lost():
    kv = KvManager(8, 2, use=CacheUse((4,), 0, 2))
    tokens = list(range(12))
    table, _ = slid(kv, tokens)
    assert kv.num_cached == 4
    others = kv.pool.take(4)  # two free blocks, then two of the four that the window has left
    assert (served(kv, tokens), served(kv, tokens[:6])) == (12, 0)
    kv.pool.release(others)
    kv.check_invariants([[table]])
    again, _ = fill(kv, tokens[:6])
    assert served(kv, tokens[:6]) == 6
    assert again[2] == 2, "the block that the prefix had kept is not shared"
    kv.check_invariants([[table], [again]])
    kv.free([table])
    kv.free([again])
    kv.check_invariants([])


def mixed(num_blocks=24, windows=(0, 4)):
    """A manager of blocks of 2 tokens with a group that keeps all, and one with a window of 4."""
    return KvManager(num_blocks, 2, use=CacheUse(windows, 4, 2))


def run(kv, tokens, others=()):
    """Return (tables, chain) of a sequence that computes `tokens` in chunks of 4 at most."""
    tables, chain = kv.new_tables(), PrefixChain()
    match = kv.match_prefix(chain, tokens)
    assert kv.can_admit(match, len(tokens))
    kv.adopt(tables, chain, match)
    assert kv.grow(tables, len(tokens), match.num_tokens)
    at = match.num_tokens
    while at < len(tokens):
        end = min(at + 4, kv.reach(tables, at, len(tokens)))
        assert end > at
        kv.publish(tables, chain, tokens, end, computed=False)
        at = end
        kv.publish(tables, chain, tokens, at, computed=True)
        kv.reach(tables, at, len(tokens))
        kv.check_invariants([*others, tables])
    return tables, chain


def test_a_long_prompt_holds_window_blocks_for_one_chunk_only():
    kv = mixed()
    tokens = list(range(36))
    assert kv.needs(36) == 18 + 4
    tables, _ = run(kv, tokens)
    full, window = tables
    assert kv.gone not in full
    assert window.count(kv.gone) == 16, "the window of the last token is 32 to 35, of the next 33"
    assert len(kv.held(tables)) == 18 + 2
    kv.free(tables)
    assert (kv.num_free, kv.usage) == (24, 0.0)


@pytest.mark.parametrize(("num_blocks", "tokens"), [(23, 38), (22, 36), (8, 8), (9, 10), (10, 12)])
def test_a_request_is_as_long_as_all_groups_together_hold(num_blocks, tokens):
    kv = mixed(num_blocks)
    assert kv.use.most_tokens(num_blocks, 1000) == tokens
    run(kv, list(range(tokens)))


def test_a_mixed_prefix_ends_where_every_group_can_serve_it():
    kv = mixed()
    tokens = list(range(16))
    tables, _ = run(kv, tokens)
    kv.free(tables)
    assert served(kv, tokens) == 16
    match = kv.match_prefix(PrefixChain(), [*tokens, 99])
    assert [table.count(kv.gone) for table in match.tables] == [0, 6]
    kv.published.evicted(match.tables[1][-1])  # as if its memory had been needed
    kv.pool.drop(match.tables[1][-1])
    assert served(kv, tokens) == 14, "only the last two tokens have lost something"
    kv.check_invariants([])


def test_evicting_a_block_of_a_group_that_keeps_all_evicts_the_entry_and_what_follows():
    kv = mixed()
    tokens = list(range(16))
    tables, _ = run(kv, tokens)
    last = [table[-1] for table in tables]
    kv.free(tables)
    while kv.index.entry(last[0]) is not None:
        kv.pool.release(kv.pool.take(kv.num_free - kv.num_cached + 1))
        kv.check_invariants([])
        assert served(kv, tokens) % 2 == 0
    assert kv.index.entry(last[1]) is None


def test_groups_of_one_prompt_share_and_catch_up_together():
    kv = mixed()
    tokens = list(range(12))
    late, late_chain = kv.new_tables(), PrefixChain()
    assert kv.grow(late, 13)
    early, _ = run(kv, tokens, [late])
    assert kv.catch_up(late, late_chain, [*tokens, 99], 0) == 12
    assert late[0][:6] == early[0]
    assert late[1][:4] == [kv.gone] * 4
    assert late[1][4:6] == early[1][4:6]
    kv.check_invariants([early, late])


def test_making_room_spares_the_prefix_that_is_about_to_be_used():
    evicted = []
    pool = BlockPool(6, evicted.append)
    taken = pool.take(6)
    pool.keep(taken)
    pool.release([1, 0, 3, 2, 5, 4])
    steps = iter([True, True, False])
    assert not pool.vacate(4, [0, 1], lambda: next(steps))
    assert evicted == [3, 2]
    assert pool.vacate(4, [0, 1], lambda: True)
    assert evicted == [3, 2, 5, 4]
    assert pool.take(5)[4] == 1, "the end of the prefix is evicted first"


def test_content_that_was_computed_from_wrong_keys_is_forgotten_too():
    kv = KvManager(16, 2)
    table, _ = fill(kv, [1, 2, 3, 4], computed=False)
    other, _ = fill(kv, [1, 2, 3, 4, 5, 6], computed=False)
    kv.published.unpublish(table[1:])
    assert hit(kv, [1, 2, 3, 4, 5, 6, 7]) == table[:1]
    kv.check_invariants([[table], [other]])
    assert len(kv.index) == 1


def published(index, chain, tokens, first_block):
    """Insert the blocks of `tokens`, first_block and following; return their entries."""
    count = len(tokens) // 4
    index.name(chain, tokens, count)
    made = []
    for n in range(count):
        made.append(index.insert(chain, [first_block + n]))
        chain.advance(made[-1])
    return made


def test_a_search_goes_on_where_the_last_one_ended(monkeypatch):
    index, waiting = PrefixIndex(4), PrefixChain()
    tokens = list(range(400))
    made = published(index, PrefixChain(), tokens[:200], 0)
    assert index.search(waiting, tokens, 100).entries == made
    looked = []
    find = index.find
    monkeypatch.setattr(index, "find", lambda *args: looked.append(args[1]) or find(*args))
    assert index.search(waiting, tokens, 100).entries == made
    assert looked == [50], "only what may have come since is looked for"
    assert len(waiting.keys) < 100, "blocks that no search reaches get no keys"
    for entry in reversed(made[30:]):
        index.forget(entry)
    assert index.search(waiting, tokens, 100).entries == made[:30]
    assert looked == [50, 30]
    assert index.search(waiting, tokens, 20).entries == made[:20]


def test_an_entry_that_comes_back_with_another_parent_ends_what_was_remembered():
    index, waiting = PrefixIndex(4), PrefixChain()
    tokens = list(range(12))
    first, second, third = published(index, PrefixChain(), tokens, 0)
    assert index.search(waiting, tokens, 3).entries == [first, second, third]
    for entry in (third, second, first):
        index.forget(entry)
    chain = PrefixChain()
    index.name(chain, tokens, 3)
    for number, old in enumerate((None, None, third)):  # third was kept in a tier, the others not
        chain.advance(index.insert(chain, [10 + number], old))
    assert chain.last is third
    found = index.search(waiting, tokens, 3).entries
    assert found == [third.parent.parent, third.parent, third]
    assert first not in found
    assert second not in found
