"""POST /tokenize and /detokenize, in vLLM's formats."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.endpoint import read_call
from cpuserve.api.openai.logprobs import TokenNames
from cpuserve.api.openapi import json_body
from cpuserve.api.tokenize.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from cpuserve.api.unset import check_unset
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import call_from
from cpuserve.serving.context import ModelContext
from cpuserve.serving.params import check_token_ids
from cpuserve.serving.prompts import chat_prompt, encode, most_counted
from cpuserve.serving.threads import run_sized
from cpuserve.serving.tools.use import tool_use

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of messages rendered with the chat template."""
    async with read_call(request, "tokenize-", TokenizeRequest) as (received, asked):
        await received.choose(asked.model)
        check_unset(asked, ("chat_template",))
        ids = await _token_ids(received.context, asked, received.body_bytes)
        body = await run_sized(len(ids), lambda: _answer(received.context, asked, ids))
    return Response(body, media_type="application/json")


def _answer(context: ModelContext, asked: TokenizeRequest, ids: list[int]) -> bytes:
    strings = None
    if asked.return_token_strs:
        names = TokenNames(context.get_tokenizer(), as_ids=False, skip_special_tokens=False)
        strings = [names.name(token) for token in ids]
    return msgspec.json.encode(TokenizeResponse(len(ids), context.max_model_len, ids, strings))


async def _token_ids(context: ModelContext, asked: TokenizeRequest, num_bytes: int) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        msg = "Give either prompt or messages, and not both"
        raise InvalidRequest(msg, param="prompt")
    most = most_counted(context)
    if asked.prompt is None:
        call = call_from(asked)
        tool_use(call, context.answers)  # refuses what chat completions refuse
        return (await chat_prompt(context, call, num_bytes, most=most)).ids
    add_special = asked.add_special_tokens is not False
    (ids,) = await encode(context, [asked.prompt], add_special_tokens=add_special, most=most)
    return ids


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    async with read_call(request, "detokenize-", DetokenizeRequest) as (received, asked):
        await received.choose(asked.model)
        body = await run_sized(len(asked.tokens), lambda: _text(received.context, asked.tokens))
    return Response(body, media_type="application/json")


def _text(context: ModelContext, ids: list[int]) -> bytes:
    check_token_ids("tokens", ids, context.bounds.vocab)
    text = context.get_tokenizer().decode(ids, skip_special_tokens=False)
    return msgspec.json.encode(DetokenizeResponse(text))
