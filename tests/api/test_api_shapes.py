"""Every error of every route has the format of the route's dialect, also those before the app."""

import asyncio
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cpuserve
from cpuserve.api import dialects
from cpuserve.api.app import ROUTERS
from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.http import startup_server
from cpuserve.api.route import Endpoint
from cpuserve.api.vllm.admin import lora_router
from cpuserve.serving.models.load_progress import LoadProgress
from tests.api.fakes import Api
from tests.api.live import live
from tests.helpers.even_loop import run_even
from tests.helpers.patience import PATIENCE_S

API = Path(cpuserve.__file__).parent / "api"
ROUTES = sorted(
    {
        (method, route.path.replace("{response_id}", "resp_1").replace("{name:path}", "tiny"))
        for router in (*ROUTERS, lora_router)
        for route in router.routes
        for method in route.methods
        if method != "HEAD"
    }
)
UNKNOWN = [("POST", f"{start}/of/nobody") for start in ("/v1/messages", "/api", "/v1", "")]
ALL = [*ROUTES, *UNKNOWN]
# Routes that read no body, and routes of files, which need a server option.
NO_BODIES = (
    "/v1/responses/resp_1",
    "/ping",
    "/slots",
    "/v1/files",
    "/v1/uploads/{upload_id}/parts",
    "/v1/uploads/{upload_id}/cancel",
    "/api/blobs/",
    "/v1/batches/",
    "/v1/messages/batches/",
)
POSTS = [route for route in ROUTES if route[0] == "POST" and not route[1].startswith(NO_BODIES)]
WITH_BODIES = [route for route in POSTS if "lora" not in route[1]]  # which need an option


LLAMACPP = {
    "apply-template",
    "completion",
    "completions",
    "embedding",
    "embeddings",
    "infill",
    "lora-adapters",
    "props",
    "slots",
}


TGI = {"generate", "generate_stream"}
TEI = {"embed", "embed_all", "embed_sparse", "predict", "similarity", "decode", "info"}


def dialect_of(path, headers=()):
    """The dialect whose clients ask for `path`, as a reader of its vendor's documentation says."""
    if path.startswith("/v1/messages") or (
        path.startswith(("/v1/models", "/v1/files")) and "anthropic" in headers
    ):
        return "anthropic"
    if path.startswith("/api/") or path == "/api":
        return "ollama"
    if f"{path}/".startswith(("/v1/embed/", "/v2/embed/", "/v2/rerank/")):
        return "cohere"
    if path.split("/")[1] in TEI:
        return "tei"
    if path.split("/")[1] in TGI:
        return "tgi"
    return "llamacpp" if path.split("/")[1] in LLAMACPP else "openai"


def check(body, dialect, where):
    """Check that `body` is an error of the dialect."""
    error = json.loads(body)
    if dialect == "anthropic":
        assert list(error) == ["type", "error", "request_id"], where
        assert error["type"] == "error"
        assert error["error"]["type"] in ANTHROPIC_KINDS, where
        told = error["error"]["message"]
    elif dialect == "ollama":
        assert list(error) == ["error"], where
        told = error["error"]
    elif dialect == "cohere":
        assert list(error) == ["id", "message"], where
        told = error["message"]
    elif dialect == "tei":
        assert list(error) == ["error", "error_type"], where
        assert error["error_type"] in TEI_KINDS, where
        told = error["error"]
    elif dialect == "tgi":
        assert list(error) == ["error", "error_type"], where
        assert error["error_type"] in TGI_KINDS, where
        told = error["error"]
    elif dialect == "llamacpp":
        assert list(error)[:1] == ["error"], where
        assert {"code", "message", "type"} <= error["error"].keys(), where
        assert 400 <= error["error"]["code"] < 600, where
        assert error["error"]["type"].endswith("_error"), where
        told = error["error"]["message"]
    else:
        assert error["error"].keys() == {"message", "type", "param", "code"}, where
        told = error["error"]["message"]
    assert isinstance(told, str), where
    assert told, where


TGI_KINDS = {"validation", "generation", "overloaded", "incomplete_generation"}
TEI_KINDS = {"Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"}
ANTHROPIC_KINDS = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
}


def head(method, path, *fields):
    lines = (f"{method} {path} HTTP/1.1", "host: test", *fields, "")
    return "\r\n".join(lines).encode()


JSON, CHUNKED = "content-type: application/json", "transfer-encoding: chunked"
# Requests that the server refuses before the app gets them: (status, bytes after the head).
EARLY = {
    "no header": (400, lambda m, p: head(m, p, "no header") + b"\r\n"),
    "bad length": (400, lambda m, p: head(m, p, "content-length: x") + b"\r\n"),
    "long header": (431, lambda m, p: head(m, p, "x: " + "a" * 200_000) + b"\r\n"),
    "many headers": (431, lambda m, p: head(m, p, *(f"x{i}: 1" for i in range(200))) + b"\r\n"),
    "slow head": (408, lambda m, p: head(m, p)),
    "after another": (400, lambda m, p: head("GET", "/live") + b"\r\n" + head(m, p, "x") + b"\r\n"),
}
# Of requests with a body, which only some methods read.
EARLY_BODIES = {
    "slow body": (408, lambda m, p: head(m, p, JSON, "content-length: 9") + b"\r\n"),
    "bad chunk": (
        400,
        lambda m, p: head(m, p, JSON, "transfer-encoding: chunked") + b"\r\nxyz\r\n",
    ),
}


async def _refusals(fault, routes):
    status, made = fault
    patience = 0.3 if status == 408 else PATIENCE_S  # a long head takes its time to arrive
    async with live(header_timeout_s=patience) as server:
        sent = [server.send(made(*route)) for route in routes]
        return status, await asyncio.wait_for(asyncio.gather(*sent), PATIENCE_S)


@pytest.mark.parametrize(
    ("fault", "routes"),
    [
        *[pytest.param(fault, ALL, id=name) for name, fault in EARLY.items()],
        *[pytest.param(fault, WITH_BODIES, id=name) for name, fault in EARLY_BODIES.items()],
    ],
)
def test_an_error_before_the_app_has_the_shape_of_its_path(fault, routes):
    status, answers = run_even(_refusals(fault, routes))
    for (method, path), answer in zip(routes, answers, strict=True):
        where = (method, path, answer[:200])
        refused = answer[answer.rindex(b"HTTP/1.1 ") :]
        assert refused.startswith(b"HTTP/1.1 %d " % status), where
        body = refused.partition(b"\r\n\r\n")[2]
        check(body, dialect_of(path), where)


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
def test_an_error_has_the_shape_of_a_path_that_came_with_the_request_before(method, path):
    async def main():
        async with live() as server:
            reader, writer = await server.open()
            bad = head(method, path, "no header") + b"\r\n"
            writer.write(head("GET", "/live") + b"\r\n" + bad[:-20])
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            writer.write(bad[-20:])
            return await asyncio.wait_for(reader.read(), PATIENCE_S)

    check(asyncio.run(main()).partition(b"\r\n\r\n")[2], dialect_of(path), path)


def test_a_path_that_two_dialects_share_has_the_shape_of_the_header():
    async def main():
        async with live() as server:
            fields = ("Anthropic-Version: 2023-06-01", "no header")
            return await server.send(head("GET", "/v1/models", *fields) + b"\r\n")

    check(asyncio.run(main()).partition(b"\r\n\r\n")[2], "anthropic", "models")


def test_an_error_without_a_request_has_openais_shape():
    async def main():
        async with live(header_timeout_s=0.1) as server:
            return [await server.send(data) for data in (b"", b"\x16\x03\x01\x02\r\n\r\n", b"\r\n")]

    for answer in run_even(main()):
        check(answer.partition(b"\r\n\r\n")[2], "openai", answer)


@pytest.mark.parametrize("path", [path for _, path in ALL])
def test_while_a_model_is_downloaded_an_error_has_the_shape_of_its_path(path):
    for given in (path, f"{path}?beta=true", f"{path}/", f"http://host{path}"):
        answer = startup_server._response_to(head("POST", given), LoadProgress())
        top, _, body = answer.partition(b"\r\n\r\n")
        if path == "/live":
            continue
        assert top.startswith(b"HTTP/1.1 503 ")
        if path not in ("/health", "/ping"):  # which add the progress
            check(body, dialect_of(path), given)


def test_both_servers_refuse_in_the_same_words():
    api = Api()
    api.context.ready, api.context.loading = False, LoadProgress("load", 1, 4)
    for _, path in WITH_BODIES:
        shown = api.post(path)
        early = startup_server._response_to(head("POST", path), api.context.loading)
        ours, theirs = json.loads(early.partition(b"\r\n\r\n")[2]), shown.json()
        for body in (ours, theirs):
            body.pop("request_id", None)
            body.pop("id", None)
        assert shown.status_code == 503
        assert ours == theirs, path


def test_the_server_of_a_download_needs_no_web_framework():
    module = "cpuserve.api.http.startup_server"
    code = f"import {module}, sys; print({{'fastapi', 'starlette'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


APP_FAULTS = {
    "no key": (401, {"api_keys": ("k",)}, {}),
    "unknown host": (403, {"host_names": ("example.org",)}, {"host": "evil.test"}),
    "stopping": (503, {}, {}),
    "media type": (415, {}, {"content-type": "text/plain", "origin": "http://a"}),
    "bad json": (400, {}, {"content-type": "application/json"}),
    "large": (413, {}, {"content-type": "application/json"}),
    "method": (405, {}, {}),
}
_BODIES = {"bad json": b"{", "large": b" " * ((4 << 20) + 1)}


@pytest.mark.parametrize("fault", APP_FAULTS)
def test_an_error_of_the_app_has_the_shape_of_its_path(fault):
    status, access, headers = APP_FAULTS[fault]
    api = Api(**access)
    api.state.stopping = fault == "stopping"
    for _, path in WITH_BODIES:
        method = "PATCH" if fault == "method" else "POST"
        answer = api.request(method, path, headers=headers, content=_BODIES.get(fault, b"{}"))
        assert answer.status_code == status, (path, answer.text)
        check(answer.content, dialect_of(path), (path, answer.text))


def test_an_error_of_the_app_has_the_shape_of_the_path_in_a_full_url():
    async def main():
        async with live() as server:
            fields = (JSON, "content-length: 1", "connection: close")
            for _, path in WITH_BODIES:
                url = f"http://host{path}"
                answer = await server.send(head("POST", url, *fields) + b"\r\n{")
                assert b" 400 " in answer.partition(b"\r\n")[0]
                check(answer.partition(b"\r\n\r\n")[2], dialect_of(path), path)

    asyncio.run(main())


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
def test_an_unknown_route_has_the_shape_of_its_beginning(method, path):
    answer = Api().request(method, path)
    assert answer.status_code == 404
    check(answer.content, dialect_of(path), path)


def test_every_dialect_is_listed():
    names = [path.parent.relative_to(API).parts for path in API.rglob("errors.py")]
    modules = [import_module(".".join(("cpuserve.api", *parts, "errors"))) for parts in names]
    found = {each for module in modules for each in vars(module).values() if type(each) is Dialect}
    assert len(found) > 5
    assert {*dialects.DIALECTS} == found


def test_the_errors_of_a_route_have_the_format_of_its_path():
    routes = [route for router in ROUTERS for route in router.routes]
    owners = [(route, getattr(route.endpoint, "__self__", None)) for route in routes]
    posts = [(route.path, owner) for route, owner in owners if isinstance(owner, Endpoint)]
    assert len(posts) > 40
    for path, endpoint in posts:
        assert endpoint.dialect is dialects.dialect_of(path, ()), path
