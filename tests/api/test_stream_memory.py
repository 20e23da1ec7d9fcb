"""The memory of an open stream: middleware that lets it pass keeps nothing of it."""

import asyncio

import pytest

from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.http.guards import AllowedHosts, ApiKeys, CallersWithinLimits, WebPages
from cpuserve.api.http.middleware import RequestLine
from cpuserve.api.http.server import make_server
from cpuserve.api.request.headers import CALLER
from cpuserve.config.server import ServerOptions
from cpuserve.serving.callers.caller import Caller

KEY = "a-key-of-the-test"
PASSES = {
    "keys": lambda app: ApiKeys(app, KnownCallers([KEY])),
    "limits": CallersWithinLimits,
    "hosts": lambda app: AllowedHosts(app, []),
    "pages": lambda app: WebPages(app, []),
    "line": RequestLine,
}


@pytest.mark.parametrize("name", PASSES)
def test_a_request_that_passes_leaves_no_frame_of_the_middleware(name):
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"host", b"localhost"), (b"x-api-key", KEY.encode())],
        CALLER: Caller.of_address("127.0.0.1"),
    }
    result = object()  # the coroutine of the app
    assert PASSES[name](lambda *_: result)(scope, None, None) is result


def test_connections_share_the_keys_of_their_attributes():
    made = asyncio.new_event_loop()
    server = make_server(lambda *_: None, ServerOptions())
    server.config.load()
    try:
        protocol = server.config.http_protocol_class(
            server.config, server.server_state, {}, _loop=made
        )
    finally:
        made.close()
    # CPython shares the keys of up to 30 attributes; more take 1.5 KB in each connection.
    assert len(vars(protocol)) <= 30
