"""POST /pooling and /classify: vectors and class labels of texts and tokens, as vLLM does."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

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
from cpuserve.api.vectors.inputs import VectorInputs, inputs_of
from cpuserve.api.vectors.route import Made, Table, vectors_call
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.events import Choice, WholeResponse
from cpuserve.serving.vectors.classes import activated
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened
from cpuserve.serving.vectors.pooling_tasks import (
    ALL,
    BOTH,
    Data,
    data_of,
    embedding_tasks,
    labels_of_task,
    results_of,
    vectors_of,
)

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.models.context import ModelContext

table = Table()
router = table.router
# The tasks of /pooling, each with the kind of model that can do it.
TASKS = {
    "embed": "an embedding model",
    "token_embed": "an embedding model",
    "classify": "a classifier of texts",
    "token_classify": "a classifier of tokens, or BGE-M3 with its heads in safetensors",
    BOTH: "BGE-M3 with its heads in safetensors",
    ALL: "BGE-M3 with its heads in safetensors",
}
# Models that label texts. A model with one label, such as a reranker, labels single texts as well.
_KINDS = {"classify": "classify", "rank": "classify"}
# The data of one input: numbers, a row of numbers per token, or the base64 text of fp32 values.
PoolingData = Sequence[float | list[float]] | str


@with_refused("pooling")
class ClassifyRequest(VectorInputs, kw_only=True):
    """The body of POST /classify: texts, token ids or messages to classify.

    activation, softmax: the same as use_activation (all three are fields of vLLM).
    """

    activation: bool | None = None
    softmax: bool | None = None
    request_id: str | None = None

    @property
    def activates(self) -> bool:
        """Whether the model's activation, such as softmax, is applied to the results."""
        return False not in (self.use_activation, self.activation, self.softmax)


@with_refused("pooling")
class PoolingRequest(VectorEncoding, kw_only=True):
    """The body of POST /pooling; task: a key of TASKS, None = the default of the model.

    activation: the same as use_activation.
    normalize: whether vectors are scaled to length 1.
    dimensions: the number of leading values of each embedding that are returned.
    """

    task: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    request_id: str | None = None

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
        default = {**_KINDS, "token_classify": "token_classify", "splade": "embed"}
        return default.get(context.pooling, "token_embed")
    if request.task not in TASKS:
        msg = f"task is {request.task[:40]!r}, but it must be one of {', '.join(TASKS)}"
        raise InvalidRequest(msg, param="task")
    possible = embedding_tasks(context) or (_KINDS.get(context.pooling, context.pooling),)
    if request.task not in possible:
        name = context.model_names[0]
        msg = f"task {request.task} needs {TASKS[request.task]}, which {name} is not"
        raise InvalidRequest(msg, param="task")
    return request.task


@table.row("/pooling", PoolingRequest, PoolingAnswer, "pool-", "input")
def pooling(body: PoolingRequest, request: RequestContext) -> Made:
    """Return the vector or the class scores of each input, or of each token of each input."""
    context = request.context
    task = task_of(body, context)
    check_encoding(body)
    if body.is_binary and task in (BOTH, ALL):
        msg = f"encoding_format {body.encoding_format} has one result an input, not those of {task}"
        raise InvalidRequest(msg, param="encoding_format")
    if body.dimensions is not None and (task != "embed" or not context.embeds):
        msg = f"dimensions is only possible with the task embed, and the task is {task}: omit it"
        raise InvalidRequest(msg, param="dimensions")
    check_dimensions(body.dimensions, context)
    if embedding_tasks(context):
        kind = {"vectors": vectors_of(task, context, activates=body.activates)}
    else:
        kind = _labels_kind(task, context, activates=body.activates)

    def item(choice: Choice) -> PoolingItem:
        data = _data(choice, task, body, context)
        if isinstance(data, dict):
            shown = {name: _shown(part, body) for name, part in data.items()}
            return PoolingItem(choice.index, "pooling", shown)
        return PoolingItem(choice.index, "pooling", _shown(data, body))

    def value(response: WholeResponse) -> PoolingAnswer | BinaryBody:
        if body.is_binary:
            results = [_data(choice, task, body, context) for choice in response.choices]
            shaped = [_shaped(data) for data in results if not isinstance(data, dict)]
            return binary_body(body, shaped, facts_of(request, _usage(response)))
        items = in_parts(item(choice) for choice in response.choices)
        name, usage = request.served.name, _usage(response)
        return PoolingAnswer(request.id, "list", request.created, name, items, usage)

    return vectors_call(body, **inputs_of(body), **kind), value


def _labels_kind(task: str, context: ModelContext, *, activates: bool) -> dict[str, str]:
    """Return the fields of a call for labels; the engine activates the scores of rerankers."""
    raw = context.pooling == "rank" and not activates
    kind = "text" if task == "classify" else "tokens"
    return {"classify": kind, "vectors": "raw" if raw else ""}


def _data(
    choice: Choice, task: str, body: PoolingRequest, context: ModelContext
) -> Data | dict[str, Data]:
    values, ids = choice.values, choice.prompt.ids
    if task == "embed":
        return shortened(values, body.dimensions, unit=body.activates).tolist()
    if context.embeds:
        return data_of(task, results_of(task, values, ids, context))
    kind = context.class_activation if body.activates else "none"
    return labels_of_task(task, values, len(ids), kind)


def _shown(data: Data, body: PoolingRequest) -> PoolingData:
    """Return the numbers as they are, or the base64 text of their bytes."""
    if body.encoding_format != "base64":
        return in_parts(data) if data and isinstance(data[0], list) else data
    return body.base64_of(_shaped(data)[0])


def _shaped(data: Data) -> tuple[array[float], tuple[int, ...]]:
    """Return all numbers of a result in one row after the other, and their shape."""
    if not data or not isinstance(data[0], list):
        return array("f", cast("Sequence[float]", data)), (len(data),)
    rows = cast("Sequence[list[float]]", data)
    return array("f", (value for row in rows for value in row)), (len(rows), len(rows[0]))


@table.row("/classify", ClassifyRequest, ClassifyAnswer, "classify-", "input", tuple(_KINDS))
def classify(body: ClassifyRequest, request: RequestContext) -> Made:
    """Return the most likely class of each input, and the probability of each class."""
    context = request.context
    kind = context.class_activation if body.activates else "none"

    def item(choice: Choice) -> ClassifyItem:
        values = activated(choice.values, kind)
        label = context.labels[values.index(max(values))]
        return ClassifyItem(choice.index, label, values, len(values))

    def value(response: WholeResponse) -> ClassifyAnswer:
        items = [item(choice) for choice in response.choices]
        name, usage = request.served.name, _usage(response)
        return ClassifyAnswer(request.id, "list", request.created, name, items, usage)

    kinds = _labels_kind("classify", context, activates=body.activates)
    return vectors_call(body, **inputs_of(body), **kinds), value


def _usage(response: WholeResponse) -> PoolingUsage:
    return PoolingUsage(response.usage.prompt, response.usage.prompt)
