"""Pictures in a prompt: where their tokens are, and that blocks with other pictures differ.

Each test of names compares two prompts of equal tokens and of two pictures: without the digest of
the picture in the name, one would find the keys and values of the other.
"""

import hashlib
from types import SimpleNamespace

import pytest
from msgspec import structs

from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.events import CacheEvents
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.prefix import PrefixChain, PrefixIndex
from cpuserve.core.kv.shared import SharedFiles
from cpuserve.core.kv.tier import SwapSpace, TierNeeds
from cpuserve.core.media import Placeholders, Stretch, extra_keys
from cpuserve.runtime.picture_tower import PictureTower
from tests.helpers.media_items import picture_item

SIZE = 4
# Two spans of six placeholders (id 9): tokens 3 .. 8, and 10 .. 15.
IDS = [1, 2, 3, *[9] * 6, 4, *[9] * 6, 5, 6, 7, 8]
MERGED = PictureTower(SimpleNamespace(turned_merge=2))
NEEDS = TierNeeds((8,), bytes(32))


def picture(name, spans=((3, 6), (10, 6)), tiles=((3, 4),)):
    return picture_item(hashlib.sha256(name.encode()).digest(), list(spans), list(tiles))


def chain_of(*pictures, salt=""):
    return PrefixChain(salt, Placeholders(pictures) if pictures else None)


def named(*pictures, seed=b"s"):
    """The chain of all full blocks of IDS."""
    chain = chain_of(*pictures)
    PrefixIndex(SIZE, seed=seed).name(chain, IDS, len(IDS) // SIZE)
    return chain


def entries_of(chain, seed=b"s"):
    """The entries of an index with all blocks of a chain that `named` has made."""
    index = PrefixIndex(SIZE, seed=seed)
    for block in range(len(chain.keys)):
        chain.advance(index.insert(chain, [block]))
    return list(index)


def cached(kv, *pictures):
    return kv.num_cached_tokens(chain_of(*pictures), IDS)


def computed(kv, *pictures):
    """Compute the prompt and end it, so that its blocks stay in the cache."""
    chain, tables = chain_of(*pictures), kv.new_tables()
    assert kv.grow(tables, len(IDS))
    kv.publish(tables, chain, IDS, len(IDS), computed=True)
    kv.free(tables)
    return chain


def test_runs_are_cut_at_the_ends_of_a_block():
    found = Placeholders([picture("a", [(3, 6)]), picture("b", [(10, 2), (12, 4)])])
    assert list(found.runs(0, 3)) == []
    assert list(found.runs(0, 4)) == [Stretch(3, 4, 0, 0)]
    assert list(found.runs(4, 8)) == [Stretch(4, 8, 0, 1)]
    assert list(found.runs(8, 13)) == [
        Stretch(8, 9, 0, 5),
        Stretch(10, 12, 1, 0),
        Stretch(12, 13, 1, 2),
    ]
    assert list(found.runs(16, 99)) == []
    assert [i for i in range(20) if i in found] == [*range(3, 9), *range(10, 16)]


def test_placeholders_are_left_out():
    found = Placeholders([picture("a")])
    assert found.without([*IDS, 77]) == [1, 2, 3, 4, 5, 6, 7, 8, 77]


def test_names_of_a_text_without_pictures_stay_as_they_were():
    chain = named()
    assert chain.contents[0] == b"".join(one.to_bytes(4, "little") for one in IDS[:4])
    assert Placeholders([]).mark(0, 4) == b""
    assert named(picture("a", [(10, 6)])).keys[:2] == chain.keys[:2]


def test_blocks_before_a_picture_are_shared_and_later_ones_are_not():
    one, other = named(picture("a", [(10, 6)])), named(picture("b", [(10, 6)]))
    assert one.keys[:2] == other.keys[:2]
    assert not set(one.keys[2:]) & set(other.keys[2:])


def test_another_part_of_the_same_picture_is_another_block():
    """The same tokens in one block stand for the rows 1 .. 4, or for the rows 5 .. 8."""
    first = named(picture("a", [(3, 6)])).contents[1]
    later = named(picture("a", [(0, 1), (1, 2), (2, 7)])).contents[1]
    assert first[:16] == later[:16]
    assert first != later


def test_the_cache_does_not_take_another_picture_for_this_one():
    kv = KvManager(32, SIZE)
    computed(kv, picture("a"))
    assert cached(kv, picture("a")) == len(IDS) - SIZE
    assert cached(kv, picture("b")) == 0
    assert cached(kv) == 0


def test_a_hash_collision_does_not_show_another_picture():
    kv = KvManager(32, SIZE, digest=lambda data: data[:1])
    computed(kv, picture("a"))
    assert cached(kv, picture("a")) > 0
    assert cached(kv, picture("b")) == 0


def test_the_tier_in_memory_does_not_take_another_picture_for_this_one():
    space, chain = SwapSpace(1 << 10, (8,)), named(picture("a"))
    for entry in entries_of(chain):
        space.put(entry, 0, bytes(8))
    assert space.find(named(picture("a")), 0, 0)
    assert not space.find(named(picture("b")), 0, 0)
    assert not space.find(named(), 0, 0)


def test_a_hash_collision_in_the_tier_in_memory_does_not_show_another_picture():
    space, chain = SwapSpace(1 << 10, (8,)), named(picture("a"))
    for entry in entries_of(chain):
        space.put(entry, 0, bytes(8))
    other = named(picture("b"))
    other.keys = chain.keys
    assert not space.find(other, 0, 0)


def test_the_tier_in_memory_compares_pictures_before_a_block_of_text_as_well():
    """The last block has only text, which is equal after both pictures."""
    space, chain = SwapSpace(1 << 10, (8,)), named(picture("a"))
    last = entries_of(chain)[-1]
    space.put(last, 0, bytes(8))
    for name in ("b", "a"):
        other, index = named(picture(name)), PrefixIndex(SIZE, seed=b"s")
        for block in range(len(other.keys) - 1):
            other.advance(index.insert(other, [block]))
        other.keys = chain.keys
        assert space.find(other, len(chain.keys) - 1, 0) == (name == "a")


@pytest.mark.parametrize("shared", [False, True])
def test_files_of_blocks_do_not_take_another_picture_for_this_one(tmp_path, shared):
    disk = DiskCache(tmp_path, NEEDS, 1 << 20, 1 << 20)
    for entry in entries_of(named(picture("a"), seed=disk.seed), disk.seed):
        assert disk.put(entry, 0, bytes(8), 5.0)
    disk.close(5.0)
    tier = SharedFiles(tmp_path, NEEDS) if shared else DiskCache(tmp_path, NEEDS, 1 << 20, 1 << 20)
    assert tier.load(named(picture("a"), seed=disk.seed), 0, 0) == (bytes(8), None)
    assert not tier.find(named(picture("b"), seed=disk.seed), 0, 0)
    assert tier.load(named(picture("a"), seed=disk.seed), 0, 0) is not None


def test_a_file_with_the_key_of_another_picture_is_refused(tmp_path):
    """The content is in the file, so a digest with a colliding key is not trusted."""
    disk = DiskCache(tmp_path, NEEDS, 1 << 20, 1 << 20)
    for entry in entries_of(named(picture("a"), seed=disk.seed), disk.seed):
        assert disk.put(entry, 0, bytes(8), 5.0)
    disk.close(5.0)
    again, other = DiskCache(tmp_path, NEEDS, 1 << 20, 1 << 20), named(picture("b"))
    other.keys = named(picture("a"), seed=disk.seed).keys
    assert again.find(other, 0, 0)
    assert again.load(other, 0, 0) is None


def test_events_have_ids_only_and_the_pictures_as_extra_keys():
    events = CacheEvents(SIZE)
    events.take()
    kv, one = KvManager(32, SIZE, events=events), picture("a")
    computed(kv, one)
    (stored,) = events.take()
    assert stored.token_ids == IDS
    name = one.digest.hex()
    want = [((name, 3),), ((name, -1),), ((name, -5),), ((name, -9),), None]
    assert stored.extra_keys == want


def test_two_pictures_in_a_block_are_two_keys():
    one, other = picture("a", [(0, 1), (1, 1)]), picture("b", [(2, 1)])
    content = named(one, other).contents[0]
    assert extra_keys(content, SIZE) == [(one.digest.hex(), 0), (other.digest.hex(), 2)]


def grids(merge, *placed):
    """Placeholders of pictures, each (position, merged rows, merged columns)."""
    made = [
        picture(
            f"{place}", spans=[(place, rows * columns)], tiles=[(rows * merge, columns * merge)]
        )
        for place, rows, columns in placed
    ]
    return Placeholders(made)


def test_the_places_of_a_picture_are_its_rows_and_columns():
    found = grids(2, (2, 2, 3), (10, 1, 2))
    # Text 0 1, a picture of 2 x 3 at 2, text at 2 + 3 = 5, a picture of 1 x 2 at 7, text at 9.
    wanted = [
        [0, 1, *[2] * 6, 5, 6, 7, 7, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]
    assert found.angles(0, 14, MERGED.grid) == wanted
    assert found.angles(0, 2, MERGED.grid) is None
    for begin in range(14):
        for end in range(max(begin + 1, 3), 15):
            assert found.angles(begin, end, MERGED.grid) == [axis[begin:end] for axis in wanted]
    assert found.angles(100, 103, MERGED.grid) == [[97, 98, 99]] * 3


def test_items_without_a_grid_have_the_places_of_a_text():
    """Between the grids of two pictures, as a sound would be."""
    one, sound, other = grids(2, (2, 2, 3), (9, 1, 4), (14, 2, 2)).items
    placed = Placeholders([one, structs.replace(sound, kind="sound"), other])
    wanted = Placeholders([one, other]).angles(0, 20, MERGED.grid)

    def grid_of(item):
        return None if item.kind == "sound" else MERGED.grid(item)

    assert placed.angles(0, 20, grid_of) == wanted
    assert wanted[1] != wanted[2]


def test_places_are_those_of_transformers():
    """The places of three pictures and of text around them (Qwen3-VL, and alike Qwen2.5-VL)."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    placed = [(3, 2, 5), (14, 4, 1), (30, 3, 3)]
    kinds = torch.zeros(1, 50, dtype=torch.int)
    for place, rows, columns in placed:
        kinds[0, place : place + rows * columns] = 1
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig()
    shapes = torch.tensor([[1, 2 * rows, 2 * columns] for _, rows, columns in placed])
    ids = torch.ones(1, 50, dtype=torch.long)
    wanted, shift = model.get_rope_index(ids, kinds, image_grid_thw=shapes)
    found = grids(2, *placed)
    assert found.angles(0, 50, MERGED.grid) == wanted[:, 0].tolist()
    assert found.angles(70, 71, MERGED.grid) == [[70 + int(shift)]] * 3
