"""Without a key, a server with keys answers only GET and HEAD of the page and of its health."""

import asyncio
import itertools
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from cpuserve.api.app import Cors
from cpuserve.api.callers.key_file import read_key_file
from tests.api.fakes import Api
from tests.api.live import live
from tests.api.post_routes import ROUTES, app_with_all_routes, prepare
from tests.api.test_api_connection import runs

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "BREW")
ACCEPTS = (b"text/html,application/xhtml+xml", b"TEXT/HTML", b"application/json, */*", b"")
HEALTH = {"/health", "/v1/health", "/ping", "/live"}
ASSETS = {
    f"/webui/{path.name}" for path in (Path(__file__).parents[2] / "cpuserve" / "webui").iterdir()
} - {"/webui/index.html"}


def encoded(path: str) -> str:
    """Return `path` with each character except the first percent-encoded."""
    return path[:1] + "".join(f"%{ord(letter):02x}" for letter in path[1:])


# What a hostile client, or a proxy on the way, can do to a path; "%2f" is a slash to a server.
FORMS = {
    "plain": lambda path: path,
    "upper": str.upper,
    "slash after": lambda path: f"{path}/",
    "slashes after": lambda path: f"{path}//",
    "slash before": lambda path: f"/{path}",
    "encoded slash after": lambda path: f"{path}%2f",
    "encoded slash before": lambda path: f"/%2F{path[1:]}",
    "encoded": encoded,
    "encoded twice": lambda path: encoded(path).replace("%", "%25"),
    "below a public path": lambda path: f"/health/..{path}",
    "below the page": lambda path: f"/webui/..{path}",
    "with a public end": lambda path: f"{path}/health",
    "with a null": lambda path: f"{path}%00",
    "with a parameter": lambda path: f"{path};/health",
}


def paths() -> list[str]:
    """Return a path for each route of a server with all routes, of each file, and of no route."""
    routes = {route.path for route in app_with_all_routes().state.routes}
    filled = {re.sub(r"\{[^}]*\}", "1", path) for path in routes}
    return sorted(filled | ASSETS | {"/nowhere", "/webui", "/webui/nowhere.js"})


def is_open(method: str, path: str, accept: bytes, *, page: bool, opened: set[str]) -> bool:
    """Whether the contract lets a request without a key in; path: decoded."""
    path = path.rstrip("/") or "/"
    if method not in ("GET", "HEAD"):
        return False
    html = b"text/html" in accept.lower()
    return path in opened or (page and (path in ASSETS or (path == "/" and html)))


async def statuses(app, requests):
    """Yield each of `requests` (method, target, accept) with its status."""
    for method, target, accept in requests:
        body = json.dumps(ROUTES[target].body if target in ROUTES else {"inputs": "hi"}).encode()
        headers = [(b"host", b"localhost"), (b"accept", accept)]
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(target),
            "raw_path": target.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "headers": [*headers, (b"content-type", b"application/json")],
        }
        sent = []
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive(rest=rest):
            return rest.pop() if rest else await asyncio.Event().wait()  # the client stays

        async def send(message, sent=sent):
            sent.append(message)

        await app(scope, receive, send)
        yield (method, target, accept), sent[0]["status"], sent


ACCESS = [{}, {"webui": False, "public_metrics": True, "cors": Cors(("*",))}]


@pytest.mark.matrix
@pytest.mark.parametrize("access", ACCESS, ids=["default", "other options"])
@pytest.mark.parametrize("form", FORMS)
def test_a_request_without_a_key_reaches_only_what_is_public(form, access):
    api = Api(api_keys=("k",), admin_routes=True, **access)
    prepare(api.context, "last")  # so that each route of vectors could be answered
    opened = HEALTH | ({"/metrics", "/version"} if access.get("public_metrics") else set())
    targets = sorted({FORMS[form](path) for path in paths()})
    asks = itertools.product(METHODS, targets, ACCEPTS)

    async def walk():
        wrong = []
        async for asked, status, sent in statuses(api.app, asks):
            method, target, accept = asked
            page = access.get("webui", True)
            expected = is_open(method, unquote(target), accept, page=page, opened=opened)
            if (status == 200) != expected or (not expected and status != 401):
                wrong.append((*asked, status))
            # What is refused says nothing of the server: neither its models nor its routes.
            if not expected and b"tiny" in b"".join(m.get("body", b"") for m in sent):
                wrong.append((*asked, "names a model"))
        return wrong

    assert asyncio.run(walk()) == []
    assert not api.engine.asked


@runs
async def test_no_spelling_of_a_target_on_a_connection_opens_a_route():
    targets = ["/", "//", "/%2f", "*", "http://a", "http://a/", "HTTP://a//", "http:%2f%2fa/"]
    targets += ["http://a/health/../", "http://a/webui/app.js/../..", "http://health", "/webui"]
    body = b'{"inputs": "hi"}'
    async with live(api_key=("k",)) as server:
        for target in targets:
            answer = await server.send(
                b"POST %b HTTP/1.1\r\nhost: a\r\naccept: text/html\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (target.encode(), len(body), body)
            )
            assert answer.startswith(b"HTTP/1.1 40"), (target, answer)
            assert b"tiny" not in answer, target
        assert not server.engine.asked


@pytest.mark.parametrize("key", ["secret-key-of-alice", "secret-key-of-nobody"])
def test_with_a_key_file_alone_every_route_asks_for_a_key_of_it(key, tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice secret-key-of-alice\n")
    api = Api(key_file=str(path), admin_routes=True)
    prepare(api.context, "last")
    asks = list(itertools.product(("GET", "POST", "DELETE"), paths(), (b"",)))

    async def walk():
        return [
            asked
            async for asked, status, _ in statuses(api.app, asks)
            if (status != 401) != is_open(asked[0], asked[1], b"", page=True, opened=HEALTH)
        ]

    assert asyncio.run(walk()) == []
    assert not api.engine.asked
    path.write_text(f"alice {key}\n")
    api.state.callers.load(read_key_file(str(path)))
    api._key = "secret-key-of-alice"
    found = {api.get(target).status_code for target in ("/v1/models", "/props", "/metrics")}
    assert found == ({200} if key == api._key else {401})
