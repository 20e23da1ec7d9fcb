"""The POST routes: a body for each, and a model that serves it.

A route that is added needs a line in ROUTES or in OTHERS; `test_api_served.py` checks it.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from cpuserve.api.app import create_app
from cpuserve.engine.ipc import Output
from tests.api.fakes import Api, FakeEngine, speak
from tests.api.test_api_systemone import URGENT, decide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI


class PostRoute(NamedTuple):
    """A body without `model`, the pooling of a model that serves it, and whether the model runs."""

    body: dict[str, Any]
    pooling: str = "none"
    runs: bool = True


HI = [{"role": "user", "content": "hi"}]
_RERANK = PostRoute({"query": "a", "documents": ["b", "c"]}, "last")
_SCORE = PostRoute({"text_1": "a", "text_2": ["b", "c"]}, "last")
# All routes with a model in the body, except /infill, which needs a model with tokens for it.
ROUTES = {
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions"), PostRoute({"messages": HI})),
    "/v1/completions": PostRoute({"prompt": "hi"}),
    "/v1/chat/completions/batch": PostRoute({"messages": [HI]}),
    "/v1/chat/completions/render": PostRoute({"messages": HI}, runs=False),
    "/v1/completions/render": PostRoute({"prompt": "hi"}, runs=False),
    "/inference/v1/generate": PostRoute({"token_ids": [65], "sampling_params": {}}),
    **dict.fromkeys(
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
        PostRoute({"messages": HI}, runs=False),
    ),
    **dict.fromkeys(("/v1/responses", "/responses"), PostRoute({"input": "hi"})),
    **dict.fromkeys(
        ("/v1/responses/input_tokens", "/responses/input_tokens"),
        PostRoute({"input": "hi"}, runs=False),
    ),
    "/v1/messages": PostRoute({"messages": HI, "max_tokens": 9}),
    "/v1/messages/count_tokens": PostRoute({"messages": HI}, runs=False),
    "/v1/systemone": PostRoute({"state": "hi", "questions": {"urgent": URGENT}}),
    "/v1/embeddings": PostRoute({"input": "hi"}, "last"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RERANK),
    **dict.fromkeys(("/reranking", "/v1/reranking"), _RERANK),
    **dict.fromkeys(("/score", "/v1/score"), _SCORE),
    "/pooling": PostRoute({"input": "hi", "task": "embed"}, "last"),
    "/classify": PostRoute({"input": "hi"}, "classify"),
    **dict.fromkeys(("/v1/embed", "/v2/embed"), PostRoute({"texts": ["hi"]}, "last")),
    "/embed": PostRoute({"inputs": "hi"}, "last"),
    "/embed_all": PostRoute({"inputs": "hi"}, "last"),
    "/embed_sparse": PostRoute({"inputs": "hi"}, "sparse"),
    "/similarity": PostRoute({"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "last"),
    "/predict": PostRoute({"inputs": "hi"}, "classify"),
    **dict.fromkeys(("/generate", "/generate_stream"), PostRoute({"inputs": "hi"})),
    "/decode": PostRoute({"ids": [65]}, runs=False),
    "/tokenize": PostRoute({"prompt": "hi"}, runs=False),
    "/detokenize": PostRoute({"tokens": [65]}, runs=False),
    **dict.fromkeys(("/completion", "/completions"), PostRoute({"prompt": "hi"})),
    "/embedding": PostRoute({"content": "hi"}, "last"),
    "/embeddings": PostRoute({"input": "hi"}, "last"),
    "/apply-template": PostRoute({"messages": HI}, runs=False),
    "/api/chat": PostRoute({"messages": HI, "stream": False}),
    "/api/generate": PostRoute({"prompt": "hi", "stream": False}),
    "/api/embed": PostRoute({"input": ["hi"]}, "last"),
    "/api/embeddings": PostRoute({"prompt": "hi"}, "last"),
    "/api/show": PostRoute({}, runs=False),
}
RUNS = [path for path, route in ROUTES.items() if route.runs]
# Routes with responses that have no model.
NO_MODEL = (
    "/inference/v1/generate",
    *("/api/embeddings", "/embedding", "/embeddings"),
    *("/generate", "/generate_stream"),
    *("/v1/embed", "/v2/embed", "/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict"),
)
# Routes without a model in the body, and /infill.
OTHERS = {
    "/api/create",
    "/api/pull",
    "/api/push",
    "/api/copy",
    "/api/blobs/{digest}",
    "/ping",
    "/infill",
    "/lora-adapters",
    "/slots/{number}",
    "/invocations",
    "/",
    "/v1/responses/compact",
    "/v1/responses/{response_id}/cancel",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/v1/files",
    "/v1/uploads",
    "/v1/uploads/{upload_id}/parts",
    "/v1/uploads/{upload_id}/complete",
    "/v1/uploads/{upload_id}/cancel",
    "/v1/messages/batches",
    "/v1/messages/batches/{message_batch_id}/cancel",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
}


def answers(engine: FakeEngine, number: int, prompt: list[int], params: Any) -> Iterator[Any]:
    """Yield logprobs of labels, a text, or vectors if max_tokens is 0, as the request asks."""
    if params.label_ids:
        yield from decide(engine, number, prompt, params)
    elif params.max_tokens:
        yield from speak(engine, number, prompt, params)
    else:
        vector = b""
        for kind in params.vectors.split("+"):
            rows = len(prompt) if kind.endswith(("tokens", "multi", "weights")) else 1
            row = struct.pack("<4f", 1, 0, 0, 0)
            vector += (row[:4] if kind.endswith("weights") else row) * rows
        yield Output(number, [], "stop", vector=vector)


def prepare(context: Any, pooling: str) -> Any:
    """Make the model of a context one with this pooling, which gives the vectors of `answers`.

    "sparse": an embedding model with the heads of BGE-M3.
    """
    context.pooling = "first" if pooling == "sparse" else pooling
    context.client.info["token_widths"] = {"weights": 1, "multi": 4} if pooling == "sparse" else {}
    context.vector_width = 4
    context.client.info["labels"] = ["a", "b", "c", "d"]  # one for each value of a vector
    return context


@functools.cache
def app_with_all_routes() -> FastAPI:
    """Return the app with all routes, including the routes that server options add."""
    api = Api()
    api.context.adapters_change = True
    return create_app(api.state, admin_routes=True)
