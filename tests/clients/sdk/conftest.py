"""The servers of the flows: those that `python -m tests.clients.sdk` has started, or new ones.

In an environment of its own, a client finds here nothing of cpuserve and of the other tests.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.sdk.blocking import Blocking
from tests.clients.sdk.environments import ENVIRONMENTS
from tests.clients.sdk.server import Server, given

_RUNNING = given()
# Without such an environment, only the flows of clients that the extra `test` has.
collect_ignore = [
    f"test_sdk_{name}.py"
    for name, environment in ENVIRONMENTS.items()
    if not (_RUNNING or environment.in_extra)
]


def _stay_here(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse connections to other machines: clients have to work offline."""
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "localhost"
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in (None, "", "localhost", b"localhost", "127.0.0.1", b"127.0.0.1", "::1"):
        msg = f"no connection to {host}: this client runs offline"
        raise OSError(msg)


if _RUNNING:
    sys.addaudithook(_stay_here)


def _server(name: str) -> Iterator[Server]:
    if _RUNNING:
        yield _RUNNING[name]
        return
    from tests.clients.sdk.servers import SERVERS

    with SERVERS[name]() as started:
        yield started


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of async clients: one for all, because some keep connections between calls."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


# Takes both halves of a client (or one object with the methods of both, and the async names of its
# sync methods), and returns one that blocks.
Half = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def half(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Half:
    """Chooses a half of a client: each flow runs with both."""

    def choose(sync: Any, other: Any = None, **names: str) -> Any:
        if request.param == "sync":
            return sync() if other is not None else sync
        return Blocking(sync if other is None else other(), loop, names)

    choose.is_async = request.param == "async"  # type: ignore[attr-defined]
    return choose


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The scripted model."""
    yield from _server("scripted")


@pytest.fixture(scope="session")
def vectors() -> Iterator[Server]:
    """Real models that embed and rank."""
    yield from _server("vectors")


@pytest.fixture(scope="session")
def pair() -> Iterator[Server]:
    """Real tiny models that embed and generate, at one address."""
    yield from _server("pair")


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """A real tiny model that generates."""
    yield from _server("tiny")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Server]:
    """The built-in model."""
    yield from _server("smollm2")
