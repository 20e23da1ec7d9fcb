"""Thoughts as opaque texts that clients send back: `encrypted_content` and `signature`.

The text is a checksum, the length of the thought, and the compressed thought. The text is not
secret, because the client may read the thought anyway. Some clients send back only this field.
The checksum has a key of this server, because a short text that a stranger wrote could expand
to a thousand times its length: only texts that this server has written are opened.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.log import get_logger
from cpuserve.core.secret_file import read_secret

if TYPE_CHECKING:
    from typing import TypeGuard

log = get_logger("serve")

_MARK = "cpuserve2."
_FILE = "sealing-key"
_KEY_BYTES, _SUM_BYTES, _LENGTH_BYTES = 32, 16, 8
_HEAD_BYTES = _SUM_BYTES + _LENGTH_BYTES
# The fastest level of zlib: the event loop compresses a thought when it ends.
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class SealedThought:
    """A thought that this server sealed: its compressed text, and its size in bytes."""

    data: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Seals thoughts with the key of a server, and opens thoughts sealed with the same key."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)

    @classmethod
    def kept_in(cls, folder: Path) -> Seal:
        """Return the seal with the key in `folder`, which restarts and other servers find again.

        If the key can be neither read nor written there, the seal has a new key.
        """
        lost = "thoughts that were sealed with it are no longer opened"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(read_secret(folder / _FILE, _KEY_BYTES, lost))
        except OSError as error:
            return cls.unkept(folder, error)

    @classmethod
    def unkept(cls, folder: Path, error: OSError) -> Seal:
        """Return a seal with a new key, because `folder` cannot be used."""
        log.info(
            "the key of sealed thoughts cannot be kept in %s (%s): after a restart, this "
            "server does not open thoughts that clients send back only in sealed form",
            folder,
            error.strerror,
        )
        return cls()

    def sealed(self, thought: str) -> str:
        """Return the thought as a text that `packed` reads."""
        raw = thought.encode("utf-8", "replace")
        body = len(raw).to_bytes(_LENGTH_BYTES, "big") + zlib.compress(raw, _LEVEL)
        return _MARK + base64.urlsafe_b64encode(self._checksum(body) + body).decode()

    def packed(self, text: str) -> SealedThought | None:
        """Return the thought in a sealed text, without expanding it.

        Returns None for a text that this server did not write, or that was changed.
        """
        if not is_sealed(text):
            return None
        try:
            given = base64.b64decode(text[len(_MARK) :].encode(), altchars=b"-_", validate=True)
        except ValueError:
            return None
        checksum, body = given[:_SUM_BYTES], given[_SUM_BYTES:]
        if len(given) < _HEAD_BYTES or not hmac.compare_digest(checksum, self._checksum(body)):
            return None
        return SealedThought(body[_LENGTH_BYTES:], int.from_bytes(body[:_LENGTH_BYTES], "big"))

    def _checksum(self, body: bytes) -> bytes:
        return hmac.digest(self.key, body, hashlib.sha256)[:_SUM_BYTES]


def is_sealed(text: object) -> TypeGuard[str]:
    """Return whether `text` is a text with the form of a sealed thought."""
    return isinstance(text, str) and text.startswith(_MARK)


def thought_of(packed: SealedThought) -> str:
    """Return the thought in a sealed text, which takes `packed.size` bytes."""
    return zlib.decompress(packed.data).decode("utf-8", "replace")


def packed_texts(seal: Seal, texts: Iterable[str]) -> tuple[Mapping[str, SealedThought], int]:
    """Return the sealed thought of each text that this server wrote, and the bytes of all thoughts.

    A text that occurs several times counts each time.
    """
    found: dict[str, SealedThought | None] = {}
    num_bytes = 0
    for text in texts:
        if text not in found:
            found[text] = seal.packed(text)
        packed = found[text]
        num_bytes += 0 if packed is None else packed.size
    return {text: packed for text, packed in found.items() if packed is not None}, num_bytes
