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

    from cpuserve.media.layout import ShownPicture
    from cpuserve.serving.calls import events


def usage_body(usage: events.TokenUsage) -> Usage:
    """Return the token counts as the member `usage` of a response."""
    return Usage(
        usage.prompt,
        usage.prompt + usage.completion,
        usage.completion,
        PromptTokensDetails(
            usage.cached, image_tokens(usage.pictures), scaled_images(usage.pictures)
        ),
        _details(usage),
    )


def _details(usage: events.TokenUsage) -> CompletionTokensDetails:
    if not usage.drafts:
        return CompletionTokensDetails(usage.reasoning)
    return CompletionTokensDetails(usage.reasoning, usage.accepted, usage.drafts - usage.accepted)


def image_tokens(pictures: Sequence[ShownPicture]) -> dict[str, int] | msgspec.UnsetType:
    """Return the tokens of all pictures by their kind; UNSET without pictures."""
    if not pictures:
        return msgspec.UNSET
    return {"image": sum(each.tokens for each in pictures)}


def scaled_images(pictures: Sequence[ShownPicture]) -> list[ScaledImage] | msgspec.UnsetType:
    """Return the pictures that were scaled to less than half of a side; UNSET if there are none."""
    found = [
        ScaledImage(index, each.width, each.height, each.used_width, each.used_height)
        for index, each in enumerate(pictures)
        if each.lost_detail
    ]
    return found or msgspec.UNSET
