"""Draws the chart of the README from the table of docs/performance.md.

`python -m docs.site.chart docs/images/peers.svg` writes it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docs.site.svg import box, drawing, text

PAGE = Path(__file__).parents[1] / "performance.md"
HEADING = "## Compared with other servers"
# Rows of the chart: (model, name of the compared server in the table of the page, label).
ROWS = (
    ("0.5B shapes", "vLLM 0.32 CPU, bf16", "vLLM 0.32, 0.5B bf16"),
    ("1B shapes", "llama.cpp, Q4_0", "llama.cpp, 1B Q4_0"),
    ("1B shapes", "OpenVINO, Q8_0", "OpenVINO, 1B Q8_0"),
)
UNIT = 110  # pixels for a factor of 1


def factors(page: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return {(model, other server): {column: factor}} of the table."""
    table = page.partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found: dict[tuple[str, str], dict[str, float]] = {}
    model = ""
    for first, other, *values in body:
        model = first or model
        numbers = {
            name: re.match(r"([\d.]+) x", value)
            for name, value in zip(head[2:], values, strict=True)
        }
        found[model, other] = {name: float(m[1]) for name, m in numbers.items() if m}
    return found


def chart() -> str:
    """Return the SVG: bars of the factors, and a line at 1, the rate of the other server."""
    of = factors(PAGE.read_text(encoding="utf-8"))
    columns = [*of[ROWS[0][0], ROWS[0][1]]]
    colours = ("blue", "amber", "green", "red")
    parts = [text(16, 30, "Rate of cpuserve divided by the rate of the other server")]
    y = 50
    for model, other, label in ROWS:
        parts.append(text(16, y + 18, label))
        for column, factor in of[model, other].items():
            name = column.split(" of ")[0]
            colour = colours[columns.index(column)]
            parts += [
                box(210, y, factor * UNIT, 20, colour=colour),
                text(218 + factor * UNIT, y + 15, f"{factor:g} x, {name}", size=13),
            ]
            y += 24
        y += 14
    line = f'<line x1="{210 + UNIT}" y1="44" x2="{210 + UNIT}" y2="{y - 10}"'
    parts.append(f'{line} class="s-ink" stroke-dasharray="4 4"/>')
    parts.append(text(210 + UNIT, y + 6, "1 x: the other server", anchor="middle", size=12))
    return drawing(720, y + 20, "cpuserve compared with vLLM, llama.cpp and OpenVINO", parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(chart(), encoding="utf-8")
