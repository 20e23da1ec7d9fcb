"""Draw bars, distributions and tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

_WIDTH = 10  # the width of a bar in characters
_BUCKETS = 24  # the width of a distribution in characters, one per bucket
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = ".:-=+*%#"


def say_drawn(text: Callable[[], str], view: Callable[[Console], RenderableType]) -> None:
    """Print a view on a terminal; print the text if standard output is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view(console))
    else:
        say(text())


def bar(console: Console, share: float) -> str:
    """Return a bar and a percentage for `share`; the bar is full at a share of 1."""
    full, empty = "#-" if console.options.ascii_only else "█░"
    filled = round(min(1.0, share) * _WIDTH)
    return f"{full * filled}{empty * (_WIDTH - filled)} {100 * share:3.0f} %"


def levels(console: Console, shares: Iterable[float]) -> str:
    """Return one character per share, from an empty one for 0 to a full one for 1."""
    marks = _ASCII_LEVELS if console.options.ascii_only else _LEVELS
    return "".join(marks[round(share * (len(marks) - 1))] for share in shares)


def distribution(console: Console, values: Sequence[float]) -> str:
    """Draw a histogram from the smallest to the largest value; a space is an empty bucket."""
    least, most = min(values), max(values)
    if most <= least:
        return levels(console, [1.0])
    counts = [0] * _BUCKETS
    for value in values:
        counts[min(_BUCKETS - 1, int((value - least) / (most - least) * _BUCKETS))] += 1
    drawn = levels(console, (count / max(counts) for count in counts))
    return "".join(mark if count else " " for mark, count in zip(drawn, counts, strict=True))


def plain_table(heads: Iterable[str], *, left: Iterable[str]) -> Table:
    """Return a table without lines; columns in `left` are aligned to the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    return table
