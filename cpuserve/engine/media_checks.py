"""Which media items of a prompt an engine can encode."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.base.errors import InvalidRequest
from cpuserve.core.admission import Limits
from cpuserve.core.media import DIGEST_BYTES, MediaItem
from cpuserve.media.kinds import KINDS


def check_media(items: Iterable[MediaItem], num_prompt: int, limits: Limits) -> None:
    """Raise InvalidRequest if the engine cannot encode an item of a prompt of this length."""
    num_before = 0
    for index, item in enumerate(items):
        noun, max_rows = KINDS[item.kind].noun, limits.media_rows.get(item.kind, 0)
        if not max_rows:
            msg = f"this model reads no {noun}s: send text only, or use a model that reads them"
            raise InvalidRequest(msg, role="messages")
        if item.num_rows > max_rows:
            msg = (
                f"{noun} {index} is {item.num_rows} tokens long, and this server encodes "
                f"{noun}s of at most {max_rows} tokens: send a smaller one"
            )
            raise InvalidRequest(msg, role="messages")
        assert len(item.digest) == DIGEST_BYTES, "a digest is too short"
        assert item.spans, "an item without tokens"
        for begin, count in item.spans:
            assert num_before <= begin < begin + count <= num_prompt, "the spans overlap"
            num_before = begin + count
