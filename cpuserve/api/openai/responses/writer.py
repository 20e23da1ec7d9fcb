"""Write generation events as a Response object, in a stream or as one JSON body."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.errors.error_json import public_message
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs
from cpuserve.api.openai.responses.cache_diagnostics import cache_diagnostics
from cpuserve.api.openai.responses.response_object import (
    PREFIX,
    RAW,
    SUMMARY,
    ConversationRef,
    IncompleteDetails,
    InputDetails,
    Item,
    OutputDetails,
    OutputItem,
    Response,
    ResponseCustomTool,
    ResponseError,
    ResponseFunction,
    ResponseNamespace,
    ResponseReasoning,
    ResponseSearchTool,
    ResponseUsage,
    items_of,
    search_items,
)
from cpuserve.api.openai.responses.schema import SEALED, conversation_id
from cpuserve.api.openai.responses.tools import is_custom, is_function, is_search, origins_of
from cpuserve.api.openai.tool_choice import plain_choice
from cpuserve.api.openai.usage import media_tokens, scaled_images
from cpuserve.api.response.stream import StreamFormat
from cpuserve.base.errors import RequestError
from cpuserve.serving.calls.events import (
    Event,
    Finish,
    PromptProgress,
    Text,
    Thought,
    TokenUsage,
    ToolCallDelta,
    ToolSearched,
    WholeResponse,
    WholeToolCall,
)

if TYPE_CHECKING:
    from cpuserve.api.openai.responses.schema import ResponsesRequest
    from cpuserve.api.openai.schema import ChatLogprob
    from cpuserve.api.request.context import RequestContext
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.generation.generate import Generation

_to_json = msgspec.json.Encoder().encode
# How many seconds pass between two events of a stream while a long prompt is computed.
# Each event repeats the whole request, so it is not sent for every prompt chunk.
# Clients wait for minutes without an event (Codex: five).
_PERIOD_S = 5.0
# The beginnings of the event types of a tool call (response.TYPE.delta and .done), by item type.
_TEXTS = {
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}


class ResponseWriter:
    """Writes the response to one request as a sequence of output items.

    A text becomes a message with one part. Text after a tool call becomes another message.
    """

    form = StreamFormat()

    def __init__(
        self, request: RequestContext, body: ResponsesRequest, generation: Generation
    ) -> None:
        params = generation.sequences[0].params
        self._random_part = request.id.removeprefix(PREFIX)
        self._response = begun(request, body, params)
        self._cache = cache_diagnostics(body.prompt_cache_options, generation)
        # The tools of an agent may take 40 kB, so only the last event of a stream contains them.
        self._brief = msgspec.structs.replace(self._response, tools=msgspec.Raw(b"[]"))
        self._origins = origins_of(body.tools or [], body.input)
        # Output items contain tools only if this server runs the tool search.
        self._tools = (body.tools or []) if generation.searches_tools else []
        seals = SEALED in (body.include or ())
        self._seal = request.state.seal if seals else None
        summarized = body.reasoning is not None and body.reasoning.has_summaries
        self._thought_form = form = SUMMARY if summarized else RAW
        self._thought_delta = f"response.{form.text}.delta".encode(), form.place.encode()
        self._top = params.num_top
        self._names = TokenNames(
            request.context.get_tokenizer(),
            as_ids=bool(body.return_tokens_as_token_ids),
            skip_special_tokens=params.skip_special_tokens,
        )
        self._num_frames = 0
        self._begun = False
        self._told_at = 0.0
        self.final: Response | None = None  # the Response at its end; None before
        self._output: list[OutputItem] = []
        self._open: Item | None = None
        self._reason = "stop"

    def frames(self, events: list[Event]) -> bytes:
        """Return the SSE frames for the events of one engine output."""
        out = b""
        if not self._begun:
            self._begun = True
            if not self._num_frames:
                out = self._frame("response.created", response=self._brief)
            out += self._frame("response.in_progress", response=self._brief)
            self._told_at = time.monotonic()
        elif (
            isinstance(events[0], PromptProgress) and time.monotonic() - self._told_at >= _PERIOD_S
        ):
            out = self._frame("response.in_progress", response=self._brief)
            self._told_at = time.monotonic()
        for event in events:
            if isinstance(event, Text):
                if event.text or event.logprobs:  # else: held-back text, or a thought
                    out += self._text(event)
            elif isinstance(event, Thought):
                out += self._think(event)
            elif isinstance(event, ToolCallDelta):
                out += self._call(event)
            elif isinstance(event, ToolSearched):
                out += self._searched(event)
            elif isinstance(event, Finish):
                self._reason = event.reason
            elif isinstance(event, TokenUsage):
                out += self._end(event)
        return out

    def failed(self, error: BaseException) -> bytes:
        """Return the SSE event for an error after the stream has begun."""
        failure = ResponseError(_cause(error), public_message(error))
        if not (self._num_frames or self._response.background):
            # The client got only pings, and no response.created.
            return self._frame("error", code=failure.code, message=failure.message, param=None)
        told = {"status": "failed", "error": failure, "output": self._output}
        self.final = msgspec.structs.replace(self._response, **told)
        return self._frame("response.failed", response=self.final)

    @property
    def begun(self) -> Response:
        """The Response at its start, with the status in_progress."""
        return self._response

    def queued(self) -> bytes:
        """Return the first SSE frames of a queued response."""
        queued = msgspec.structs.replace(self._brief, status="queued")
        frames = [
            self._frame(f"response.{kind}", response=queued) for kind in ("created", "queued")
        ]
        return b"".join(frames)

    def cancelled(self) -> bytes:
        """End the response with the items written so far; return the last SSE frames."""
        out = self._close("length")
        self.final = msgspec.structs.replace(
            self._response, status="cancelled", output=self._output
        )
        return out + self._frame("response.incomplete", response=self.final)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole Response as JSON."""
        (choice,) = response.choices
        logprobs = self._logprobs(choice.logprobs)
        self._output = items_of(
            choice,
            self._random_part,
            self._origins,
            logprobs,
            seal=self._seal,
            thought_form=self._thought_form,
            tools=self._tools,
        )
        return _to_json(self._ended(choice.reason or "stop", response.usage))

    def _text(self, event: Text) -> bytes:
        out, item = b"", self._open
        if item is None or item.kind != "message":
            out, item = self._start()
            out += self._of(item, "content_part.added", content_index=0, part=item.part())
        logprobs = self._logprobs(event.logprobs)
        item.text.append(event.text)
        item.logprobs += logprobs
        more = b',"logprobs":' + _to_json(logprobs)
        return out + self._delta(item, b"response.output_text.delta", event.text, more)

    def _think(self, event: Thought) -> bytes:
        out, item, form = b"", self._open, self._thought_form
        if item is None or item.kind != "reasoning":
            out, item = self._start(thinks=True)
            out += self._of(item, f"{form.part}.added", **{form.place: 0}, part=item.thought())
        item.text.append(event.text)
        kind, index = self._thought_delta
        return out + self._delta(item, kind, event.text, index=index)

    def _call(self, event: ToolCallDelta) -> bytes:
        out, item = b"", self._open
        if event.id is not None or item is None or item.call is None:
            out, item = self._start(WholeToolCall(event.id or "", event.name or ""))
        assert item.call is not None
        if event.arguments:
            item.call.arguments.append(event.arguments)
            if (name := _TEXTS.get(item.kind)) is not None:
                out += self._of(item, f"{name}.delta", delta=event.arguments)
        return out

    def _searched(self, event: ToolSearched) -> bytes:
        """Return the frames of a tool search that the server ran: its call and result items."""
        out = self._close()
        found = search_items(event, self._random_part, len(self._output), self._tools)
        for item in found:
            place, begun = len(self._output), msgspec.structs.replace(item, status="in_progress")
            out += self._frame("response.output_item.added", output_index=place, item=begun)
            out += self._frame("response.output_item.done", output_index=place, item=item)
            self._output.append(item)
        return out

    def _start(
        self, call: WholeToolCall | None = None, *, thinks: bool = False
    ) -> tuple[bytes, Item]:
        """Close the open item and begin a new item; return (frames for both, the new item)."""
        out = self._close()
        self._open = item = Item(self._random_part, len(self._output), self._origins, call)
        item.thinks, item.seal, item.thought_form = thinks, self._seal, self._thought_form
        added = self._frame(
            "response.output_item.added", output_index=item.index, item=item.begun()
        )
        return out + added, item

    def _close(self, reason: str = "") -> bytes:
        """Return the frames that end the open item; reason: why the response ends with it."""
        item, self._open = self._open, None
        if item is None:
            return b""
        if item.thinks:
            thought, form = item.thought(), self._thought_form
            out = self._of(item, f"{form.text}.done", **{form.place: 0}, text=thought.text)
            out += self._of(item, f"{form.part}.done", **{form.place: 0}, part=thought)
        elif item.call is None:
            part = item.part()
            told = {"content_index": 0, "text": part.text, "logprobs": part.logprobs}
            out = self._of(item, "output_text.done", **told)
            out += self._of(item, "content_part.done", content_index=0, part=part)
        elif (name := _TEXTS.get(item.kind)) is not None:
            told = {name.rpartition("_")[2]: "".join(item.call.arguments)}
            out = self._of(item, f"{name}.done", **told)
        else:
            out = b""
        self._output.append(item.written(reason))
        done = {"output_index": item.index, "item": self._output[-1]}
        return out + self._frame("response.output_item.done", **done)

    def _end(self, usage: TokenUsage) -> bytes:
        out = b""
        if self._open is None and not self._output:  # if the output is empty, add an empty message
            out = self._text(Text(0, "", [], []))
        out += self._close(self._reason)
        response = self._ended(self._reason, usage)
        return out + self._frame(f"response.{response.status}", response=response)

    def _ended(self, reason: str, usage: TokenUsage) -> Response:
        """Return the Response at its end, with all output items."""
        cut = reason == "length"
        self.final = msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=self._output,
            prompt_cache_diagnostics=self._cache,
            usage=usage_of(usage),
        )
        return self.final

    def _logprobs(self, entries: list[TokenLogprob] | None) -> list[ChatLogprob]:
        if self._top is None:
            return []
        return chat_logprobs(entries or [], self._top, self._names).content

    def _of(self, item: Item, kind: str, **members: Any) -> bytes:
        """Return the SSE frame of an event about one output item."""
        place = {"item_id": item.id, "output_index": item.index}
        return self._frame(f"response.{kind}", **place, **members)

    def _delta(
        self,
        item: Item,
        kind: bytes,
        text: str,
        more: bytes = b"",
        *,
        index: bytes = b"content_index",
    ) -> bytes:
        """Return the SSE frame with a piece of text; it must be cheap, as it runs for each token.

        more: further JSON members of the event, each with a comma before it.
        index: the member with the index of the part, which is always 0.
        """
        number, place = self._num_frames, (_to_json(item.id), item.index)
        self._num_frames += 1
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d' % (kind, kind, number)
        tail = b'"%b":0,"delta":%b%b}\n\n' % (index, _to_json(text), more)
        return head + b',"item_id":%b,"output_index":%d,' % place + tail

    def _frame(self, kind: str, **members: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_frames, **members}
        self._num_frames += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _to_json(body))


def _cause(error: BaseException) -> str:
    """Return the error code of a failed Response; OpenAI clients know all of these codes."""
    status = error.status if isinstance(error, RequestError) else 500
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < 500 else "server_error"


def usage_of(usage: TokenUsage) -> ResponseUsage:
    """Return token counts in the format of the member `usage` of a Response."""
    return ResponseUsage(
        usage.prompt,
        InputDetails(
            usage.cached,
            multimodal_tokens=media_tokens(usage.media),
            scaled_images=scaled_images(usage.media),
        ),
        usage.completion,
        OutputDetails(usage.reasoning),
        usage.prompt + usage.completion,
    )


def begun(request: RequestContext, body: ResponsesRequest, params: SamplingParams) -> Response:
    """Return the Response for a checked request with these sampling parameters.

    body: the request; its `store` says whether the response is actually stored.
    """
    return Response(
        id=request.id,
        created_at=request.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=_written(body.metadata or {}),
        model=request.served.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        background=body.background is True,
        store=body.store is True,
        previous_response_id=body.previous_response_id or None,
        conversation=None if (named := conversation_id(body)) is None else ConversationRef(named),
        prompt_cache_key=body.prompt_cache_key,
        reasoning=_reasoning(body),
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        text=_written(_text(body)),
        tool_choice=_written(plain_choice(body.tool_choice) or "auto"),
        tools=_written(_tools(body.tools or [])),
        top_logprobs=params.logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


def _reasoning(body: ResponsesRequest) -> ResponseReasoning:
    given = body.reasoning
    return ResponseReasoning(given.effort, given.summary) if given else ResponseReasoning()


def _written(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _text(body: ResponsesRequest) -> dict[str, Any]:
    text = body.text
    verbosity = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
    form = None if text is None else text.format
    return {"format": form or {"type": "text"}, **verbosity}


def _tools(
    tools: list[dict[str, Any]],
) -> list[ResponseFunction | ResponseCustomTool | ResponseNamespace | ResponseSearchTool]:
    """Return the offered tools; members that the request omits have their defaults."""
    found: list[ResponseFunction | ResponseCustomTool | ResponseNamespace | ResponseSearchTool] = []
    for tool in tools:
        about = tool.get("description")
        if tool.get("type") == "tool_search":
            runs = "client" if is_search(tool) else "server"
            found.append(ResponseSearchTool(runs, about, tool.get("parameters")))
        elif tool.get("type") == "namespace":
            inner = [one for member in tool["tools"] for one in _callable(member)]
            found.append(ResponseNamespace(tool["name"], about, inner))
        else:
            found += _callable(tool)
    return found


def _callable(tool: object) -> list[ResponseFunction | ResponseCustomTool]:
    """Return [tool] for a function or custom tool; [] for a tool of another type."""
    if not isinstance(tool, dict) or not (is_function(tool) or is_custom(tool)):
        return []
    later = True if tool.get("defer_loading") is True else msgspec.UNSET
    about = tool.get("description")
    if is_custom(tool):
        form = tool.get("format") or {"type": "text"}
        return [ResponseCustomTool(tool["name"], about, form, later)]
    strict = tool.get("strict") is True
    return [ResponseFunction(tool["name"], about, tool.get("parameters"), strict, later)]
