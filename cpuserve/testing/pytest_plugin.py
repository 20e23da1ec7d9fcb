"""pytest fixtures: `cpuserve_server` and `cpuserve_script`.

pytest loads this module in every project, so it imports nothing heavy until a fixture is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cpuserve.testing import LocalServer, ScriptedServer
    from cpuserve.testing.local_server import ServerStart

_START: pytest.StashKey[ServerStart] = pytest.StashKey()
_NAME = re.compile(rb"\bcpuserve_server\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line and ini options of the fixtures."""
    group = parser.getgroup("cpuserve")
    group.addoption(
        "--cpuserve-url",
        metavar="URL",
        help="server for the fixture cpuserve_server, without /v1, such as a vLLM server on GPUs; "
        "by default, the fixture starts one",
    )
    group.addoption("--cpuserve-key", metavar="KEY", help="API key of the server at --cpuserve-url")
    parser.addini("cpuserve_model", "model of the fixture cpuserve_server, as in `cpuserve serve`")
    parser.addini("cpuserve_options", "options of `cpuserve serve` for this model", type="args")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start the server before pytest imports a module that mentions the fixture's name.

    Loading and importing then overlap. If options select only some tests,
    the text of a module does not show whether its tests will run, so nothing is started here.
    """
    config = parent.config
    if _starts_early(config) and not _selects(config) and _NAME.search(module_path.read_bytes()):
        _started(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server if a test needs it, so that it loads while the first tests run."""
    if _starts_early(session.config) and any(
        "cpuserve_server" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        _started(session.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ask the server to end while pytest writes its summary."""
    if (start := session.config.stash.get(_START, None)) is not None:
        start.end()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait until the server has ended."""
    if (start := config.stash.get(_START, None)) is not None:
        start.stop()


def _starts_early(config: pytest.Config) -> bool:
    """Return whether the server may start before a fixture needs it.

    Workers of pytest-xdist do not start it early, because some workers may never need a server.
    """
    return not config.getoption("collectonly") and not hasattr(config, "workerinput")


def _selects(config: pytest.Config) -> bool:
    """Return whether command-line options select only some tests of the modules."""
    options = (config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf"))
    return any(options) or any("::" in argument for argument in config.args)


def _started(config: pytest.Config) -> ServerStart | None:
    """Return the server's start, which begins with the first call; None with --cpuserve-url."""
    from cpuserve.loader.builtin import DEFAULT
    from cpuserve.testing.local_server import ServerStart

    if config.getoption("cpuserve_url"):
        return None
    if _START not in config.stash:
        model = config.getini("cpuserve_model") or DEFAULT
        config.stash[_START] = ServerStart(model, *config.getini("cpuserve_options"))
    return config.stash[_START]


@pytest.fixture(scope="session")
def cpuserve_server(pytestconfig: pytest.Config) -> LocalServer:
    """A server with a real model, which all tests of the session share.

    The ini options cpuserve_model and cpuserve_options set the model and its options.
    The flag --cpuserve-url selects a running server instead.
    """
    from cpuserve.config.values import base_url
    from cpuserve.testing.local_server import NO_KEY, LocalServer, first_model

    if (start := _started(pytestconfig)) is not None:
        return start.wait()
    url = base_url(pytestconfig.getoption("cpuserve_url"))
    key = pytestconfig.getoption("cpuserve_key") or NO_KEY
    return LocalServer(url, first_model(url, key), key)


@pytest.fixture(scope="session")
def _cpuserve_script_server() -> Iterator[ScriptedServer]:
    from cpuserve.testing.scripted_server import scripted

    with scripted(strict=False) as server:
        yield server


@pytest.fixture
def cpuserve_script(_cpuserve_script_server: ScriptedServer) -> Iterator[ScriptedServer]:
    """A server without a model: the test adds replies, and each request gets the next reply.

    At its end, the test fails if a request got no reply or if a reply was not used.
    """
    _cpuserve_script_server.reset()
    yield _cpuserve_script_server
    _cpuserve_script_server.check()
