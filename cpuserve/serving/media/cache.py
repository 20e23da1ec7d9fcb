"""What was read of the last files, so that turns of a conversation read each of them once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cpuserve.config.engine import MEDIA_PAYLOAD_BYTES
from cpuserve.media.kinds import ItemLayout

# The most files with layouts that are kept.
MOST_FILES = 4096


class MediaCache:
    """The layouts of files and the payloads of items; the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._files: OrderedDict[bytes, Sequence[ItemLayout]] = OrderedDict()
        self._payloads: OrderedDict[bytes, bytes] = OrderedDict()

    def layouts(self, key: bytes) -> Sequence[ItemLayout] | None:
        """Return the layouts of the items of a file; None = they are not known."""
        return self._files.get(key)

    def payload(self, digest: bytes) -> bytes | None:
        """Return the payload of an item; None = it is not known."""
        return self._payloads.get(digest)

    def keep_layouts(self, key: bytes, layouts: Sequence[ItemLayout]) -> None:
        """Keep the layouts of the items of a file."""
        self._files[key] = layouts
        while len(self._files) > MOST_FILES:
            self._files.popitem(last=False)

    def keep_payload(self, digest: bytes, payload: bytes) -> None:
        """Keep a payload, and forget old ones of more than MEDIA_PAYLOAD_BYTES."""
        payloads = self._payloads
        payloads[digest] = payload
        while len(payloads) > 1 and sum(map(len, payloads.values())) > MEDIA_PAYLOAD_BYTES:
            payloads.popitem(last=False)
