"""The body of POST /v1/embeddings, its conversion to a GenerateCall, and the response objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.request.fields import with_refused
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import GenerateCall
from cpuserve.serving.tasks import select_task

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext

FORMATS = ("float", "base64")


@with_refused("embeddings")
class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/embeddings; `input` is text, token ids, or a list of either.

    prompt_name: the checkpoint's prompt that is put before each text (a field of TEI).
    task: a task of the checkpoint, such as "retrieval.query" (a field of the Jina API).
    normalize, use_activation: false = vectors are not scaled to length 1 (fields of TEI and vLLM).
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_name: str | None = None
    task: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def unit(self) -> bool:
        """Whether vectors are scaled to Euclidean length 1."""
        return False not in (self.normalize, self.use_activation)


class EmbeddingItem(msgspec.Struct):
    """The vector of one input, as numbers or as the base64 text of its little-endian fp32."""

    object: str
    index: int
    embedding: list[float] | str


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


def to_call(request: EmbeddingRequest, context: ModelContext) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest for a field that the model does not support."""
    if (request.encoding_format or "float") not in FORMATS:
        msg = f"encoding_format must be one of {', '.join(FORMATS)}"
        raise InvalidRequest(msg, param="encoding_format")
    check_dimensions(request.dimensions, context)
    adapter, prompt_name = select_task(request.task, request.prompt_name, context.tasks)
    if adapter is not None and request.model in context.adapters and request.model != adapter:
        msg = f"model is the adapter {request.model!r}, but task selects {adapter!r}: omit one"
        raise InvalidRequest(msg, param="task")
    return GenerateCall(
        model=request.model,
        prompt=request.input,
        add_special_tokens=request.add_special_tokens,
        prompt_name=prompt_name,
        adapter=adapter,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        max_tokens=0,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=request.timeout,
        embed=True,
        vectors="" if request.unit else "plain",
    )


def check_dimensions(
    dimensions: int | None, context: ModelContext, field: str = "dimensions"
) -> None:
    """Raise InvalidRequest if the model's embeddings cannot be cut to `dimensions` values.

    field: the name of `dimensions` in the request. This function accepts models without embeddings,
    because serving.generate.prepare refuses them later.
    """
    width = context.vector_width
    if dimensions is not None and context.embeds and not 1 <= dimensions <= width:
        msg = f"{field} must be between 1 and {width}, the length of this model's vectors"
        raise InvalidRequest(msg, param=field)
