"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.endpoint import get_serving
from cpuserve.api.openai.protocol import ModelCard, ModelList
from cpuserve.api.openapi import json_answer
from cpuserve.api.serving import Serving

router = APIRouter()


def _card(serving: Serving, name: str) -> ModelCard:
    return ModelCard(
        name,
        "model",
        serving.started,
        "cpuserve",
        serving.model_names[0],
        None,
        serving.max_model_len,
        dict(serving.default_sampling),
    )


@router.get("/v1/models", openapi_extra=json_answer(ModelList))
async def list_models(request: Request) -> Response:
    """List the served model names."""
    serving = get_serving(request)
    models = ModelList("list", [_card(serving, name) for name in serving.model_names])
    return Response(msgspec.json.encode(models), media_type="application/json")


@router.get("/v1/models/{name:path}", openapi_extra=json_answer(ModelCard))
async def get_model(request: Request, name: str) -> Response:
    """Describe one served model name; 404 for others."""
    serving = get_serving(request)
    card = _card(serving, serving.check_model(name))
    return Response(msgspec.json.encode(card), media_type="application/json")
