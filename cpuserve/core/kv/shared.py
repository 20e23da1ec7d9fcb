"""SharedFiles: read-only KV blocks in files that another server has written.

`shared=DIR` finds the prefixes that a server with `--prefix-cache-dir DIR` has kept.
DIR is that directory on a network file system, or a copy of it in a container image.
The hashes (keys) of its blocks start from the seed in DIR,
so this tier can be combined with any other tier. The list of files is read once, at the start.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.core.kv.block_file import (
    HEAD,
    SEED_BYTES,
    TEMPORARY,
    BlockFormat,
    file_name,
)
from cpuserve.core.kv.cache_folder import FOLDER
from cpuserve.core.kv.prefix import BlockHash, CachedBlock, PrefixChain
from cpuserve.core.kv.tier import Data, TierBlock, TierNeeds
from cpuserve.core.regular_file import read_regular

# How many block keys stay in memory:
# a key takes about 200 bytes and saves a microsecond of SHA-256.
_MOST_KEYS = 1 << 16
# The most bytes of the tokens in a file. A larger file than the head,
# the data of a block and this number of bytes does not belong to this model.
_MOST_TOKEN_BYTES = 1 << 16

log = get_logger("kv")


class SharedFiles:
    """Reads the blocks in the prefix cache at `directory`.

    Raises:
        OSError: there is no prefix cache, or it cannot be read.
    """

    name = "shared"
    durable = False
    seed = None

    def __init__(self, directory: Path, needs: TierNeeds) -> None:
        root = directory / FOLDER
        seed = read_regular(root / "seed", SEED_BYTES, links=True)
        if seed is None or len(seed) != SEED_BYTES:
            raise OSError(
                errno.EINVAL, "this is not the seed of a prefix cache", str(root / "seed")
            )
        self._format = BlockFormat(needs, seed)
        self._folder = root / self._format.folder
        self._sizes = _sizes(self._folder, HEAD.size + max(needs.sizes) + _MOST_TOKEN_BYTES)
        self._num_bytes = sum(self._sizes.values())
        self._keys: dict[BlockHash, bytes] = {}
        self._broken = 0
        if not self._sizes:
            log.warning(
                "%s has no KV blocks of this model, version and settings, so none are found there",
                root,
            )

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of this model."""
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """The size of the files of these blocks, in bytes."""
        return self._num_bytes

    def find(self, chain: PrefixChain, index: int, group: int) -> bool:
        """Whether there is a file of block `index` of `chain`."""
        return bool(self._sizes) and self._file(chain, index, group) in self._sizes

    def load(self, chain: PrefixChain, index: int, group: int) -> TierBlock | None:
        """Return the bytes of the block, or None if its file is gone or damaged."""
        file = self._file(chain, index, group)
        parent = self._key(chain, index - 1) if index else b""
        key, content = self._key(chain, index), chain.contents[index]
        name = self._format.name(key, group, parent, chain.salt, content)
        try:
            fault("kv_shared.read")
            raw = read_regular(self._folder / file, name.file_bytes)
        except OSError as error:
            if error.errno not in TEMPORARY:
                self._forget(file)
            log.debug("%s cannot be read: %s", self._folder / file, error)
            return None
        data = None if raw is None else self._format.unpack(name, raw)
        if data is None:
            self._forget_broken(file)
            return None
        return data, None

    def _forget(self, file: str) -> None:
        self._num_bytes -= self._sizes.pop(file, 0)

    def _forget_broken(self, file: str) -> None:
        self._broken += 1
        self._forget(file)
        if self._broken == 1:
            log.warning(
                "%s is damaged, so its block is computed again; further ones are silently ignored",
                self._folder / file,
            )

    def _file(self, chain: PrefixChain, index: int, group: int) -> str:
        return file_name(self._format.key(self._key(chain, index), group))

    def _key(self, chain: PrefixChain, index: int) -> bytes:
        """Return the key of block `index` of `chain` in this directory.

        Keys are chained hashes.
        The hashes of this directory start from another seed than the hashes of the engine,
        so self._keys maps the engine's key of a block to the key in this directory.
        """
        if len(self._keys) > _MOST_KEYS:
            self._keys.clear()
        known, first = self._keys, index + 1
        while first and chain.keys[first - 1] not in known:
            first -= 1
        key = known[chain.keys[first - 1]] if first else self._format.root(chain.salt)
        for at in range(first, index + 1):
            key = known[chain.keys[at]] = hashlib.sha256(key + chain.contents[at]).digest()
        return key

    def ready(self, group: int) -> bool:  # noqa: ARG002
        """Return False, because the files belong to another server."""
        return False

    def wants(self, entry: CachedBlock, group: int) -> bool:  # noqa: ARG002
        """Return False, because the files belong to another server."""
        return False

    def put(self, entry: CachedBlock, group: int, data: Data, wait_s: float = 0.0) -> bool:  # noqa: ARG002
        """Return False without storing the block, because the files belong to another server."""
        return False

    def filled(self, entry: CachedBlock, group: int) -> None:
        """Do nothing: the file is still valid."""

    def close(self, wait_s: float) -> None:
        """Do nothing: there are no writes to finish."""


def _sizes(folder: Path, most: int) -> dict[str, int]:
    """Return the size of each file of at most `most` bytes in `folder`; {} without a folder."""
    try:
        with os.scandir(folder) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            sizes = {file.name: file.stat().st_size for file in files}
    except FileNotFoundError:
        return {}
    return {name: size for name, size in sizes.items() if size <= most}


def make_shared(place: str, needs: TierNeeds) -> SharedFiles:
    """Return the tier `shared=PLACE`."""
    return SharedFiles(Path(place).expanduser(), needs)
