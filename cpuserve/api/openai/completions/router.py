"""POST /v1/completions."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
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
    num_scores,
    num_shown,
    run_jobs,
    usage,
)
from cpuserve.api.openai.logprobs import (
    LegacyBuilder,
    TokenNames,
    joined,
    prompt_logprobs,
)
from cpuserve.api.openai.prompts import Prompt, completion_prompts
from cpuserve.api.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    LegacyLogprobs,
    PromptLogprobs,
    StreamOptions,
)
from cpuserve.api.openai.sampling import (
    check_stream,
    check_supported,
    completion_params,
)
from cpuserve.api.openapi import json_body
from cpuserve.api.stream import EventStream, JsonResult
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.engine.output import TextDelta

router = APIRouter()

# How many prompt token ids are checked per microsecond.
_IDS_PER_US = 32

_NOTHING = b',"text":"","logprobs":null,"finish_reason":null'


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest, Completion))
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, or compute their logprobs."""
    async with read_call(request, "cmpl", CompletionRequest) as (call, asked):
        answer = await _answer(call, asked)
    if asked.stream:
        return EventStream(answer.events(), call.serving.http.silent_s)
    return JsonResult(answer.body)


async def _answer(call: Call, asked: CompletionRequest) -> _CompletionAnswer:
    model = call.serving.check_model(asked.model)
    check_supported(asked)
    check_stream(asked)
    prompts = await completion_prompts(call.serving, asked)
    limits, defaults = call.serving.bounds, call.serving.default_sampling

    def make_jobs() -> list[Job]:
        params = completion_params(asked, [prompt.ids for prompt in prompts], limits, defaults)
        return fan_out(prompts, params, asked, call.serving.http.longest_s)

    num_ids = sum(len(prompt.ids) for prompt in prompts)
    jobs = await run_sized(num_ids // _IDS_PER_US, make_jobs)
    call.serving.check_capacity(jobs)
    drop_inputs(asked)
    return _CompletionAnswer(call, asked, model, prompts, jobs)


class _CompletionAnswer:
    """The answer to one request, as a stream or as one body."""

    def __init__(
        self,
        call: Call,
        asked: CompletionRequest,
        model: str,
        prompts: list[Prompt],
        jobs: list[Job],
    ) -> None:
        self._call = call
        self._asked = asked
        self._model = model
        self._jobs = jobs
        self._scored: dict[int, PromptLogprobs | None] = {}
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._skip_special = jobs[0].params.skip_special_tokens
        self._names = TokenNames(
            call.serving.get_tokenizer(),
            as_ids=bool(asked.return_tokens_as_token_ids),
            skip_special_tokens=self._skip_special,
        )

    async def body(self) -> bytes:
        """Return the whole Completion as JSON."""
        results = await collect(self._call.serving, self._jobs)
        return await run_sized(num_shown(results), lambda: self._written(results))

    def _written(self, results: list[Collected]) -> bytes:
        return msgspec.json.encode(
            Completion(
                self._call.id,
                "text_completion",
                self._call.created,
                self._model,
                self._call.serving.fingerprint,
                [self._choice(result) for result in results],
                usage(self._prompt_tokens, self._jobs),
            )
        )

    def _choice(self, result: Collected) -> CompletionChoice:
        choice = _Choice(self, result.job)
        text = choice.echoed_text() + "".join(result.text)
        logprobs = choice.logprobs(result.token_ids, result.logprobs, result.prompt_logprobs)
        show_ids = self._asked.return_token_ids
        return CompletionChoice(
            result.job.index,
            text,
            logprobs,
            result.finish_reason,
            result.stop_reason,
            self._prompt_logprobs(result),
            result.token_ids if show_ids else msgspec.UNSET,
            result.job.prompt.ids if show_ids else msgspec.UNSET,
        )

    def _prompt_logprobs(self, result: Collected) -> PromptLogprobs | None:
        """Return the prompt's logprobs, which are built once for all choices of the prompt."""
        job, top = result.job, self._asked.prompt_logprobs
        scorer = job.index if job.scored_by is None else job.scored_by
        if scorer not in self._scored:
            self._scored[scorer] = prompt_logprobs(result.prompt_logprobs, top, self._names)
        return self._scored[scorer]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the stream, without [DONE]."""
        options = self._asked.stream_options or StreamOptions()
        chunks = self._call.chunk_format("text_completion", self._model, options)
        choices = [_Choice(self, job) for job in self._jobs]
        async with aclosing(run_jobs(self._call.serving, self._jobs)) as deltas:
            async for job, delta in deltas:
                if delta.processed:
                    yield chunks.chunk(job.index, _NOTHING, None, job.progress_member(delta))
                    continue
                choice = choices[job.index]
                members = await run_sized(
                    num_scores(delta.prompt_logprobs), partial(choice.members, delta)
                )
                if members:
                    counts = None
                    if options.continuous_usage_stats:
                        counts = usage(self._prompt_tokens, self._jobs)
                    yield chunks.chunk(job.index, members, counts)
        if options.include_usage:
            yield chunks.usage_chunk(usage(self._prompt_tokens, self._jobs))

    @property
    def asked(self) -> CompletionRequest:
        """The request."""
        return self._asked

    @property
    def names(self) -> TokenNames:
        """The names of tokens in logprobs."""
        return self._names

    @property
    def strips_space(self) -> bool:
        """Whether the tokenizer puts a space before a text and drops it when decoding."""
        return self._call.serving.get_tokenizer().strips_leading_space

    def prompt_text(self, prompt: Prompt) -> str:
        """Return the prompt as `echo` shows it: the text that was sent, or the decoded ids."""
        if prompt.text is not None:
            return prompt.text
        tokenizer = self._call.serving.get_tokenizer()
        return tokenizer.decode(prompt.ids, skip_special_tokens=self._skip_special)


class _Choice:
    """Formats one choice: its echoed prompt, and logprobs with offsets counted over all deltas."""

    def __init__(self, answer: _CompletionAnswer, job: Job) -> None:
        self._answer = answer
        self._job = job
        self._echo = bool(answer.asked.echo)
        self._legacy: LegacyBuilder | None = None
        if job.params.logprobs is not None:
            self._legacy = LegacyBuilder(answer.names, job.params.logprobs)
        self._first = True

    def echoed_text(self) -> str:
        """Return the prompt's text if the request sets `echo`, else ""."""
        return self._answer.prompt_text(self._job.prompt) if self._echo else ""

    def logprobs(
        self,
        tokens: list[int],
        entries: list[TokenLogprob],
        prompt_entries: list[TokenLogprob | None] | None,
    ) -> LegacyLogprobs | None:
        """Return the logprobs of `tokens`; the first call adds those of an echoed prompt."""
        if self._legacy is None:
            return None
        if not (self._echo and self._first):
            return self._legacy.piece(tokens, entries)
        prompt = self._job.prompt
        scores = prompt_entries or [None] * len(prompt.ids)
        echoed = self._legacy.prompt(prompt, scores, self._answer.strips_space)
        return joined(echoed, self._legacy.piece(tokens, entries))

    def members(self, delta: TextDelta) -> bytes:
        """Return the JSON members of the chunk for `delta`; b"" if it has nothing to send yet."""
        first, text = self._first, delta.text
        if first:
            text = self.echoed_text() + text
        logprobs = self.logprobs(delta.token_ids, delta.logprobs or [], delta.prompt_logprobs)
        self._first = False
        show_ids = self._answer.asked.return_token_ids
        wanted = delta.token_ids and (show_ids or self._legacy is not None)
        if not (text or wanted or delta.finish_reason is not None):
            return b""
        out = b',"text":%b,"logprobs":%b,"finish_reason":%b' % (
            to_json(text),
            to_json(logprobs),
            to_json(delta.finish_reason),
        )
        if delta.finish_reason is not None:
            out += b',"stop_reason":' + to_json(delta.stop_reason)
        if show_ids:
            out += b',"token_ids":' + to_json(delta.token_ids)
            if first:
                out += b',"prompt_token_ids":' + to_json(self._job.prompt.ids)
        return out
