"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.entrypoints.openai.body import decode_request
from cpuserve.entrypoints.openai.endpoint import read_call
from cpuserve.entrypoints.openai.logprobs import TokenNames
from cpuserve.entrypoints.openai.prompts import chat_prompt, encode
from cpuserve.entrypoints.openai.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from cpuserve.entrypoints.openai.sampling import check_token_ids
from cpuserve.entrypoints.openai.schema import json_body
from cpuserve.entrypoints.openai.serving import Serving
from cpuserve.errors import InvalidRequest

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages after the chat template."""
    call = await read_call(request, "tokenize")
    asked = decode_request(call.body, TokenizeRequest)
    call.serving.check_model(asked.model)
    ids = await _token_ids(call.serving, asked)
    strings = None
    if asked.return_token_strs:
        names = TokenNames(call.serving.get_tokenizer(), as_ids=False, skip_special_tokens=False)
        strings = [names.name(token) for token in ids]
    answer = TokenizeResponse(len(ids), call.serving.max_model_len, ids, strings)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _token_ids(serving: Serving, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        msg = "Give either prompt or messages"
        raise InvalidRequest(msg, param="prompt")
    if asked.prompt is None:
        return (await chat_prompt(serving, asked)).ids
    add_special = asked.add_special_tokens is not False
    return await encode(serving, asked.prompt, add_special_tokens=add_special)


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    call = await read_call(request, "detokenize")
    asked = decode_request(call.body, DetokenizeRequest)
    call.serving.check_model(asked.model)
    check_token_ids("tokens", asked.tokens, call.serving.bounds.vocab)
    tokenizer = call.serving.get_tokenizer()
    text = await asyncio.to_thread(tokenizer.decode, asked.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode(DetokenizeResponse(text)), media_type="application/json")
