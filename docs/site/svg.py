"""Pieces of drawings in SVG, in colours that are readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# Light and dark values of each colour. An SVG in an <img> follows the system's scheme.
COLOURS = {
    "paper": ("#ffffff", "#12171d"),
    "ink": ("#1f2933", "#e6ebf0"),
    "soft": ("#52606d", "#9fb0c0"),
    "line": ("#9aa5b1", "#5b6b7b"),
    "box": ("#eef2f6", "#1f2831"),
    "blue": ("#9ec5fe", "#1d4f91"),
    "green": ("#a3e0b8", "#1c6b3a"),
    "amber": ("#ffd98a", "#7a5200"),
    "red": ("#f5b5b5", "#7d2b2b"),
}
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def style() -> str:
    """Return the rules of all colours: class `f-NAME` fills, and `s-NAME` strokes."""
    rules = [f"text {{ font-family: {FONT}; font-size: 14px }}", ".mono { font-family: monospace }"]
    for scheme in (0, 1):
        of = [
            f".f-{name} {{ fill: {pair[scheme]} }} .s-{name} {{ stroke: {pair[scheme]} }}"
            for name, pair in COLOURS.items()
        ]
        rules += of if scheme == 0 else ["@media (prefers-color-scheme: dark) {", *of, "}"]
    return "<style>" + "\n".join(rules) + "</style>"


def text(
    x: float, y: float, words: str, *, colour: str = "ink", anchor: str = "start", size: int = 14
) -> str:
    """Return a line of text; y is its base line. anchor: start, middle or end."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="font-size:{size}px"'
    return f'<text {place} class="f-{colour}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, *, colour: str = "box") -> str:
    """Return a rectangle with round corners."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="6" class="f-{colour} s-line"/>'


def labelled(
    x: float, y: float, width: float, height: float, lines: Iterable[str], *, colour: str = "box"
) -> str:
    """Return a rectangle with lines of text in its middle; the first line is the title."""
    words = [*lines]
    top = y + height / 2 - (len(words) - 1) * 9 + 5
    parts = [
        text(x + width / 2, top + 18 * i, line, anchor="middle", size=14 if i == 0 else 12)
        for i, line in enumerate(words)
    ]
    return "\n".join([box(x, y, width, height, colour=colour), *parts])


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an arrow: a line with a head at its end."""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} class="s-line" stroke-width="1.5" marker-end="url(#head)"/>'


def drawing(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a whole SVG with a title for screen readers."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" class="f-line"/></marker></defs>'
    )
    paper = f'<rect width="{width}" height="{height}" rx="8" class="f-paper"/>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    lines = [opening, f"<title>{escape(title)}</title>", style(), head, paper, *parts, "</svg>"]
    return "\n".join(lines) + "\n"
