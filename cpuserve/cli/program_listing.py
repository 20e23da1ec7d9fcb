"""Show a Program as text or JSON: its operations with the shapes of their values and weights."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cpuserve.program.ops import Op, Rope
from cpuserve.program.program import Program

Shapes = dict[str, tuple[int, ...]]

MOST_WEIGHTS = 4  # a line shows at most this many weight names
SHAPES = ("width", "vocab", "rows", "in_features", "features")  # not listed: shapes show these


def render(program: Program) -> str:
    """Return one line per operation, and a last line with totals."""
    shapes = {need.name: need.shape for need in program.weights}
    lines = [_line(i, op, program, shapes) for i, op in enumerate(program.ops)]
    parameters = sum(_elements(shape) for shape in shapes.values())
    lines.append(
        f"{len(program.ops)} operations, {len(program.weights)} tensors, "
        f"{parameters:,} parameters, {len(program.cache)} KV layers; T = tokens of a step"
    )
    return "\n".join(lines)


def as_records(program: Program) -> list[dict[str, Any]]:
    """Return the operations as dicts: values with widths, weights with shapes, and parameters."""
    shapes = {need.name: need.shape for need in program.weights}
    return [
        {
            "op": op_name(op),
            "values": {f: _value(program, value) for f, value in _values(op)},
            "weights": {w: list(shapes.get(w, ())) for w in _weights(op, shapes)},
            "parameters": dict(_parameters(op, shapes)),
        }
        for op in program.ops
    ]


def op_name(op: Op) -> str:
    """Return the snake-case name of an operation, such as rope_store_kv for RopeStoreKV."""
    name = type(op).__name__.removesuffix("Op")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _line(index: int, op: Op, program: Program, shapes: Shapes) -> str:
    reads = [_value(program, value) for f, value in _values(op) if f != "out"]
    writes = f" -> {_value(program, op.out)}" if hasattr(op, "out") else ""
    names = _weights(op, shapes)
    weights = " ".join(f"{w}{list(shapes.get(w, ()))}" for w in names[:MOST_WEIGHTS])
    if len(names) > MOST_WEIGHTS:  # for example, the matrices of 128 experts
        weights += f" and {len(names) - MOST_WEIGHTS} more"
    parameters = " ".join(f"{k}={v}" for k, v in _parameters(op, shapes))
    parts = [f"{index:4d} {op_name(op):<14} {', '.join(reads)}{writes}", weights, parameters]
    return "  ".join(p for p in parts if p)


def _value(program: Program, value_id: int) -> str:
    value = next(v for v in program.values if v.id == value_id)
    rows = "T" if value.copies == 1 else f"{value.copies} T"
    return f"{value.name}[{rows}, {value.width}]"


def _values(op: Op) -> list[tuple[str, int]]:
    """Return (field name, value id) for each field of an operation that refers to a value."""
    fields = {name for name, of in type(op).__annotations__.items() if of.startswith("ValueId")}
    held = [(name, getattr(op, name)) for name in op.__struct_fields__ if name in fields]
    return [(name, value) for name, value in held if value is not None]


def _weights(op: Op, shapes: Shapes) -> list[str]:
    return [name for field in op.__struct_fields__ for name in _named(getattr(op, field), shapes)]


def _named(held: Any, shapes: Shapes) -> list[str]:
    """Return each weight name in a field of an operation; they may be in nested tuples."""
    if isinstance(held, tuple):
        return [name for each in held for name in _named(each, shapes)]
    return [held] if isinstance(held, str) and held in shapes else []


def _is_empty(held: Any) -> bool:
    """Return whether a field contains nothing: None, or nested tuples of None."""
    return held is None or (isinstance(held, tuple) and all(map(_is_empty, held)))


def _parameters(op: Op, shapes: Shapes) -> list[tuple[str, Any]]:
    """Return the fields besides values, weights and sizes that differ from their defaults."""
    values = dict(_values(op))
    found: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(op):
        held = getattr(op, field.name)
        if field.name in values or field.name in SHAPES or _is_empty(held) or _named(held, shapes):
            continue
        if field.default is not msgspec.NODEFAULT and held == field.default:
            continue
        found.append((field.name, _short(held)))
    return found


def _short(held: Any) -> Any:
    if isinstance(held, Rope):
        return f"rotary {held.rotary}"
    if isinstance(held, msgspec.Struct):
        return msgspec.structs.asdict(held)
    return float(f"{held:.6g}") if isinstance(held, float) else held


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
