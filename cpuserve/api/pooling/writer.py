"""Write the responses of /pooling and /classify."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.openai.embeddings.writer import base64_of, shortened
from cpuserve.api.pooling.schema import (
    ClassifyAnswer,
    ClassifyItem,
    PoolingAnswer,
    PoolingItem,
    PoolingUsage,
    task_of,
)
from cpuserve.serving.classes import activated, rows_of
from cpuserve.serving.events import floats_of

if TYPE_CHECKING:
    from cpuserve.api.pooling.schema import ClassifyRequest, PoolingRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.events import Choice, WholeResponse
    from cpuserve.serving.generate import Generation


class ClassifyWriter:
    """Writes the response of /classify."""

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
    """Writes the response of /pooling."""

    def __init__(
        self, received: RequestContext, asked: PoolingRequest, _generation: Generation
    ) -> None:
        self._received = received
        self._asked = asked
        self._task = task_of(asked, received.context)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        received, as_text = self._received, self._asked.encoding_format == "base64"
        items = []
        for choice in response.choices:
            rows = self._rows(choice)
            data: str | list[float] | list[list[float]]
            if as_text:
                data = base64_of(array("f", (value for row in rows for value in row)))
            else:
                data = rows if self._task.startswith("token") else rows[0]
            items.append(PoolingItem(choice.index, "pooling", data))
        name, usage = received.served.name, _usage(response)
        whole = PoolingAnswer(received.id, "list", received.created, name, items, usage)
        return msgspec.json.encode(whole)

    def _rows(self, choice: Choice) -> list[list[float]]:
        """Return the rows of a result: one for each token, or a single one."""
        asked, context, values = self._asked, self._received.context, floats_of(choice.vector)
        if self._task == "embed":
            return [shortened(values, asked.dimensions, unit=asked.activates).tolist()]
        rows = rows_of(values, len(choice.prompt.ids) if self._task.startswith("token") else 1)
        if self._task == "token_embed" or not asked.activates:
            return rows
        return [activated(row, context.class_activation) for row in rows]


def _usage(response: WholeResponse) -> PoolingUsage:
    return PoolingUsage(response.usage.prompt, response.usage.prompt)
