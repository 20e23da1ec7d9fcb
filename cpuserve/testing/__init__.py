"""Servers for the tests of programs that use a language model.

* `serve` runs a real server with a real model in its own process.
  This server decodes greedily, so the same request returns the same text.
* `scripted` runs the front end of the server with an engine that returns the replies of a script.
  This server needs no model and no network, and supports every API dialect.

pytest_plugin.py has fixtures for pytest. Heavy modules are imported only when they are used.
docs/testing-your-code.md is the guide.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.testing.local_server import LocalServer, serve
    from cpuserve.testing.recorder import Exchange
    from cpuserve.testing.replies import ScriptedCall, ScriptedReply, call, failure, raw, reply
    from cpuserve.testing.script import ScriptedRequest
    from cpuserve.testing.scripted_server import ScriptedServer, scripted

__all__ = [
    "Exchange",
    "LocalServer",
    "ScriptedCall",
    "ScriptedReply",
    "ScriptedRequest",
    "ScriptedServer",
    "call",
    "failure",
    "raw",
    "reply",
    "scripted",
    "serve",
]

_MODULES = {
    "Exchange": "recorder",
    "LocalServer": "local_server",
    "ScriptedCall": "replies",
    "ScriptedReply": "replies",
    "ScriptedRequest": "script",
    "ScriptedServer": "scripted_server",
    "call": "replies",
    "failure": "replies",
    "raw": "replies",
    "reply": "replies",
    "scripted": "scripted_server",
    "serve": "local_server",
}


def __getattr__(name: str) -> object:
    # pytest imports this package in every project, so this file must not import heavy modules.
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
