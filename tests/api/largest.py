"""The largest values of every field of every endpoint, from the schema of /openapi.json.

A field is tried with values of each shape that its schema permits: long texts, lists and objects of
many members, deep nesting, great numbers. Each shape begins with what fills a body, and gets
smaller until the server takes it, so the largest legal value is among those that are sent.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cpuserve.api.request.object_limits import MAX_OBJECTS
from cpuserve.api.request.sealed import Seal
from tests.api.post_routes import HI, ROUTES, app_with_all_routes

# Bodies of routes that ROUTES does not have, as far as a field is not tried.
BODIES: dict[str, dict[str, Any]] = {
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {},
    "/v1/conversations/{conversation_id}/items": {"items": HI},
    "/v1/batches": {
        "input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h",
    },
    "/v1/uploads": {
        "filename": "a", "purpose": "user_data", "bytes": 1, "mime_type": "text/plain",
    },
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_0"]},
    "/v1/messages/batches": {
        "requests": [
            {"custom_id": "a", "params": {"model": "tiny", "max_tokens": 1, "messages": HI}}
        ]
    },
    "/api/create": {"model": "new", "from": "tiny"},
    "/api/copy": {"source": "tiny", "destination": "new"},
    "/api/delete": {"model": "new"},
    "/api/pull": {"model": "tiny"},
    "/api/push": {"model": "tiny"},
    "/lora-adapters": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/invocations": {"messages": HI},
    "/": {"inputs": "hi"},
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
}  # fmt: skip
# Elements of lists that the schema describes only as objects, by the name of the field.
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PART = {"type": "text", "text": "a"}
_SAID = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
# A thought of 1 MiB, sealed with the key of the servers that get it: 6 KB.
SEALED = Seal(bytes(32)).sealed("a" * (1 << 20))
_THOUGHT = {"type": "thinking", "thinking": "", "signature": SEALED}
_OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}
_FUNCTION = {"type": "function", "function": {"name": "NUMBER", "parameters": {"type": "object"}}}
ELEMENTS: dict[str, tuple[Any, ...]] = {
    "messages": (
        HI[0], {"role": "user", "content": [_PART]}, _SAID, {"role": "assistant", "content": "a"},
        {"role": "tool", "tool_call_id": "a", "content": "b"}, {"role": "system", "content": "a"},
        {"role": "assistant", "content": [_THOUGHT, _PART]}, HI,
    ),
    "input": (
        HI[0], {"role": "user", "content": [{"type": "input_text", "text": "a"}]}, _OUTPUT,
        {"type": "function_call", "call_id": "NUMBER", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": [], "encrypted_content": SEALED},
        {"type": "compaction", "encrypted_content": SEALED},
        {"type": "item_reference", "id": "a"},
    ),
    "tools": (
        _FUNCTION, {"name": "NUMBER", "input_schema": {"type": "object"}},
        {"type": "function", "name": "NUMBER", "parameters": {"type": "object"}},
        {"type": "custom", "name": "NUMBER"},
    ),
    "requests": ({
        "custom_id": "NUMBER", "params": {"model": "tiny", "max_tokens": 1, "messages": HI},
    },),
    "questions": ({"type": "choice", "text": "a", "options": ["a", "b"]},),
    "inputs": ("a", ["a", "b"]), "documents": ("a", {"text": "a"}), "items": (HI[0],),
}  # fmt: skip
# The parts of one message: its content may be as long as the conversation.
NESTED = ("messages", "input", "items")
_TEXTS = ("a", "\\n", "{{", "\u00e9", "[", " a")
_COUNTS = (MAX_OBJECTS * 16, MAX_OBJECTS * 4, MAX_OBJECTS - 10, 8000, 2048, 1024, 256, 64, 20, 10)
_NUMBERS = (2**63 - 1, 2**31 - 1, 2**20, 2**16, 4096, 1024, 256, 128, 64, 20, 10, 5, 2)
_DEPTHS = (100_000, 900, 400, 100, 30)


@dataclass(frozen=True, eq=False)
class Field:
    """A field of an operation: the path, and the name of the field, with that of its object."""

    path: str
    name: str
    inner: str
    schema: dict[str, Any]

    @property
    def label(self) -> str:
        """The field as errors name it."""
        return f"{self.name}.{self.inner}" if self.inner else self.name


@functools.cache
def schema() -> dict[str, Any]:
    """Return /openapi.json of the app with all routes."""
    return app_with_all_routes().openapi()


def resolved(found: dict[str, Any]) -> dict[str, Any]:
    """Return a schema itself in place of a reference to it."""
    while "$ref" in found:
        found = schema()["components"]["schemas"][found["$ref"].rpartition("/")[2]]
    return found


def alternatives(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that a value may have, without null."""
    found = resolved(found)
    several = found.get("anyOf") or found.get("oneOf")
    if several is None:
        return [] if found.get("type") == "null" else [found]
    return [each for one in several for each in alternatives(one)]


def posts() -> list[str]:
    """Return the paths of all operations with a JSON body, except aliases with an equal body."""
    known, found = set(), []
    for path, operations in schema()["paths"].items():
        for name, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" not in content or name not in ("post", "delete"):
                continue
            kind = operation["summary"], json.dumps(content)
            if kind not in known:
                known.add(kind)
                found.append(path)
    return found


def method(path: str) -> str:
    """Return the method of the operation at a path that has a body."""
    return next(
        name.upper() for name, each in schema()["paths"][path].items() if "requestBody" in each
    )


@functools.cache
def tried() -> dict[str, list[Field]]:
    """Return the fields to try by the path of their operation.

    A field that several operations have under one name, with one schema, is tried at the first of
    them, where all dialects share the code that reads it. Fields that each dialect reads with code
    of its own are tried at each: inputs, which are in the base bodies, and lists of ELEMENTS.
    """
    known, found = set(), {}
    for path in posts():
        own = base(path).keys() | ELEMENTS.keys()
        kinds = {field: (field.label, json.dumps(field.schema)) for field in fields(path)}
        found[path] = [f for f, kind in kinds.items() if f.name in own or kind not in known]
        known.update(kinds.values())
    return found


def fields(path: str) -> Iterator[Field]:
    """Yield each field of the operation, and the fields of objects with known members."""
    (operation,) = (e for e in schema()["paths"][path].values() if "requestBody" in e)
    found: dict[str, Field] = {}
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    for one in alternatives(body):
        for name, value in one.get("properties", {}).items():
            found.setdefault(name, Field(path, name, "", value))
            for each in alternatives(value):
                for inner, nested in each.get("properties", {}).items():
                    found.setdefault(f"{name}.{inner}", Field(path, name, inner, nested))
    yield from found.values()


def base(path: str) -> dict[str, Any]:
    """Return a small valid body; a KeyError means that a new route needs one in BODIES."""
    return {"model": "tiny", **(ROUTES[path].body if path in ROUTES else BODIES[path])}


def shapes(field: Field, room: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield a name and the values, largest first, of each shape that the field may have.

    room: the bytes that a value may have. The values are JSON.
    """
    name = field.inner or field.name
    for each in alternatives(field.schema):
        yield from _of(name, each, room)


def _of(name: str, found: dict[str, Any], room: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    kind = found.get("type")
    if kind in (None, "string"):
        for text in _TEXTS:
            yield f"text {text}", (_text(text, size) for size in _sizes(room))
    if kind in (None, "integer", "number"):
        yield "number", (str(number).encode() for number in _NUMBERS)
    if kind in (None, "array"):
        yield from _lists(name, found.get("items", {}), room)
        yield "nested lists", (b"[" * depth + b"]" * depth for depth in _DEPTHS)
    if kind in (None, "object"):
        yield "members", (_members("1", count, room) for count in _COUNTS)
        yield "text members", (_members('"a"', count, room) for count in _COUNTS)
        yield "nested objects", (b'{"a":' * depth + b"1" + b"}" * depth for depth in _DEPTHS)
        for text in _TEXTS[:1]:
            yield "long member", (b'{"type":' + _text(text, size) + b"}" for size in _sizes(room))


def _lists(name: str, items: dict[str, Any], room: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    kinds = {each.get("type") for each in alternatives(items)} or {None}
    if kinds & {"integer", "number", None}:
        counts = (room // 2, 1 << 20, 1 << 17, *_COUNTS)
        yield "numbers", (_repeated(b"5", count, room) for count in counts)
    if kinds & {"string", None}:
        yield "texts", (_repeated(b'"NUMBER"', count, room) for count in _COUNTS)
        sizes = (room // 1000, 4096, 256, 40)
        yield (
            "long texts",
            (
                _repeated(_text("a", size), count, room)
                for size, count in itertools.product(sizes, (1000, 60, 10))
            ),
        )
    if kinds & {"object", "array", None}:
        for element in ELEMENTS.get(name, ({}, [])):
            raw = json.dumps(element).encode()
            yield f"{raw[:60].decode()} ...", (_repeated(raw, count, room) for count in _COUNTS)
    if name in NESTED:
        for part in ("text", "input_text"):
            yield f"parts {part}", (_one_message(part, count, room) for count in _COUNTS)


def _one_message(kind: str, count: int, room: int) -> bytes:
    part = json.dumps({"type": kind, "text": "a"}).encode()
    return b'[{"role":"user","content":%b}]' % _repeated(part, count, room - 40)


def _sizes(room: int) -> tuple[int, ...]:
    return (room, room // 8, 1 << 17, 1 << 13, 256)


def _text(text: str, size: int) -> bytes:
    raw = text.encode()
    return b'"%b"' % (raw * ((size - 2) // len(raw)))


def _members(value: str, count: int, room: int) -> bytes:
    count = min(count, room // (12 + len(value)))
    return b"{%b}" % ",".join(f'"{number}":{value}' for number in range(count)).encode()


def _repeated(element: bytes, count: int, room: int) -> bytes:
    """Return a list of `count` elements, or fewer if they do not fit; NUMBER is a new number."""
    count = max(1, min(count, (room - 2) // (len(element) + 1)))
    if b"NUMBER" not in element:
        return b"[%b%b]" % ((element + b",") * (count - 1), element)
    return b"[%b]" % b",".join(element.replace(b"NUMBER", b"n%d" % i) for i in range(count))


def bodies(field: Field, most: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield a name and the bodies, largest first, of each shape of a field's value."""
    given = base(field.path)
    outer = given.pop(field.name, None)
    rest = json.dumps(given)[1:-1].encode()
    head = b"{%b%b" % (rest, b"," if rest else b"") + json.dumps(field.name).encode() + b":"
    tail = b"}"
    if field.inner:
        inside = dict(outer) if isinstance(outer, dict) else {}
        inside.pop(field.inner, None)
        shown = json.dumps(inside)[1:-1].encode()
        head += b"{%b%b" % (shown, b"," if shown else b"")
        head += json.dumps(field.inner).encode() + b":"
        tail = b"}}"
    room = most - len(head) - len(tail)
    for name, values in shapes(field, room):
        yield name, (head + value + tail for value in values)
