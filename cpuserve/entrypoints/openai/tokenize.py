"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

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
from cpuserve.entrypoints.openai.sampling import check_token_ids, check_unset
from cpuserve.entrypoints.openai.schema import json_body
from cpuserve.entrypoints.openai.serving import Serving
from cpuserve.entrypoints.openai.threads import run_sized
from cpuserve.errors import InvalidRequest

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages after the chat template."""
    call = await read_call(request, "tokenize")
    asked = decode_request(call.body, TokenizeRequest)
    call.serving.check_model(asked.model)
    check_unset(asked, ("tools", "chat_template"))
    ids = await _token_ids(call.serving, asked, len(call.body))
    body = await run_sized(len(ids), lambda: _answer(call.serving, asked, ids))
    return Response(body, media_type="application/json")


def _answer(serving: Serving, asked: TokenizeRequest, ids: list[int]) -> bytes:
    strings = None
    if asked.return_token_strs:
        names = TokenNames(serving.get_tokenizer(), as_ids=False, skip_special_tokens=False)
        strings = [names.name(token) for token in ids]
    return msgspec.json.encode(TokenizeResponse(len(ids), serving.max_model_len, ids, strings))


async def _token_ids(serving: Serving, asked: TokenizeRequest, num_bytes: int) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        msg = "Give either prompt or messages"
        raise InvalidRequest(msg, param="prompt")
    if asked.prompt is None:
        return (await chat_prompt(serving, asked, num_bytes)).ids
    add_special = asked.add_special_tokens is not False
    (ids,) = await encode(serving, [asked.prompt], add_special_tokens=add_special)
    return ids


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    call = await read_call(request, "detokenize")
    asked = decode_request(call.body, DetokenizeRequest)
    call.serving.check_model(asked.model)
    body = await run_sized(len(asked.tokens), lambda: _text(call.serving, asked.tokens))
    return Response(body, media_type="application/json")


def _text(serving: Serving, ids: list[int]) -> bytes:
    check_token_ids("tokens", ids, serving.bounds.vocab)
    text = serving.get_tokenizer().decode(ids, skip_special_tokens=False)
    return msgspec.json.encode(DetokenizeResponse(text))
