"""One place finds the model of a request, whatever the endpoint, and its lease lasts to the end."""

from __future__ import annotations

import asyncio
import struct
import threading
from typing import Any

import httpx
import pytest

from cpuserve.engine.ipc import Output
from cpuserve.serving.registry import ModelRegistry
from tests.api.fakes import Api, FakeEngine, make_context, speak
from tests.api.test_api_shapes import dialect_of
from tests.api.test_api_systemone import URGENT, decide

HI = [{"role": "user", "content": "hi"}]
PAIR = {"query": "a", "documents": ["b"]}
# The body for each POST endpoint that has a model, without the model.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/systemone": {"state": "hi", "questions": {"urgent": URGENT}},
    "/v1/embeddings": {"input": "hi"},
    "/rerank": PAIR,
    "/v1/rerank": PAIR,
    "/v2/rerank": PAIR,
    "/reranking": PAIR,
    "/v1/reranking": PAIR,
    "/completion": {"prompt": "hi"},
    "/completions": {"prompt": "hi"},
    "/embedding": {"content": "hi"},
    "/embeddings": {"input": "hi"},
    "/apply-template": {"messages": HI},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/pooling": {"input": "hi", "task": "embed"},
    "/classify": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/api/show": {},
}
VECTORS = ("embed", "rerank", "score", "pooling")
# POST endpoints without a model, and /infill, which needs a model with tokens for it.
OTHERS = {
    "/ping",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/infill",
    "/lora-adapters",
    "/slots/{number}",
    "/invocations",
    "/v1/responses/compact",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items",
    "/v1/files",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/v1/messages/batches",
    "/v1/messages/batches/{message_batch_id}/cancel",
}
# name in the request -> (the engine, the name in the response, the adapter)
NAMES: dict[str | None, tuple[str, str, str | None]] = {
    None: ("first", "tiny", None),
    "tiny": ("first", "tiny", None),
    "tiny:latest": ("first", "tiny", None),
    "alias": ("first", "alias", None),
    "alias:latest": ("first", "alias", None),
    "polite": ("first", "polite", "polite"),
    "polite:latest": ("first", "polite", "polite"),
    "other": ("other", "other", None),
    "other:latest": ("other", "other", None),
}


def script(engine: FakeEngine, number: int, prompt: list[int], params: Any) -> Any:
    if params.max_tokens == 0:
        yield Output(number, [], "stop", vector=struct.pack("<4f", 1, 0, 0, 0))
    elif params.label_ids:
        yield from decide(engine, number, prompt, params)
    else:
        yield from speak(engine, number, prompt, params)


class Loader:
    """Loads "other"; `loaded` are its models so far."""

    name = "other"
    most_body_bytes = 4 << 20
    aliases = ()
    adapters = {}  # noqa: RUF012

    def __init__(self, pooling: str = "none", script: Any = script) -> None:
        self.loaded: list[Any] = []
        self._pooling, self._script = pooling, script

    async def load(self, promised_bytes: int) -> Any:
        context = prepared(make_context(FakeEngine(self._script)), self._pooling)
        self.loaded.append(context)
        return context


def prepared(context: Any, pooling: str) -> Any:
    context.pooling = pooling
    context.vector_width = 4
    context.client.info["labels"] = ["a", "b", "c", "d"]  # one for each value of a vector
    return context


def served_api(path: str) -> tuple[Api, Loader, list[Any]]:
    """An Api for this endpoint, the loader of its other model, and the models that it finds."""
    pooling = "last" if any(word in path for word in VECTORS) else "none"
    pooling = "classify" if path == "/classify" else pooling
    loader = Loader(pooling)
    api = Api(script, loaders=[loader])
    prepared(api.context, pooling)
    api.context.adapters["polite"] = "/adapters/polite"
    found: list[Any] = []
    find = api.state.models.find

    async def noting(name: str | None) -> Any:
        found.append(await find(name))
        return found[-1]

    api.state.models.find = noting  # type: ignore[method-assign]
    return api, loader, found


def test_every_endpoint_with_a_model_is_in_the_table():
    routes = Api().app.state.routes
    posts = {route.path for route in routes if "POST" in (getattr(route, "methods", None) or ())}
    assert posts - OTHERS == set(BODIES)
    for route in routes:
        if getattr(route, "path", None) in BODIES:
            assert route.endpoint.__module__ == "cpuserve.api.route", route.path


@pytest.mark.parametrize("path", BODIES)
def test_a_name_means_the_same_model_in_every_endpoint(path):
    api, loader, found = served_api(path)
    for name, (engine, shown, adapter) in NAMES.items():
        if name is None and path.startswith("/api/"):
            continue
        found.clear()
        model = {} if name is None else {"model": name}
        response = api.post(path, **BODIES[path], **model)
        assert response.status_code == 200, (name, response.text)
        (served,) = found
        expected = api.context if engine == "first" else loader.loaded[0]
        assert served.context is expected
        assert (served.name, served.adapter) == (shown, adapter)
        body = response.json()
        assert (body[0] if isinstance(body, list) else body).get("model", shown) == shown
        asked = expected.client.asked
        if asked:
            assert asked[-1][1].adapter == adapter
            asked.clear()
    assert len(loader.loaded) == 1
    (slot,) = api.state.models._slots.values()
    assert slot.leases == 0


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_name_is_404_in_the_words_of_the_dialect(path):
    api, loader, _ = served_api(path)
    for name in ("nobody", "nobody:latest", "TINY", "other:", ":latest"):
        response = api.post(path, **BODIES[path], model=name)
        assert response.status_code == 404, (name, response.text)
        body = response.json()
        if path.startswith("/api/"):
            assert list(body) == ["error"]
        elif path.startswith("/v1/messages"):
            assert body["error"]["type"] == "not_found_error"
        elif dialect_of(path) == "llamacpp":
            assert (body["error"]["code"], body["error"]["type"]) == (404, "not_found_error")
        else:
            assert (body["error"]["code"], body["error"]["param"]) == ("model_not_found", "model")
        assert "tiny, alias, polite, other" in response.text
    assert not loader.loaded


@pytest.mark.parametrize("path", BODIES)
def test_a_large_body_finds_its_model_once_too(path):
    api, loader, found = served_api(path)
    padding = {"user": "u" * (1 << 17)}
    response = api.post(path, **BODIES[path], model="other", **padding)
    assert response.status_code in (200, 400), response.text
    assert [served.context for served in found] == loader.loaded
    (slot,) = api.state.models._slots.values()
    assert slot.leases == 0


class Held:
    """A server where a request for "other" can be held while it tokenizes and while it streams."""

    def __init__(self) -> None:
        self.may_render = threading.Event()
        self.may_speak = asyncio.Event()
        self.loader = Loader(script=self.script)
        self.api = Api(loaders=[self.loader])

    def script(self, engine: FakeEngine, number: int, prompt: list[int], params: Any) -> Any:
        first, *rest = speak(engine, number, prompt, params)
        yield first
        yield self.may_speak
        yield from rest

    async def post(self, path: str, **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    async def unload(self) -> bool:
        """Ask for "other" to be unloaded; return whether it was."""
        response = await self.post("/api/generate", model="other", keep_alive=0)
        assert response.status_code == 200
        return not self.loader.loaded[-1].client.alive

    async def hold_tokenizing(self) -> threading.Event:
        """Load "other", and let its template wait for may_render; return an event of its start."""
        assert (await self.post("/api/generate", model="other")).status_code == 200
        template = self.loader.loaded[-1].chat_template
        render, begun = template.render, threading.Event()

        def waiting(*args: Any, **kwargs: Any) -> str:
            begun.set()
            assert self.may_render.wait(30)
            return render(*args, **kwargs)

        template.render = waiting
        return begun


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"]
)
def test_a_model_is_not_unloaded_while_a_request_tokenizes_or_streams(path, stream):
    async def run() -> None:
        held = Held()
        begun = await held.hold_tokenizing()
        body = {**BODIES[path], "model": "other", "stream": stream, "max_tokens": 9}
        if path == "/v1/responses":
            del body["max_tokens"]
        response = asyncio.ensure_future(held.post(path, **body))
        assert await asyncio.to_thread(begun.wait, 30)
        assert not await held.unload()
        held.may_render.set()
        context = held.loader.loaded[-1]
        while not context.client.running:
            await asyncio.sleep(0.001)
        assert not await held.unload()
        held.may_speak.set()
        assert (await response).status_code == 200
        assert await held.unload()
        assert len(held.loader.loaded) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"]
)
def test_a_model_is_not_unloaded_while_a_request_counts(path):
    async def run() -> None:
        held = Held()
        begun = await held.hold_tokenizing()
        body = {"messages": HI} if path == "/tokenize" else BODIES[path]
        response = asyncio.ensure_future(held.post(path, model="other", **body))
        assert await asyncio.to_thread(begun.wait, 30)
        assert not await held.unload()
        held.may_render.set()
        assert (await response).status_code == 200
        assert await held.unload()

    asyncio.run(run())


def test_a_client_that_leaves_while_it_tokenizes_gives_its_lease_back():
    async def run() -> None:
        held = Held()
        begun = await held.hold_tokenizing()
        body = {**BODIES["/v1/messages"], "model": "other"}
        response = asyncio.ensure_future(held.post("/v1/messages", **body))
        assert await asyncio.to_thread(begun.wait, 30)
        response.cancel()
        await asyncio.wait((response,))
        held.may_render.set()
        assert await held.unload()

    asyncio.run(run())


def test_models_are_found_in_one_place():
    """Only RequestContext.choose asks the registry for a model to use."""
    import re
    from pathlib import Path

    import cpuserve

    root = Path(cpuserve.__file__).parent
    callers = [
        path.relative_to(root).as_posix()
        for path in sorted([*root.glob("api/**/*.py"), *root.glob("serving/**/*.py")])
        if re.search(r"\bmodels\.find\(", path.read_text(encoding="utf-8"))
    ]
    assert callers == ["api/request/context.py"]
    assert ModelRegistry.find.__doc__
