"""The parts of uvicorn that have no documentation, and that the server stands on, still exist."""

import ast
import asyncio
import inspect
import logging
import re
from pathlib import Path

import h11
import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from cpuserve.api.http import server as served
from cpuserve.api.response import direct_body
from cpuserve.config.server import ServerOptions

ROOT = Path(__file__).parents[2]
SCOPE = {"type": "http", "http_version": "1.1", "headers": [], "method": "GET", "path": "/"}


@pytest.fixture
def connection():
    loop = asyncio.new_event_loop()
    made = H11Protocol(uvicorn.Config(None, log_config=None), ServerState(), {}, loop)
    keywords = {
        name: None
        for name in inspect.signature(RequestResponseCycle.__init__).parameters
        if name not in ("self", "scope", "conn")
    }
    made.cycle = RequestResponseCycle(
        scope=SCOPE, conn=h11.Connection(h11.SERVER), **{**keywords, "message_event": object()}
    )
    yield made
    loop.close()


def names(module, of):
    """Return the attributes that a module reads from the objects that it calls `of`."""
    tree = ast.parse(inspect.getsource(module))
    own = {name for made in vars(module).values() if inspect.isclass(made) for name in vars(made)}
    own -= vars(H11Protocol).keys()
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in of
    }
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return {n for n in found - own if not (n.startswith("_") and n in assigned)}


def test_a_connection_has_what_the_protocol_uses(connection):
    used = names(served, ("self", "super()"))
    used -= {"lifespan", "servers"}  # of the server, in the same file
    assert {"conn", "cycle", "flow", "transport", "app", "loop", "client"} <= used
    assert [name for name in sorted(used) if not hasattr(connection, name)] == []
    overridden = vars(served.GuardedProtocol).keys() & vars(H11Protocol).keys()
    assert {
        "connection_made", "data_received", "eof_received", "connection_lost", "pause_writing",
        "resume_writing", "on_response_complete", "send_400_response",
        "_unsupported_upgrade_warning",
    } <= overridden  # fmt: skip


def test_a_request_has_what_the_protocol_and_direct_bodies_use(connection):
    used = names(served, ("cycle", "self.cycle")) | names(direct_body, ("cycle", "self._cycle"))
    assert {"response_started", "response_complete", "more_body", "disconnected"} <= used
    assert [name for name in sorted(used) if not hasattr(connection.cycle, name)] == []


def test_a_server_has_what_the_front_end_uses():
    server = uvicorn.Server(uvicorn.Config(None, log_config=None))
    used = ("should_exit", "force_exit", "started", "capture_signals", "serve", "server_state")
    used += ("startup", "config")
    assert [name for name in used if not hasattr(server, name)] == []
    assert server.server_state.tasks == set()
    parts = inspect.getsource(uvicorn.Server)
    assert [name for name in ("self.servers", "self.lifespan.state") if name not in parts] == []
    server.config.load()
    assert issubclass(server.config.http_protocol_class, asyncio.Protocol)
    assert {"config", "server_state", "app_state"} <= inspect.signature(
        H11Protocol
    ).parameters.keys()
    assert server.config.backlog > 0


def test_only_tested_versions_are_installed():
    (listed,) = re.findall(r'"(uvicorn[^"]*)"', (ROOT / "pyproject.toml").read_text())
    bounds = Requirement(listed)
    assert {spec.operator for spec in bounds.specifier} == {">=", "<"}
    assert bounds.specifier.contains(uvicorn.__version__)


def test_events_to_a_client_that_is_gone_write_no_lines(caplog):
    served.make_server(lambda *_: None, ServerOptions())
    logger = logging.getLogger("asyncio")
    logger.warning("socket.send() raised exception.")
    logger.warning("another warning")
    assert caplog.messages == ["another warning"]
