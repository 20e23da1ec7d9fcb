"""POST /embedding and /embeddings, in the format of llama-server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.llamacpp.completion.prompts import flat_prompts
from cpuserve.api.llamacpp.completion.schema import PromptItem, PromptObject
from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.route import post, salt_of
from cpuserve.api.vectors.route import Made, answer, vectors_call
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import Prompt, unsupported

router = APIRouter()
# With embd_normalize 0, a vector is scaled so that its largest absolute value is this number.
_MOST = 32760.0
_UNCHANGED, _MAX, _EUCLIDEAN = -1, 0, 2


class LlamaEmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of POST /embedding; `content` (or its alias `input`) has one or several texts.

    embd_normalize: 0 scales the largest absolute value to 32760; p > 0 scales the p-norm to 1.
    """

    model: str | None = None
    content: str | PromptObject | list[PromptItem] | None = None
    input: str | PromptObject | list[PromptItem] | None = None
    embd_normalize: int | None = None
    priority: int | None = None
    timeout: float | None = None


class LlamaEmbedding(msgspec.Struct):
    """The embedding of one text: a list with one vector, because tokens are pooled."""

    index: int
    embedding: list[list[float]]


@post(
    router,
    "/embedding",
    "/embeddings",
    schema=LlamaEmbeddingRequest,
    response=list[LlamaEmbedding],
    dialect=LLAMACPP,
    id_prefix="embedding-",
    words=lambda body: {"prompt": "content" if body.content is not None else "input", "cut": ""},
)
async def llama_embedding(request: RequestContext, body: LlamaEmbeddingRequest) -> Response:
    """Return a vector for each text, in the format of llama-server."""
    await request.choose(body.model)
    given = body.input if body.content is None else body.content
    if given is None:
        msg = "content is missing: give a text, token ids, or a list of them"
        raise InvalidRequest(msg, param="content")
    if body.embd_normalize is not None and body.embd_normalize < _UNCHANGED:
        msg = f"embd_normalize must be at least 0, got {body.embd_normalize}"
        raise InvalidRequest(msg, param="embd_normalize")
    if body.embd_normalize == _UNCHANGED:
        msg = "embd_normalize -1 is not supported, because vectors have the length 1: omit it"
        raise unsupported(msg, "embd_normalize")
    found = await flat_prompts(request.context, given, salt_of(request, None))
    prompts: list[str | int | list[int]] = [p for p in found if not isinstance(p, Prompt)]
    if len(prompts) < len(found):
        msg = "multimodal_data is not supported: this server embeds texts only"
        raise unsupported(msg, "content" if body.content is not None else "input")

    def make(body: LlamaEmbeddingRequest, _request: RequestContext) -> Made:
        norm = _EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
        return vectors_call(body, prompt=prompts), lambda response: in_parts(
            LlamaEmbedding(index, [normalized(choice.values, norm)])
            for index, choice in enumerate(response.choices)
        )

    return await answer(request, body, make)


def normalized(vector: Sequence[float], norm: int) -> list[float]:
    """Scale a vector of Euclidean length 1 to another norm; see LlamaEmbeddingRequest."""
    if norm == _EUCLIDEAN:
        return list(vector)
    largest = max(map(abs, vector), default=0.0)
    if norm == _MAX:
        size = largest / _MOST
    else:
        # Dividing by the largest value first keeps the sum of powers from underflowing to 0.
        size = largest and largest * sum((abs(x) / largest) ** norm for x in vector) ** (1 / norm)
    return [x / size if size else 0.0 for x in vector]
