"""Records the first minute with cpuserve, and draws it as an animated SVG for the README.

`python -m docs.site.recording record FILE.json` serves the default model with the command
`cpuserve`, and sends the request of the README. `python -m docs.site.recording draw FILE.json
FILE.svg` draws it. All lines are the output of these commands; waits of more than WAIT_S are cut.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ADDRESS = "http://127.0.0.1:8000"
CURL = (
    f"curl {ADDRESS}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
    '  -d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}]}\''
)
COLUMNS, LINE, WAIT_S, HOLD_S = 100, 20, 1.5, 6.0

Session = list[dict[str, Any]]  # {"command": TEXT, "s": SECONDS, "output": [[SECONDS, LINE], ...]}


def record() -> Session:
    """Run the commands, and return their lines with the seconds after the start of each."""
    with tempfile.TemporaryDirectory() as work:
        return _served(work)


def _served(work: str) -> Session:
    began = time.monotonic()
    server = subprocess.Popen(
        ["cpuserve", "serve"], cwd=work, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    output: list[tuple[float, str]] = []
    try:
        while not any("http://" in line for _, line in output):
            line = server.stdout.readline()
            if not line:
                raise SystemExit("\n".join(text for _, text in output))
            output.append((time.monotonic() - began, line.rstrip()))
        _wait_ready()
        served = {"command": "cpuserve serve", "s": output[-1][0], "output": output}
        began = time.monotonic()
        asked = subprocess.run(
            ["sh", "-c", CURL.replace("curl", "curl -s", 1)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        took = time.monotonic() - began
    finally:
        server.terminate()
        server.wait()
    return [served, {"command": CURL, "s": took, "output": [[took, asked.stdout.strip()]]}]


def _wait_ready() -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{ADDRESS}/health").close()
        except OSError:
            time.sleep(0.1)
        else:
            return


def draw(session: Session) -> str:
    """Return the SVG: lines appear at their times, and the film begins again."""
    home = str(Path.home())
    lines: list[tuple[float, str, bool]] = []  # (seconds, text, whether the user typed it)
    now = 0.5
    for part in session:
        for i, line in enumerate(part["command"].splitlines()):
            lines.append((now, ("$ " if i == 0 else "  ") + line, True))
        now, before = now + 1.0, 0.0
        for seconds, text in part["output"]:
            now += min(seconds - before, WAIT_S)
            before = seconds
            lines += [(now, piece, False) for piece in _pieces(text.replace(home, "~"))]
        if part["s"] > WAIT_S:
            lines.append((now, f"({part['s']:.0f} s)", False))
        now += 1.0
    return _film(lines, now + HOLD_S)


def _pieces(text: str) -> Sequence[str]:
    """Return the text as at most three lines of COLUMNS characters."""
    pieces = [text[i : i + COLUMNS] for i in range(0, max(len(text), 1), COLUMNS)]
    if len(pieces) > 3:
        pieces = [*pieces[:2], pieces[2][: COLUMNS - 2] + " …"]
    return pieces


def _film(lines: Sequence[tuple[float, str, bool]], length: float) -> str:
    width, height = COLUMNS * 8.5 + 32, len(lines) * LINE + 52
    rules = ["text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 14px; fill: "
             "#d7dee6; white-space: pre } .u { fill: #8fd19e }"]  # fmt: skip
    parts = []
    for i, (at, text, typed) in enumerate(lines):
        share = 100 * at / length
        rules.append(
            f"@keyframes k{i} {{ 0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% "
            f"{{ opacity: 1 }} }} .l{i} {{ animation: k{i} {length:.1f}s infinite }}"
        )
        name = f"l{i} u" if typed else f"l{i}"
        parts.append(f'<text x="16" y="{52 + LINE * i}" class="{name}">{escape(text)}</text>')
    rules.append("@media (prefers-reduced-motion: reduce) { text { animation: none !important } }")
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="18" r="5" fill="{colour}"/>'
        for i, colour in enumerate(("#ff6b60", "#ffc043", "#5fd068"))
    )
    title = "cpuserve serves a model, and responds to a request"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">',
        f"<title>{title}</title>", "<style>" + "\n".join(rules) + "</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="#12171d" stroke="#5b6b7b"/>',
        dots, *parts, "</svg>\n",
    ])  # fmt: skip


def main(what: str, source: Path, target: Path | None = None) -> None:
    """Record into the file `source`, or draw `source` into `target`."""
    if what == "record":
        source.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    elif target is not None:
        target.write_text(draw(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
