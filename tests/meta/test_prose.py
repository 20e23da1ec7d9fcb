"""Comments, docstrings and pages are written in the words of the field, in plain sentences.

Each habit below makes readers stop and guess, or is a word that the field does not use. One line
with a habit may be right, so a habit has a rate: lines with it per 10,000 words of prose. The
rates are about those of November 2026, and at most twice the highest one of httpx, starlette,
gemma.cpp, llm.c and mini-sglang.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import nodes

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".h", ".cpp", ".cc", ".c", ".md"}
SKIPPED = ("tests/", "build/")
OWNERS = (
    r"GGUF|Intel|Arm|OpenAI|Ollama|vLLM|llama\.cpp|Anthropic|DeepSeek|Debian|Python|Cohere|Jina|"
    r"Gemma|Qwen\w*|PEFT|AMX"
)
WHAT = r"an?|the|it|they|is|has|no|was|were|needs|reads|makes|all|each|every|one|must|may|other|do"
HABITS = {
    "relative clauses with 'of which', 'whose'": (
        r"\b(of|in|by|to|with|for|upon|behind|beside) which\b|\bwhose\b", 0.3
    ),
    "'answer' for a response": (r"\banswers?\b", 0.5),
    "a vendor with an apostrophe": (rf"\b({OWNERS})'s\b", 0.3),
    "'names' (as a verb: reports, lists, asks for)": (r"\bnames\b", 4.5),
    "clauses with 'what'": (rf"\bwhat ({WHAT}|does)\b", 0.4),
    "'that of', 'those of'": (
        r"\b(that|which|what) \w+ (is|are) of\b|\bis that of\b|\bthose of\b|\bthat of\b", 0.3
    ),
    "'gives' for returns, computes, is": (r"\bgives?\b", 0.3),
    "'behind' for after": (r"\bbehind\b", 0.3),
    "'also' or 'too' as an afterthought": (
        r", (also|too)\b"
        r"|\balso (of|in|where|with|those|from|by|for|while|during|at|on|to|if|when)\b", 0.3
    ),
    "sentences that begin with 'What'": (r"(?:^|[.:;] )\W*What (?!is the|are the)", 0.3),
    "'lies', 'stands' for is": (r"\b(lies|lie|stands?)\b", 0.3),
    "'beside' for besides, next to": (r"\bbeside\b", 0.4),
    "old words": (r"\b(anew|upon|thereby|whereby|hence|thereof|wherein)\b", 0.3),
    "'tells' for says, shows": (r"\b(tells?|told)\b", 0.3),
    "'in a form'": (r"\b(answers?|text) (in|of) (a|that|its) form\b|\ban? form\b", 0.3),
    "'the law' for a rule": (r"\b[Tt]he law\b|\bnumerics law\b", 0.0),
    "notes without a noun ('name: of the layer')": (
        r"(?:^|[.] )\w+: (of|for|with|without|in|if|the [a-z]+ of which)\b", 0.5
    ),
}  # fmt: skip

Line = tuple[str, int, str]


def tracked() -> list[str]:
    """Return the files that git tracks; without a repository, those of the source tree."""
    if shutil.which("git"):
        made = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=False, capture_output=True, text=True
        )
        if names := list(filter(None, made.stdout.split("\0"))):
            return names
    found = (path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")))
    return [p.as_posix() for p in found if not any(part.startswith(".") for part in p.parts)]


def python_lines(source: str) -> Iterator[tuple[int, str]]:
    """The lines of comments and docstrings, with their numbers."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in nodes(source):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield from enumerate(map(str.strip, text.splitlines()), node.body[0].lineno)


def prose_of(name: str, source: str) -> Iterator[Line]:
    """(file, line, text) of the prose in a file."""
    if name.endswith(".py"):
        lines: Iterable[tuple[int, str]] = python_lines(source)
    elif name.endswith(".md"):
        lines = enumerate(source.splitlines(), 1)
    else:
        split = (line.partition("//") for line in source.splitlines())
        lines = ((n, text.strip()) for n, (_, found, text) in enumerate(split, 1) if found)
    return ((name, number, text) for number, text in lines if text)


def prose() -> Iterator[Line]:
    for name in tracked():
        path = ROOT / name
        if path.suffix in SUFFIXES and not name.startswith(SKIPPED) and path.is_file():
            yield from prose_of(name, path.read_text(encoding="utf-8"))


def over_their_rates(lines: list[Line]) -> list[str]:
    """A text for each habit that is over its rate, with the first ten lines."""
    words = sum(len(text.split()) for _, _, text in lines)
    found = []
    for habit, (pattern, most) in HABITS.items():
        hits = [line for line in lines if re.search(pattern, line[2])]
        rate = 1e4 * len(hits) / max(words, 1)
        if rate > most:
            shown = [f"{name}:{number}: {text}" for name, number, text in hits[:10]]
            head = f"{habit}: {len(hits)} lines, {rate:.2f} per 10,000 words, at most {most}:"
            found.append("\n  ".join([head, *shown]))
    return found


def test_no_habit_is_over_its_rate():
    lines = list(prose())
    assert len(lines) > 1000
    found = over_their_rates(lines)
    assert not found, "rewrite some of these lines in plain words\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.py", "def f():\n    return 'whose'  # the list whose end is open\n"),
        ("a.py", 'def f():\n    """The list\n\n    whose end is open."""\n    return "whose"\n'),
        ("a.cpp", 'int f();  // the list whose end is open\nauto x = "whose";\n'),
        ("a.md", "# Lists\n\nThe list whose end is open.\n"),
    ],
)
def test_prose_is_found_and_code_is_not(name, source):
    hits = [line for line in prose_of(name, source) if "whose" in line[2]]
    at = next(n for n, text in enumerate(source.splitlines(), 1) if "whose end" in text)
    assert [(file, number) for file, number, _ in hits] == [(name, at)]


def test_a_habit_over_its_rate_is_reported_with_ten_lines():
    lines = [("a.md", n, "the list whose end is open") for n in range(12)]
    (report,) = over_their_rates(lines)
    assert "12 lines" in report
    assert report.count("a.md:") == 10
