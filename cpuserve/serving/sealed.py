"""Thoughts as opaque texts that clients send back: `encrypted_content` and `signature`.

The text is a checksum and the compressed thought. The text is not secret, because the client
may read the thought anyway. Some clients send back only this field of a thought.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

_MARK = "cpuserve1."
_SUM_BYTES = 8
# The limit on a decompressed thought: zlib can expand a client's text a thousand times.
_MAX_BYTES = 1 << 24


def sealed(thought: str) -> str:
    """Return the thought as a text that `unsealed` reads."""
    packed = zlib.compress(thought.encode("utf-8", "replace"))
    return _MARK + base64.urlsafe_b64encode(_checksum(packed) + packed).decode()


def unsealed(text: object) -> str | None:
    """Return the thought; None for a text that another server wrote, or that was changed."""
    if not isinstance(text, str) or not text.startswith(_MARK):
        return None
    try:
        given = base64.b64decode(text[len(_MARK) :].encode(), altchars=b"-_", validate=True)
        found, packed = given[:_SUM_BYTES], given[_SUM_BYTES:]
        if found != _checksum(packed):
            return None
        return zlib.decompressobj().decompress(packed, _MAX_BYTES).decode("utf-8", "replace")
    except (ValueError, zlib.error):
        return None


def _checksum(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()[:_SUM_BYTES]
