"""POST /v1/responses/compact: replace a conversation by its user messages and a summary."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.openai.responses.history import decoded, read_turn
from cpuserve.api.openai.responses.response_object import ResponseUsage
from cpuserve.api.openai.responses.schema import ResponsesRequest, to_call, words
from cpuserve.api.openai.responses.sealed_items import with_opened
from cpuserve.api.openai.responses.writer import usage_of
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.stream import JsonResult
from cpuserve.api.route import post, prepared
from cpuserve.errors import InvalidRequest
from cpuserve.serving.generation.report import report_of
from cpuserve.serving.threads import run_sized

router = APIRouter()
# A user message at the end of the conversation, which asks the model for the summary.
_ASK = (
    "Summarize our conversation so far, for an assistant that continues it and cannot see it. "
    "Include the goals of the user, decisions, facts, names, results of tools, and what is still "
    "to be done. Write only the summary."
)
# The beginning of the summary text, for the model that continues the conversation.
_TOLD = "Summary of the conversation so far:\n"


class CompactRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses/compact."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    max_output_tokens: int | None = None


class CompactedItem(msgspec.Struct, tag_field="type", tag="compaction"):
    """The summary of a conversation; `encrypted_content` has its text in sealed form."""

    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct):
    """The response of /v1/responses/compact. output: items to send as the next `input`."""

    id: str
    created_at: int
    output: list[Any]
    usage: ResponseUsage
    object: str = "response.compaction"


def _as_response(body: CompactRequest) -> ResponsesRequest:
    """Return the request that generates the summary, without the items of the history."""
    return ResponsesRequest(
        model=body.model,
        input=body.input if body.input is not None or not body.previous_response_id else [],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        max_output_tokens=body.max_output_tokens,
        include_reasoning=False,
        store=False,
    )


@post(
    router,
    "/v1/responses/compact",
    schema=CompactRequest,
    response=CompactedResponse,
    id_prefix="resp_",
    conversation="input",
    words=lambda body: words(_as_response(body)),
)
async def compact_response(request: RequestContext, body: CompactRequest) -> Response:
    """Return a shorter conversation: the user messages, and a summary of everything."""
    await request.choose(body.model)
    turn = await read_turn(request, _as_response(body))
    items = await run_sized(request.body_bytes, lambda: decoded(turn.history + turn.own))
    if not items:
        msg = "input is missing: send the items of the conversation, or previous_response_id"
        raise InvalidRequest(msg, param="input", code="missing_required_parameter")
    ask = {"type": "message", "role": "user", "content": _ASK}
    told = await with_opened(request, [*items, ask])
    whole = msgspec.structs.replace(turn.body, input=told)
    generation = await prepared(request, whole, to_call)

    async def compacted() -> bytes:
        response = await generation.folded()
        (choice,) = response.choices
        summary = "".join(part for part in choice.parts if isinstance(part, str)).strip()
        sealed = request.state.seal.sealed(_TOLD + summary)
        made = CompactedItem(f"cmp_{request.request_id}", sealed)
        kept = [item for item in items if item.get("role") == "user"]
        usage = usage_of(response.usage)
        return msgspec.json.encode(
            CompactedResponse(request.id, request.created, [*kept, made], usage)
        )

    return JsonResult(compacted, partial(report_of, generation))
