"""POST /completion, and POST /infill: the model writes the text between a prefix and a suffix.

LlamaCompletionWriter writes generation events in the format of llama-server.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.llamacpp.completion.prompts import flat_prompts
from cpuserve.api.llamacpp.completion.schema import (
    COMPLETIONS,
    LlamaChosen,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaOptions,
    LlamaToken,
    to_call,
    words,
)
from cpuserve.api.llamacpp.defaults import shown_params
from cpuserve.api.llamacpp.errors import LLAMACPP, llama_error
from cpuserve.api.openai.logprobs import TokenNames, finite
from cpuserve.api.openai.timings import sequence_timings
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import with_refused
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.stream import StreamFormat
from cpuserve.api.route import generate, post, salt_of
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, unsupported
from cpuserve.serving.calls.events import Choice, Event, Finish, PromptProgress, Text
from cpuserve.serving.prompts.encode import encode, most_counted
from cpuserve.serving.threads import run_sized
from cpuserve.tokenizer.infill import InfillTokens, infill_prompt

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.generation.plan import SequencePlan
    from cpuserve.serving.models.context import ModelContext

router = APIRouter()


@post(
    router,
    "/completion",
    "/completions",
    schema=LlamaCompletionRequest,
    response=COMPLETIONS,
    dialect=LLAMACPP,
    id_prefix="completion-",
    stream=EVENTS,
    words=words,
)
async def llama_completion(request: RequestContext, body: LlamaCompletionRequest) -> Response:
    """Continue one or several prompts, in the format of llama-server."""
    await request.choose(body.model)
    salt = salt_of(request, body.cache_salt)
    prompts = await flat_prompts(request.context, body.prompt, salt)
    call = partial(to_call, request.context, prompts)
    return await generate(request, body, call, LlamaCompletionWriter)


# Names of the project and the file for the prompt, because requests have no fields for them.
_PROJECT, _FILE = "myproject\n", "filename\n"
# Separates the texts of other files in the prompt if the tokenizer has no file-separator token.
_SNIPPET = "\n\n--- snippet ---\n\n"
# At least 1 / _RESPONSE_SHARE of the context is reserved for the response, or n_predict if less.
_RESPONSE_SHARE = 4


class ExtraFile(msgspec.Struct):
    """An excerpt of another file, which the prompt has before the prefix and the suffix."""

    filename: str
    text: str


@with_refused("completion")
class LlamaInfillRequest(LlamaOptions, kw_only=True):
    """The body of POST /infill; `prompt` is the beginning of the text to insert."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None


@post(
    router,
    "/infill",
    schema=LlamaInfillRequest,
    response=COMPLETIONS,
    dialect=LLAMACPP,
    id_prefix="infill-",
    stream=EVENTS,
    words=words,
)
async def infill(request: RequestContext, body: LlamaInfillRequest) -> Response:
    """Generate the text between the prefix and the suffix, in the format of llama-server."""
    await request.choose(body.model)
    context = request.context
    tokens = _tokens(context)
    ids = await _prompt(context, body, tokens)

    def call(body: LlamaInfillRequest) -> GenerateCall:
        made = to_call(context, [ids], body)
        made.stop_token_ids = sorted(_ends(context, tokens))
        return made

    return await generate(request, body, call, LlamaCompletionWriter)


def _tokens(context: ModelContext) -> InfillTokens:
    found = InfillTokens.of(context.get_tokenizer())
    if found is None:
        msg = (
            f"/infill is not possible with {context.model_names[0]}, because its tokenizer has no "
            "tokens for fill-in-the-middle: use a code model"
        )
        raise unsupported(msg, "model")
    return found


def _ends(context: ModelContext, tokens: InfillTokens) -> set[int]:
    """Return token ids that never occur within a text, so generation stops at them."""
    pads = map(context.get_tokenizer().token_id, ("<|fim_pad|>", "<fim_pad>"))
    return {token for token in (*tokens, *pads) if token is not None}


async def _prompt(
    context: ModelContext, body: LlamaInfillRequest, tokens: InfillTokens
) -> list[int]:
    """Return the token ids of the prompt, cut so that it fits in the context.

    The prefix is cut at its beginning and the suffix at its end.
    As many of the extra files are kept as fit, beginning with the last file.
    """
    extra = body.input_extra or []
    if len(extra) > MAX_PROMPTS:
        msg = f"input_extra has {len(extra)} files: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, param="input_extra")
    tokenizer, by_file = context.get_tokenizer(), tokens.file is not None
    heads = [f"{file.filename}\n" if by_file else _SNIPPET for file in extra]
    texts = [body.input_prefix, body.input_suffix, body.prompt or "", _PROJECT, _FILE]
    texts += [head + file.text for head, file in zip(heads, extra, strict=True)]
    mask = context.get_chat_template().mask
    masked = await run_sized(sum(map(len, texts)), lambda: [mask(text) for text in texts])
    encoded = await encode(
        context, masked, add_special_tokens=False, most=most_counted(context), masked=True
    )
    prefix, suffix, begun, project, name, *files = encoded
    length = body.max_tokens if body.n_predict is None else body.n_predict
    share = context.max_model_len // _RESPONSE_SHARE
    wanted = share if length is None or length < 0 else min(length, share)
    marks = len(infill_prompt(tokenizer, tokens, [], []))
    room = max(0, context.max_model_len - max(1, wanted) - marks - len(begun))
    suffix = suffix[: max(room // 4, room - len(prefix))]
    prefix = prefix[max(0, len(prefix) - (room - len(suffix))) :]
    room -= len(prefix) + len(suffix)
    before = _before(tokens, project, name, files, room)
    return [*infill_prompt(tokenizer, tokens, prefix, suffix, before), *begun]


def _before(
    tokens: InfillTokens, project: list[int], name: list[int], files: list[list[int]], room: int
) -> list[int]:
    """Return at most `room` tokens of other files, including the tokens that separate files."""
    marks = [] if tokens.file is None else [tokens.file]
    first = [] if tokens.repository is None else [tokens.repository, *project]
    last = [*marks, *name] if marks else []
    room -= len(first) + len(last)
    kept: list[list[int]] = []
    for file in reversed(files):
        room -= len(marks) + len(file)
        if room < 0:
            break
        kept.insert(0, [*marks, *file])
    if not kept:
        return []
    return [*first, *(token for file in kept for token in file), *last]


# The id_slot in responses: this server assigns no slots to requests.
_NO_SLOT = -1


class LlamaCompletionWriter:
    """Writes the response to one completion request."""

    form = StreamFormat()

    def __init__(self, request: RequestContext, body: LlamaOptions, generation: Generation) -> None:
        self._request = request
        self._body = body
        self._sequences = generation.sequences
        self._longest = generation.call.max_tokens or 0
        self._top = generation.sequences[0].params.logprobs
        self._tokenizer = request.context.get_tokenizer()
        self._names = TokenNames(self._tokenizer, as_ids=False, skip_special_tokens=False)
        self._new_line = [False] * len(generation.sequences)

    def frames(self, events: list[Event]) -> bytes:
        """Return the chunks for the events of one engine output; b"" if they show nothing."""
        out = b""
        for event in events:
            if isinstance(event, Text) and (event.text or event.token_ids):
                out += self._chunk(self._part(event))
            elif isinstance(event, PromptProgress):
                out += self._chunk(self._progress(event))
            elif isinstance(event, Finish):
                out += self._chunk(self._ended(event))
        return out

    def failed(self, error: BaseException) -> bytes:
        """Return the SSE event for an error after the stream has begun."""
        return b"data: " + llama_error(error) + b"\n\n"

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON: an object, or a list for several sequences."""
        results = [self._selected(self._result(choice)) for choice in response.choices]
        return msgspec.json.encode(results[0] if len(results) == 1 else results)

    def _chunk(self, result: LlamaCompletion) -> bytes:
        return b"data: " + msgspec.json.encode(self._selected(result)) + b"\n\n"

    def _selected(self, result: LlamaCompletion) -> object:
        """Return only the members in `response_fields`; "a/b" means member b of the object a."""
        fields = self._body.response_fields
        if not fields:
            return result
        body: dict[str, Any] = msgspec.to_builtins(result)
        found: dict[str, object] = {}
        for field in fields:
            value: object = body
            for name in field.split("/"):
                value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
            if value is not msgspec.UNSET:
                found[field] = value
        return found

    def _base(self, index: int, content: str, tokens: list[int], *, stop: bool) -> LlamaCompletion:
        sequence = self._sequences[index]
        return LlamaCompletion(
            index=index,
            content=content,
            tokens=tokens,
            id_slot=_NO_SLOT,
            stop=stop,
            tokens_predicted=sequence.tally.completion_tokens,
            tokens_evaluated=len(sequence.prompt.ids),
        )

    def _part(self, event: Text) -> LlamaCompletion:
        self._new_line[event.index] |= "\n" in event.text
        part = self._base(event.index, event.text, event.token_ids, stop=False)
        part.completion_probabilities = self._probabilities(event.logprobs)
        if self._body.timings_per_token:
            part.timings = sequence_timings(self._sequences[event.index])
        return part

    def _progress(self, event: PromptProgress) -> LlamaCompletion:
        part = self._base(event.index, "", [], stop=False)
        part.prompt_progress = {
            "total": event.total,
            "cache": event.cached,
            "processed": event.processed,
            "time_ms": event.elapsed_ms,
        }
        return part

    def _ended(self, finish: Finish) -> LlamaCompletion:
        """Return the last chunk of the stream of one sequence."""
        last = self._base(finish.index, "", [], stop=True)
        self._describe(last, finish.reason, finish.stop_reason, self._new_line[finish.index])
        return last

    def _result(self, choice: Choice) -> LlamaCompletion:
        text = "".join(choice.text)
        tokens = choice.token_ids if self._body.return_tokens else []
        result = self._base(choice.index, text, tokens, stop=True)
        result.completion_probabilities = self._probabilities(choice.logprobs)
        self._describe(result, choice.reason, choice.stop_reason, "\n" in text)
        return result

    def _describe(
        self, result: LlamaCompletion, reason: str | None, stop: str | int | None, new_line: bool
    ) -> None:
        """Add the members that describe the end of a sequence, such as stop_type and timings."""
        sequence = self._sequences[result.index]
        word = stop if isinstance(stop, str) else ""
        result.model = self._request.served.name
        result.generation_settings = self._settings(sequence)
        result.prompt = self._tokenizer.decode(sequence.prompt.ids, skip_special_tokens=False)
        result.has_new_line = new_line
        result.truncated = reason == "length" and self._is_full(sequence)
        result.stop_type = "limit" if reason == "length" else "word" if word else "eos"
        result.stopping_word = word
        result.tokens_cached = sequence.tally.cached_tokens
        result.timings = sequence_timings(sequence)

    def _is_full(self, sequence: SequencePlan) -> bool:
        """Whether the prompt and the response together fill the context."""
        bounds = self._request.context.bounds
        max_tokens = min(bounds.max_model_len, bounds.kv_tokens + 1)
        return len(sequence.prompt.ids) + sequence.tally.completion_tokens >= max_tokens

    def _settings(self, sequence: SequencePlan) -> dict[str, Any]:
        body = self._body
        return {
            **shown_params(sequence.params, self._longest),
            "n_ctx": self._request.context.max_model_len,
            "stream": bool(body.stream),
            "n_probs": body.n_probs or 0,
            "n_indent": body.n_indent or 0,
            "t_max_predict_ms": body.t_max_predict_ms or 0,
            "grammar": body.grammar or "",
            "timings_per_token": bool(body.timings_per_token),
            "lora": [] if body.lora is None else msgspec.to_builtins(body.lora),
        }

    def _probabilities(self, entries: list[TokenLogprob] | None) -> list[LlamaChosen] | None:
        if self._top is None or entries is None:
            return None
        return [self._chosen(entry) for entry in entries]

    def _chosen(self, entry: TokenLogprob) -> LlamaChosen:
        chosen = LlamaChosen(**self._token(entry.token, entry.logprob))
        top = [LlamaToken(**self._token(*each)) for each in entry.top[: self._top]]
        if self._body.post_sampling_probs:
            chosen.top_probs = top
        else:
            chosen.top_logprobs = top
        return chosen

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.raw(token)
        named = {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw)}
        if self._body.post_sampling_probs:
            return {**named, "prob": math.exp(logprob)}
        return {**named, "logprob": finite(logprob)}
