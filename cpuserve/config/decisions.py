"""The table of decisions: setting, requested value, its source, resulting value and reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from cpuserve.config.engine import Decision
from cpuserve.config.options import EngineOptions
from cpuserve.config.server import FIELDS, ServerOptions

T = TypeVar("T")


class Ledger:
    """Collects the decisions that a platform makes while it resolves the settings."""

    def __init__(self, options: EngineOptions, sources: Mapping[str, str]) -> None:
        self._options = options
        self._sources = sources
        self.decisions: list[Decision] = []

    def asked(self, *names: str) -> str:
        """Return source and value of the first of `names` that is set: "env CPUSERVE_ISA=avx2"."""
        name = next((n for n in names if getattr(self._options, n, None) is not None), names[0])
        source = self._sources.get(name, name)
        return f"{source}={getattr(self._options, name, None)}"

    def decide(self, name: str, got: T, why: str) -> T:
        """Record that setting `name` has the value `got` for the reason `why`; return `got`."""
        asked = getattr(self._options, name, None)
        source = self._sources.get(name, "default" if asked is None else "argument")
        self.decisions.append(Decision(name, asked, source, got, why))
        return got


def server_decisions(server: ServerOptions, sources: Mapping[str, str]) -> list[Decision]:
    """Return a Decision for each front-end option: its value as set, but secrets are hidden."""
    found = []
    for field in FIELDS:
        if field.name not in sources:
            found.append(Decision(field.name, None, "default", field.default, "the default"))
            continue
        shown = "(set)" if field.secret else getattr(server, field.name)
        found.append(Decision(field.name, shown, sources[field.name], shown, "as asked"))
    return found


def render_table(decisions: Sequence[Decision]) -> str:
    """Return a text table for `cpuserve config`, with one decision per line."""
    head = ("setting", "asked", "source", "got", "why")
    rows = [(d.field, show(d.asked), d.source, show(d.got), d.why) for d in decisions]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(4)]
    lines = [_line(head, widths), _line(tuple("-" * w for w in (*widths, 3)), widths)]
    lines += [_line(row, widths) for row in rows]
    return "\n".join(lines)


def render_pairs(decisions: Sequence[Decision]) -> list[tuple[str, str]]:
    """Return a pair for each decision, for narrow terminals: the setting, and all about it."""
    pairs = []
    for d in decisions:
        asked = "" if d.asked is None else f"={show(d.asked)}"
        pairs.append((d.field, f"{show(d.got)} ({d.source}{asked}): {d.why}"))
    return pairs


def render_json(decisions: Sequence[Decision]) -> str:
    """Return the decisions as a JSON list of objects."""
    rows = [
        {"field": d.field, "asked": d.asked, "source": d.source, "got": d.got, "why": d.why}
        for d in decisions
    ]
    return json.dumps(rows, indent=2)


def show(value: object) -> str:
    """Return a value as text for people; None is shown as a dash."""
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
