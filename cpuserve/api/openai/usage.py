"""Convert token counts to the OpenAI format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.openai.schema import (
    CompletionTokensDetails,
    PromptTokensDetails,
    ScaledImage,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.media.kinds import SeenItem
    from cpuserve.serving.calls import events


def usage_body(usage: events.TokenUsage) -> Usage:
    """Return the token counts as the member `usage` of a response."""
    return Usage(
        usage.prompt,
        usage.prompt + usage.completion,
        usage.completion,
        PromptTokensDetails(usage.cached, media_tokens(usage.media), scaled_images(usage.media)),
        _details(usage),
    )


def _details(usage: events.TokenUsage) -> CompletionTokensDetails:
    if not usage.drafts:
        return CompletionTokensDetails(usage.reasoning)
    return CompletionTokensDetails(usage.reasoning, usage.accepted, usage.drafts - usage.accepted)


def media_tokens(media: Sequence[SeenItem]) -> dict[str, int] | msgspec.UnsetType:
    """Return the tokens of all media items by their kind; UNSET without media."""
    if not media:
        return msgspec.UNSET
    tokens = dict.fromkeys((item.kind for item in media), 0)
    for item in media:
        tokens[item.kind] += item.tokens
    return tokens


def scaled_images(media: Sequence[SeenItem]) -> list[ScaledImage] | msgspec.UnsetType:
    """Return the images that were scaled to less than half of a side; UNSET if there are none."""
    images = enumerate(item for item in media if item.kind == "image")
    scaled = [ScaledImage(index, *image.scaled) for index, image in images if image.scaled]
    return scaled or msgspec.UNSET
