"""The operations of the API, with requests to begin from: what is recorded, and what is tried.

Operations come from the routes of the app, so a route that is added is fuzzed as soon as it has a
body in tests/api (`largest.base`), which another test demands.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import tests.contract
from tests.api import largest, recorded
from tests.api.post_routes import ROUTES, app_with_all_routes

_MODULE = re.compile(r"cpuserve\.api\.(?:vectors\.)?(\w+)(?:\.(\w+))?")
_OWN = ("chat", "completions", "responses")  # the parts of OpenAI's API that have a target each
# A stream without an end.
_ENDLESS = ("/models/sse",)


class Operation(NamedTuple):
    """A method and a path of the API, and the target that it belongs to."""

    method: str
    path: str
    target: str

    @property
    def pooling(self) -> str:
        """The pooling of a model that serves the operation."""
        return ROUTES[self.path].pooling if self.path in ROUTES else "none"


@functools.cache
def operations() -> tuple[Operation, ...]:
    """Return all operations of the app with all routes."""
    found = []
    for route in app_with_all_routes().state.routes:
        for method in sorted(route.methods - {"HEAD"}):
            if route.path not in _ENDLESS:
                found.append(Operation(method, route.path, _target(route.endpoint)))
    return tuple(found)


def _target(endpoint: Any) -> str:
    """Return the name of the target of a route, from the module with its handler."""
    owner = getattr(endpoint, "__self__", None)
    handler = getattr(owner, "handler", None) or endpoint
    module = _MODULE.match(handler.__module__)
    if module is None:
        return "http-other"
    first, second = module.groups()
    if first == "openai" and second in _OWN:
        return f"http-openai-{second}"
    return "http-shared" if first == "route" else f"http-{first}"


@functools.cache
def by_target() -> dict[str, list[Operation]]:
    """Return the operations of each target."""
    found: dict[str, list[Operation]] = {}
    for operation in sorted(operations(), key=lambda each: each.target):
        found.setdefault(operation.target, []).append(operation)
    return found


@functools.cache
def fields(path: str) -> dict[str, tuple[str, ...]]:
    """Return the fields of a body with their JSON types, as /openapi.json has them."""
    found = largest.fields(path) if path in _with_bodies() else ()
    kinds: dict[str, list[str]] = {}
    for field in found:
        some = largest.alternatives(field.schema) if not field.inner else []
        kinds.setdefault(field.name, []).extend(each.get("type", "") for each in some)
    return {name: tuple(filter(None, some)) for name, some in kinds.items()}


@functools.cache
def _with_bodies() -> frozenset[str]:
    paths = largest.schema()["paths"]
    return frozenset(
        path
        for path, operations in paths.items()
        for each in operations.values()
        if "application/json" in each.get("requestBody", {}).get("content", {})
    )


@functools.cache
def seeds() -> dict[str, tuple[bytes, ...]]:
    """Return the bodies to begin from by path: a small valid one, recorded ones, tried values."""
    found: dict[str, list[Any]] = {path: [largest.base(path)] for path in sorted(_with_bodies())}
    for asked in recorded.requests().values():
        if isinstance(asked.get("body"), dict):
            found.setdefault(asked["path"], []).append(asked["body"])
    for path, body in _tried():
        found.setdefault(path, []).append(body)
    for name, elements in largest.ELEMENTS.items():
        for path in [path for path in found if name in fields(path)]:
            found[path] += [{**largest.base(path), name: [each]} for each in elements]
    return {path: tuple(json.dumps(body).encode() for body in some) for path, some in found.items()}


def _tried() -> list[tuple[str, Any]]:
    """Return (path, body) of the values of fields in tests/contract."""
    found = []
    for file in sorted(Path(tests.contract.__path__[0]).glob("test_*.py")):
        module = importlib.import_module(f"tests.contract.{file.stem}")
        marks = [m for each in vars(module).values() for m in getattr(each, "pytestmark", ())]
        for mark in marks:
            if mark.name == "parametrize" and mark.args[0] == "case":
                cases = [getattr(each, "values", (each,))[0] for each in mark.args[1]]
                found += [(case.path, case.body) for case in cases if hasattr(case, "body")]
    return found
