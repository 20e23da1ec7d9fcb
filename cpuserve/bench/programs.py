"""Programs of about 300 lines for edits; a seed determines them, and no line comes twice."""

from __future__ import annotations

import random

NAMES = ("Ledger", "Account", "Register", "Journal", "Archive", "Inventory", "Catalog", "Depot")
KINDS_USED = 11
# The things in a program: one, several of them, their quantity, and its unit.
KINDS = (
    ("crate", "crates", "weight", "kilograms"),
    ("ticket", "tickets", "price", "cents"),
    ("cable", "cables", "length", "meters"),
    ("barrel", "barrels", "volume", "liters"),
    ("lamp", "lamps", "power", "watts"),
    ("field", "fields", "area", "hectares"),
    ("engine", "engines", "torque", "newton meters"),
    ("melody", "melodies", "duration", "seconds"),
    ("battery", "batteries", "charge", "coulombs"),
    ("river", "rivers", "depth", "centimeters"),
    ("letter", "letters", "postage", "stamps"),
    ("tower", "towers", "height", "feet"),
)
_FUNCTIONS = (
    '''
def add_{one}({own}: {Name}, {one}: str, {amount}: int) -> {Name}:
    """Return the {own} with one more {one}; the {amount} is given in {unit}."""
    if not {low} <= {amount} <= {high}:
        raise ValueError(f"the {amount} of {{{one}}} must be {low} to {high} {unit}")
    {many} = {{**{own}.{many}, {one}: {amount}}}
    log.info("%s was added to the {many} of %s", {one}, {own}.owner)
    return replace({own}, {many}={many})
''',
    '''
def remove_{one}({own}: {Name}, {one}: str) -> {Name}:
    """Return the {own} without this {one}, or raise KeyError if it has no such {one}."""
    {many} = dict({own}.{many})
    if {many}.pop({one}, None) is None:
        raise KeyError(f"{{{own}.owner}} has no {one} called {{{one}}}")
    return replace({own}, {many}=dict(sorted({many}.items())))
''',
    '''
def total_{amount}({own}: {Name}) -> float:
    """Return the {amount} of all {many} in {unit}; {many} that are lost count {part} percent."""
    lost_{many} = {own}.lost & {own}.{many}.keys()
    {amount} = sum({own}.{many}[{one}] for {one} in lost_{many}) * {part} / 100
    for {one} in {own}.{many}.keys() - lost_{many}:
        {amount} += {own}.{many}[{one}]
    return round({amount}, {digits})
''',
)
_BEGIN = '''"""Keep what an owner has: {all}."""

import logging
from dataclasses import dataclass, field, replace

log = logging.getLogger("{own}")


@dataclass(frozen=True)
class {Name}:
    """A {own} says what its owner has, and which of these things are lost."""

    owner: str
    lost: frozenset[str] = frozenset()
{fields}'''


def program(chance: random.Random, name: str) -> str:
    """Return a Python program of about 300 lines that uses the class `name` in all functions."""
    kinds = chance.sample(KINDS, KINDS_USED)
    own = name.lower()
    everything = [many for _, many, *_ in kinds]
    line = "    {}: dict[str, int] = field(default_factory=dict)\n"
    begin = {"fields": "".join(map(line.format, everything)), "all": ", ".join(everything)}
    parts = [_BEGIN.format(Name=name, own=own, **begin)]
    for one, many, amount, unit in kinds:
        values: dict[str, str | int] = {"one": one, "many": many, "amount": amount, "unit": unit}
        values |= {"own": own, "Name": name}
        values |= {"low": chance.randrange(1, 10), "high": chance.randrange(100, 9999)}
        values |= {"part": chance.randrange(10, 90), "digits": chance.randrange(1, 6)}
        functions = chance.sample(_FUNCTIONS, len(_FUNCTIONS))
        parts += [function.format(**values) for function in functions]
    return "\n".join(parts)


def rename(chance: random.Random) -> str:
    """Return a request to write a program again with another name of its class."""
    name, other = chance.sample(NAMES, 2)
    asked = f"Rename the class {name} to {other} in this program, and change nothing else."
    code = f"```python\n{program(chance, name)}```"
    return f"{asked} Write the whole program.\n\n{code}"
