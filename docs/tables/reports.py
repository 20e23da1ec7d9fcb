"""The tables of the metrics in docs/metrics.md, and of the report in docs/doctor.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from cpuserve.api.status.router import AdapterMetrics, store_families, task_families
from cpuserve.base.waits import CAUSES
from cpuserve.cli.doctor import DoctorReport
from cpuserve.cli.listings import markdown
from cpuserve.engine.client import ReplicaStatus
from cpuserve.engine.ipc import Stats
from cpuserve.metrics.families import server_families
from cpuserve.metrics.figures import CpuSample
from cpuserve.metrics.http import HttpMetrics
from cpuserve.metrics.operating import OperatingFigures, operating_families
from cpuserve.metrics.processes import PageFigures, RoleFigures, page_families, process_families
from cpuserve.metrics.server import ServerMetrics


def metrics() -> str:
    """Return a Markdown table of the metrics of a server that has every kind of metric."""
    server = ServerMetrics(
        model_name="m",
        max_model_len=100,
        stats=Stats,
        cache={"block_size": 32},
        cpu=lambda: CpuSample(1, 1.0, 1.0, 1.0, 1.0, 1, 1.0, 1.0),
        replicas=lambda: [ReplicaStatus(serves=True, restarts=0, stats=Stats())],
        tiers=("disk",),
        drafts=True,
        media=True,
        experts=True,
    )
    server.on_cache_miss("new")  # this metric is listed only after a first cache miss
    adapters = AdapterMetrics(["a"], ())
    http = HttpMetrics()
    http.dropped_traces = int
    families = [
        *server_families(server),
        *adapters.collect(),
        *http.collect(),
        *process_families({"engine": RoleFigures()}),
        *page_families(PageFigures({"engine": 0}, {("engine", "0"): 0})),
        *task_families({}),
        *store_families({}),
        *operating_families(OperatingFigures("", certificate_end=0.0, audit=(True, 0))),
    ]
    rows = [["metric", "type", "meaning"]]
    for family in sorted(families, key=lambda family: family.name):
        suffix = "_total" if family.type == "counter" else ""
        rows.append([f"`{family.name}{suffix}`", family.type, family.documentation])
    return "\n".join(markdown(rows))


# What to do about a wait, if there is anything to do.
_REMEDIES = {
    "body": "fewer large bodies at a time",
    "model": "memory for all models of `--also-serve`, a longer `--keep-alive`",
    "grammar": "equal schemas in equal words: a compiled grammar is kept",
    "slots": "more `--max-num-seqs`, if the KV cache is not full",
    "blocks": "`--kv-cache-memory`, `--kv-cache-dtype int8`",
    "prompts": "a higher `--itl-target-ms`; equal beginnings of prompts",
    "media": "smaller pictures; pictures that were sent before are not encoded again",
    "experts": "more memory for experts (`--weights-on-disk`)",
}


def waits() -> str:
    """Return a Markdown table of the causes of a wait."""
    rows = [["cause", "what held the request back", "what helps"]]
    rows += [[f"`{cause}`", text, _REMEDIES.get(cause, "")] for cause, text in CAUSES.items()]
    return "\n".join(markdown(rows))


def report() -> str:
    """Return Markdown with a table of fields and types for each record of the doctor report."""
    return "\n\n".join(_record(record) for record in _records(DoctorReport, []))


def _records(record: type[Any], before: list[type[Any]]) -> list[type[Any]]:
    """Return `record` and the records that its fields contain, each once, in order of use."""
    before.append(record)
    for field in msgspec.structs.fields(record):
        for part in _structs(msgspec.inspect.type_info(field.type)):
            if part not in before:
                _records(part, before)
    return before


def _structs(info: object) -> Iterator[type[Any]]:
    if isinstance(info, msgspec.inspect.StructType):
        yield info.cls
        return
    parts: list[object] = [*getattr(info, "types", ()), *getattr(info, "item_types", ())]
    parts += [getattr(info, name, None) for name in ("item_type", "key_type", "value_type")]
    for part in filter(None, parts):
        yield from _structs(part)


def _record(record: type[Any]) -> str:
    rows = [["field", "type"]]
    for field in msgspec.structs.fields(record):
        shown = ", ".join(_shown(msgspec.inspect.type_info(field.type)))
        rows.append([f"`{field.name}`", shown])
    return "\n".join([f"## {record.__name__}", "", *_text(record), "", *markdown(rows)])


def _text(record: type[Any]) -> Iterator[str]:
    """Yield the lines of a record's docstring, with the notes on its fields as a list."""
    summary, *paragraphs = inspect.cleandoc(record.__doc__ or "").split("\n\n")
    yield summary
    for paragraph in paragraphs:
        yield ""
        lines = re.sub(r"\n +", " ", paragraph).split("\n")
        notes = all(re.match(r"[\w*, ]+: ", line) for line in lines)
        yield from (f"- {line}" for line in lines) if notes else [" ".join(lines)]


def _shown(info: Any) -> Iterable[str]:
    """Return the words for a type in JSON; the word for a record is a link to its table."""
    if isinstance(info, msgspec.inspect.StructType):
        name = info.cls.__name__
        return [f"[{name}](#{name.lower()})"]
    if isinstance(info, msgspec.inspect.UnionType):
        return [word for part in info.types for word in _shown(part)]
    if isinstance(info, msgspec.inspect.DictType):
        return [f"object of {' or '.join(_shown(info.value_type))}"]
    if isinstance(info, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        return [f"list of {' or '.join(_shown(info.item_type))}"]
    if isinstance(info, msgspec.inspect.TupleType):
        parts = [word for part in info.item_types for word in _shown(part)]
        return [f"list of {' and '.join(parts)}"]
    words = {"Str": "text", "Int": "integer", "Float": "number", "Bool": "boolean", "None": "null"}
    name = type(info).__name__.removesuffix("Type")
    return [words.get(name, re.sub("(?<!^)(?=[A-Z])", " ", name).lower())]
