"""Token counts in OpenAI's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.openai.schema import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from cpuserve.serving import events


def usage_body(usage: events.Usage) -> Usage:
    """Return the counts as the `usage` member of an answer."""
    return Usage(
        usage.prompt,
        usage.prompt + usage.completion,
        usage.completion,
        PromptTokensDetails(usage.cached),
    )
