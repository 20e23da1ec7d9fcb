"""Prompts that continue the token ids of an earlier prompt and response."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.prompts.encode import encode

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import Earlier
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.conversation import ConversationMessage


def next_turn(text: str) -> tuple[str, list[ConversationMessage]]:
    """Return a mark, and messages where the user writes `text` after a turn with the mark."""
    mark = f"turn{uuid.uuid4().hex}"
    return mark, [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": mark},
        {"role": "user", "content": text},
    ]


async def continued(
    context: ModelContext, earlier: Earlier, rendered: str, *, masked: bool
) -> list[int]:
    """Return the earlier token ids and the ids of the new prompt.

    rendered: the messages as the template wrote them (masked), or a text.

    Raises:
      InvalidRequest: the template wrote no earlier turn, or the new prompt alone is too long.
    """
    mark, after = earlier.mark, rendered
    if mark:
        _, found, after = rendered.rpartition(mark)
        if not found:
            msg = (
                "context is not possible with this model, because its chat template leaves out "
                "earlier responses: send messages to /api/chat"
            )
            raise InvalidRequest(msg, role="context")
    (ids,) = await encode(context, [after], add_special_tokens=False, masked=masked)
    first = context.get_tokenizer().before_text
    if not mark and ids[: len(first)] == first:
        ids = ids[len(first) :]
    before = list(earlier.ids)
    if mark and before[-1] in context.bounds.eos_ids:
        before.pop()  # the rendered text after the mark begins with this end token
    return [*before, *ids]
