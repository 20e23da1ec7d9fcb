"""Parses and formats sizes, counts and CPU lists.

Every ValueError says what is wrong and shows examples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.base.errors import brief
from cpuserve.base.ids import CpuId, NodeId

GIB = 1 << 30
UNIT_BYTES = {"b": 1} | {
    f"{letter}{end}": 1024**power
    for power, letter in enumerate("kmg", 1)
    for end in ("", "b", "ib")
}
SIZE_EXAMPLES = "give bytes (4194304) or a unit (4MiB, 1.5GiB)"
SPACE_EXAMPLES = "give GiB (4 or 0.5), a unit (512MiB), a share of memory (30%), or 0 for automatic"
BIND_EXAMPLES = "give auto, nobind, or CPUs such as 0-31, 0,2,4 or 0-62:2"
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
# Go writes the micro sign, and reads the Greek letter as well.
_UNIT_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "\N{MICRO SIGN}s": 1e-6,
    "\N{GREEK SMALL LETTER MU}s": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
# The longest duration in seconds, because a timer cannot count much longer.
LONGEST_S = 10.0 * 365 * 24 * 3600
MAX_CPU = 1 << 16  # far above the NR_CPUS of any kernel, so that a typo cannot create a huge list


@dataclass(frozen=True, slots=True)
class Space:
    """An amount of memory: `bytes`, or `percent` of the memory; both None = automatic."""

    bytes: int | None = None
    percent: float | None = None

    @property
    def automatic(self) -> bool:
        """Whether cpuserve chooses the size."""
        return self.bytes is None and self.percent is None


def parse_size(text: str, plain: int = 1) -> int:
    """Return the bytes of "512MiB", "1.5G", "64kb" or "4"; units are powers of 1,024.

    plain: how many bytes a number without a unit counts for: 1, or GIB.
    """
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", text.strip().lower())
    if match is None or (match[2] and match[2] not in UNIT_BYTES):
        raise ValueError(SIZE_EXAMPLES)
    unit = UNIT_BYTES.get(match[2], plain)
    size = float(match[1]) * unit
    if not math.isfinite(size) or (unit == 1 and "." in match[1]):
        raise ValueError(SIZE_EXAMPLES)
    return int(match[1]) * unit if match[1].isdecimal() else int(size)


def parse_space(text: str) -> Space:
    """Parse "4" (GiB), "0.25", "512MiB", "30%" or "0" (automatic)."""
    lowered = text.strip().lower()
    if lowered == "auto":
        return Space()
    share = re.fullmatch(rf"({_NUMBER})\s*%", lowered)
    if share is None:
        try:
            size = parse_size(lowered, GIB)
        except ValueError:
            raise ValueError(SPACE_EXAMPLES) from None
        return Space(bytes=size or None)
    percent = float(share[1])
    if percent > 100:
        msg = "a share of memory is at most 100%"
        raise ValueError(msg)
    return Space(percent=percent or None)


def parse_count(text: str) -> int:
    """Parse "8192", "8k" (8,000) or "8K" (8,192); m and M, g and G differ in the same way."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    scale = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": GIB}
    if match is None or ("." in match[1] and not match[2]):
        msg = "must be a whole number"
        raise ValueError(msg)
    return int(float(match[1]) * scale[match[2]]) if match[2] else int(match[1])


def parse_duration(value: object) -> float:
    """Return the seconds of "5m", "1h30m", "500ms", "90" or a number; inf if it is negative."""
    text = brief(value, 65).strip().lower()
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    seconds = math.nan
    if isinstance(value, bool) or len(text) > 64:
        pass
    elif re.fullmatch(_NUMBER, rest):
        seconds = float(rest)
    elif re.fullmatch(rf"({_NUMBER}({'|'.join(_UNIT_S)}))+", rest):
        parts = re.findall(rf"({_NUMBER})({'|'.join(_UNIT_S)})", rest)
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    if math.isnan(seconds):
        msg = "must be seconds or a time such as 5m, 1h30m or 500ms; 0 = at once, -1 = never"
        raise ValueError(msg)
    return math.inf if sign < 0 and seconds else min(seconds, LONGEST_S)


def parse_cpu_list(text: str) -> list[CpuId]:
    """Parse "0-31", "0,2,4-6" or "0-62:2" to CPU numbers, in the given order."""
    cpus: list[CpuId] = []
    for part in text.split(","):
        cpus.extend(_cpu_range(part.strip()))
    twice = sorted({c for c in cpus if cpus.count(c) > 1}) if len(set(cpus)) < len(cpus) else []
    if twice:
        msg = f"CPU {format_cpus(twice)} is listed twice; {BIND_EXAMPLES}"
        raise ValueError(msg)
    return cpus


def _cpu_range(part: str) -> list[CpuId]:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", part)
    if match is None:
        msg = f"{part!r} is not a CPU or a range; {BIND_EXAMPLES}"
        raise ValueError(msg)
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    step = int(match[3]) if match[3] else 1
    if last < first or step < 1 or last >= MAX_CPU:
        msg = f"{part!r} is an empty or impossible range; {BIND_EXAMPLES}"
        raise ValueError(msg)
    return [CpuId(c) for c in range(first, last + 1, step)]


def parse_bind(text: str) -> str | list[list[CpuId]]:
    """Parse "auto", "nobind", or one CPU list per rank, separated by "|"."""
    word = text.strip().lower()
    if word in ("auto", "nobind"):
        return word
    return [parse_cpu_list(rank) for rank in word.split("|")]


def parse_nodes(text: str) -> list[NodeId]:
    """Parse "0,1" or "2-3" to NUMA nodes, in the given order."""
    try:
        return [NodeId(number) for number in parse_cpu_list(text)]
    except ValueError:
        msg = "give NUMA nodes such as 0, 0,1 or 2-3, each once"
        raise ValueError(msg) from None


def base_url(url: str) -> str:
    """Return the URL of a server without a slash and without the "/v1" of its API at the end."""
    return url.rstrip("/").removesuffix("/v1")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns; the first row has the heads."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of a Markdown table; all columns but the first are numbers."""
    head, *others = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    rule = [":--", *("--:" for _ in head[1:])]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *others)]


def format_cpus(cpus: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as "0-2,5", in the given order."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_bytes(count: float) -> str:
    """Format 1610612736 as "1.50 GiB"."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{int(count)} B"


def format_gib(count: int) -> str:
    """Format bytes as GiB, rounded down, as CPUSERVE_KVCACHE_SPACE accepts it."""
    return _plain(count * 100 // GIB, 2)


def format_gib_up(count: int) -> str:
    """Format bytes as GiB, rounded up."""
    return _plain(-(-count * 1000 // GIB), 3)


def _plain(scaled: int, digits: int) -> str:
    """Format scaled / 10^digits without an exponent or trailing zeros."""
    return f"{scaled / 10**digits:.{digits}f}".rstrip("0").rstrip(".")
