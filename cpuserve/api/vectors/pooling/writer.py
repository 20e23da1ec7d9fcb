"""Write the responses of /pooling and /classify."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.openai.writer import base64_of
from cpuserve.api.vectors.pooling.schema import (
    ClassifyAnswer,
    ClassifyItem,
    PoolingAnswer,
    PoolingData,
    PoolingItem,
    PoolingUsage,
    task_of,
)
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.vectors.classes import activated
from cpuserve.serving.vectors.matryoshka import shortened
from cpuserve.serving.vectors.pooling_tasks import data_of, labels_of_task, results_of

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.vectors.pooling.schema import ClassifyRequest, PoolingRequest
    from cpuserve.serving.calls.events import Choice, WholeResponse
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.vectors.pooling_tasks import Data


class ClassifyWriter:
    """Writes the response to a request to /classify."""

    def __init__(
        self, received: RequestContext, asked: ClassifyRequest, _generation: Generation
    ) -> None:
        self._received = received
        self._kind = received.context.class_activation if asked.activates else "none"

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        received = self._received
        items = [self._item(choice) for choice in response.choices]
        name, usage = received.served.name, _usage(response)
        whole = ClassifyAnswer(received.id, "list", received.created, name, items, usage)
        return msgspec.json.encode(whole)

    def _item(self, choice: Choice) -> ClassifyItem:
        values = activated(floats_of(choice.vector), self._kind)
        label = self._received.context.labels[values.index(max(values))]
        return ClassifyItem(choice.index, label, values, len(values))


class PoolingWriter:
    """Writes the response to a request to /pooling."""

    def __init__(
        self, received: RequestContext, asked: PoolingRequest, _generation: Generation
    ) -> None:
        self._received = received
        self._asked = asked
        self._task = task_of(asked, received.context)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        received = self._received
        items = in_parts(self._item(choice) for choice in response.choices)
        name, usage = received.served.name, _usage(response)
        whole = PoolingAnswer(received.id, "list", received.created, name, items, usage)
        return msgspec.json.encode(whole)

    def _item(self, choice: Choice) -> PoolingItem:
        data = self._data(choice)
        if isinstance(data, dict):
            shown = {name: self._shown(part) for name, part in data.items()}
            return PoolingItem(choice.index, "pooling", shown)
        return PoolingItem(choice.index, "pooling", self._shown(data))

    def _shown(self, data: Data) -> PoolingData:
        """Return the numbers as they are, or the base64 text of their little-endian fp32 bytes."""
        if self._asked.encoding_format != "base64":
            return in_parts(data) if data and isinstance(data[0], list) else data
        rows = (each if isinstance(each, list) else [each] for each in data)
        return base64_of(array("f", (value for row in rows for value in row)))

    def _data(self, choice: Choice) -> Data | dict[str, Data]:
        asked, context, task = self._asked, self._received.context, self._task
        values, ids = floats_of(choice.vector), choice.prompt.ids
        if task == "embed":
            return shortened(values, asked.dimensions, unit=asked.activates).tolist()
        if context.embeds:
            return data_of(task, results_of(task, values, ids, context))
        kind = context.class_activation if asked.activates else "none"
        return labels_of_task(task, values, len(ids), kind)


def _usage(response: WholeResponse) -> PoolingUsage:
    return PoolingUsage(response.usage.prompt, response.usage.prompt)
