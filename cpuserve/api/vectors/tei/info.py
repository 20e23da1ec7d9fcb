"""GET /info: the first model and its limits, in the TEI format."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.request.state import get_state
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get
from cpuserve.api.vectors.tei.errors import TEI
from cpuserve.base.version import version
from cpuserve.serving.calls.call import MAX_PROMPTS
from cpuserve.serving.models.context import ModelContext

router = APIRouter()
_POOLINGS = {"first": "cls", "last": "last_token", "mean": "mean"}


class TeiInfo(msgspec.Struct):
    """The response to GET /info: a description of the first model and its limits.

    model_type: {"embedding": {"pooling": ...}}, or the labels in an object "classifier"
      or "reranker"; a model that generates text has the key "text-generation".
    max_batch_requests: always None: a batch may have any number of requests.
    """

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


@get(router, "/info", TeiInfo, dialect=TEI)
async def info(request: Request) -> Response:
    """Describe the first model and its limits."""
    state = get_state(request)
    state.check_available()
    context = state.context
    limits, name = context.limits, context.model_names[0]
    return json_response(
        TeiInfo(
            model_id=context.details.source or name,
            model_sha=None,
            model_dtype=context.details.quantization.lower(),
            served_model_name=name,
            model_type=_kind(context),
            max_concurrent_requests=limits.max_queued_requests + limits.slots,
            max_input_length=context.max_model_len,
            max_batch_tokens=context.bounds.max_rows,
            max_batch_requests=None,
            max_client_batch_size=MAX_PROMPTS,
            auto_truncate=True,
            tokenization_workers=1,
            version=version(),
            sha=None,
            docker_label=None,
        )
    )


def _kind(context: ModelContext) -> dict[str, Any]:
    """Return the type of a model in the TEI format (TeiInfo.model_type)."""
    if context.pooling == "none":
        return {"text-generation": {}}
    if context.embeds or context.pooling == "splade":
        return {"embedding": {"pooling": _POOLINGS.get(context.pooling, context.pooling)}}
    labels = context.labels or ["LABEL_0"]
    names = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    return {"reranker" if context.pooling == "rank" else "classifier": names}
