"""The processes that render chat templates: one that forks, and forks of it that render.

A template comes with a model, and its messages come from a client. Together they can use
all memory, compute for hours or overflow the stack of C. No check in Python can foresee this,
as one call of json.dumps is enough. So the kernel ends a process when its render reaches a limit.

The first process has loaded Jinja, has one thread and renders nothing, so a fork of it is ready
in a millisecond. A fork serves one connection, one job after another, until it is closed.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from cpuserve.base.fault_points import fault
from cpuserve.limited.child import address_space, limit_memory, limit_time, serve_forks
from cpuserve.limited.wire import receive, send
from cpuserve.tokenizer.rendering.wire import (
    READY,
    REFUSED,
    RENDERED,
    STOPPED,
    UNLIMITED,
    RenderJob,
    unpacked,
)

MAX_MESSAGE_CHARS = 1000
# The message of Jinja for a template that sets a member of an object.
NO_NAMESPACE = "cannot assign attribute on non-namespace object"
_ESCAPED = re.compile("[^\x00-\x7f\U00100000-\U0010fffd]+")
_MASK = re.compile("[\U00100000-\U0010fffd]")
# An escaped backslash, which is skipped, or an escaped mask in a text that repr() returned.
_ESCAPED_MASK = re.compile(r"\\\\|\\U(0010[0-9a-f]{4})")


class _Generation(Extension):
    """A Jinja extension that renders the content of `{% generation %}` (a mask for training)."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(SandboxedEnvironment):
    """The Jinja environment that chat templates expect, as in transformers.

    Templates may also change lists and objects, because each render has its own copies.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)


class _Assignable(dict[str, Any], Namespace):
    """An object that a template may change: `{% set message.content = "" %}`."""


def assignable(value: Any) -> Any:
    """Return a copy of a JSON value, with _Assignable as its objects.

    llama.cpp allows such assignments, so templates made for it have them (MiroThinker).
    """
    if isinstance(value, dict):
        return _Assignable({key: assignable(member) for key, member in value.items()})
    return [assignable(item) for item in value] if isinstance(value, list) else value


class _MaskedText(str):
    """A text with masks, which stay as they are if a template writes its list or object.

    Jinja writes these with repr(), which would write the escape sequence of a mask.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the text in quotes."""
        return _ESCAPED_MASK.sub(
            lambda found: chr(int(found[1], 16)) if found[1] else found[0], super().__repr__()
        )


def with_masks(value: Any) -> Any:
    """Return a copy of a JSON value; repr() does not change its masks (tokenizer/masks.py).

    Raises RecursionError if the value nests too deeply.
    """
    if isinstance(value, str):
        return _MaskedText(value) if _MASK.search(value) else value
    if isinstance(value, dict):
        return {with_masks(key): with_masks(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_masks(each) for each in value]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's tojson, as in the training data of models."""
    text = json.dumps(
        list(value) if isinstance(value, Iterator) else value,  # such as a result of the filter map
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    # Masks (tokenizer/masks.py) stand for ASCII texts and stay as they are.
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message)[:MAX_MESSAGE_CHARS])


def _strftime_now(form: Any) -> str:
    return datetime.now().strftime(str(form))  # local time, as in transformers


MAX_ERROR_CHARS = 500
# Bytes of all masks in UTF-8, and in the JSON that `packed` makes; others may have them too.
_MASKS = re.compile(rb"\xf4|\\udb")


def main() -> int:
    """Fork a process for each connection that arrives, until the server has ended."""
    return serve_forks(
        "cpuserve-templates",
        _serve,
        # imports modules of Jinja
        lambda: ChatEnvironment().from_string("{{ [x] | tojson }}").render(x=1),
        lambda: fault("template_process.accept", 1),
        lambda: fault("template_process.fork"),
    )


def _serve(sock: socket.socket) -> None:
    """Do the jobs of one connection in this fork."""
    worker = _Worker()
    send(sock, READY if worker.address_space else UNLIMITED)
    while (body := receive(sock)) is not None:
        fault("template_fork.receive")
        kind, text = worker.do(body)
        fault("template_fork.send")
        send(sock, kind, text)


class _Worker:
    """The state of a fork: its compiled templates, and its initial address space in bytes."""

    def __init__(self) -> None:
        self._templates: dict[bytes, Template] = {}
        self.address_space = address_space()

    def do(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the kind and the text of the reply to a job."""
        job = msgspec.msgpack.decode(body, type=RenderJob)
        del body
        if self.address_space:
            limit_memory(self.address_space + job.memory_bytes)
        limit_time(job.cpu_s, job.wall_s)
        try:
            return self._render(job)
        except MemoryError:
            return STOPPED, b"it needs more than %d MB of memory" % (job.memory_bytes >> 20)
        except RecursionError:
            return STOPPED, b"it nests too deeply"
        except Exception as error:  # any error of a template must only fail its request
            return REFUSED, str(error)[:MAX_ERROR_CHARS].encode("utf-8", "replace")
        finally:
            limit_time(0, 0)

    def _render(self, job: RenderJob) -> tuple[bytes, bytes]:
        if job.source is not None:
            source = job.source.decode("utf-8", "surrogatepass")
            self._templates[job.template] = ChatEnvironment().from_string(source)
        if job.variables is None:
            return RENDERED, b""
        template = self._templates[job.template]
        try:
            text = template.render(_variables(job.variables))
        except TemplateRuntimeError as error:
            if NO_NAMESPACE not in str(error):
                raise
            text = template.render(assignable(_variables(job.variables)))
        if len(text) > job.max_bytes:
            return STOPPED, b"it writes %d characters; at most %d are allowed here" % (
                *(len(text), job.max_bytes),
            )
        return RENDERED, text.encode("utf-8", "surrogatepass")


def _variables(data: bytes) -> dict[str, Any]:
    found = unpacked(data)
    if _MASKS.search(data) is not None:
        found = with_masks(found)
    return found


if __name__ == "__main__":
    sys.exit(main())
