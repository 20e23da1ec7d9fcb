"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.body import drop_inputs
from cpuserve.api.endpoint import Call, read_call
from cpuserve.api.openai.chunks import to_json
from cpuserve.api.openai.generation import (
    Collected,
    Job,
    collect,
    fan_out,
    num_shown,
    run_jobs,
    usage,
)
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from cpuserve.api.openai.prompts import chat_prompt
from cpuserve.api.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    StreamOptions,
)
from cpuserve.api.openai.sampling import chat_params, check_stream, check_supported
from cpuserve.api.openapi import json_body
from cpuserve.api.stream import EventStream, JsonResult
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cpuserve.engine.output import TextDelta

router = APIRouter()

_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'

_NOTHING = b',"delta":{},"logprobs":null,"finish_reason":null'


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest, ChatCompletion))
async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation."""
    async with read_call(request, "chatcmpl", ChatRequest) as (call, asked):
        answer = await _answer(call, asked)
    if asked.stream:
        return EventStream(answer.events(), call.serving.http.silent_s)
    return JsonResult(answer.body)


async def _answer(call: Call, asked: ChatRequest) -> _ChatAnswer:
    model = call.serving.check_model(asked.model)
    check_supported(asked)
    check_stream(asked)
    prompt = await chat_prompt(call.serving, asked, call.body_bytes)
    params = chat_params(asked, prompt.ids, call.serving.bounds, call.serving.default_sampling)
    jobs = fan_out([prompt], [params], asked, call.serving.http.longest_s)
    call.serving.check_capacity(jobs)
    drop_inputs(asked)
    return _ChatAnswer(call, asked, model, jobs)


class _ChatAnswer:
    """The answer to one request, as a stream or as one body."""

    def __init__(self, call: Call, asked: ChatRequest, model: str, jobs: list[Job]) -> None:
        self._call = call
        self._asked = asked
        self._model = model
        self._jobs = jobs
        self._prompt_tokens = len(jobs[0].prompt.ids)
        self._top = jobs[0].params.logprobs
        self._options = asked.stream_options or StreamOptions()
        self._chunks = call.chunk_format("chat.completion.chunk", model, asked.stream_options)
        self._names = TokenNames(
            call.serving.get_tokenizer(),
            as_ids=bool(asked.return_tokens_as_token_ids),
            skip_special_tokens=jobs[0].params.skip_special_tokens,
        )

    async def body(self) -> bytes:
        """Return the whole ChatCompletion as JSON."""
        results = await collect(self._call.serving, self._jobs)
        return await run_sized(num_shown(results), lambda: self._written(results))

    def _written(self, results: list[Collected]) -> bytes:
        first = results[0]
        return msgspec.json.encode(
            ChatCompletion(
                self._call.id,
                "chat.completion",
                self._call.created,
                self._model,
                self._call.serving.fingerprint,
                [self._choice(result) for result in results],
                usage(self._prompt_tokens, self._jobs),
                prompt_logprobs(
                    first.prompt_logprobs, first.job.params.prompt_logprobs, self._names
                ),
                first.job.prompt.ids if self._asked.return_token_ids else msgspec.UNSET,
            )
        )

    def _choice(self, result: Collected) -> ChatChoice:
        logprobs = None
        if self._top is not None:
            logprobs = chat_logprobs(result.logprobs, self._top, self._names)
        return ChatChoice(
            result.job.index,
            ChatMessage("assistant", "".join(result.text)),
            logprobs,
            result.finish_reason,
            result.stop_reason,
            result.token_ids if self._asked.return_token_ids else msgspec.UNSET,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the stream, without [DONE]."""
        started = [False] * len(self._jobs)
        async with aclosing(run_jobs(self._call.serving, self._jobs)) as deltas:
            async for job, delta in deltas:
                if delta.processed:
                    yield self._chunk(job, _NOTHING, job.progress_member(delta))
                    continue
                event = self._delta(job, delta)
                if not started[job.index]:
                    started[job.index] = True
                    event = self._role(job) + event
                if event:
                    yield event
        if self._options.include_usage:
            yield self._chunks.usage_chunk(usage(self._prompt_tokens, self._jobs))

    def _role(self, job: Job) -> bytes:
        more = b""
        if self._asked.return_token_ids:
            more = b',"prompt_token_ids":' + to_json(job.prompt.ids)
        return self._chunk(job, _ROLE, more)

    def _delta(self, job: Job, delta: TextDelta) -> bytes:
        """Return the chunks of a delta: its text, and its finish reason; b"" if it has neither."""
        out = b""
        if delta.text or (
            delta.token_ids and (self._top is not None or self._asked.return_token_ids)
        ):
            members = b',"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
                to_json(delta.text),
                self._logprobs(delta),
                self._token_ids(delta),
            )
            out = self._chunk(job, members)
        if delta.finish_reason is not None:
            members = b',"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b' % (
                to_json(delta.finish_reason),
                to_json(delta.stop_reason),
            )
            out += self._chunk(job, members)
        return out

    def _logprobs(self, delta: TextDelta) -> bytes:
        if self._top is None:
            return b"null"
        return to_json(chat_logprobs(delta.logprobs or [], self._top, self._names))

    def _token_ids(self, delta: TextDelta) -> bytes:
        if not self._asked.return_token_ids:
            return b""
        return b',"token_ids":' + to_json(delta.token_ids)

    def _chunk(self, job: Job, members: bytes, more: bytes = b"") -> bytes:
        now = (
            usage(self._prompt_tokens, self._jobs) if self._options.continuous_usage_stats else None
        )
        return self._chunks.chunk(job.index, members, now, more)
