"""Sizes that a reader can take in: lines of files and functions, files at the root of the API."""

import ast
from pathlib import Path

import pytest

from tests.helpers.sources import nodes

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 900  # a longer file has more than one subject
MAX_FUNCTION_LINES = 60
MAX_API_ROOT_FILES = 5
# Tables of data: a reader searches them, and does not read them from start to end.
TABLES = {"cpuserve/config/options.py", "cpuserve/config/server.py"}
SOURCES = {".py", ".pyi", ".cpp", ".h", ".js", ".css"}
FOLDERS = ("cpuserve", "benchmarks", "csrc")


def sources(folder):
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCES]


def functions(text):
    """Return (name, lines) of each function, with its decorators and docstring."""
    return [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in nodes(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_have_at_most_900_lines(folder):
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(folder)
    }
    assert lines
    long = {name for name, count in lines.items() if count > MAX_FILE_LINES}
    assert long <= TABLES, "divide the file by subject, or add a table of data to TABLES"


@pytest.mark.parametrize("folder", ["cpuserve", "benchmarks"])
def test_functions_have_at_most_60_lines(folder):
    found = [
        (path.relative_to(ROOT).as_posix(), name, lines)
        for path in sources(folder)
        if path.suffix == ".py"
        for name, lines in functions(path.read_text(encoding="utf-8"))
    ]
    assert found
    assert [one for one in found if one[2] > MAX_FUNCTION_LINES] == []


def test_the_root_of_the_api_has_at_most_five_files():
    files = [p for p in (ROOT / "cpuserve" / "api").glob("*.py") if p.name != "__init__.py"]
    assert 0 < len(files) <= MAX_API_ROOT_FILES
