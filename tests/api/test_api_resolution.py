"""One place finds the model of a request, whatever the endpoint, and its lease lasts to the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from cpuserve.serving.models.registry import ModelRegistry
from tests.api.fakes import Api, FakeEngine, make_context, speak
from tests.api.post_routes import HI, ROUTES, answers, prepare
from tests.api.test_api_shapes import dialect_of
from tests.helpers.patience import PATIENCE_S

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


class Loader:
    """Loads "other"; `loaded` are its models so far."""

    name = "other"
    most_body_bytes = 4 << 20
    aliases = ()
    adapters = {}  # noqa: RUF012

    def __init__(self, pooling: str = "none", script: Any = answers) -> None:
        self.loaded: list[Any] = []
        self._pooling, self._script = pooling, script

    async def pooling(self) -> str:
        """As if it were read from the files."""
        return self._pooling

    async def load(self, promised_bytes: int) -> Any:
        context = prepare(make_context(FakeEngine(self._script)), self._pooling)
        self.loaded.append(context)
        return context


def served_api(path: str) -> tuple[Api, Loader, list[Any]]:
    """An Api for this endpoint, the loader of its other model, and the models that it finds."""
    pooling = ROUTES[path].pooling
    loader = Loader(pooling)
    api = Api(answers, loaders=[loader])
    prepare(api.context, pooling)
    api.context.adapters["polite"] = "/adapters/polite"
    found: list[Any] = []
    find = api.state.models.find

    async def noting(name: str | None) -> Any:
        found.append(await find(name))
        return found[-1]

    api.state.models.find = noting  # type: ignore[method-assign]
    return api, loader, found


@pytest.mark.parametrize("path", ROUTES)
def test_a_name_means_the_same_model_in_every_endpoint(path):
    api, loader, found = served_api(path)
    for name, (engine, shown, adapter) in NAMES.items():
        if name is None and path.startswith("/api/"):
            continue
        found.clear()
        model = {} if name is None else {"model": name}
        response = api.post(path, **ROUTES[path].body, **model)
        assert response.status_code == 200, (name, response.text)
        (served,) = found
        expected = api.context if engine == "first" else loader.loaded[0]
        assert served.context is expected
        assert (served.name, served.adapter) == (shown, adapter)
        is_json = response.headers["content-type"] == "application/json"
        body = response.json() if is_json else {}
        first = body[0] if isinstance(body, list) else body
        assert not isinstance(first, dict) or first.get("model", shown) == shown
        asked = expected.client.asked
        if asked:
            assert asked[-1][1].adapter == adapter
            asked.clear()
    assert len(loader.loaded) == 1
    (slot,) = api.state.models._slots.values()
    assert slot.leases == 0


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_name_is_404_in_the_words_of_the_dialect(path):
    api, loader, _ = served_api(path)
    for name in ("nobody", "nobody:latest", "TINY", "other:", ":latest"):
        response = api.post(path, **ROUTES[path].body, model=name)
        assert response.status_code == 404, (name, response.text)
        body = response.json()
        if path.startswith("/api/"):
            assert list(body) == ["error"]
        elif path.startswith("/v1/messages"):
            assert body["error"]["type"] == "not_found_error"
        elif dialect_of(path) == "llamacpp":
            assert (body["error"]["code"], body["error"]["type"]) == (404, "not_found_error")
        elif dialect_of(path) == "cohere":
            assert list(body) == ["id", "message"]
        elif dialect_of(path) in ("tei", "tgi"):
            assert list(body) == ["error", "error_type"]
        else:
            assert (body["error"]["code"], body["error"]["param"]) == ("model_not_found", "model")
        assert "tiny, alias, polite, other" in response.text
    assert not loader.loaded


@pytest.mark.parametrize("path", ROUTES)
def test_a_large_body_finds_its_model_once_too(path):
    api, loader, found = served_api(path)
    padding = {"user": "u" * (1 << 17)}
    response = api.post(path, **ROUTES[path].body, model="other", **padding)
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
            assert self.may_render.wait(PATIENCE_S)
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
        body = {**ROUTES[path].body, "model": "other", "stream": stream, "max_tokens": 9}
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
        body = {"messages": HI} if path == "/tokenize" else ROUTES[path].body
        response = asyncio.ensure_future(held.post(path, model="other", **body))
        assert await asyncio.to_thread(begun.wait, 30)
        assert not await held.unload()
        held.may_render.set()
        assert (await response).status_code == 200
        assert await held.unload()

    asyncio.run(run())


def test_a_client_that_leaves_while_it_tokenizes_gives_its_lease_back_when_the_thread_ends():
    async def run() -> None:
        held = Held()
        begun = await held.hold_tokenizing()
        body = {**ROUTES["/v1/messages"].body, "model": "other"}
        response = asyncio.ensure_future(held.post("/v1/messages", **body))
        assert await asyncio.to_thread(begun.wait, 30)
        response.cancel()
        await asyncio.wait((response,))
        assert not await held.unload()
        held.may_render.set()
        while not await held.unload():
            await asyncio.sleep(0.01)

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
