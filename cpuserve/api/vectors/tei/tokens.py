"""POST /decode, and POST /tokenize in the TEI format."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.route import post
from cpuserve.api.vectors.tei.errors import TEI
from cpuserve.api.vectors.tei.fields import check_inputs
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.params import check_token_ids
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.prompts.encode import check_count, encode_spans
from cpuserve.serving.threads import run_sized
from cpuserve.tokenizer.coder import TokenSpan
from cpuserve.tokenizer.tokenizer import named_prompt

router = APIRouter()


class TeiTokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize; prompt_name: as in TeiEmbedRequest."""

    inputs: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class TeiToken(msgspec.Struct, gc=False):
    """A token with its byte range in the text; a special token has no range."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /decode: token ids, or a list of lists of token ids."""

    ids: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


@post(
    router,
    schema=TeiTokenizeRequest,
    response=list[list[TeiToken]],
    dialect=TEI,
    id_prefix="tokenize-",
    words=lambda _: {"prompt": "inputs"},
)
async def tei_tokenize(request: RequestContext, body: TeiTokenizeRequest) -> Response:
    """Return the tokens of each text."""
    await request.choose(body.model)
    check_inputs("inputs", [body.inputs] if isinstance(body.inputs, str) else body.inputs)
    context = request.context
    before = named_prompt(context.get_tokenizer().prompts, body.prompt_name)
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    texts = [before + text for text in given]
    add_special = body.add_special_tokens is not False
    found = await encode_spans(context, texts, add_special_tokens=add_special)

    def written() -> bytes:
        return msgspec.json.encode(
            in_parts(
                in_parts(_tokens(text, spans)) for text, spans in zip(texts, found, strict=True)
            )
        )

    data = await run_sized(sum(map(len, texts)), written)
    return Response(data, media_type="application/json")


def _tokens(text: str, spans: list[TokenSpan]) -> list[TeiToken]:
    """Return the tokens of a text; TEI counts bytes, whereas the spans count characters."""
    at = [0]
    for char in text:
        at.append(at[-1] + len(char.encode()))
    return [
        TeiToken(span.id, span.name, True, None, None)
        if span.special
        else TeiToken(span.id, text[span.start : span.stop], False, at[span.start], at[span.stop])
        for span in spans
    ]


@post(
    router,
    "/decode",
    schema=DecodeRequest,
    response=list[str],
    dialect=TEI,
    id_prefix="decode-",
)
async def decode(request: RequestContext, body: DecodeRequest) -> Response:
    """Return the text of each list of token ids."""
    await request.choose(body.model)
    check_inputs("ids", body.ids)
    several = [ids for ids in body.ids if isinstance(ids, list)]
    single = [number for number in body.ids if isinstance(number, int)]
    lists = [single] if single else several
    if single and several:
        msg = "ids mixes token ids with lists of them: give one list of ids, or a list of lists"
        raise InvalidRequest(msg, param="ids")
    skips = body.skip_special_tokens is not False
    count = sum(map(len, lists))
    check_count(request.context, "ids", count)
    data = await run_sized(count, lambda: _texts(request.context, lists, skips=skips))
    return Response(data, media_type="application/json")


def _texts(context: ModelContext, lists: list[list[int]], *, skips: bool) -> bytes:
    for ids in lists:
        check_token_ids("ids", ids, context.bounds.vocab)
    tokenizer = context.get_tokenizer()
    return msgspec.json.encode([tokenizer.decode(ids, skip_special_tokens=skips) for ids in lists])
