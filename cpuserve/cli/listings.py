"""The commands `program` and `models`, and the lists that they show.

A Program is text or JSON: its operations with the shapes of their values and weights.
docs/models.md has the tables of families and formats, from the registries of both.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import msgspec

from cpuserve.cli import flags
from cpuserve.cli.terminal import ProgressBars, say
from cpuserve.prepare import find, model_facts
from cpuserve.program.ops import Op, Rope
from cpuserve.program.program import Program

Shapes = dict[str, tuple[int, ...]]

MOST_WEIGHTS = 4  # a line shows at most this many weights
SHAPES = ("width", "vocab", "rows", "in_features", "features")  # not listed: shapes show these


def program(args: argparse.Namespace) -> int:
    """Run `cpuserve program`: print a model's operations, from its config without weights."""
    from cpuserve.models import build_program

    options = flags.asked(args).options
    progress = ProgressBars()
    try:
        spec, _ = model_facts(options, find(options, progress))
    finally:
        progress.close()
    built = build_program(spec)
    say(json.dumps(as_records(built), indent=1) if args.json else render(built))
    return 0


def models(args: argparse.Namespace) -> int:
    """Run `cpuserve models`: list the models here, the built-in ones and the architectures."""
    from cpuserve.cli.disk_models import table_of
    from cpuserve.loader.hub import list_builtin
    from cpuserve.loader.on_disk import stored_models
    from cpuserve.models import MODELS

    if args.supported:
        say(page())
        say(
            "\n".join(
                ["", "Kernels that each ISA level of this CPU takes:", "", *markdown(levels())]
            )
        )
        return 0
    if stored := stored_models():
        say("On this machine (cpuserve serve NAME, cpuserve show NAME, cpuserve rm NAME):")
        for line in table_of(stored):
            say(f"  {line}")
    say("Built-in models (cpuserve serve NAME):")
    for model in list_builtin():
        say(f"  {model.name:<16} {model.description}")
    say("Architectures (safetensors directories, Hugging Face ids, GGUF files):")
    for name in MODELS.names():
        say(f"  {name}")
    return 0


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
    rows = rows if value.fold == 1 else f"T / {value.fold}"
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


ROWS = {
    "bf16": "bf16",
    "f32": "fp32",
    "q8g32": "int8, one scale for 32 values",
    "q8g128": "int8, one scale for 128 values",
    "q8g256": "int8, one scale for 256 values",
    "q8row": "int8, one scale for a row",
}


def families() -> list[list[str]]:
    """Return a row per architecture: its name, a description, and its names in GGUF files."""
    from cpuserve.loader.gguf.archs.table import ARCHS
    from cpuserve.models import FAMILIES, MODELS

    rows = [["architecture", "what sets it apart", "in GGUF files"]]
    for name in MODELS.names():
        archs = [arch for arch, found in ARCHS.items() if found.family == name]
        if name in FAMILIES.texts:
            archs += FAMILIES.texts[name].shared_gguf.get(name, "").split()
        rows.append([name, _sentence(MODELS.get(name)), ", ".join(archs)])
    rows += [[name, _whole(name), ""] for name in sorted(FAMILIES.wholes)]
    what = "labels texts, or ranks them if it has one label"
    rows += [
        [name, f"{what}: {part} and its head", ""]
        for name, part in sorted(FAMILIES.rerankers.items())
    ]
    for what, heads in (
        ("labels texts", FAMILIES.classifiers),
        ("labels each token", FAMILIES.taggers),
        ("computes sparse embeddings (SPLADE)", FAMILIES.masked),
    ):
        rows += [[name, f"{what}: {part} and its head", ""] for name, part in sorted(heads.items())]
    return rows


def _whole(name: str) -> str:
    """Return which parts of a model for images and text run."""
    from cpuserve.models.text_parts import text_architectures
    from cpuserve.models.towers import TOWERS

    *others, last = text_architectures(name)
    parts = f"{', '.join(others)} or {last}" if others else last
    if name in TOWERS:
        return f"reads pictures; its part for text is {parts}"
    return f"only its part for text runs, as {parts}"


def formats() -> list[list[str]]:
    """Return a row per format of safetensors files: its quant_method and a description."""
    from cpuserve.quant.registry import BUILTIN

    rows = [["quant_method", "what is read"]]
    for name, place in BUILTIN.items():
        if name != "gguf":
            shown = "none" if name == "dense" else name
            rows.append([shown, _sentence(import_module(place.partition(":")[0]))])
    return rows


def types() -> list[list[str]]:
    """Return a row per GGUF type: name, bits, weight kind, and the format of activations."""
    from cpuserve.loader.gguf.file import TENSOR_TYPES
    from cpuserve.program.row_formats import ACT_FORMAT
    from cpuserve.quant.gguf.blocks import QUANTIZED
    from cpuserve.quant.gguf.converted import CONVERTED
    from cpuserve.quant.gguf.sizes import packed_bytes
    from cpuserve.quant.stored import QUANTIZED_KINDS

    blocks = {name: (weights, size) for name, weights, size in TENSOR_TYPES.values()}

    def bits(dtype: str) -> list[str]:
        """The bits of a weight in the file and in memory."""
        weights, size = blocks[dtype]
        sizes = size, packed_bytes(dtype, 2 * size) / 2  # some types are packed in pairs of blocks
        return [f"{8 * nbytes / weights:.4g}" for nbytes in sizes]

    rows = [["GGUF type", "bits in the file", "bits in memory", "weight kind", "activations"]]
    for dtype, source in QUANTIZED.items():
        kind = QUANTIZED_KINDS[source]
        kept = f"codes kept, in weight kind {kind}"
        rows.append([dtype, *bits(dtype), kept, ROWS[ACT_FORMAT[kind]]])
    for dtype, how in CONVERTED.items():
        rows.append([dtype, *bits(dtype), f"converted to {how.to} while loading", ""])
    return rows


def levels() -> list[list[str]]:
    """Return a row per kernel: its name, and for each ISA level the level that provides it."""
    from cpuserve.platforms.cpu import CpuPlatform

    platform = CpuPlatform()
    names = platform.host().isa_levels
    tables = [platform.kernels(level) for level in names]
    kernels = tables[0] if tables else {}
    return [["kernel", *names]] + [[k, *(table[k] for table in tables)] for k in kernels]


def page() -> str:
    """Return Markdown with the tables that are the same on every machine."""
    return "\n\n".join("\n".join(markdown(rows)) for rows in (families(), formats(), types()))


def _sentence(described: object) -> str:
    """Return the first paragraph of a docstring, without the text from "Source:" on."""
    paragraph = (inspect.getdoc(described) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r" ?Source:.*", "", paragraph)


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is the header."""
    head, *body = rows
    for cells in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(cells)} |"
