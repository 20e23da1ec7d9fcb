"""The stub of the native extension has its functions, with the arguments that they take.

The stub is a page for readers, written by hand. A generator (pybind11-stubgen 3.0) writes the same
names without the descriptions, `SupportsInt | SupportsIndex` for each int, and `*args, **kwargs`
for each operation; the descriptions would have to become texts in C++.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cpuserve import _C

STUB = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
# Program.__getattr__ stands for the methods that add operations.
OPERATIONS = {f"Program.{name}" for name in _C.operation_fields()}
DESCRIBED = {"Program.__getattr__", "Executor.SlotRequest"}


def arguments(text):
    """The arguments of a signature of pybind11: {name: whether it has a default}."""
    depth, parts = 0, [""]
    for character in text:
        depth += character in "[({"
        depth -= character in "])}"
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    named = [part.strip() for part in parts if part.strip() not in ("", "*", "/")]
    found = {re.match(r"\w+", part)[0]: bool(re.search(r"[^=!<>]=[^=]", part)) for part in named}
    found.pop("self", None)
    return found


def in_extension():
    """{name: its arguments, or None for a property}, of functions and of members of classes."""
    found = {}
    places = [(_C, "")] + [(c, f"{c.__name__}.") for c in vars(_C).values() if isinstance(c, type)]
    for place, prefix in places:
        for name, value in vars(place).items():
            if isinstance(value, type) or (name.startswith("_") and name != "__init__"):
                continue
            if isinstance(value, property):
                found[prefix + name] = None
            elif callable(value) and prefix + name not in OPERATIONS:
                signature = re.match(r"\w+\((.*)\) -> ", value.__doc__.splitlines()[0])
                found[prefix + name] = arguments(signature[1])
    return found


def in_stub():
    found = {}
    members = [(node, "") for node in STUB.body]
    for node in STUB.body:
        if isinstance(node, ast.ClassDef):
            members += [(member, f"{node.name}.") for member in node.body]
    for node, prefix in members:
        if isinstance(node, ast.AnnAssign):
            found[prefix + node.target.id] = None
        elif isinstance(node, ast.FunctionDef):
            is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
            args = node.args
            plain = [arg.arg for arg in args.args]
            given = dict.fromkeys(plain, False)
            given |= dict.fromkeys(plain[len(plain) - len(args.defaults) :], True)
            given |= {
                arg.arg: default is not None
                for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
            }
            given.pop("self", None)
            found[prefix + node.name] = None if is_property else given
    return {name: given for name, given in found.items() if name not in DESCRIBED}


@pytest.mark.parametrize("name", sorted({*in_extension(), *in_stub()}))
def test_the_stub_declares_what_the_extension_has(name):
    assert in_stub()[name] == in_extension()[name]
