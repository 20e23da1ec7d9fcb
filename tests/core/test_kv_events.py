"""A subscriber that applies the events of the prefix cache knows its content exactly."""

import random
from array import array

import msgspec
import pytest

from cpuserve.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvents
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.prefix import PrefixChain

BLOCK = 4


class Subscriber:
    """Knows {key of a block: (key of its parent, its tokens)} from decoded events alone."""

    def __init__(self):
        self.blocks = {}
        self.kinds = set()

    def apply(self, events):
        for event in msgspec.msgpack.decode(msgspec.msgpack.encode(events)):
            self.kinds.add(event[0])
            getattr(self, event[0])(*event[1:])

    def BlockStored(self, keys, parent, tokens, size, _lora_id, medium, name, extra):
        assert (size, medium, name, extra) == (BLOCK, "GPU", None, None)
        assert len(tokens) == len(keys) * size
        for index, key in enumerate(keys):
            assert key not in self.blocks
            assert parent is None or parent in self.blocks
            self.blocks[key] = (parent, tokens[index * size : (index + 1) * size])
            parent = key

    def BlockRemoved(self, keys, medium):
        assert medium == "GPU"
        for key in keys:
            del self.blocks[key]

    def AllBlocksCleared(self):
        self.blocks.clear()


def content(kv):
    return {
        entry.key: (entry.parent and entry.parent.key, array("i", entry.content).tolist())
        for entry in kv.index
    }


def run(kv, ids):
    """Compute a prompt: look it up, publish its blocks, free them."""
    chain, tables = PrefixChain(), kv.new_tables()
    match = kv.match_prefix(chain, ids)
    if not kv.can_admit(match, len(ids)):
        return
    kv.adopt(tables, chain, match)
    assert kv.grow(tables, len(ids), match.num_tokens)
    kv.publish(tables, chain, ids, len(ids), computed=True)
    if ids[-1] % 7 == 0:
        kv.published.unpublish_own(chain)
    kv.free(tables)


@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
def test_a_subscriber_knows_the_index_after_every_batch(windows):
    from cpuserve.config.cache_groups import cache_use

    chance, events = random.Random(1), CacheEvents(BLOCK)
    kv = KvManager(24, BLOCK, use=cache_use(list(windows), 64, BLOCK), events=events)
    subscriber, most = Subscriber(), 0
    for turn in range(400):
        ids = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
        run(kv, [*ids, chance.randrange(20)])
        if turn % 97 == 96:
            kv.published.clear()
        if chance.random() < 0.5:
            subscriber.apply(events.take())
            assert subscriber.blocks == content(kv)
            most = max(most, len(subscriber.blocks))
    assert most > 5
    assert subscriber.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_an_adapter_and_a_salt_are_keys_of_their_blocks():
    names = {"fingerprint": "french", "fingerprint*0.5": "french*0.5"}
    events = CacheEvents(BLOCK, names.__getitem__)
    kv = KvManager(24, BLOCK, events=events)
    assert events.take() == [AllBlocksCleared()]
    for salt in ("", "fingerprint@", "secret", "fingerprint@secret", "fingerprint*0.5@"):
        chain, tables = PrefixChain(salt), kv.new_tables()
        assert kv.grow(tables, 8, 0)
        kv.publish(tables, chain, [1] * 8, 8, computed=True)
        kv.free(tables)
    plain, adapted, salted, both, half = events.take()
    assert (plain.lora_name, plain.extra_keys) == (None, None)
    assert (adapted.lora_name, adapted.extra_keys) == ("french", [("french",), ("french",)])
    assert (salted.lora_name, salted.extra_keys) == (None, [("secret",), None])
    assert both.extra_keys == [("french", "secret"), ("french",)]
    assert (half.lora_name, half.extra_keys) == ("french*0.5", [("french*0.5",)] * 2)
    assert len({event.block_hashes[0] for event in (plain, adapted, salted, both, half)}) == 5


def test_events_are_arrays_with_the_members_of_vllm():
    """The arrays that llm-d reads: the tag, then the members in this order."""
    stored = BlockStored([b"k"], None, [1, 2], 2, None, "GPU", None)
    encoded = msgspec.msgpack.encode([stored, BlockRemoved([b"k"], "GPU"), AllBlocksCleared()])
    assert msgspec.msgpack.decode(encoded) == [
        ["BlockStored", [b"k"], None, [1, 2], 2, None, "GPU", None, None],
        ["BlockRemoved", [b"k"], "GPU"],
        ["AllBlocksCleared"],
    ]
