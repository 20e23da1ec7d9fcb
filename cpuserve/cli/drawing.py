"""Draw bars, distributions and tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from rich.console import Console, RenderableType

_WIDTH = 10  # the width of a bar in characters
_BUCKETS = 24  # the width of a distribution in characters, one per bucket
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = ".:-=+*%#"
_GAP = 2  # spaces between two columns
_ENDLESS = 1000  # columns of a file


def console_of() -> Console:
    """Return a console for standard output; a pipe or a file has lines of any length."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_ENDLESS)


def say_drawn(text: Callable[[], str], view: Callable[[Console], RenderableType]) -> None:
    """Print a view on a terminal; print the text if standard output is no terminal."""
    console = console_of()
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


def fitting_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str],
    styles: Sequence[str] = (),
) -> RenderableType:
    """Return a table without lines, or lines with the head of each cell if it is too wide.

    left: the columns that are aligned to the left. styles: of the rows, if they have any.
    """
    from rich.cells import cell_len
    from rich.table import Table

    columns = zip(heads, *rows, strict=True)
    width = sum(_GAP + max(map(cell_len, column)) for column in columns) - _GAP
    if width > console.width:
        return _listed(console, heads, rows, styles)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    for index, row in enumerate(rows):
        table.add_row(*row, style=styles[index] if styles else "")
    return table


def _listed(
    console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]
) -> RenderableType:
    """Return the cells of each row with their heads, in lines that break between cells."""
    from rich.cells import cell_len
    from rich.text import Text

    shown = Text()
    for index, row in enumerate(rows):
        length = 0
        for head, cell in zip(heads, row, strict=True):
            if not cell:
                continue
            size = cell_len(f"{head} {cell}")
            if length:
                breaks = length + _GAP + size > console.width
                shown.append("\n" + " " * _GAP if breaks else " " * _GAP)
                length = 0 if breaks else length
            shown.append(head, "bold").append(f" {cell}", styles[index] if styles else "")
            length += _GAP + size
        shown.append("\n" if index + 1 < len(rows) else "")
    return shown
