"""The table of what was decided: field, what was asked, by whom, what it got, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from cpuserve.config.engine import Decision, EngineOptions

T = TypeVar("T")


class Ledger:
    """Collects decisions while a platform resolves; `decide` records and returns the value."""

    def __init__(self, options: EngineOptions, sources: Mapping[str, str]) -> None:
        self._options = options
        self._sources = sources
        self.decisions: list[Decision] = []

    def asked(self, *names: str) -> str:
        """ "env CPUSERVE_ISA=avx2": how an error names what was asked for, the first that was."""
        name = next((n for n in names if getattr(self._options, n, None) is not None), names[0])
        source = self._sources.get(name, name)
        return f"{source}={getattr(self._options, name, None)}"

    def decide(self, name: str, got: T, why: str) -> T:
        """Record that `name` became `got`, and return it."""
        asked = getattr(self._options, name, None)
        source = self._sources.get(name, "default" if asked is None else "argument")
        self.decisions.append(Decision(name, asked, source, got, why))
        return got


def render_table(decisions: Sequence[Decision]) -> str:
    """A text table for `cpuserve config`, one decision a line."""
    head = ("setting", "asked", "source", "got", "why")
    rows = [(d.field, show(d.asked), d.source, show(d.got), d.why) for d in decisions]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(4)]
    lines = [_line(head, widths), _line(tuple("-" * w for w in (*widths, 3)), widths)]
    lines += [_line(row, widths) for row in rows]
    return "\n".join(lines)


def render_json(decisions: Sequence[Decision]) -> str:
    """The same as a JSON list of objects."""
    rows = [
        {"field": d.field, "asked": d.asked, "source": d.source, "got": d.got, "why": d.why}
        for d in decisions
    ]
    return json.dumps(rows, indent=2)


def show(value: object) -> str:
    """A value as a person reads it; nothing asked is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ",".join(str(v) for v in value) or "-"
    return str(value)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [c.ljust(w) for c, w in zip(cells, widths, strict=False)]
    return "  ".join([*padded, *cells[len(widths) :]]).rstrip()
