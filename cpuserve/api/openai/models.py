"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.response.openapi import response_types
from cpuserve.api.state import get_state
from cpuserve.serving.registry import ModelRegistry

router = APIRouter()


class ModelCard(msgspec.Struct):
    """One served name; default_sampling_params apply to requests that do not set their own.

    max_model_len: null while the model is not loaded. Of a LoRA adapter, root is its path and
    parent its model.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    default_sampling_params: dict[str, int | float]


class ModelList(msgspec.Struct):
    """The body of GET /v1/models."""

    object: str
    data: list[ModelCard]


def _card(models: ModelRegistry, name: str) -> ModelCard:
    context = models.peek(name)
    if context is None:
        return ModelCard(name, "model", models.first.started, "cpuserve", name, None, None, {})
    adapter = context.adapters.get(name)
    return ModelCard(
        name,
        "model",
        context.started,
        "cpuserve",
        adapter or context.model_names[0],
        context.model_names[0] if adapter else None,
        context.max_model_len,
        dict(context.default_sampling),
    )


@router.get("/v1/models", openapi_extra=response_types(ModelList))
async def list_models(request: Request) -> Response:
    """List the served models."""
    models = get_state(request).models
    cards = ModelList("list", [_card(models, name) for name in models.names])
    return Response(msgspec.json.encode(cards), media_type="application/json")


@router.get("/v1/models/{name:path}", openapi_extra=response_types(ModelCard))
async def get_model(request: Request, name: str) -> Response:
    """Describe one served model name; 404 for others."""
    models = get_state(request).models
    card = _card(models, models.resolve(name))
    return Response(msgspec.json.encode(card), media_type="application/json")
