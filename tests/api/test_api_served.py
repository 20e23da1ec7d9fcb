"""What a request's `model` means, on every route: a model, an adapter, a model to be loaded."""

import asyncio
import json

import httpx
import pytest

from cpuserve.api.lifecycle.front_end import FrontEnd
from cpuserve.config.server import ServerOptions
from cpuserve.engine.ipc import Output
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import ANSWER, Api, FakeEngine, make_context, speak
from tests.api.live import live, post
from tests.api.post_routes import (
    HI,
    NO_MODEL,
    OTHERS,
    ROUTES,
    RUNS,
    answers,
    app_with_all_routes,
    prepare,
)
from tests.helpers.fake_executor import fake_config

# Routes that refuse streams.
NO_STREAM = ("/v1/systemone", "/v1/chat/completions/batch")


def served(pooling="none"):
    api = Api(answers)
    api.context.adapters["polite"] = "/adapters/polite"
    prepare(api.context, pooling)
    return api


def test_every_route_has_a_line_in_a_table():
    routes = app_with_all_routes().state.routes
    posts = {route.path for route in routes if "POST" in (getattr(route, "methods", None) or ())}
    assert posts - OTHERS == {*ROUTES}
    assert posts >= OTHERS
    for route in routes:
        if getattr(route, "path", None) in ROUTES:
            assert route.endpoint.__module__ == "cpuserve.api.route", route.path


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["polite", "polite:latest"])
@pytest.mark.parametrize("path", RUNS)
def test_every_route_uses_the_adapter_that_is_named(path, name, stream):
    route = ROUTES[path]
    api = served(route.pooling)
    asked = {} if path in NO_STREAM else {"stream": stream}
    response = api.post(path, **{**route.body, **asked, "model": name})
    assert response.status_code == 200, response.text
    assert api.engine.asked
    assert {params.adapter for _, params in api.engine.asked} == {"polite"}
    if path not in NO_MODEL:
        assert '"model":"polite"' in response.text


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_finds_a_model_with_the_default_tag(path):
    body, pooling, _ = ROUTES[path]
    api = served(pooling)
    for name in ("tiny", "tiny:latest", "alias:latest"):
        assert api.post(path, model=name, **body).status_code == 200
    assert {params.adapter for _, params in api.engine.asked} <= {None}
    response = api.post(path, model="tiny:7b", **body)
    assert response.status_code == 404
    assert "tiny, alias, polite" in response.text


def any_name(pooling="none"):
    api = served(pooling)
    api.context.any_name = True
    return api


@pytest.mark.parametrize("path", ROUTES)
def test_a_model_with_any_name_serves_unknown_names_in_every_dialect(path):
    body, pooling, _ = ROUTES[path]
    api = any_name(pooling)
    response = api.post(path, model="claude-opus-4-8", **body)
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        found = response.json()
        if "model" in found:
            assert found["model"] == "claude-opus-4-8"
    assert {params.adapter for _, params in api.engine.asked} <= {None}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"],
)
def test_a_response_has_the_name_that_its_request_asks_for(path, stream):
    body = {**ROUTES[path].body, "model": "org/Any:7b", "stream": stream}
    response = any_name().post(path, **body)
    assert response.status_code == 200, response.text
    assert '"model":"org/Any:7b"' in response.text
    assert '"model":"tiny"' not in response.text


def test_any_name_leaves_known_names_their_meaning():
    api = any_name()
    second = Second()
    api.state.models = type(api.state.models)(api.context, [second])
    for name, adapter in (("polite", "polite"), ("alias", None), ("tiny:latest", None)):
        assert api.complete(model=name).status_code == 200
        assert api.engine.asked[-1][1].adapter == adapter
    assert api.complete(model="b").json()["model"] == "b"
    assert second.loads == 1
    card = api.get("/v1/models/claude-opus-4-8").json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("claude-opus-4-8", "tiny", 128)
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == [
        *("tiny", "alias", "polite", "b")
    ]


def test_a_name_may_not_be_a_text():
    """A response repeats the name in each event."""
    api = any_name()
    assert api.complete(model="x" * 256).status_code == 200
    response = api.complete(model="x" * 257)
    assert response.status_code == 404
    assert "a name may have 256 characters, and this has 257" in response.text


def test_an_unknown_name_is_told_the_names_and_how_to_accept_any():
    message = served().complete(model="gpt-5").json()["error"]["message"]
    assert "This server serves: tiny, alias, polite." in message
    assert "--served-model-name '*'" in message


def test_the_models_are_described_with_the_default_tag():
    api = served()
    assert api.get("/v1/models/polite:latest").json()["parent"] == "tiny"
    card = api.request("GET", "/v1/models/tiny:latest", headers={"anthropic-version": "1"}).json()
    assert card["id"] == "tiny"


class Second:
    """Loads a model "b" with a context of its own."""

    name = "b"
    most_body_bytes = 16 << 20
    aliases = ()
    adapters = {}  # noqa: RUF012

    def __init__(self, max_model_len=128, most_body=1 << 20, silent_s=15.0):
        self.engine = FakeEngine(answers)
        limits = ClientLimits(max_body_bytes=most_body, silent_s=silent_s)
        self.context = prepare(make_context(self.engine, http=limits), "none")
        self.context.model_names = ("b",)
        self.context.max_model_len = max_model_len
        self.loads = 0

    async def pooling(self):
        return None

    async def load(self, promised_bytes):
        self.loads += 1
        self.engine.alive = True
        return self.context


def padded(size, **body):
    """A body of `size` bytes; what fills it is in a field that is not read."""
    bare = len(json.dumps({**body, "unread": ""}))
    return json.dumps({**body, "unread": "x" * (size - bare)}).encode()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_is_measured_by_the_limit_of_its_model(chunked):
    """6 MiB, for a model that takes 8 MiB beside a first one that takes 4."""
    second = Second(most_body=8 << 20)
    api = Api(loaders=[second])

    def answer(size, model):
        body = padded(size, model=model, prompt="hi")
        sent = iter([body]) if chunked else body
        content = _chunks(sent) if chunked else sent
        headers = {"content-type": "application/json"}
        return api.request("POST", "/v1/completions", content=content, headers=headers)

    for _ in range(2):  # not loaded, and loaded
        assert answer(6 << 20, "b").status_code == 200
        refused = answer(6 << 20, "tiny")
        assert refused.status_code == 413
        assert f"{4 << 20} bytes" in refused.json()["error"]["message"]
        assert answer((8 << 20) + 1, "b").status_code == 413
    assert answer(4 << 20, "tiny").status_code == 200
    assert answer(6 << 20, "c").status_code == 404
    assert second.loads == 1


async def _chunks(parts):
    for part in parts:
        yield part


def test_the_messages_of_a_body_are_counted_for_its_model():
    """A conversation may have as many messages as the context of its model has tokens."""
    many = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 29_000
    api = Api(loaders=[Second(max_model_len=200_000, most_body=16 << 20)])
    for model, told in (("b", "maximum context length"), ("tiny", "at most 33024 are allowed")):
        response = api.post("/v1/chat/completions", model=model, messages=many)
        assert response.status_code in (400, 413)
        assert told in response.json()["error"]["message"], (model, response.text[:300])


def test_while_the_first_engine_restarts_the_others_answer():
    api = Api(loaders=[Second()])
    assert api.complete(model="b").status_code == 200
    api.engine.alive = False
    assert api.complete(model="b", max_tokens=99).json()["choices"][0]["text"] == ANSWER
    for name in ("tiny", None):
        assert api.complete(model=name).status_code == 503
    api.engine.alive = True
    assert api.complete().status_code == 200
    api.context.failed = "The engine process has died: the server will exit"
    assert api.complete(model="b").status_code == 503


def test_a_second_model_that_restarts_answers_503():
    second = Second()
    api = Api(loaders=[second])
    assert api.complete(model="b").status_code == 200
    second.engine.__class__ = type("Restarts", (FakeEngine,), {"ended": False})
    second.engine.alive = False
    assert api.complete(model="b").status_code == 503
    assert api.complete().status_code == 200


@pytest.mark.matrix
@pytest.mark.parametrize("ends", ["answered", "refused", "left"])
@pytest.mark.parametrize("path", RUNS)
def test_a_model_stays_loaded_from_the_first_byte_of_its_prompt_to_the_last_of_its_answer(
    path, ends
):
    body = {name: value for name, value in ROUTES[path].body.items() if name != "stream"}
    second = Second()
    prepare(second.context, ROUTES[path].pooling)
    held, gate = [], asyncio.Event()

    def waits(engine, number, prompt, params):
        held.append(slot.leases)
        if ends == "left":
            yield gate
        yield from answers(engine, number, prompt, params)

    second.engine.script = waits

    async def main():
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            more = {"priority": 2**40, "max_tokens": 0, "input": 5} if ends == "refused" else {}
            asked = client.post(path, json={"model": "b", **body, **more})
            if ends != "left":
                return (await asked).status_code
            task = asyncio.create_task(asked)
            while not held:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None

    api = Api(loaders=[second])
    slot = api.state.models._slots["b"]
    status = asyncio.run(main())
    if ends == "answered":
        assert status == 200
    assert held == [1] * len(held)
    assert slot.leases == 0


def test_a_stream_that_is_read_slowly_keeps_its_model():
    second = Second(silent_s=0.05)  # the server notices at a ping that nobody reads

    async def main():
        async with live() as server:
            server.state.models = type(server.state.models)(server.context, [second])
            watched = server.state.models._slots["b"]
            gate = asyncio.Event()
            second.engine.script = lambda e, n, p, q: [Output(n, [40]), gate, *speak(e, n, p, q)]
            body = {"model": "b", "prompt": "hi", "stream": True}
            reader, writer = await server.post("/v1/completions", body)
            await reader.readuntil(b"data:")
            assert watched.leases == 1
            assert not watched.is_idle()
            gate.set()
            await reader.readuntil(b"[DONE]")
            await server.until(lambda: watched.leases == 0)
            reader, writer = await server.post("/v1/completions", body)
            gate.clear()
            await reader.readuntil(b"data:")
            writer.close()
            await server.until(lambda: watched.leases == 0)

    asyncio.run(main())


def test_a_keep_alive_of_zero_unloads_a_model_and_loads_none():
    second = Second()
    api = Api(loaders=[second])
    for path in ("/api/chat", "/api/generate"):
        for zero in (0, "0", "0s", "0m"):
            told = api.post(path, model="b", keep_alive=zero).json()
            assert (told["done"], told["done_reason"]) == (True, "unload")
        assert second.loads == 0
    assert api.post("/api/chat", model="b").json()["done_reason"] == "load"
    assert second.loads == 1
    listed = [model["name"] for model in api.get("/api/ps").json()["models"]]
    assert "b" in listed
    assert api.post("/api/generate", model="b:latest", keep_alive=0).json()["model"] == "b"
    assert "b" not in [model["name"] for model in api.get("/api/ps").json()["models"]]
    assert api.post("/api/chat", model="tiny", keep_alive=0).json()["done_reason"] == "unload"
    assert api.post("/api/chat", model="tiny", keep_alive=0, messages=HI).status_code == 200
    for stays in (-1, 300, "5m", None, "-1m"):
        assert api.post("/api/chat", model="b", keep_alive=stays).json()["done_reason"] == "load"
    for path in ("/api/chat", "/api/generate"):
        assert api.post(path, model="nobody", keep_alive=0).status_code == 404


def test_a_request_on_a_connection_names_an_adapter():
    async def main():
        async with live() as server:
            server.context.adapters["polite"] = "x"
            body = {"model": "polite:latest", "messages": HI, "max_tokens": 5}
            answer = await server.send(post("/v1/messages", body, close=True))
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert server.engine.asked[0][1].adapter == "polite"

    asyncio.run(main())


def test_a_star_in_the_names_of_a_model_means_any_name():
    config = fake_config(served_model_names=["one", "*"])
    front_end = FrontEnd(FakeEngine(), [config], ServerOptions(), "", CpuPlatform())
    context = front_end.context
    assert (context.model_names, context.any_name) == (("one",), True)
    assert front_end.models.resolve("gpt-5") == "gpt-5"
    assert front_end.models.names == ("one",)
    alone = FrontEnd(FakeEngine(), [fake_config()], ServerOptions(), "", CpuPlatform())
    assert not alone.context.any_name


def test_aliases_are_shown_before_a_model_is_loaded():
    second = Second()
    second.aliases = ("bee", "b2")
    api = Api(loaders=[second])
    cards = {card["id"]: card["aliases"] for card in api.get("/v1/models").json()["data"]}
    assert cards["b"] == ["bee", "b2"]
    assert cards["bee"] == ["b", "b2"]
    assert cards["tiny"] == ["alias"]
    assert second.loads == 0
