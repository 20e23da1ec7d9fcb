"""Convert token counts to the OpenAI format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.openai.schema import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from cpuserve.serving.calls import events


def usage_body(usage: events.TokenUsage) -> Usage:
    """Return the token counts as the member `usage` of a response."""
    return Usage(
        usage.prompt,
        usage.prompt + usage.completion,
        usage.completion,
        PromptTokensDetails(usage.cached),
        CompletionTokensDetails(usage.reasoning),
    )
