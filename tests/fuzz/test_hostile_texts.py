"""No text of a client can start a line, or write to a terminal, in an error or in the log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from cpuserve.base.errors import printable
from cpuserve.base.log import OneLine
from tests.fuzz.dialects import JSON, HttpBench, Request
from tests.fuzz.operations import Operation, by_target, seeds

FORGED = "2026-01-01 00:00:00 ERROR forged"
LONG = 10_000  # bytes of bodies that have no other places than shorter ones
HOSTILE = f"a\r\n{FORGED}\x1b[2J\x85\u2028\u202e\x00"


def changed(body: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of a body with another text in one place, or another key, and which it is."""
    if isinstance(body, str):
        yield place, HOSTILE
    elif isinstance(body, dict):
        yield f"{place}.*", {**body, HOSTILE: HOSTILE}
        for name, value in body.items():
            for where, each in changed(value, f"{place}.{name}"):
                yield where, {**body, name: each}
    elif isinstance(body, list):
        for index, value in enumerate(body[:3]):
            for where, each in changed(value, f"{place}[]"):
                yield where, [*body[:index], each, *body[index + 1 :]]


def cases(operation: Operation) -> Iterator[Request]:
    """Yield requests of an operation: the text in the path, or in each place that a body has."""
    made: Request = {
        "method": operation.method,
        "path": re.sub(r"\{[^}]*\}", quote(HOSTILE, safe=""), operation.path),
        "media": JSON,
        "body": "{}",
        "says": "hi",
        "pooling": operation.pooling,
    }
    yield made
    bodies = seeds().get(operation.path, ()) if operation.method == "POST" else ()
    found: dict[str, Any] = {}
    for body in bodies:
        if len(body) < LONG:
            for place, each in changed(json.loads(body)):
                found.setdefault(place, each)
    for body in found.values():
        another = made.copy()
        another["body"] = json.dumps(body)
        yield another


class Lines(logging.Handler):
    """Keeps the lines that the log would have."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(OneLine())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.mark.deep
@pytest.mark.parametrize("target", [name for name in by_target() if name.startswith("http-")])
def test_errors_and_log_lines_show_hostile_texts_escaped(target: str) -> None:
    bench, log = HttpBench(by_target()[target]), Lines()
    root = logging.getLogger("cpuserve")
    root.addHandler(log)
    outcomes = []
    try:
        for operation in by_target()[target]:
            for case in cases(operation):
                outcomes.append(bench.outcome(case))  # checks the message of an error
    finally:
        root.removeHandler(log)
        bench.close()
    assert outcomes
    for line in log.lines:
        assert line == printable(line)
        assert not re.search(rf"^{FORGED}", line)
