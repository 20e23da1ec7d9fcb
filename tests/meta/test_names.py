"""A name has one meaning: no two classes of cpuserve, and no class and a type alias, share one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import nodes, parsed

ROOT = Path(__file__).parents[2]


def classes(source: str) -> Iterator[str]:
    return (node.name for node in nodes(source) if isinstance(node, ast.ClassDef))


def aliases(tree: ast.Module) -> Iterator[str]:
    """The names in CamelCase that a module assigns, such as type aliases."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        names = (target.id for target in targets if isinstance(target, ast.Name))
        yield from (name for name in names if name[:1].isupper() and not name.isupper())


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that two classes, or a class and an alias, have, and their files."""
    by_class: dict[str, list[str]] = defaultdict(list)
    by_alias: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for name in classes(source):
            by_class[name].append(path)
        for name in aliases(parsed(source)):
            by_alias[name].append(path)
    found = {name: [*paths, *by_alias.get(name, ())] for name, paths in by_class.items()}
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_every_class_of_cpuserve_has_a_name_of_its_own():
    files = sorted((ROOT / "cpuserve").rglob("*.py"))
    assert len(files) > 400
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}
    assert shared_names(sources) == {}


@pytest.mark.parametrize(
    "other",
    ["class Part: ...", "Part = dict[str, int]", "Part: TypeAlias = int"],
)
def test_a_second_meaning_of_a_name_is_found(other):
    sources = {"a.py": "class Part: ...", "b.py": other, "c.py": "class Parts: ...\nPARTS = 1"}
    assert shared_names(sources) == {"Part": ["a.py", "b.py"]}


def test_no_two_files_of_tests_have_one_name():
    """Outside of packages, pytest imports a file of tests under its name alone."""
    tests = (ROOT / "tests").rglob("test_*.py")
    names = [path.name for path in tests if not path.with_name("__init__.py").exists()]
    assert sorted(names) == sorted(set(names))
