"""POST /v2/embed and /v1/embed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from cpuserve.api.request.fields import COHERE_FIELDS, with_refused
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.cohere.errors import COHERE
from cpuserve.api.vectors.input_types import INPUT_TYPES, prompt_for
from cpuserve.api.vectors.numbers import check_kind, converted
from cpuserve.api.vectors.route import Made, Table, vectors_call
from cpuserve.base.errors import InvalidRequest
from cpuserve.config.engine import EMBEDDINGS
from cpuserve.serving.calls.call import MAX_PROMPTS, unsupported
from cpuserve.serving.calls.events import WholeResponse
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.models.context import ModelContext

_CUT = ', or set truncate to "END", which cuts it'
table = Table(COHERE, {"prompt_name": "input_type", "cut": _CUT})
router = table.router
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereContent(msgspec.Struct, kw_only=True):
    """One part of an input, which must be a text; images are refused."""

    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    """An input of several parts, which gets one embedding vector."""

    content: list[CohereContent]


class CohereFields(msgspec.Struct, kw_only=True):
    """The fields that both versions of the endpoint share.

    input_type: the purpose of the vectors, such as "search_query";
      this purpose selects a prompt of the checkpoint.
    truncate: the side where a long text is cut, "END" (the default) or "START"; "NONE" = an error.
    """

    model: str | None = None
    texts: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    timeout: float | None = None


@with_refused(COHERE_FIELDS)
class CohereEmbedRequest(CohereFields, kw_only=True):
    """The body of POST /v2/embed, with either `texts` or `inputs`.

    max_tokens: longer texts are cut to this number of tokens.
    output_dimension: the number of leading values of each vector that are returned.
    """

    inputs: list[CohereInput] | None = None
    max_tokens: int | None = None
    output_dimension: int | None = None
    priority: int | None = None


@with_refused(COHERE_FIELDS)
class CohereEmbedV1Request(CohereFields, kw_only=True):
    """The body of POST /v1/embed."""


class CohereVectors(msgspec.Struct, omit_defaults=True):
    """The vectors in each requested type; `base64` has little-endian fp32 values."""

    floats: list[list[float]] | None = msgspec.field(default=None, name="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereVersion(msgspec.Struct):
    """The version of the Cohere API that the response follows."""

    version: str


class CohereUnits(msgspec.Struct, omit_defaults=True):
    """The number of tokens of all inputs, in the members that Cohere clients read.

    search_units: 1 for a ranking, which Cohere counts instead of tokens.
    """

    input_tokens: int
    search_units: int | None = None


class CohereMeta(msgspec.Struct):
    """The metadata of a response: the API version and the number of tokens."""

    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbeddings(msgspec.Struct):
    """The body of the response; `embeddings` is a plain list if no types were requested."""

    id: str
    embeddings: CohereVectors | list[list[float]]
    texts: list[str]
    meta: CohereMeta
    response_type: str


def texts_of(request: CohereFields) -> list[str]:
    """Return the texts of a request; InvalidRequest if it has no texts, or parts such as images."""
    inputs = request.inputs if isinstance(request, CohereEmbedRequest) else None
    if (request.texts is None) == (inputs is None):
        what = "neither texts nor inputs" if inputs is None else "both texts and inputs"
        msg = f"The request has {what}: send one of them"
        raise InvalidRequest(msg, param="texts")
    name = "texts" if inputs is None else "inputs"
    found = request.texts or [_text_of(each) for each in inputs or ()]
    if not 0 < len(found) <= MAX_PROMPTS:
        msg = f"{name} has {len(found)} texts: give 1 to {MAX_PROMPTS}"
        raise InvalidRequest(msg, param=name)
    return found


def _text_of(given: CohereInput) -> str:
    for part in given.content:
        if part.type != "text":
            msg = f"inputs has a part of the type {part.type[:40]!r}: this server embeds text only"
            raise unsupported(msg, "inputs")
    return "".join(part.text or "" for part in given.content)


@table.row("/v2/embed", CohereEmbedRequest, CohereEmbeddings, "embd-", "texts", EMBEDDINGS)
def cohere_embed(body: CohereEmbedRequest, request: RequestContext) -> Made:
    """Return a vector for each text, in the format of Cohere."""
    context, dimensions = request.context, body.output_dimension
    check_dimensions(dimensions, context, "output_dimension")
    most = _most(body, context)
    types = body.embedding_types or ["float"]
    return _made(body, request, types, "2", dimensions, most)


@table.row("/v1/embed", CohereEmbedV1Request, CohereEmbeddings, "embd-", "texts", EMBEDDINGS)
def cohere_embed_v1(body: CohereEmbedV1Request, request: RequestContext) -> Made:
    """Return a vector for each text, in the format of version 1 of the Cohere API."""
    return _made(body, request, body.embedding_types or (), "1")


def _made(
    body: CohereFields,
    request: RequestContext,
    types: Sequence[EmbeddingType],
    version: str,
    dimensions: int | None = None,
    most: int = -1,
) -> Made:
    """Return the call and its writer. types: none = the vectors are a plain list (version 1).

    most: the length in tokens that texts are cut to; -1 = the length of the context.
    """
    context = request.context
    for kind in body.embedding_types or ():
        check_kind(kind, dimensions or context.vector_width, "embedding_types")
    call = vectors_call(
        body,
        prompt=[*texts_of(body)],
        prompt_name=prompt_for(body.input_type, context, INPUT_TYPES),
        truncate_prompt_tokens=None if body.truncate == "NONE" else most,
        truncation_side="left" if body.truncate == "START" else "right",
    )

    def value(response: WholeResponse) -> CohereEmbeddings:
        vectors = [shortened(choice.values, dimensions) for choice in response.choices]
        found: CohereVectors | list[list[float]]
        if not types:
            found = in_parts(vector.tolist() for vector in vectors)
        else:
            found = CohereVectors()
            for kind in types:
                shown = in_parts(converted(vector, kind) for vector in vectors)
                setattr(found, "floats" if kind == "float" else kind, shown)
        meta = CohereMeta(CohereVersion(version), CohereUnits(response.usage.prompt))
        named = "embeddings_by_type" if types else "embeddings_floats"
        return CohereEmbeddings(request.id, found, texts_of(body), meta, named)

    return call, value


def _most(request: CohereEmbedRequest, context: ModelContext) -> int:
    """Return the maximum number of tokens of each text; -1 = the length of the context."""
    if request.max_tokens is None:
        return -1
    if request.max_tokens < 1:
        msg = f"max_tokens must be at least 1, got {request.max_tokens}"
        raise InvalidRequest(msg, param="max_tokens")
    if request.truncate == "NONE":
        msg = 'max_tokens cuts texts, and truncate "NONE" forbids it: omit one of them'
        raise InvalidRequest(msg, param="max_tokens")
    return min(request.max_tokens, context.max_model_len)
