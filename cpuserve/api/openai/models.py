"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.openai.model_card import ModelCard, card, ollama_entry
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import parameters, response_types

router = APIRouter()
_ONE = "/v1/models/{name:path}"
# Only Codex sends this query parameter. It expects `models` in its own format, where each entry has
# a system prompt that replaces the prompt of Codex. If the list is empty, Codex keeps its prompt.
_CODEX = "client_version"


class ModelList(msgspec.Struct):
    """The body of GET /v1/models. models: the same models as in `data`, in the Ollama format."""

    object: str
    data: list[ModelCard]
    models: list[dict[str, Any]]


@router.get("/v1/models", openapi_extra=response_types(ModelList))
async def list_models(request: Request) -> Response:
    """List all served models, whether loaded or not."""
    models = get_state(request).models
    cards = [card(models, name) for name in models.names]
    others = [] if _CODEX in request.query_params else models.names
    found = ModelList("list", cards, [ollama_entry(models, name) for name in others])
    return Response(msgspec.json.encode(found), media_type="application/json")


@router.get(_ONE, openapi_extra={**response_types(ModelCard), **parameters(_ONE)})
async def get_model(request: Request) -> Response:
    """Describe one served model name; 404 for a name that is not served."""
    models = get_state(request).models
    found = card(models, models.resolve(request.path_params["name"]))
    return Response(msgspec.json.encode(found), media_type="application/json")
