"""The fields of POST /pooling and /classify, and the calls that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.openai.embeddings.schema import FORMATS, check_dimensions
from cpuserve.api.request.fields import with_refused
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import GenerateCall
from cpuserve.serving.pooling_tasks import ALL, BOTH, embedding_tasks, vectors_of

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext

# The tasks of /pooling, and the kind of model that each needs.
TASKS = {
    "embed": "an embedding model",
    "token_embed": "an embedding model",
    "classify": "a classifier of texts",
    "token_classify": "a classifier of tokens, or BGE-M3 with its heads in safetensors",
    BOTH: "BGE-M3 with its heads in safetensors",
    ALL: "BGE-M3 with its heads in safetensors",
}
# The data of an input: numbers, a row for each token, or base64 of their fp32.
PoolingData = Sequence[float | list[float]] | str


class _Inputs(msgspec.Struct, kw_only=True):
    """The fields that /pooling and /classify share; `input` is as in /v1/embeddings.

    use_activation, activation, softmax: false = the logits as they are (all are fields of vLLM).
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
        """Whether the activation of the model is applied to its results."""
        return False not in (self.use_activation, self.activation)


@with_refused("pooling")
class ClassifyRequest(_Inputs, kw_only=True):
    """POST /classify: texts, or token ids, to be labelled."""

    softmax: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether the activation of the model is applied to its results."""
        return False not in (self.use_activation, self.activation, self.softmax)


@with_refused("pooling")
class PoolingRequest(_Inputs, kw_only=True):
    """POST /pooling; task: one of TASKS, None = as the model allows.

    normalize: whether vectors are scaled to length 1.
    dimensions: how many values of an embedding are returned.
    """

    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    @property
    def activates(self) -> bool:
        """Whether the activation of the model is applied to its results."""
        return False not in (self.use_activation, self.activation, self.normalize)


class PoolingUsage(msgspec.Struct):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyItem(msgspec.Struct):
    """The most likely label of an input, and the value of each label."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    """The body of POST /classify."""

    id: str
    object: str
    created: int
    model: str
    data: list[ClassifyItem]
    usage: PoolingUsage


class PoolingItem(msgspec.Struct):
    """The result of one input; of several tasks at once, the data of each by its name."""

    index: int
    object: str
    data: PoolingData | dict[str, PoolingData]


class PoolingAnswer(msgspec.Struct):
    """The body of POST /pooling."""

    id: str
    object: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: PoolingUsage


def task_of(request: PoolingRequest, context: ModelContext) -> str:
    """Return the task of a request; InvalidRequest for a task that is not known."""
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
    """Return the call of /pooling; InvalidRequest for a field that `context` does not support."""
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
    """Return the call of /classify."""
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
