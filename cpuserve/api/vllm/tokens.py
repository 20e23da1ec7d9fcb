"""POST /tokenize and /detokenize, in the vLLM formats."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.batches.references import read_files
from cpuserve.api.openai.chat.conversation import chat_messages, continues
from cpuserve.api.openai.chat.schema import offered
from cpuserve.api.openai.logprobs import TokenNames
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import check_fields, with_refused
from cpuserve.api.request.state import get_state
from cpuserve.api.route import get, post
from cpuserve.base.errors import InvalidRequest
from cpuserve.media.pictures.layout import ShownPicture
from cpuserve.serving.calls.call import Prompt, call_from
from cpuserve.serving.calls.params import check_token_ids
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.prompts.encode import check_count, encode, most_counted
from cpuserve.serving.prompts.prompts import counted_prompt
from cpuserve.serving.threads import run_sized
from cpuserve.tokenizer.tokenizer import Tokenizer

# The alternative fields with a text or messages; a request must have exactly one of them.
INPUTS = ("prompt", "messages", "content")


@with_refused("tokenize")
class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: either `prompt` or `messages`.

    content, add_special: the llama.cpp fields for `prompt` and `add_special_tokens`;
      with `content`, special tokens are added only if the request asks for them.
    with_pieces: return tokens as objects with their texts, as in llama.cpp.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenPiece(msgspec.Struct):
    """A token id and its text, or its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct):
    """The token ids of a text, and their strings if `return_token_strs` is set.

    tokens: token ids, or a TokenPiece per token if `with_pieces` is set.
    pictures: the sizes and the tokens of each picture in the messages.
    """

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None
    pictures: list[ShownPicture] | msgspec.UnsetType = msgspec.UNSET


class TokenizerInfo(msgspec.Struct, omit_defaults=True):
    """The body of GET /tokenizer_info: fields of tokenizer_config.json, with tokens as texts."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text of the tokens, once in the vLLM field and once in the llama.cpp field."""

    prompt: str
    content: str


def words(request: TokenizeRequest) -> dict[str, str]:
    """Return {"prompt": the request field with the text or the messages}."""
    given = [name for name in INPUTS if getattr(request, name) is not None]
    return {"prompt": given[0]} if given else {}


router = APIRouter()
# The transformers class for tokenizers that a tokenizer.json describes completely.
# All tokenizers of this server are of this class.
_CLASS = "PreTrainedTokenizerFast"


@post(
    router,
    schema=TokenizeRequest,
    response=TokenizeResponse,
    id_prefix="tokenize-",
    words=words,
)
async def tokenize(request: RequestContext, body: TokenizeRequest) -> Response:
    """Return the token ids of a text, or of messages rendered with the chat template."""
    await request.choose(body.model)
    check_fields(body)
    prompt = await _prompt(request, body)
    data = await run_sized(len(prompt.ids), lambda: _token_body(request.context, body, prompt))
    return Response(data, media_type="application/json")


def _token_body(context: ModelContext, body: TokenizeRequest, prompt: Prompt) -> bytes:
    strings, tokenizer, ids = None, context.get_tokenizer(), prompt.ids
    if body.return_token_strs:
        names = TokenNames(tokenizer, as_ids=False, skip_special_tokens=False)
        strings = [names.name(token) for token in ids]
    tokens: list[int | TokenPiece] = [*ids]
    if body.with_pieces:
        tokens = [_piece(tokenizer, token) for token in ids]
    pictures = [item for item in prompt.shown if isinstance(item, ShownPicture)] or msgspec.UNSET
    told = TokenizeResponse(len(ids), context.max_model_len, tokens, strings, pictures)
    return msgspec.json.encode(told)


def _piece(tokenizer: Tokenizer, token: int) -> TokenPiece:
    raw = tokenizer.token_bytes(token)
    try:
        return TokenPiece(token, raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(token, list(raw))


async def _prompt(request: RequestContext, body: TokenizeRequest) -> Prompt:
    context = request.context
    given = [name for name in INPUTS if getattr(body, name) is not None]
    if len(given) != 1:
        what = "nothing to tokenize" if not given else f"both {given[0]} and {given[1]}"
        msg = f"The request has {what}: send one of prompt, messages, and llama.cpp's content"
        raise InvalidRequest(msg, param="prompt")
    if body.messages is not None:
        messages, offer = chat_messages(body.messages or []), offered(body.tools or [])
        body.continue_final_message = continues(body.messages, body.continue_final_message)
        call = call_from(body, messages=messages, tools=offer.functions, custom_tools=offer.custom)
        await read_files(request, call)
        return await counted_prompt(context, call, request.body_bytes)
    text, default = (body.prompt, True) if body.prompt is not None else (body.content, False)
    wishes = (body.add_special_tokens, body.add_special, default)
    add_special = next(wish for wish in wishes if wish is not None)
    most = most_counted(context)
    (ids,) = await encode(context, [text or ""], add_special_tokens=add_special, most=most)
    return Prompt(ids)


@get(router, "/tokenizer_info", TokenizerInfo)
async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer of the first model: its special tokens and its chat template."""
    state = get_state(request)
    state.check_available()
    context = state.context
    special = context.get_tokenizer().special_tokens
    known = {name: special[name] for name in TokenizerInfo.__struct_fields__ if name in special}
    source = context.get_chat_template().source
    told = TokenizerInfo(_CLASS, context.max_model_len, chat_template=source, **known)
    return Response(msgspec.json.encode(told), media_type="application/json")


@post(
    router,
    "/detokenize",
    schema=DetokenizeRequest,
    response=DetokenizeResponse,
    id_prefix="detokenize-",
)
async def detokenize(request: RequestContext, body: DetokenizeRequest) -> Response:
    """Return the text of token ids, including special tokens."""
    await request.choose(body.model)
    check_count(request.context, "tokens", len(body.tokens))
    data = await run_sized(len(body.tokens), lambda: _text(request.context, body.tokens))
    return Response(data, media_type="application/json")


def _text(context: ModelContext, ids: list[int]) -> bytes:
    check_token_ids("tokens", ids, context.bounds.vocab)
    text = context.get_tokenizer().decode(ids, skip_special_tokens=False)
    return msgspec.json.encode(DetokenizeResponse(text, text))
