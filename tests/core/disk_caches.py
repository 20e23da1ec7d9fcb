"""A DiskCache in a directory of the test, and what is in it."""

from cpuserve.core.kv.block_file import HEAD
from cpuserve.core.kv.cache_folder import FOLDER
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.prefix import PrefixChain, PrefixIndex
from cpuserve.core.kv.tier import TierNeeds

SIZE = 4
DATA = [bytes([i]) * 100 for i in range(8)]
FINGERPRINT = bytes(range(32))


def open_cache(
    directory,
    *,
    fingerprint=FINGERPRINT,
    block_bytes=100,
    max_bytes=1 << 20,
    queue_bytes=3200,
    cpus=(),
):
    needs = TierNeeds((block_bytes,) * 8, fingerprint)
    return DiskCache(directory, needs, max_bytes, queue_bytes, cpus)


def entries_of(cache, tokens, salt=""):
    """Return (chain, entries) of the full blocks of `tokens`, hashed with the cache's seed."""
    index, chain = PrefixIndex(SIZE, seed=cache.seed), PrefixChain(salt)
    count = len(tokens) // SIZE
    index.name(chain, tokens, count)
    entries = []
    for block in range(count):
        entry = index.insert(chain, [block])
        chain.advance(entry)
        entries.append(entry)
    return chain, entries


def fill(cache, tokens, salt=""):
    chain, entries = entries_of(cache, tokens, salt)
    for entry, data in zip(entries, DATA, strict=False):
        assert cache.wants(entry, 0)
        assert cache.put(entry, 0, data, 5.0)
    return chain


def load(cache, chain, index):
    """Return the bytes of a block of the first cache group, or None."""
    loaded = cache.load(chain, index, 0)
    assert loaded is None or loaded[1] is None
    return None if loaded is None else loaded[0]


def found(cache, chain):
    """Return for each block of `chain` whether there is a file."""
    return [cache.find(chain, index, 0) for index in range(len(chain.keys))]


def files(directory):
    return sorted(directory.glob(f"{FOLDER}/*/*.kv"))


ONE = HEAD.size + 4 * SIZE + 100  # bytes of a file
