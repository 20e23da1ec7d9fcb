"""The bodies of POST /v2/embed and /v1/embed, and their conversion to a GenerateCall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cpuserve.api.request.fields import COHERE, with_refused
from cpuserve.api.vectors.openai.input_types import INPUT_TYPES, prompt_for
from cpuserve.api.vectors.openai.schema import check_kind
from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall, unsupported
from cpuserve.serving.vectors.matryoshka import check_dimensions

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

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


@with_refused(COHERE)
class CohereEmbedRequest(CohereFields, kw_only=True):
    """The body of POST /v2/embed, with either `texts` or `inputs`.

    max_tokens: longer texts are cut to this number of tokens.
    output_dimension: the number of leading values of each vector that are returned.
    """

    inputs: list[CohereInput] | None = None
    max_tokens: int | None = None
    output_dimension: int | None = None
    priority: int | None = None


@with_refused(COHERE)
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


def cohere_call(request: CohereFields, context: ModelContext) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest for a field that the model does not support."""
    more: dict[str, Any] = {"truncate_prompt_tokens": -1}
    width = context.vector_width
    if isinstance(request, CohereEmbedRequest):
        check_dimensions(request.output_dimension, context, "output_dimension")
        more = {"truncate_prompt_tokens": _most(request, context), "priority": request.priority}
        width = request.output_dimension or width
    for kind in request.embedding_types or ():
        check_kind(kind, width, "embedding_types")
    if request.truncate == "NONE":
        more["truncate_prompt_tokens"] = None
    return GenerateCall(
        model=request.model,
        prompt=[*texts_of(request)],
        prompt_name=prompt_for(request.input_type, context, INPUT_TYPES),
        truncation_side="left" if request.truncate == "START" else "right",
        max_tokens=0,
        timeout=request.timeout,
        embed=True,
        **more,
    )


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
