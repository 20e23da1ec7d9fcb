"""The tables of docs/fields.md: which request fields each endpoint honours or refuses."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cpuserve.api.anthropic.schema import MessagesRequest
from cpuserve.api.llamacpp.completion.schema import LlamaCompletionRequest
from cpuserve.api.ollama.options import OllamaOptions
from cpuserve.api.ollama.schema import OllamaChat, OllamaGenerate
from cpuserve.api.openai.chat.schema import ChatRequest
from cpuserve.api.openai.completions.schema import CompletionRequest
from cpuserve.api.openai.completions.tokens import TokensRequest
from cpuserve.api.openai.responses.schema import ResponsesRequest
from cpuserve.api.request import fields
from cpuserve.api.systemone import SystemOneRequest
from cpuserve.api.tgi.schema import TgiParameters, TgiRequest
from cpuserve.api.vectors.cohere.embed import CohereEmbedRequest, CohereEmbedV1Request
from cpuserve.api.vectors.openai import EmbeddingRequest
from cpuserve.api.vectors.pooling import ClassifyRequest, PoolingRequest
from cpuserve.api.vectors.scores import RerankRequest, ScoreRequest
from cpuserve.api.vectors.tei.embed import (
    EmbedAllRequest,
    EmbedSparseRequest,
    SimilarityRequest,
    TeiEmbedRequest,
    TeiRerankRequest,
)
from cpuserve.api.vectors.tei.predict import PredictRequest
from cpuserve.api.vllm.tokens import TokenizeRequest

# For each endpoint: its name in the table REFUSED, its path, and the schema of its body.
SCHEMAS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    (fields.CHAT, "/v1/chat/completions", ChatRequest),
    (fields.TEXT, "/v1/completions", CompletionRequest),
    (fields.RESPONSES, "/v1/responses", ResponsesRequest),
    (fields.MESSAGES, "/v1/messages", MessagesRequest),
    (fields.OLLAMA, "/api/chat", OllamaChat),
    (fields.OLLAMA_TEXT, "/api/generate", OllamaGenerate),
    (fields.OPTIONS, "options of /api/chat and /api/generate", OllamaOptions),
    (fields.EMBEDDINGS, "/v1/embeddings", EmbeddingRequest),
    (fields.POOLING, "/pooling", PoolingRequest),
    (fields.POOLING, "/classify", ClassifyRequest),
    (fields.COHERE_FIELDS, "/v2/embed", CohereEmbedRequest),
    (fields.COHERE_FIELDS, "/v1/embed", CohereEmbedV1Request),
    (fields.TEI_FIELDS, "/embed", TeiEmbedRequest),
    (fields.TEI_FIELDS, "/embed_all", EmbedAllRequest),
    (fields.TEI_FIELDS, "/embed_sparse", EmbedSparseRequest),
    (fields.TEI_FIELDS, "/similarity", SimilarityRequest),
    (fields.TEI_FIELDS, "/predict", PredictRequest),
    (fields.TEI_FIELDS, "/rerank (TEI)", TeiRerankRequest),
    (fields.TGI, "/generate", TgiRequest),
    (fields.TGI_PARAMETERS, "parameters of /generate", TgiParameters),
    (fields.RERANK, "/v1/rerank", RerankRequest),
    (fields.RERANK, "/v1/score", ScoreRequest),
    (fields.DECISIONS, "/v1/systemone", SystemOneRequest),
    (fields.TOKENIZE, "/tokenize", TokenizeRequest),
    (fields.COMPLETION, "/completion", LlamaCompletionRequest),
    (fields.TOKENS, "/inference/v1/generate", TokensRequest),
)


def tables() -> str:
    """Return Markdown tables of the fields that are honoured, refused, or without effect."""
    return "\n".join([*_honoured(), "", *_refused(), "", *_without_effect()])


def _honoured() -> Iterator[str]:
    yield from ("Honoured:", "", "| endpoint | fields |", "|---|---|")
    for endpoint, shown, schema in SCHEMAS:
        yield f"| {_code(shown)} | {_codes(fields.honoured(endpoint, schema))} |"


def _refused() -> Iterator[str]:
    yield from ("Refused:", "", "| field | endpoints | message |", "|---|---|---|")
    for rule in fields.REFUSED:
        yield f"| `{rule.name}` | {_paths(rule.endpoints)} | {rule.name} {rule.why} |"


def _without_effect() -> Iterator[str]:
    yield from ("Without effect:", "", "| fields | endpoints | reason |", "|---|---|---|")
    for row in fields.NO_EFFECT:
        yield f"| {_codes(row.names)} | {_paths(row.endpoints)} | {row.why} |"


def _paths(endpoints: tuple[str, ...]) -> str:
    return ", ".join(_code(path) for endpoint, path, _ in SCHEMAS if endpoint in endpoints)


def _code(shown: str) -> str:
    return f"`{shown}`" if shown.startswith("/") else shown


def _codes(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
