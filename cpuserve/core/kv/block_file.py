"""The format of a file with one KV block: its identity, its predecessor, and a checksum.

The content of a block is the ids of its tokens and the marks of its media items (media.py).
Parts of encoded items have files of the same format.
"""

from __future__ import annotations

import errno
import hashlib
import struct
import zlib
from dataclasses import dataclass

from cpuserve.core.kv.prefix import BlockHash
from cpuserve.core.kv.tier import Data, TierNeeds

MAGIC = b"cpuskv1\n"
# A file still exists and may be readable later if reading it fails with one of these codes.
TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
SEED_BYTES = 32
# The head has a magic number, the fingerprint, the key of the block, the key of its parent (zeros
# for the first block of a text), and the hash of seed and salt. The number of bytes of the content
# and of the data follow, then a CRC-32 of the content, the data and the head before this field.
HEAD = struct.Struct("<8s32s32s32s32sQQI")
_HEAD_BEFORE_CRC = HEAD.size - 4


@dataclass(frozen=True, slots=True)
class BlockName:
    """The fields in a file's head that identify its block; size: number of bytes of its data."""

    key: bytes
    parent: bytes
    root: bytes
    content: bytes
    size: int

    @property
    def file_bytes(self) -> int:
        """The size of the file in bytes."""
        return HEAD.size + len(self.content) + self.size


class BlockFormat:
    """The format of block files for one model with its settings; such files share a folder.

    seed: the bytes that the keys of the blocks start from.
    """

    def __init__(self, needs: TierNeeds, seed: bytes) -> None:
        self.seed = seed
        self._fingerprint = needs.fingerprint
        self._sizes = needs.sizes
        self._head = needs.head

    @property
    def folder(self) -> str:
        """The name of the folder with the files of this format."""
        return self._fingerprint.hex()[:32]

    def name(self, key: bytes, group: int, parent: bytes, salt: str, content: bytes) -> BlockName:
        """Return the name of a block in a cache group; parent: b"" for a text's first block."""
        root, size = self.root(salt), self._sizes[group]
        return BlockName(self.key(key, group), parent or bytes(32), root, content, size)

    def key(self, key: bytes, group: int) -> bytes:
        """Return the key of the file for block `key` in a cache group; the last may be a head's."""
        of_head = self._head and group == len(self._sizes) - 1
        return file_key(key, group, self._head if of_head else b"")

    def media(self, digest: bytes, part: int, size: int) -> BlockName:
        """Return the name of a part of the rows of an encoded item (`MediaFiles`)."""
        content = digest + part.to_bytes(4, "little")
        key = hashlib.sha256(b"media" + content).digest()
        return BlockName(key, bytes(32), self.root(""), content, size)

    def root(self, salt: str) -> bytes:
        """Return the 32 bytes that the chained keys of texts with this salt start from."""
        return hashlib.sha256(self.seed + salt.encode("utf-8", "surrogatepass")).digest()

    def pack(self, name: BlockName, data: Data) -> tuple[Data, ...]:
        """Return the parts of a block's file in order: head, CRC-32, tokens and data."""
        head = HEAD.pack(
            MAGIC,
            self._fingerprint,
            name.key,
            name.parent,
            name.root,
            len(name.content),
            len(data),
            0,
        )[:_HEAD_BEFORE_CRC]
        crc = zlib.crc32(data, zlib.crc32(name.content, zlib.crc32(head)))
        return head, struct.pack("<I", crc), name.content, data

    def unpack(self, name: BlockName, raw: bytes | memoryview) -> Data | None:
        """Return the data of the file `raw`; None if it is damaged or belongs to another block."""
        if len(raw) < HEAD.size:
            return None
        *head, content_bytes, data_bytes, crc = HEAD.unpack_from(raw)
        want = [MAGIC, self._fingerprint, name.key, name.parent, name.root]
        begin = HEAD.size + content_bytes
        if head != want or data_bytes != name.size or len(raw) != begin + data_bytes:
            return None
        if zlib.crc32(memoryview(raw)[HEAD.size :], zlib.crc32(raw[:_HEAD_BEFORE_CRC])) != crc:
            return None
        return raw[begin:] if raw[HEAD.size : begin] == name.content else None


def file_key(key: BlockHash | bytes, group: int, head: bytes = b"") -> bytes:
    """Return the key of the file for block `key` in a cache group; it is `key` in group 0.

    head: `TierNeeds.head` of the head that the group belongs to.
    """
    return hashlib.sha256(key + group.to_bytes(2, "little") + head).digest() if group else key


def file_name(key: bytes) -> str:
    """Return the name of the file with this key."""
    return f"{key.hex()}.kv"
