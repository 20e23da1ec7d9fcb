"""The bodies of POST /pooling and /classify, and their conversion to a GenerateCall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.request.fields import with_refused
from cpuserve.api.vectors.openai.schema import FORMATS
from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.vectors.matryoshka import check_dimensions
from cpuserve.serving.vectors.pooling_tasks import ALL, BOTH, embedding_tasks, vectors_of

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

# The tasks of /pooling, each with the kind of model that can do it.
TASKS = {
    "embed": "an embedding model",
    "token_embed": "an embedding model",
    "classify": "a classifier of texts",
    "token_classify": "a classifier of tokens, or BGE-M3 with its heads in safetensors",
    BOTH: "BGE-M3 with its heads in safetensors",
    ALL: "BGE-M3 with its heads in safetensors",
}
# The data of one input: numbers, a row of numbers per token, or the base64 text of fp32 values.
PoolingData = Sequence[float | list[float]] | str


class _Inputs(msgspec.Struct, kw_only=True):
    """The request fields that /pooling and /classify share; `input` is as in /v1/embeddings.

    use_activation, activation, softmax: false = return raw logits (all three are vLLM fields).
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None
    request_id: str | None = None

    @property
    def activates(self) -> bool:
        """Whether the model's activation, such as softmax, is applied to the results."""
        return False not in (self.use_activation, self.activation)


@with_refused("pooling")
class ClassifyRequest(_Inputs, kw_only=True):
    """The body of POST /classify: texts or token ids to classify."""

    softmax: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether the model's activation, such as softmax, is applied to the results."""
        return False not in (self.use_activation, self.activation, self.softmax)


@with_refused("pooling")
class PoolingRequest(_Inputs, kw_only=True):
    """The body of POST /pooling; task: a key of TASKS, None = the default of the model.

    normalize: whether vectors are scaled to length 1.
    dimensions: the number of leading values of each embedding that are returned.
    """

    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether the model's activation, or scaling to length 1, is applied to the results."""
        return False not in (self.use_activation, self.activation, self.normalize)


class PoolingUsage(msgspec.Struct):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyItem(msgspec.Struct):
    """The most likely class of an input, and the probability or logit of each class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    """The response of POST /classify."""

    id: str
    object: str
    created: int
    model: str
    data: list[ClassifyItem]
    usage: PoolingUsage


class PoolingItem(msgspec.Struct):
    """The result for one input; if a request has several tasks, the data of each task by name."""

    index: int
    object: str
    data: PoolingData | dict[str, PoolingData]


class PoolingAnswer(msgspec.Struct):
    """The response of POST /pooling."""

    id: str
    object: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: PoolingUsage


def task_of(request: PoolingRequest, context: ModelContext) -> str:
    """Return the pooling task of a request; InvalidRequest for an unknown task."""
    if request.task is None:
        default = {"classify": "classify", "token_classify": "token_classify", "splade": "embed"}
        return default.get(context.pooling, "token_embed")
    if request.task not in TASKS:
        msg = f"task is {request.task[:40]!r}, but it must be one of {', '.join(TASKS)}"
        raise InvalidRequest(msg, param="task")
    possible = embedding_tasks(context) or (context.pooling,)
    if request.task not in possible:
        name = context.model_names[0]
        msg = f"task {request.task} needs {TASKS[request.task]}, which {name} is not"
        raise InvalidRequest(msg, param="task")
    return request.task


def pooling_call(request: PoolingRequest, context: ModelContext) -> GenerateCall:
    """Return the GenerateCall of /pooling; InvalidRequest for a field the model cannot support."""
    task = task_of(request, context)
    if (request.encoding_format or "float") not in FORMATS:
        msg = f"encoding_format must be one of {', '.join(FORMATS)}"
        raise InvalidRequest(msg, param="encoding_format")
    if request.dimensions is not None and (task != "embed" or not context.embeds):
        msg = f"dimensions is only possible with the task embed, and the task is {task}: omit it"
        raise InvalidRequest(msg, param="dimensions")
    check_dimensions(request.dimensions, context)
    if embedding_tasks(context):
        return _call(request, vectors=vectors_of(task, context, activates=request.activates))
    return _call(request, classify="text" if task == "classify" else "tokens")


def classify_call(request: ClassifyRequest) -> GenerateCall:
    """Return the GenerateCall of a request to /classify."""
    return _call(request, classify="text")


def _call(request: _Inputs, **kind: str) -> GenerateCall:
    return GenerateCall(
        model=request.model,
        prompt=request.input,
        add_special_tokens=request.add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        max_tokens=0,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=request.timeout,
        embed=True,
        **kind,  # type: ignore[arg-type]
    )
