"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.openai.chat.schema import ChatRequest
from cpuserve.api.request.fields import CHAT, honoured
from cpuserve.api.request.state import get_state
from cpuserve.api.response.listed import listed
from cpuserve.api.route import get
from cpuserve.sampling.fields import LIMITED

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.registry import ModelRegistry

# Parameters under their OpenRouter names; a model card lists those that have an effect.
_PARAMETERS = sorted(
    {name for name, rule in LIMITED.items() if rule.listed}
    | {"include_reasoning", "logit_bias", "logprobs", "max_completion_tokens", "reasoning_effort"}
    | {"parallel_tool_calls", "response_format", "stop", "structured_outputs", "tool_choice"}
    | {"tools", "top_logprobs"}
)
_OF_TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
_OF_THOUGHTS = {"include_reasoning", "reasoning_effort"}


class ModelMeta(msgspec.Struct):
    """Sizes of a model, under the keys of llama-server; null = unknown.

    n_ctx: the longest sequence in tokens that a request can have.
    n_ctx_train: the longest sequence in tokens that the model was trained for.
    size: the size of all tensors in bytes.
    ftype: the data type of most weights.
    """

    n_ctx: int
    n_ctx_train: int | None
    n_vocab: int | None
    n_embd: int | None
    n_params: int | None
    size: int | None
    ftype: str


class Architecture(msgspec.Struct):
    """The input and output modalities of a model, as in llama-server and OpenRouter."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelStatus(msgspec.Struct):
    """Whether a model is "loaded", "loading", "sleeping" or "unloaded", as in llama-server."""

    value: str


class ModelPermission(msgspec.Struct):
    """The rights of requests to a model, as in vLLM: constants that clients expect."""

    id: str
    object: str
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(msgspec.Struct):
    """One served model name. Members are null or empty while the model is not loaded.

    default_sampling_params apply to requests that do not set their own.
    For a LoRA adapter, root is its path, and parent is its base model. max_model_len (vLLM),
    context_length (OpenRouter) and max_context_length (LM Studio) are the same number of tokens.

    aliases: further names that select the same model.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    default_sampling_params: dict[str, int | float | list[str]]
    context_length: int | None
    max_context_length: int | None
    supported_parameters: list[str]
    aliases: list[str]
    status: ModelStatus
    architecture: Architecture | None
    meta: ModelMeta | None
    permission: list[ModelPermission]


def card(models: ModelRegistry, name: str) -> ModelCard:
    """Return the entry of /v1/models for a served name."""
    context, parent = models.peek(name), models.parent(name)
    own = models.own_names(name) if context is None else context.model_names
    created = (context or models.first).started
    length = None if context is None else context.max_model_len
    generates = context is not None and context.pooling == "none"
    return ModelCard(
        id=name,
        object="model",
        created=created,
        owned_by="cpuserve",
        root=models.adapter_path(name) if parent else own[0],
        parent=parent,
        max_model_len=length,
        default_sampling_params={} if context is None else dict(context.default_sampling),
        context_length=length,
        max_context_length=length,
        supported_parameters=_parameters(context) if context is not None and generates else [],
        aliases=[] if parent else [other for other in own if other != name],
        status=ModelStatus(models.status(name)),
        architecture=None if context is None else _architecture(context),
        meta=None if context is None else _meta(context),
        permission=[_permission(name, created, generates=generates)],
    )


def ollama_entry(models: ModelRegistry, name: str) -> dict[str, Any]:
    """Return an entry of `models`, the list that llama-server adds for clients of Ollama."""
    context = models.peek(name)
    able = [] if context is None else context.abilities
    further = {"type": "model", "description": "", "tags": [], "parameters": ""}
    return {**listed(models, name), **further, "capabilities": able}


def _parameters(context: ModelContext) -> list[str]:
    """Return the sampling parameters that have an effect on this model."""
    without = set() if context.tool_format is not None else set(_OF_TOOLS)
    without |= set() if context.learned_format.thinks else _OF_THOUGHTS
    known = {*honoured(CHAT, ChatRequest)} - without
    return [name for name in _PARAMETERS if name in known]


_RESULTS = {
    "none": "text",
    "rank": "scores",
    "classify": "labels",
    "token_classify": "labels",
}


def _architecture(context: ModelContext) -> Architecture:
    result = _RESULTS.get(context.pooling, "embeddings")
    reads = ["text"] if context.media is None else ["text", *context.media.part_kinds]
    return Architecture(reads, [result])


def _meta(context: ModelContext) -> ModelMeta:
    details = context.details
    return ModelMeta(
        context.max_model_len,
        details.trained_len or None,
        details.vocab or None,
        details.width or None,
        details.parameters or None,
        details.size_bytes or None,
        details.quantization,
    )


def _permission(name: str, created: int, *, generates: bool) -> ModelPermission:
    return ModelPermission(
        id=f"modelperm-{hashlib.sha256(name.encode()).hexdigest()[:32]}",
        object="model_permission",
        created=created,
        allow_create_engine=False,
        allow_sampling=generates,
        allow_logprobs=generates,
        allow_search_indices=False,
        allow_view=True,
        allow_fine_tuning=False,
        organization="*",
        group=None,
        is_blocking=False,
    )


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


@get(router, "/v1/models", ModelList)
async def list_models(request: Request) -> Response:
    """List all served models, whether loaded or not."""
    models = get_state(request).models
    cards = [card(models, name) for name in models.names]
    others = [] if _CODEX in request.query_params else models.names
    found = ModelList("list", cards, [ollama_entry(models, name) for name in others])
    return Response(msgspec.json.encode(found), media_type="application/json")


@get(router, _ONE, ModelCard)
async def get_model(request: Request) -> Response:
    """Describe one served model name; 404 for a name that is not served."""
    models = get_state(request).models
    found = card(models, models.resolve(request.path_params["name"]))
    return Response(msgspec.json.encode(found), media_type="application/json")
