"""POST /v1/embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.request.fields import with_refused
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.binary import (
    BinaryBody,
    VectorEncoding,
    binary_body,
    check_encoding,
    facts_of,
)
from cpuserve.api.vectors.input_types import ANY_INPUT_TYPES, prompt_for
from cpuserve.api.vectors.inputs import inputs_of
from cpuserve.api.vectors.numbers import KINDS, as_base64, check_kind, converted
from cpuserve.api.vectors.route import Made, Table, vectors_call
from cpuserve.base.errors import InvalidRequest
from cpuserve.config.engine import EMBEDDINGS
from cpuserve.serving.calls.events import WholeResponse
from cpuserve.serving.models.tasks import select_task
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.models.context import ModelContext

table = Table()
router = table.router
# The values of `truncate` that other servers have besides true and false, and the side they cut.
_SIDES = {"END": "right", "START": "left", "NONE": None}


@with_refused("embeddings")
class EmbeddingRequest(VectorEncoding, kw_only=True):
    """The body of POST /v1/embeddings.

    prompt_name: the checkpoint's prompt that is put before each text (a field of TEI).
    task: a task of the checkpoint, such as "retrieval.query" (a field of the Jina API).
    normalize, normalized, use_activation: false = vectors are not scaled to length 1
      (fields of TEI, Jina and vLLM).
    output_dimension: the same as dimensions (Voyage, Mistral).
    output_dtype, embedding_type: the type of the numbers, one of KINDS (Voyage, Mistral and Jina).
    input_type: the purpose, which selects a prompt of the checkpoint (Voyage, NVIDIA).
    truncate, truncation: whether longer texts are cut to the context (Jina, NVIDIA, Voyage).
    """

    dimensions: int | None = None
    prompt_name: str | None = None
    task: str | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    output_dimension: int | None = None
    output_dtype: str | None = None
    embedding_type: str | None = None
    input_type: str | None = None
    truncate: bool | str | None = None
    truncation: bool | None = None

    @property
    def unit(self) -> bool:
        """Whether vectors are scaled to Euclidean length 1."""
        return False not in (self.normalize, self.normalized, self.use_activation)

    @property
    def length(self) -> int | None:
        """The number of leading values of each vector that are returned; None = all."""
        return self.output_dimension if self.dimensions is None else self.dimensions

    @property
    def kind(self) -> str:
        """The type of the numbers, one of KINDS; `embedding_type` base64 has floats."""
        found = self.output_dtype or self.embedding_type or "float"
        return "float" if found == "base64" else found

    @property
    def as_text(self) -> bool:
        """Whether vectors are base64 texts."""
        return "base64" in (self.encoding_format, self.embedding_type)


class EmbeddingItem(msgspec.Struct):
    """The vector of one input, as numbers or as base64 text of its little-endian numbers."""

    object: str
    index: int
    embedding: Sequence[float] | str


class EmbeddingUsage(msgspec.Struct):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct):
    """The body of the response to POST /v1/embeddings."""

    object: str
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@table.row("/v1/embeddings", EmbeddingRequest, EmbeddingAnswer, "embd-", "input", EMBEDDINGS)
def create_embeddings(body: EmbeddingRequest, request: RequestContext) -> Made:
    """Return an embedding vector for each input."""
    context, prompt_name = request.context, body.prompt_name
    check_encoding(body)
    _check_types(body, context)
    if body.input_type is not None:
        if body.prompt_name is not None or body.task is not None:
            msg = "input_type selects a prompt, as prompt_name and task do: set one of them"
            raise InvalidRequest(msg, param="input_type")
        prompt_name = prompt_for(body.input_type, context, ANY_INPUT_TYPES)
    adapter, prompt_name = select_task(body.task, prompt_name, context.tasks)
    if adapter is not None and body.model in context.adapters and body.model != adapter:
        msg = f"model is the adapter {body.model!r}, but task selects {adapter!r}: omit one"
        raise InvalidRequest(msg, param="task")
    call = vectors_call(
        body,
        **inputs_of(body),
        prompt_name=prompt_name,
        adapter=adapter,
        **_cut(body),
        vectors="" if body.unit else "plain",
    )

    def written(vector: array[float]) -> Sequence[float] | str:
        if not body.as_text:
            return converted(vector, body.kind)
        return body.base64_of(vector) if body.kind == "float" else as_base64(vector, body.kind)

    def value(response: WholeResponse) -> EmbeddingAnswer | BinaryBody:
        vectors = (shortened(c.values, body.length, unit=body.unit) for c in response.choices)
        usage = EmbeddingUsage(response.usage.prompt, response.usage.prompt)
        if body.is_binary:
            shaped = [(vector, (len(vector),)) for vector in vectors]
            return binary_body(body, shaped, facts_of(request, usage))
        items = (
            EmbeddingItem("embedding", index, written(vector))
            for index, vector in enumerate(vectors)
        )
        return EmbeddingAnswer("list", in_parts(items), request.served.name, usage)

    return call, value


def _check_types(request: EmbeddingRequest, context: ModelContext) -> None:
    """Raise InvalidRequest for lengths and types of vectors that are not possible."""
    if None not in (request.dimensions, request.output_dimension):
        msg = "dimensions and output_dimension mean the same: set one of them"
        raise InvalidRequest(msg, param="output_dimension")
    if request.kind != "float":
        for name in ("embed_dtype", "endianness"):
            if getattr(request, name) is not None:
                msg = f"{name} is the type of floats, and {request.kind} are asked for: omit one"
                raise InvalidRequest(msg, param=name)
        if request.is_binary:
            msg = f"encoding_format {request.encoding_format} has floats: omit {request.kind}"
            raise InvalidRequest(msg, param="encoding_format")
    named = "dimensions" if request.output_dimension is None else "output_dimension"
    check_dimensions(request.length, context, named)
    fields = {"output_dtype": request.output_dtype, "embedding_type": request.embedding_type}
    sent = {name: value for name, value in fields.items() if value is not None}
    if len({*sent.values()}) > 1:
        msg = "output_dtype and embedding_type mean the same: set one of them"
        raise InvalidRequest(msg, param="output_dtype")
    for name, value in sent.items():
        known = (*KINDS, "base64") if name == "embedding_type" else KINDS
        if value not in known:
            msg = f"{name} must be one of {', '.join(known)}, got {value[:40]!r}"
            raise InvalidRequest(msg, param=name)
        check_kind(value, request.length or context.vector_width, name)
        if value in ("int8", "uint8") and not request.unit:
            msg = (
                f"{name} {value} needs vectors of length 1: omit the field that leaves them longer"
            )
            raise InvalidRequest(msg, param=name)


def _cut(request: EmbeddingRequest) -> dict[str, Any]:
    """Return the truncation fields of a GenerateCall.

    Raises:
      InvalidRequest: a field is invalid, or several fields say how texts are cut.
    """
    own = {
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "truncation_side": request.truncation_side,
    }
    fields = {"truncate": request.truncate, "truncation": request.truncation}
    sent = {name: value for name, value in fields.items() if value is not None}
    if not sent:
        return own
    (name, value), *others = sent.items()
    if others or request.truncate_prompt_tokens is not None:
        other = others[0][0] if others else "truncate_prompt_tokens"
        msg = f"{name} and {other} mean the same: set one of them"
        raise InvalidRequest(msg, param=name)
    if isinstance(value, bool):
        return {**own, "truncate_prompt_tokens": -1 if value else None}
    if value not in _SIDES:
        msg = f"{name} must be true, false or one of {', '.join(_SIDES)}, got {value[:40]!r}"
        raise InvalidRequest(msg, param=name)
    side = _SIDES[value]
    return {"truncate_prompt_tokens": None if side is None else -1, "truncation_side": side}
