"""Schemas that make the values of a oneOf, of counted members and of sets fit exactly.

A grammar may write fewer values than a schema allows, if each of them is right. So members that a
schema lets open are required or forbidden where this decides which of several schemas a value fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cpuserve.engine.grammars.schema_facts import Facts, Reader, disjoint

# The most schemas for the combinations of members or of items, as each enlarges the grammar.
MAX_COMBINATIONS = 128
_FEW = range(1, MAX_COMBINATIONS + 1)


class Choices:
    """The schemas of one oneOf, changed so that no value fits two of them.

    names: the members that each must have. opposites: further schemas that its values must fit.

    facts: of each schema. beside: see `disjoint`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Any, str]],
        facts: Sequence[Facts],
        reader: Reader,
        beside: Sequence[str] | None,
    ) -> None:
        self._parts, self._facts, self._reader = parts, facts, reader
        self._written = list(facts)  # of the values that the grammar may write
        self._beside = beside
        self._tags: list[str] = []  # members that differ in earlier pairs
        self.names: list[list[str]] = [[] for _ in parts]
        self.opposites: list[list[Any]] = [[] for _ in parts]

    def separate(self) -> tuple[int, int] | None:
        """Fill `names` and `opposites`; return the indices of two that a value may both fit."""
        for i in range(len(self._parts)):
            for k in range(i):
                if not (self._differ(k, i) or self._by_member(k, i) or self._by_opposite(k, i)):
                    return k, i
        return None

    def _differ(self, k: int, i: int) -> bool:
        if disjoint(self._facts[k], self._facts[i], self._reader, self._beside):
            return True
        return self._are_separate(k, self._written[k], i, self._written[i])

    def _are_separate(self, k: int, of_k: Facts, i: int, of_i: Facts) -> bool:
        """Whether no value with the facts of_k fits schema i, and none with of_i schema k."""
        return disjoint(of_k, self._facts[i], self._reader, None) and disjoint(
            of_i, self._facts[k], self._reader, None
        )

    def _by_member(self, k: int, i: int) -> bool:
        """Require a member that has other values in each of two schemas, such as a tag."""
        left, right = self._written[k], self._written[i]
        if left.types != {"object"} or right.types != {"object"}:
            return False
        names = set(_member_names(left)) & set(_member_names(right))
        for name in sorted(names, key=lambda name: (name not in self._tags, name)):
            with_it = _requiring(left, name), _requiring(right, name)
            if self._are_separate(k, with_it[0], i, with_it[1]):
                self._tags.append(name)
                for at, facts in zip((k, i), with_it, strict=True):
                    if name not in self._written[at].required:
                        self.names[at].append(name)
                    self._written[at] = facts
                return True
        return False

    def _by_opposite(self, k: int, i: int) -> bool:
        """Exclude the values of each of two schemas from the other, if both keep some values."""
        alternatives = [self._without(k, i), self._without(i, k)]
        if None in alternatives:
            return False
        self.opposites[k].append(alternatives[0])
        self.opposites[i].append(alternatives[1])
        return True

    def _without(self, one: int, other: int) -> Any:
        part, at = self._parts[other]
        facts = self._facts[one]
        against = self._reader.negated(part, facts, at, partly=True)
        options = against["anyOf"] if isinstance(against, dict) else []
        kept = [
            o for o in options if not disjoint(facts, self._reader.facts(o, at), self._reader, None)
        ]
        return {"anyOf": kept} if kept else None


def _member_names(facts: Facts) -> Iterator[str]:
    yield from facts.members
    for group in facts.branches:
        for branch in group:
            yield from _member_names(branch)


def _requiring(facts: Facts, name: str) -> Facts:
    branches = [[_requiring(branch, name) for branch in group] for group in facts.branches]
    return replace(facts, required=facts.required | {name}, branches=branches)


def with_count(names: Iterable[str], least: int, most: int | None) -> list[Any] | None:
    """Return schemas: a value fits one of them if it has `least` to `most` of these members.

    None: these are too many. most: None = all, below 0 = no value has so few.
    """
    if most is not None and most < 0:
        return [False]
    optional = list(names)
    allowed = len(optional) if most is None else min(most, len(optional))
    if _combinations(len(optional), allowed) * _combinations(allowed, least) not in _FEW:
        return None
    return [
        {
            "type": "object",
            "properties": {name: False for name in optional if name not in some},
            "required": list(needed),
        }
        for some in itertools.combinations(optional, allowed)
        for needed in itertools.combinations(some, least)
    ]


def distinct(values: Sequence[Any], least: int, most: int | None) -> list[Any] | None:
    """Return schemas of arrays with distinct items of `values`; None if these are too many.

    If not all orders fit into the limit, the items have the order of `values`.
    """
    num_values = len(values)
    if not 0 < num_values <= MAX_COMBINATIONS:
        return None
    sizes = range(least, min(num_values, num_values if most is None else most) + 1)
    ways = (itertools.permutations, math.perm), (itertools.combinations, math.comb)
    for arrange, count in ways:
        if sum(count(num_values, size) for size in sizes) in _FEW:
            return [
                {
                    "type": "array",
                    "prefixItems": [{"const": value} for value in some],
                    "items": False,
                    "minItems": size,
                    "maxItems": size,
                }
                for size in sizes
                for some in arrange(values, size)
            ]
    return None


def _combinations(num: int, size: int) -> int:
    """Return how many subsets of this size there are, or more than MAX_COMBINATIONS."""
    # Large numbers would take seconds to compute.
    return math.comb(num, size) if min(size, num - size) < 8 else MAX_COMBINATIONS + 1
