"""The layer rule and the bans: imports point down, in Python and in C++ (ARCHITECTURE.md).

Imports for the type checker and imports inside functions count too, and no module imports itself
over others: a circle is one piece of code, whatever its files are called.

The parts of a family in its folder (cpuserve/models/kimi/) may be of any floor up to serving,
because only its record names them ("module:attribute"): no other module imports them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import nodes, parsed

ROOT = Path(__file__).parents[2]

# A package may import packages of a lower rank, and itself.
RANK = {
    "__init__": 16, "__main__": 16,
    "entrypoints": 16,
    "integrations": 15,
    "testing": 15,
    "cli": 15,
    "llm": 14, "api": 14,
    "offline": 12,
    "outputs": 11, "prepare": 11,
    "serving": 10,
    "bench": 9,
    "engine": 8,
    "runtime": 7, "tokenizer": 7, "media": 7,
    "loader": 6,
    "models": 5, "quant": 5,
    "program": 4, "core": 4,
    "sampling_params": 4, "pooling_params": 4,
    "sampling": 3,
    "platforms": 2,
    "engine_args": 2,
    "config": 1,
    "distributed": 0, "inputs": 0, "lora": 0, "utils": 0,
    "limited": 1,
    "metrics": 0,
    "base": -1,
}  # fmt: skip
NATIVE = {"program/lower.py", "runtime/native.py", "platforms/cpu.py"}
TORCH = {
    "program/interpret.py",
    # Parts of the interpreter:
    "program/reference/attention.py",
    "program/reference/recurrent.py",
    "program/reference/rows.py",
    "program/reference/quantized.py",
    "runtime/torch_executor.py",
    "runtime/transformers_fallback.py",
}
# Operations have their references in torch, and import it in the functions that run it.
OPERATIONS = "program/operations/"
REFERENCES = "cpuserve.program.reference."
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "__import__"}
# The folders of families, each with its record and its parts.
FAMILY_FOLDERS = {
    path.parent.name
    for path in (ROOT / "cpuserve/models").glob("*/__init__.py")
    if path.parent.name != "families"
}
HIGHEST_PART = "serving"  # a part of a family may import this package and those below it
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}

CPP_RANK = {"base": 0, "cpu": 1, "parallel": 1, "kernels": 2, "runtime": 3, "bindings": 4}
# What an instruction-set unit is made of: C headers and kernels only, so that nothing inline of a
# C++ header is compiled for its instructions and kept by the linker for everyone.
UNIT_PARTS = ("vec", "generic", "linear", "isa")
C_HEADERS = {
    "arm_neon.h", "assert.h", "float.h", "immintrin.h", "limits.h", "math.h", "stddef.h",
    "stdint.h", "string.h",
}  # fmt: skip


def is_typing_block(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`; what it imports never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and (
        node.test.id == "TYPE_CHECKING"
    )  # fmt: skip


@functools.cache
def running(source: str) -> list[ast.AST]:
    """Every node of `source` that can run."""
    blocks = [node for node in nodes(source) if is_typing_block(node)]
    typing = {id(node) for block in blocks for node in ast.walk(block)}
    return [node for node in nodes(source) if id(node) not in typing]


def imports(found: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, module) of everything that nodes import; `from a import b` counts as a.b."""
    for node in found:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)


def package_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def may_import(package: str, target: str) -> bool:
    return target == package or (target in RANK and RANK[target] < RANK[package])


def family_of(module: str) -> str | None:
    """The family whose folder has `module`, such as cpuserve.models.kimi.tower; None = none."""
    parts = module.split(".")
    inside = parts[:2] == ["cpuserve", "models"] and len(parts) > 2 and parts[2] in FAMILY_FOLDERS
    return parts[2] if inside else None


def floor_fault(path: str, module: str) -> str | None:
    """What is wrong with an import of `module`, a part of cpuserve, in `path`; None = nothing."""
    package, target = package_of(path), module.split(".")[1]
    own = family_of("cpuserve." + path.removesuffix(".py").replace("/", "."))
    if (family := family_of(module)) not in (None, own):
        return f"{module} is a part of the family {family}, which only its record names"
    is_part = own is not None and not path.endswith("__init__.py")
    if is_part and (target == HIGHEST_PART or may_import(HIGHEST_PART, target)):
        return None
    return None if may_import(package, target) else f"{package} may not import {target}"


def is_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "transformers") or module.startswith(REFERENCES)


def may_use_torch(path: str, *, first: bool) -> bool:
    return path in TORCH or (path.startswith(OPERATIONS) and not first)


def import_faults(path: str, source: str) -> Iterator[str]:
    """What `path` (inside cpuserve/) imports and may not."""
    run = set(imports(running(source)))
    first = set(imports(parsed(source).body))  # those that run when the module is imported
    for line, module in imports(nodes(source)):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if not top:
            yield f"{path}:{line}: relative import"
        elif top != "cpuserve" and (line, module) not in run:
            continue  # other packages may be named for the type checker
        elif top in BANNED_MODULES:
            yield f"{path}:{line}: {top} runs what it reads"
        elif is_torch(module) and not may_use_torch(path, first=(line, module) in first):
            yield f"{path}:{line}: {module} outside the torch executor"
        elif top == "os" and target in ENVIRONMENT and path != "config/env.py":
            yield f"{path}:{line}: os.{target} outside config/env.py"
        elif top == "cpuserve" and target == "_C":
            if path not in NATIVE:
                yield f"{path}:{line}: cpuserve._C outside {sorted(NATIVE)}"
        elif top == "cpuserve" and (wrong := floor_fault(path, module)) is not None:
            yield f"{path}:{line}: {wrong}"


def call_faults(path: str, source: str) -> Iterator[str]:
    """What `path` does and nothing here may."""
    for node in running(source):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                yield f"{path}:{node.lineno}: {node.func.id}()"
            for keyword in node.keywords:
                if keyword.arg == "shell" and getattr(keyword.value, "value", None) is True:
                    yield f"{path}:{node.lineno}: shell=True"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("torch.load", "yaml.load", "tempfile.mktemp"):
                yield f"{path}:{node.lineno}: {name}"
            if node.value.id == "os" and node.attr in ENVIRONMENT and path != "config/env.py":
                yield f"{path}:{node.lineno}: {name} outside config/env.py"


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules of cpuserve that each module imports, anywhere in it."""
    edges: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for _, module in imports(nodes(source)):
            # `from cpuserve.a import b` imports the module b, or a name of the module a.
            target = module if module in sources else module.rpartition(".")[0]
            if target in sources and target != name:
                edges[name].add(target)
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other over any number of steps: what stays when leaves are cut."""
    left = {name: set(targets) for name, targets in edges.items()}
    for cut in (lambda n: left[n], lambda n: {m for m in left if n in left[m]}):
        while leaves := [name for name in left if not cut(name)]:
            for name in leaves:
                del left[name]
            for targets in left.values():
                targets.difference_update(leaves)
    return [sorted([name, *targets]) for name, targets in sorted(left.items())]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def siblings(edges: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """What each file and folder of `package` imports of the others, anywhere in it."""
    found: dict[str, set[str]] = {}
    begin = f"{package}."

    def child_of(module: str) -> str:
        return module.removeprefix(begin).partition(".")[0]

    for name, targets in edges.items():
        if name.startswith(begin):
            inside = {child_of(target) for target in targets if target.startswith(begin)}
            found.setdefault(child_of(name), set()).update(inside - {child_of(name)})
    return found


def num_layers(edges: dict[str, set[str]]) -> int:
    """The length of the longest chain of imports between siblings, which have no circle."""

    @functools.cache
    def height(name: str) -> int:
        return 1 + max(map(height, edges[name]), default=0)

    return max(map(height, edges))


def faults(path: str, source: str) -> list[str]:
    return [*import_faults(path, source), *call_faults(path, source)]


def include_faults(path: str, source: str) -> list[str]:
    """What `path` (inside csrc/) includes and may not, and getenv anywhere."""
    found = []
    package, *rest = path.split("/")
    in_unit = package == "kernels" and rest[0] in UNIT_PARTS
    for line, text in enumerate(source.splitlines(), 1):
        code = text.split("//")[0]
        if re.search(r"\bgetenv\b|\bsetenv\b|\bputenv\b", code):
            found.append(f"{path}:{line}: the environment is config/env.py's")
        include = re.match(r'\s*#\s*include\s*(["<])([^">]+)', text)
        if not include:
            continue
        quote, target = include.groups()
        target_package = target.split("/")[0]
        if quote == "<":
            if in_unit and target not in C_HEADERS:
                found.append(f"{path}:{line}: <{target}> in an instruction-set unit")
        elif target_package not in CPP_RANK or CPP_RANK[target_package] > CPP_RANK[package]:
            found.append(f"{path}:{line}: {package} may not include {target}")
        elif in_unit and target_package != "kernels":
            found.append(f"{path}:{line}: {target} in an instruction-set unit")
    return found


PYTHON = sorted((ROOT / "cpuserve").rglob("*.py"))
CPP = sorted([*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")])


def test_every_package_has_a_rank():
    packages = {package_of(p.relative_to(ROOT / "cpuserve").as_posix()) for p in PYTHON}
    assert packages <= RANK.keys()
    cpp_packages = {p.relative_to(ROOT / "csrc").parts[0] for p in CPP}
    assert cpp_packages == CPP_RANK.keys()


def test_python_imports_point_down_and_nothing_banned_is_used():
    found = []
    for path in PYTHON:
        found += faults(path.relative_to(ROOT / "cpuserve").as_posix(), path.read_text("utf-8"))
    assert found == []


def names_outside(files: dict[str, str], folders: Iterable[str]) -> list[str]:
    """The names of `folders` of cpuserve/models in files outside of them, and in their paths."""
    return [
        f"{path}: {folder}"
        for path, text in files.items()
        for folder in folders
        if f"/models/{folder}/" not in path and folder in f"{path}\n{text}".lower()
    ]


def test_only_the_folder_of_a_family_has_its_name():
    files = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in PYTHON + CPP}
    assert {"gemma4", "kimi", "lfm", "qwen3_5", "rwkv"} <= FAMILY_FOLDERS
    assert names_outside(files, FAMILY_FOLDERS) == []


def test_the_name_of_a_family_elsewhere_is_seen():
    files = {
        "cpuserve/models/kimi/text.py": "class KimiLinear:",
        "cpuserve/quant/a.py": "# as in Kimi",
        "csrc/kernels/kimi.h": "",
        "cpuserve/loader/b.py": "# as in RWKV",
    }
    assert names_outside(files, ["kimi"]) == [
        "cpuserve/quant/a.py: kimi",
        "csrc/kernels/kimi.h: kimi",
    ]


def test_no_modules_import_each_other():
    sources = {module_of(path): path.read_text("utf-8") for path in PYTHON}
    # The extension module is not the package that it lies in.
    assert circles(graph({**sources, "cpuserve._C": ""})) == []


@functools.cache
def package_graph() -> dict[str, set[str]]:
    """The imports, without the parts of families, which may be of a higher floor than models."""
    sources = {module_of(path): path.read_text("utf-8") for path in PYTHON}
    return graph({name: text for name, text in sources.items() if family_of(name) is None})


def test_no_siblings_in_a_package_import_each_other():
    """Files and folders beside each other: a reader of one need not read those above it."""
    edges = package_graph()
    packages = {name.rpartition(".")[0] for name in edges} - {""}
    assert len(packages) > 50
    found = {package: circles(siblings(edges, package)) for package in sorted(packages)}
    assert {package: circle for package, circle in found.items() if circle} == {}


def test_siblings_that_import_each_other_are_seen():
    edges = {"p.a.x": {"p.b.y"}, "p.b.z": {"p.a.w"}, "p.b.y": {"p.c"}, "p.a.w": set(), "p.c": set()}
    assert circles(edges) == []
    assert circles(siblings(edges, "p")) == [["a", "b"], ["a", "b"]]
    edges["p.b.z"] = {"q.a.w"}
    assert circles(siblings(edges, "p")) == []


@pytest.mark.parametrize(("package", "most"), [("serving", 6), ("api", 11)])
def test_a_package_has_few_layers(package, most):
    assert num_layers(siblings(package_graph(), f"cpuserve.{package}")) <= most


@pytest.mark.parametrize(
    "back",
    [
        "import cpuserve.a",
        "from cpuserve import a",
        "from cpuserve.a import x",
        "def f():\n    from cpuserve.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cpuserve.a import x",
    ],
    ids=["module", "of-package", "name", "lazy", "typing"],
)
def test_a_circle_is_seen(back):
    sources = {"cpuserve": "", "cpuserve.a": "import cpuserve.b", "cpuserve.b": "import cpuserve.c"}
    leaves = {"cpuserve.d": "import cpuserve.a", "cpuserve.e": ""}
    assert circles(graph({**sources, **leaves, "cpuserve.c": "import cpuserve.e"})) == []
    found = circles(graph({**sources, **leaves, "cpuserve.c": f"import cpuserve.e\n{back}"}))
    assert [names[0] for names in found] == ["cpuserve.a", "cpuserve.b", "cpuserve.a"]


def cpp_units(sources: dict[str, str]) -> dict[str, set[str]]:
    """The units (a header and its source file) that each unit of csrc/ includes."""
    edges: dict[str, set[str]] = {}
    for path, source in sources.items():
        unit = path.rpartition(".")[0]
        targets = re.findall(r'^\s*#\s*include\s*"([^"]+)\.\w+"', source, re.MULTILINE)
        edges.setdefault(unit, set()).update({target for target in targets if target != unit})
    for targets in edges.values():
        targets.intersection_update(edges)
    return edges


def knots(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of two units or more of which each reaches all others."""

    def reached(unit: str) -> set[str]:
        seen: set[str] = set()
        new = [unit]
        while new:
            fresh = edges[new.pop()] - seen
            seen |= fresh
            new += fresh
        return seen

    reach = {unit: reached(unit) for unit in edges}
    all_knots = {frozenset(t for t in reach[u] if u in reach[t]) for u in edges if u in reach[u]}
    return sorted(map(set, all_knots), key=len)


@functools.cache
def unit_graph() -> dict[str, set[str]]:
    return cpp_units({p.relative_to(ROOT / "csrc").as_posix(): p.read_text("utf-8") for p in CPP})


def test_no_units_of_csrc_include_each_other():
    """A program knows its operations, and an operation knows only the declarations of a program."""
    assert len(unit_graph()) > 100
    assert knots(unit_graph()) == []


def test_no_files_and_folders_beside_each_other_in_csrc_include_each_other():
    """The operations of `csrc/runtime` are one of its siblings: what they include knows none."""
    edges = {
        unit.replace("/", "."): {target.replace("/", ".") for target in targets}
        for unit, targets in unit_graph().items()
    }
    # A kernel has its arguments in its own file, and table.h joins these files.
    folders = {unit.rpartition(".")[0] for unit in edges} - {"kernels"}
    assert "runtime.operations" in folders
    assert [folder for folder in sorted(folders) if circles(siblings(edges, folder))] == []


def test_a_knot_is_seen():
    sources = {
        "a/x.h": "", "a/x.cpp": '#include "a/x.h"\n#include "a/y.h"', "a/y.h": '#include "a/z.h"',
        "a/z.h": '  # include "a/x.h"', "a/w.cpp": '#include "a/x.h"\n#include <vector>',
    }  # fmt: skip
    assert knots(cpp_units(sources)) == [{"a/x", "a/y", "a/z"}]
    sources["a/z.h"] = ""
    assert knots(cpp_units(sources)) == []


def test_cpp_includes_point_down():
    found = []
    for path in CPP:
        found += include_faults(path.relative_to(ROOT / "csrc").as_posix(), path.read_text("utf-8"))
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/a.py", "from cpuserve.engine.client import EngineClient"),
        ("core/a.py", "import cpuserve.runtime.native"),
        ("core/a.py", "def f():\n    from cpuserve import program"),
        ("core/a.py", "if TYPE_CHECKING:\n    from cpuserve.engine.client import EngineClient"),
        (
            "serving/a.py",
            "if TYPE_CHECKING:\n    from cpuserve.api.request.context import RequestContext",
        ),
        ("models/a.py", "from cpuserve.quant.base import Weights"),
        ("models/kimi/__init__.py", "from cpuserve.tokenizer.splits import splitter"),
        ("models/kimi/tools.py", "from cpuserve.api.route import post"),
        ("models/kimi/tools.py", "from cpuserve.models.rwkv.rwkv7 import Rwkv7"),
        ("serving/a.py", "def f():\n    from cpuserve.models.kimi import tools"),
        ("engine/a.py", "from cpuserve import _C"),
        ("engine/a.py", "from cpuserve.nowhere import x"),
        ("engine/a.py", "from . import b"),
        ("engine/a.py", "import torch"),
        ("engine/a.py", "def f():\n    import torch"),
        ("program/operations/a.py", "import torch"),
        ("program/operations/a.py", "from cpuserve.program.reference.rows import rms_norm"),
        ("engine/a.py", "def f():\n    from transformers import AutoModel"),
        ("engine/a.py", "import pickle"),
        ("engine/a.py", "from os import environ"),
        ("engine/a.py", "import os\nos.getenv('X')"),
        ("engine/a.py", "import os\nx = os.environ"),
        ("engine/a.py", "eval('1')"),
        ("engine/a.py", "subprocess.run('ls', shell=True)"),
        ("program/interpret.py", "import torch\ntorch.load('x')"),
    ],
)
def test_the_rule_sees_a_breach(path, source):
    assert len(faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("program/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("engine/a.py", "from cpuserve.engine.ipc import Message\nfrom cpuserve.core import step"),
        ("program/operations/a.py", "def f():\n    import torch"),
        ("config/env.py", "import os\nx = os.environ"),
        ("runtime/native.py", "from cpuserve import _C"),
        ("models/kimi/tools.py", "from cpuserve.serving.tools.layout import CallLayout"),
        ("models/rwkv/rwkv6.py", "from cpuserve.models.rwkv.rwkv7 import read_inner"),
    ],
)
def test_the_rule_lets_through_what_is_allowed(path, source):
    assert faults(path, source) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("base/a.h", '#include "kernels/table.h"'),
        ("parallel/a.h", '#include "runtime/program.h"'),
        ("kernels/generic/a.h", '#include "cpu/features.h"'),
        ("kernels/linear/a.h", "#include <vector>"),
        ("kernels/isa/a.cpp", '#include "vec.h"'),
        ("cpu/a.cpp", 'const char* x = getenv("X");'),
    ],
)
def test_the_include_rule_sees_a_breach(path, source):
    assert len(include_faults(path, source)) == 1
