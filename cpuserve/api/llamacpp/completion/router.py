"""POST /completion, and POST /infill: the model writes the text between a prefix and a suffix."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.llamacpp.completion.prompts import flat_prompts
from cpuserve.api.llamacpp.completion.schema import (
    COMPLETIONS,
    LlamaCompletionRequest,
    LlamaOptions,
    to_call,
    words,
)
from cpuserve.api.llamacpp.completion.writer import LlamaCompletionWriter
from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import with_refused
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.route import generate, post
from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, unsupported
from cpuserve.serving.prompts.encode import encode, most_counted
from cpuserve.serving.threads import run_sized
from cpuserve.tokenizer.infill import InfillTokens, infill_prompt

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall
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
    prompts = await flat_prompts(request.context, body.prompt)
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
