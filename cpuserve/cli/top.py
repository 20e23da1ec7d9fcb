"""`cpuserve top`: a live view of the activity of a running server."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.status.activity_body import Activity, ModelActivity, SequenceActivity
from cpuserve.base.errors import CpuserveError
from cpuserve.bench.http import LoadError
from cpuserve.cli.drawing import bar, console_of, fitting_table, levels
from cpuserve.cli.remote import asked, target_of
from cpuserve.config.values import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, RenderableType

    from cpuserve.bench.driver import Target
    from cpuserve.platforms.cpu_times import CpuTimes

_PATH = "/v1/activity"
_ROWS = 12  # the view shows at most this many requests
_BARS = 16  # with more CPUs than this, one character shows each CPU instead of a bar
_LEFT = ("abort", "error")


def top(args: argparse.Namespace) -> int:
    """Show requests, rates, KV cache and cores of a server until Ctrl-C, or once with --once.

    Raises:
        CpuserveError: the server refuses the request, or with --once does not respond.
    """
    target, console = target_of(args), console_of()
    with suppress(KeyboardInterrupt):
        if args.once:
            before = _activity(target)
            time.sleep(args.interval)
            console.print(view(console, target.url, before, _activity(target)))
        else:
            _watch(console, target, args.interval)
    return 0


def view(console: Console, url: str, before: Activity, now: Activity) -> RenderableType:
    """Return a view of the server at `url`; its rates are means between two reports."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(("cpuserve top", "bold"), f"  {url}")
    rows = [_models(console, before, now), _cores(console, before.cpus, now.cpus)]
    return Group(head, "", *rows, "", _requests(console, now))


def _watch(console: Console, target: Target, interval_s: float) -> None:
    """Show views of a server: on a terminal in place, elsewhere one after the other."""
    from rich.live import Live

    if not console.is_terminal:
        for shown in views(console, target, interval_s):
            console.print(shown)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for shown in views(console, target, interval_s):
            live.update(shown, refresh=True)


def views(console: Console, target: Target, interval_s: float) -> Iterator[RenderableType]:
    """Yield views of a server forever, even while the server does not run.

    Raises:
        CpuserveError: the server refuses the request.
    """
    before: Activity | None = None
    while True:
        try:
            now = _activity(target)
        except LoadError as error:
            before = None
            yield f"{error}\nwaiting for the server (Ctrl-C ends)"
        else:
            yield view(console, target.url, before or now, now)
            before = now
        time.sleep(interval_s)


def _activity(target: Target) -> Activity:
    """Return the activity report of the server; LoadError if the server does not respond."""
    body = asked(target, _PATH)
    try:
        return msgspec.json.decode(body, type=Activity)
    except msgspec.DecodeError as error:
        msg = f"{target.url}{_PATH} is no report of cpuserve: {error}"
        raise CpuserveError(msg) from None


def _models(console: Console, before: Activity, now: Activity) -> RenderableType:
    """Return a table with one row per loaded model."""
    heads = ("MODEL", "RUN", "WAIT", "KV CACHE", "PROMPT/s", "CACHED/s", "OUTPUT/s", "BANDWIDTH")
    rows = []
    earlier = {model.model: model for model in before.models}
    elapsed_s = now.time - before.time
    for model in now.models:
        old = earlier.get(model.model, model)
        counts = [
            (model.prompt_tokens, old.prompt_tokens),
            (model.cached_tokens, old.cached_tokens),
            (model.output_tokens, old.output_tokens),
        ]
        kv = f"{bar(console, model.kv_usage)} {format_bytes(model.kv_bytes)}"
        rates = [f"{_rate(to, since, elapsed_s):.0f}" for to, since in counts]
        used = _bandwidth(old, model, elapsed_s)
        rows.append((model.model, str(model.running), str(model.waiting), kv, *rates, used))
    return fitting_table(console, heads, rows, left=("MODEL", "KV CACHE", "BANDWIDTH"))


def _bandwidth(old: ModelActivity, model: ModelActivity, elapsed_s: float) -> str:
    """Return the rate at which steps read weights, and the measured memory bandwidth."""
    read = _rate(model.weight_bytes, old.weight_bytes, elapsed_s)
    roofline = model.roofline_bytes_per_s
    if roofline is None:
        return f"{read / 1e9:.1f} GB/s"
    return f"{read / 1e9:.1f} of {roofline / 1e9:.1f} GB/s"


def _cores(console: Console, before: Iterable[CpuTimes], now: list[CpuTimes]) -> RenderableType:
    """Return bars that show how busy each CPU is."""
    from rich.columns import Columns

    earlier = {times.cpu: times for times in before}
    shares = {each.cpu: _busy(earlier.get(each.cpu, each), each) for each in now}
    if len(shares) <= _BARS:
        bars = [f"CPU {cpu:<2} {bar(console, share)}" for cpu, share in shares.items()]
        return Columns(bars, padding=(0, 3))
    mean = sum(shares.values()) / len(shares)
    marks = levels(console, shares.values())
    return f"{marks} {len(shares)} CPUs, {100 * mean:.0f} % busy"


def _requests(console: Console, now: Activity) -> RenderableType:
    """Return a table of running and waiting sequences, followed by the most recently ended."""
    heads = ("REQUEST", "STATE", "PROMPT", "CACHED", "OUTPUT", "TOKENS/s", "SECONDS")
    rows, styles = [], []
    found = [each for model in now.models for each in model.sequences]
    found.sort(key=lambda each: (each.ended_s is not None, -each.arrived_s))
    for each in found[:_ROWS]:
        style = "" if each.ended_s is None else "red" if each.state in _LEFT else "dim"
        end_s = now.time if each.ended_s is None else each.ended_s
        counts = (each.prompt_tokens, each.cached_tokens, each.output_tokens)
        seconds = f"{end_s - each.arrived_s:.1f}"
        row = (str(each.number), each.state, *map(str, counts), _speed(each, end_s), seconds)
        rows.append(row)
        styles.append(style)
    return fitting_table(console, heads, rows, left=("STATE",), styles=styles)


def _speed(each: SequenceActivity, end_s: float) -> str:
    """Return the tokens per second of a sequence after its first token."""
    if each.first_s is None or each.output_tokens < 2 or end_s <= each.first_s:
        return ""
    return f"{(each.output_tokens - 1) / (end_s - each.first_s):.1f}"


def _busy(before: CpuTimes, now: CpuTimes) -> float:
    busy, idle = now.busy_s - before.busy_s, now.idle_s - before.idle_s
    return min(1.0, max(0.0, busy / (busy + idle))) if busy + idle > 0 else 0.0


def _rate(now: float, before: float, elapsed_s: float) -> float:
    """Return the growth of a counter per second; 0 if the server has restarted in between."""
    return max(0.0, (now - before) / elapsed_s) if elapsed_s > 0 else 0.0
