"""SharedFiles finds what a DiskCache has written, whatever its own seed, and changes nothing."""

import threading

import pytest

from cpuserve.core.kv import shared
from cpuserve.core.kv.cache_folder import FOLDER
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.prefix import PrefixChain, PrefixIndex
from cpuserve.core.kv.shared import SharedFiles
from cpuserve.core.kv.tier import TierNeeds
from tests.helpers.patience import PATIENCE_S
from tests.helpers.special_files import replace_with

SIZE, BYTES = 4, 100
FINGERPRINT = bytes(range(32))
NEEDS = TierNeeds((BYTES, BYTES), FINGERPRINT)
TOKENS = list(range(40, 56))
BLOCKS = [bytes([number]) * BYTES for number in range(4)]


def chain_of(tokens, salt="", seed=None):
    """Return the chain of all full blocks, whose keys start from `seed` (None: random)."""
    chain = PrefixChain(salt)
    PrefixIndex(SIZE, seed=seed).name(chain, tokens, len(tokens) // SIZE)
    return chain


def fill(directory, tokens=TOKENS, salt="", groups=1, fingerprint=FINGERPRINT):
    """Write the blocks of `tokens`; the bytes of group g begin with g."""
    disk = DiskCache(directory, TierNeeds((BYTES,) * groups, fingerprint), 1 << 20, 1 << 20)
    index, chain = PrefixIndex(SIZE, seed=disk.seed), PrefixChain(salt)
    index.name(chain, tokens, len(tokens) // SIZE)
    for number in range(len(tokens) // SIZE):
        entry = index.insert(chain, [number])
        for group in range(groups):
            assert disk.put(entry, group, bytes([group]) + BLOCKS[number][1:], PATIENCE_S)
        chain.advance(entry)
    disk.close(PATIENCE_S)


def loaded(tier, chain, group=0):
    """Return the bytes of each block of `chain` that is found, up to the first that is not."""
    found = []
    for index in range(len(chain.keys)):
        block = tier.load(chain, index, group) if tier.find(chain, index, group) else None
        if block is None:
            break
        assert block[1] is None
        found.append(block[0])
    return found


def contents(directory):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.glob("**/*")
        if path.is_file()
    }


@pytest.mark.parametrize("most", [1 << 16, 1])
def test_blocks_are_found_under_other_keys(tmp_path, monkeypatch, most):
    monkeypatch.setattr(shared, "_MOST_KEYS", most)
    fill(tmp_path, groups=2)
    tier = SharedFiles(tmp_path, NEEDS)
    assert (len(tier), tier.num_blocks) == (8, 8)
    chains = [chain_of(TOKENS), chain_of([*TOKENS[:9], 1, *TOKENS[10:]])]
    for group in (0, 1):
        want = [bytes([group]) + block[1:] for block in BLOCKS]
        assert loaded(tier, chains[0], group) == want
        assert loaded(tier, chains[1], group) == want[:2]
    assert loaded(tier, chains[0], 2) == []
    assert tier.find(chains[0], 3, 0), "the keys before it are computed again"


def test_nothing_is_changed(tmp_path):
    fill(tmp_path)
    before = contents(tmp_path)
    tier = SharedFiles(tmp_path, NEEDS)
    entry = PrefixIndex(SIZE).insert(chain_of([1] * SIZE), [0])
    assert not tier.wants(entry, 0)
    assert not tier.put(entry, 0, BLOCKS[0])
    assert loaded(tier, chain_of(TOKENS)) == [bytes([0]) + block[1:] for block in BLOCKS]
    tier.filled(entry, 0)
    tier.close(1.0)
    assert contents(tmp_path) == before
    assert tier.num_bytes == sum(len(data) for path, (data, _) in before.items()
                                 if path.suffix == ".kv")  # fmt: skip


def test_other_texts_salts_and_settings_have_no_blocks(tmp_path, caplog):
    fill(tmp_path, salt="a")
    tier = SharedFiles(tmp_path, NEEDS)
    assert len(loaded(tier, chain_of(TOKENS, "a"))) == 4
    assert loaded(tier, chain_of(TOKENS)) == []
    assert loaded(tier, chain_of(TOKENS[1:], "a")) == []
    assert not caplog.records
    other = SharedFiles(tmp_path, TierNeeds((BYTES,), bytes(32)))
    assert loaded(other, chain_of(TOKENS, "a")) == []
    assert "no KV blocks of this model" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "link"])
def test_what_is_no_block_file_is_neither_waited_for_nor_read(tmp_path, kind):
    fill(tmp_path)
    tier, chain = SharedFiles(tmp_path, NEEDS), chain_of(TOKENS)
    replace_with(tmp_path / FOLDER / FINGERPRINT.hex()[:32] / tier._file(chain, 1, 0), kind)
    results = []
    reader = threading.Thread(target=lambda: results.append(loaded(tier, chain)), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert [len(result) for result in results] == [1]
    assert not tier.find(chain, 1, 0)


@pytest.mark.parametrize("how", ["flipped", "short", "another", "gone"])
def test_a_file_that_is_not_right_is_forgotten_and_stays(tmp_path, caplog, how):
    fill(tmp_path)
    tier, chain = SharedFiles(tmp_path, NEEDS), chain_of(TOKENS)
    bytes_before = tier.num_bytes
    path = tmp_path / FOLDER / FINGERPRINT.hex()[:32] / tier._file(chain, 1, 0)
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "another":
        path.write_bytes(path.with_name(tier._file(chain, 2, 0)).read_bytes())
    else:
        path.write_bytes(data[:-1] + (b"?" if how == "flipped" else b""))
    before = contents(tmp_path)
    assert len(loaded(tier, chain)) == 1
    assert not tier.find(chain, 1, 0)
    assert tier.find(chain, 2, 0)
    assert (len(tier), tier.num_bytes) == (3, bytes_before - len(data))
    assert contents(tmp_path) == before
    assert ("is damaged" in caplog.text) == (how != "gone")


def test_a_directory_without_a_prefix_cache_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        SharedFiles(tmp_path, NEEDS)
    fill(tmp_path)
    (tmp_path / FOLDER / "seed").write_bytes(b"short")
    with pytest.raises(OSError, match="not the seed of a prefix cache"):
        SharedFiles(tmp_path, NEEDS)


def test_links_and_large_files_are_left_alone(tmp_path):
    fill(tmp_path)
    folder = tmp_path / FOLDER / FINGERPRINT.hex()[:32]
    (folder / "link.kv").symlink_to(tmp_path / FOLDER / "seed")
    (folder / "large.kv").write_bytes(bytes(1 << 18))
    assert len(SharedFiles(tmp_path, NEEDS)) == 4
