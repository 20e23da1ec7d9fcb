"""Access to the server: host names, origins of web pages, API keys, and forms of requests."""

import json
import socket

import pytest

from cpuserve.api.app import Cors
from cpuserve.api.http.guards import host_names
from cpuserve.config.server import ServerOptions
from tests.api.fakes import Api, error_of
from tests.api.live import live
from tests.api.test_api_connection import runs

HOSTS = ("api.example.com", "*.b.example")


def ask(api: Api, host: str, path: str = "/v1/models"):
    return api.request("GET", path, headers={"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "app.localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.0.7",
        "host.docker.internal:8000",
        socket.gethostname(),
    ],
)
@pytest.mark.parametrize("names", [(), HOSTS])
def test_local_names_and_addresses_are_always_allowed(host, names):
    assert ask(Api(host_names=names), host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "b.example",
        "evilb.example",
        "user@localhost",
        "[evil.example]",
    ],
)
@pytest.mark.parametrize("names", [(), HOSTS])
def test_another_name_is_refused_and_told_what_to_do(host, names):
    response = ask(Api(host_names=names), host)
    assert response.status_code == 403
    error = error_of(response)
    assert error["type"] == "PermissionDeniedError"
    assert "--allowed-hosts" in error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "host", ["api.example.com", "API.example.com:443", "x.b.example", "api.example.com."]
)
def test_names_that_were_given_are_allowed(host):
    assert ask(Api(host_names=HOSTS), host).status_code == 200
    assert ask(Api(host_names=()), host).status_code == 403


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ()),
        ({"host": "localhost"}, ()),
        ({"host": "::1"}, ()),
        ({"host": "127.8.8.8"}, ()),
        ({"host": "0.0.0.0"}, None),
        ({"host": "10.0.0.1"}, None),
        ({"api_key": ("k",)}, None),
        ({"uds": "/run/x.sock"}, None),
        ({"allowed_hosts": ("a",)}, ("a",)),
        ({"allowed_hosts": ("a",), "host": "0.0.0.0", "api_key": ("k",)}, ("a",)),
        ({"allowed_hosts": ("a", "*")}, None),
    ],
)
def test_host_names_are_checked_on_loopback_without_a_key(options, names):
    assert host_names(ServerOptions(**options)) == names


@runs
async def test_a_server_on_loopback_without_a_key_refuses_other_names():
    async with live(allowed_hosts=()) as server:
        good = b"GET /health HTTP/1.1\r\nhost: localhost:8000\r\nconnection: close\r\n\r\n"
        assert (await server.send(good)).startswith(b"HTTP/1.1 200 ")
        evil = await server.send(good.replace(b"localhost", b"evil.example"))
        assert evil.startswith(b"HTTP/1.1 403 ")
        # HTTP/1.0 has no Host header, and no browser uses it.
        assert (await server.send(b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


ORIGIN = "https://chat.example.com"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_no_other_origin_is_allowed_by_default():
    api = Api()
    response = api.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 405
    response = api.request("GET", "/v1/models", headers={"origin": ORIGIN})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(ORIGIN,), ("*",)])
def test_pages_of_an_allowed_origin_may_ask_before_they_have_sent_a_key(origins):
    api = Api(api_keys=("k",), cors=Cors(origins))
    response = api.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "POST" in response.headers["access-control-allow-methods"]
    # The page can read errors, too.
    response = api.request("GET", "/v1/models", headers={"origin": ORIGIN})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] in (ORIGIN, "*")
    exposed = response.headers["access-control-expose-headers"].split(", ")
    facts, kinds = ("limit", "remaining", "reset"), ("requests", "tokens")
    limits = {f"x-ratelimit-{fact}-{kind}" for fact in facts for kind in kinds}
    limits |= {f"anthropic-ratelimit-{kind}-{fact}" for fact in facts for kind in kinds}
    assert sorted(exposed) == sorted(
        {"x-request-id", "request-id", "retry-after", "warning"} | limits
    )


def test_public_pages_of_an_allowed_origin_may_use_a_server_in_a_private_network():
    api, asked = Api(cors=Cors((ORIGIN,))), {"access-control-request-private-network": "true"}
    for origin, status in ((ORIGIN, 200), ("https://evil.example", 400)):
        headers = {**PREFLIGHT, "origin": origin}
        for more, allowed in (({}, None), (asked, "true" if status == 200 else None)):
            response = api.request("OPTIONS", "/v1/chat/completions", headers={**headers, **more})
            assert response.status_code == status
            assert response.headers.get("access-control-allow-private-network") == allowed


def test_pages_of_other_origins_may_not():
    api = Api(cors=Cors((ORIGIN,), methods=("GET",), headers=("x-mine",)))
    other = {**PREFLIGHT, "origin": "https://evil.example"}
    response = api.request("OPTIONS", "/v1/chat/completions", headers=other)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    response = api.request("GET", "/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers
    assert api.request("OPTIONS", "/v1/models", headers=PREFLIGHT).status_code == 400


def test_credentials_are_allowed_only_if_asked_for():
    for credentials in (False, True):
        api = Api(cors=Cors((ORIGIN,), credentials=credentials))
        response = api.request("GET", "/v1/models", headers={"origin": ORIGIN})
        assert ("access-control-allow-credentials" in response.headers) == credentials


@runs
async def test_the_servers_options_reach_the_app():
    options = {
        "api_key": ("k",),
        "public_metrics": True,
        "allowed_origins": (ORIGIN,),
        "allowed_methods": ("GET", "POST"),
        "allowed_headers": ("x-mine",),
        "allow_credentials": True,
    }
    async with live(**options) as server:
        answer = await server.send(
            b"OPTIONS /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
            b"origin: https://chat.example.com\r\naccess-control-request-method: GET\r\n\r\n"
        )
        head = answer.lower()
        assert b"access-control-allow-origin: https://chat.example.com\r\n" in head
        assert b"access-control-allow-methods: get, post\r\n" in head
        assert b"x-mine" in head
        assert b"access-control-allow-credentials: true\r\n" in head
        get = b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert (await server.send(get)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/metrics", "/version"])
def test_metrics_need_a_key_unless_they_are_public(path):
    assert Api(api_keys=("k",)).get(path).status_code == 401
    public = Api(api_keys=("k",), public_metrics=True)
    assert public.get(path).status_code == 200
    assert public.get("/v1/models").status_code == 401
    assert public.get("/v1/cpu").status_code == 401
    assert public.chat().status_code == 401


GETS = ["/health", "/ping", "/live", "/version", "/metrics", "/v1/models", "/v1/models/tiny"]


@pytest.mark.parametrize("path", [*GETS, "/v1/models/nope", "/nowhere"])
def test_head_is_get_without_the_body(path):
    api = Api()
    get, head = api.get(path), api.request("HEAD", path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers.get("content-type") == get.headers.get("content-type")
    if path != "/metrics":
        assert head.headers["content-length"] == get.headers["content-length"]


def test_head_on_a_route_that_only_supports_post_is_405():
    response = Api().request("HEAD", "/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


@runs
async def test_after_a_head_the_connection_goes_on():
    async with live() as server:
        head = b"HEAD /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
        last = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        answer = await server.send(head + head + last)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        body = answer.rpartition(b"\r\n\r\n")[2]
        assert list(json.loads(body)) == ["version"]
        assert b"tiny" not in answer


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost:8000/health", 200),
        (b"HTTP://localhost/v1/models?x=http://y", 200),
        (b"https://127.0.0.1/v1/models/", 200),
        (b"http://localhost", 200),
        (b"http://localhost/nowhere", 404),
        (b"ftp://localhost/health", 404),
        (b"http://evil.example/health", 403),
    ],
)
@runs
async def test_a_whole_url_is_asked_for_by_its_path_and_host(target, status):
    async with live(allowed_hosts=()) as server:
        answer = await server.send(
            b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % target
        )
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer


@runs
async def test_a_post_to_a_whole_url_needs_its_key_and_is_answered():
    body = b'{"prompt":"hi"}'
    head = b"POST http://a/v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    async with live(api_key=("k",)) as server:
        assert (await server.send(head + b"\r\n" + body)).startswith(b"HTTP/1.1 401 ")
        answer = await server.send(head + b"authorization: Bearer k\r\n\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 200 ")


@runs
async def test_a_length_and_chunks_are_refused_and_what_follows_is_no_request():
    async with live() as server:
        answer = await server.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
            b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "Transfer-Encoding" in error["message"]
        assert not server.engine.asked
        await server.is_sane()
