"""Fixtures for pytest: `cpuserve_server` and `cpuserve_script`.

pytest loads this module in every project, so it imports nothing else before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cpuserve.testing import LocalServer, ScriptedServer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the fixtures."""
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


@pytest.fixture(scope="session")
def cpuserve_server(pytestconfig: pytest.Config) -> Iterator[LocalServer]:
    """A server with a real model, which all tests of the session share.

    The ini options cpuserve_model and cpuserve_options select the model and its options. The flag
    --cpuserve-url selects a server that runs already.
    """
    from cpuserve.loader.builtin import DEFAULT
    from cpuserve.testing.local_server import NO_KEY, LocalServer, first_model, serve

    if url := pytestconfig.getoption("cpuserve_url"):
        url = url.rstrip("/").removesuffix("/v1")
        key = pytestconfig.getoption("cpuserve_key") or NO_KEY
        yield LocalServer(url, first_model(url, key), key)
        return
    model = pytestconfig.getini("cpuserve_model") or DEFAULT
    with serve(model, *pytestconfig.getini("cpuserve_options")) as server:
        yield server


@pytest.fixture(scope="session")
def _cpuserve_script_server() -> Iterator[ScriptedServer]:
    from cpuserve.testing.scripted_server import scripted

    with scripted(strict=False) as server:
        yield server


@pytest.fixture
def cpuserve_script(_cpuserve_script_server: ScriptedServer) -> Iterator[ScriptedServer]:
    """A server without a model: the test adds the replies, which the requests get in their order.

    At its end, the test fails if a request got no reply or a reply is left.
    """
    _cpuserve_script_server.reset()
    yield _cpuserve_script_server
    _cpuserve_script_server.check()
