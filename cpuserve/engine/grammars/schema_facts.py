"""Facts that a JSON schema states: targets of references, types, values, members, a finite value.

schemas.py needs them because llguidance leaves objects open, closes each part of an allOf by
itself, and has neither `not` nor `if`: their opposite is computed from these facts.
A schema that requires itself has no finite value: llguidance begins its texts, which never end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from cpuserve.engine.grammars.schema_values import OPPOSITES, PATTERNS, opposite, other_texts

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
DATA = ("const", "enum", "default", "examples")  # the values of these keywords are not schemas
_ANNOTATIONS = {
    "title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
    "writeOnly", "$schema", "$id", "$anchor",
}  # fmt: skip


class SchemaError(Exception):
    """A schema that grammars cannot enforce; the message has the keyword and its JSON pointer."""


@dataclass(slots=True)
class Facts:
    """Facts about all values that fit a schema, as far as the keywords of the schema state them.

    types: the value has one of these types.
    values: the value is one of these values; None = the schema lists no values.
    names, patterns: the members that the schema describes by name, and by pattern.
    members: the (schema, JSON pointer) pairs for each name of a member.
    required: the members that the value must have.
    is_open: whether a part of the schema allows other members (additionalProperties).
    has_properties: whether a part of the schema has `properties`.
    closed: whether the schema itself forbids all members except `names`.
    closes: whether the value has only the members `names`,
      unless another schema describes it as well, which the caller checks.
    branches: the facts of the schemas in each anyOf or oneOf.
    """

    types: set[str] = field(default_factory=lambda: set(ALL_TYPES))
    values: list[Any] | None = None
    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    members: dict[str, list[tuple[Any, str]]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    is_open: bool = False
    has_properties: bool = False
    closed: bool = False
    closes: bool = False
    branches: list[list[Facts]] = field(default_factory=list)

    @property
    def allowed(self) -> dict[str, None]:
        """The members of a closed object, including members that only `required` lists."""
        return self.names | dict.fromkeys(sorted(self.required))

    def narrow(self, other: Facts) -> None:
        """Add the facts of another schema that the same value must fit as well."""
        self.types = common_types(self.types, other.types)
        if other.values is not None:
            self.list_values(other.values)
        self.describe(other)
        for name, some in other.members.items():
            self.members.setdefault(name, []).extend(some)
        self.required |= other.required
        self.branches += other.branches

    def describe(self, other: Facts) -> None:
        """Add the members that another schema describes for the same value."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.is_open = self.is_open or other.is_open
        self.has_properties = self.has_properties or other.has_properties

    def list_values(self, values: list[Any]) -> None:
        """Add the fact that the value is one of `values`."""
        known = values if self.values is None else self.values
        self.values = [v for v in known if type_of(v) in self.types and listed(v, values)]
        self.types &= set(map(type_of, self.values))


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def listed(value: Any, values: list[Any]) -> bool:
    """Whether a JSON value is in `values`; true does not equal 1 here."""
    return any(value == some and type_of(value) == type_of(some) for some in values)


def common_types(left: set[str], right: set[str]) -> set[str]:
    """Return the types that are allowed by both sets; an integer is a number as well."""
    common = left & right
    for narrow, wide in ((left, right), (right, left)):
        if "integer" in narrow and "number" in wide:
            common.add("integer")
    return common


class Reader:
    """Resolves the references in a JSON document, and finds facts about its schemas.

    closed: whether objects with `properties` have no other members,
      unless their schema allows them.
    """

    def __init__(self, root: Any, closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._anchors: dict[str, str] = {}  # the JSON pointers of schemas by their $id or $anchor
        self._resources: list[str] = []  # the JSON pointers of schemas that have an $id
        self._note_names()

    def _note_names(self) -> None:
        left: list[tuple[str, Any]] = [("#", self._root)]
        while left:
            at, some = left.pop()
            if isinstance(some, dict):
                for key in ("$id", "id", "$anchor", "$dynamicAnchor"):
                    if isinstance(name := some.get(key), str):
                        self._anchors.setdefault(("#" if "nchor" in key else "") + name, at)
                if isinstance(some.get("$id"), str):
                    self._resources.append(at)
                left += [(f"{at}/{escaped(k)}", v) for k, v in some.items() if k not in DATA]
            elif isinstance(some, list):
                left += [(f"{at}/{i}", v) for i, v in enumerate(some)]

    def find(self, to: Any, at: str) -> tuple[str, Any]:
        """Return (JSON pointer, schema) of the target of the reference `to` at pointer `at`."""
        if not isinstance(to, str):
            msg = f"$ref at {at} must be a text"
            raise SchemaError(msg)
        for place in self._candidates(unquote(to), at):
            try:
                return place, self._get(place)
            except (KeyError, IndexError, ValueError, TypeError):
                continue
        msg = f"$ref at {at} leads nowhere: there is no {to[:100]} in this schema"
        raise SchemaError(msg)

    def _candidates(self, to: str, at: str) -> list[str]:
        name, mark, rest = to.partition("#")
        bases = [r for r in self._resources if at == r or at.startswith(f"{r}/")]
        bases = [max(bases, key=len, default="#"), "#"]
        if name:
            ends = [a for n, a in self._anchors.items() if n == name or n.endswith(f"/{name}")]
            bases = ends or []
        found = [base + rest for base in bases if not rest or rest.startswith("/")]
        if mark and f"#{rest}" in self._anchors:
            found.append(self._anchors[f"#{rest}"])
        return found

    def _get(self, place: str) -> Any:
        some = self._root
        for part in place.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            some = some[int(key)] if isinstance(some, list) else some[key]
        if not isinstance(some, dict | bool):
            raise TypeError
        return some

    def dynamic(self, key: str, value: Any, at: str) -> str:
        """Return the $ref for a dynamic reference; SchemaError if its anchor is not unique."""
        if key == "$recursiveRef" or value == "#":
            return "#"
        name = str(value).partition("#")[2]
        text = [n for n in self._anchors if n == f"#{name}"]
        if len(text) == 1 and self._count_anchor(name) == 1:
            return f"#{name}"
        msg = f"{key} at {at} cannot be kept: use $ref"
        raise SchemaError(msg)

    def _count_anchor(self, name: str) -> int:
        left, count = [self._root], 0
        while left:
            some = left.pop()
            if isinstance(some, dict):
                count += some.get("$dynamicAnchor") == name
                left += some.values()
            elif isinstance(some, list):
                left += some
        return count

    # --- facts that a schema states -----------------------------------------------------------

    def facts(self, schema: Any, at: str, seen: frozenset[str] = frozenset()) -> Facts:
        """Return the facts in the keywords of a schema; a reference back to it adds no facts."""
        found = Facts()
        if schema is False:
            found.types = set()
        if not isinstance(schema, dict):
            return found
        self._read_own(schema, at, found)
        if "$ref" in schema or "$recursiveRef" in schema:
            place, named = self.find(schema.get("$ref", "#"), at)
            if place not in seen:
                found.narrow(self.facts(named, place, seen | {place}))
        for i, part in enumerate(_schemas(schema, "allOf")):
            found.narrow(self.facts(part, f"{at}/allOf/{i}", seen))
        for key in ("anyOf", "oneOf"):
            if parts := _schemas(schema, key):
                some = [self.facts(p, f"{at}/{key}/{i}", seen) for i, p in enumerate(parts)]
                self._read_branches(some, found)
        for key, part in self._conditional(schema):
            found.describe(self.facts(part, f"{at}/{key}", seen))
        return found

    def _read_own(self, schema: dict[str, Any], at: str, found: Facts) -> None:
        types = schema.get("type", list(ALL_TYPES))
        found.types = {
            t for t in (types if isinstance(types, list) else [types]) if isinstance(t, str)
        }
        if "const" in schema:
            found.list_values([schema["const"]])
        if isinstance(schema.get("enum"), list):
            found.list_values(schema["enum"])
        if found.types == {"boolean"} and found.values is None:
            found.values = [True, False]
        if isinstance(properties := schema.get("properties"), dict):
            found.has_properties = True
            found.names = dict.fromkeys(properties)
            for name, some in properties.items():
                found.members[name] = [(some, f"{at}/properties/{escaped(name)}")]
        if isinstance(patterns := schema.get("patternProperties"), dict):
            found.patterns = dict.fromkeys(patterns)
        if isinstance(required := schema.get("required"), list):
            found.required = {name for name in required if isinstance(name, str)}
        other = schema.get("additionalProperties")
        found.is_open = other is not None and other is not False
        alone = not {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"} & schema.keys()
        found.closed = not found.patterns and other is False
        found.closes = self._closed and other is None and found.has_properties and alone

    @staticmethod
    def _read_branches(some: list[Facts], found: Facts) -> None:
        found.branches.append(some)
        possible = [branch for branch in some if common_types(branch.types, found.types)]
        found.types = set().union(*(common_types(b.types, found.types) for b in possible))
        if possible and all(branch.values is not None for branch in possible):
            found.list_values([v for branch in possible for v in branch.values or ()])
        for branch in some:
            found.describe(branch)

    @staticmethod
    def _conditional(schema: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return (JSON pointer in this schema, subschema) of subschemas for only some values.

        These are the subschemas of if, then, else, dependentSchemas and dependencies.
        """
        some: list[tuple[str, Any]]
        some = [(key, schema[key]) for key in ("if", "then", "else") if key in schema]
        for key in ("dependentSchemas", "dependencies"):
            if isinstance(parts := schema.get(key), dict):
                some += [(f"{key}/{escaped(n)}", p) for n, p in parts.items()]
        return [(key, part) for key, part in some if isinstance(part, dict)]

    def requiring(self, part: Any, at: str, names: list[str]) -> Any:
        """Return a schema with further required members; the target of a reference is copied.

        llguidance does not support a schema that refers to itself and has other keywords.
        """
        if not names:
            return part
        if part.keys() - _ANNOTATIONS != {"$ref"}:
            kept = {key: some for key, some in part.items() if key not in ("$defs", "definitions")}
            return {**kept, "required": [*_schemas(part, "required"), *names]}
        place, target = self.find(part["$ref"], at)
        name = f"{escaped(place)} {names}".replace("/", " ")
        definitions = self._root.setdefault("$defs", {})
        if name not in definitions:
            definitions[name] = True  # the target may refer to itself
            definitions[name] = self.requiring(target, place, names)
        return {"$ref": f"#/$defs/{escaped(name)}"}

    # --- schemas that exclude values ----------------------------------------------------------

    def negated(self, schema: Any, allowed: Facts, at: str, *, partly: bool = False) -> Any:
        """Return a schema for the values that have the facts `allowed` but do not fit `schema`.

        partly: the schema may be one for some of these values only.
        None: no keywords of JSON Schema that grammars can enforce express it.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            msg = f"{at}: a schema is an object or a boolean"
            raise SchemaError(msg)
        keys = schema.keys() - _ANNOTATIONS
        if keys == {"$ref"}:
            place, named = self.find(schema["$ref"], at)
            return self.negated(named, allowed, place, partly=partly)
        options: list[Any] = []
        if keys & {"const", "enum"}:
            values = self.facts({k: schema[k] for k in keys & {"const", "enum", "type"}}, at).values
            keys = keys - {"const", "enum", "type"}
            options += _values_except(values or [], allowed)
        if "type" in keys:
            options.append(self._other_types(schema["type"], allowed))
            keys = keys - {"type"}
        for key, join in (("allOf", "anyOf"), ("anyOf", "allOf")):
            if key in keys:
                parts = [
                    self.negated(p, allowed, f"{at}/{key}/{i}", partly=partly)
                    for i, p in enumerate(_schemas(schema, key))
                ]
                if partly and join == "anyOf":
                    parts = [part for part in parts if part is not None] or [None]
                options.append(None if None in parts else {join: parts})
                keys = keys - {key}
        for key in sorted(keys & OPPOSITES.keys()):
            options.append(opposite(key, schema[key], allowed.types))
        options += self._without_members(schema, allowed, at, partly)
        if not partly and (keys - {"properties", "required"} - OPPOSITES.keys() or None in options):
            return None
        options = [some for some in options if some is not None]
        if partly and not options:
            return None
        options = [some for some in options if some is not False and some != {"enum": []}]
        return {"anyOf": options} if options else False

    def _other_types(self, types: Any, allowed: Facts) -> Any:
        given = set(filter(_is_text, types if isinstance(types, list) else [types]))
        if "integer" in given and "number" in allowed.types and "number" not in given:
            return None
        if "number" in given:
            given |= {"integer"}
        left = sorted(common_types(allowed.types, set(ALL_TYPES)) - given)
        return {"type": left} if left else False

    def _without_members(
        self, schema: dict[str, Any], allowed: Facts, at: str, partly: bool
    ) -> list[Any]:
        """Return a schema for each way to violate `properties` or `required`; None = not known."""
        found: list[Any] = []
        for name in filter(_is_text, _schemas(schema, "required")):
            found.append({"type": "object", "properties": {name: False}})
        members = schema.get("properties")
        for name, some in members.items() if isinstance(members, dict) else ():
            of_member = Facts()
            for known, known_at in allowed.members.get(name, ()):
                of_member.narrow(self.facts(known, known_at))
            place = f"{at}/properties/{escaped(name)}"
            against = self.negated(some, of_member, place, partly=partly)
            if against is None:
                found.append(None)
            elif against is not False:
                found.append({"type": "object", "properties": {name: against}, "required": [name]})
        return found

    # --- propertyNames -----------------------------------------------------------------------

    def names(self, schema: Any, at: str) -> bool | list[str] | dict[str, Any]:
        """Return which keys of an object fit the schema of propertyNames.

        True = all keys, False = no key, a list = these keys,
        a dict = the keys that fit its keywords.
        """
        if isinstance(schema, bool):
            return schema
        facts = self.facts(schema, at)
        if "string" not in facts.types:
            return False
        if facts.values is not None:
            return [v for v in facts.values if isinstance(v, str)]
        left: dict[str, Any] = {}
        while "$ref" in schema and schema.keys() - _ANNOTATIONS <= {"$ref", "type"}:
            at, schema = self.find(schema["$ref"], at)
        for key, value in schema.items():
            if key in ("pattern", "minLength", "maxLength"):
                left[key] = value
            elif key == "format":
                left |= {key: value} if value in PATTERNS else {}
            elif key not in _ANNOTATIONS | {"type", "format"}:
                left[key] = value
        left = {k: v for k, v in left.items() if (k, v) != ("minLength", 0)}
        return left or True

    def name_fits(self, schema: Any, name: str, at: str) -> bool:
        """Whether `name`, a key of `properties`, fits the schema of propertyNames."""
        fits = self.names(schema, at)
        if isinstance(fits, bool):
            return fits
        if isinstance(fits, list):
            return name in fits
        if len(name) < fits.get("minLength", 0) or len(name) > fits.get("maxLength", len(name)):
            return False
        pattern = fits.get("pattern", PATTERNS.get(fits.get("format", ""), ""))
        try:
            return re.search(pattern, name) is not None
        except re.error as error:
            msg = f"propertyNames at {at} cannot be kept: {error}"
            raise SchemaError(msg) from error


def _values_except(values: list[Any], allowed: Facts) -> list[Any]:
    """Return schemas for the values with the facts `allowed` except `values`; None = not known."""
    if allowed.values is not None:
        return [{"enum": [v for v in allowed.values if not listed(v, values)]}]
    found: list[Any] = []
    texts = [value for value in values if isinstance(value, str)]
    if "string" in allowed.types and texts:
        pattern = other_texts(texts)
        found.append(None if pattern is None else {"type": "string", "pattern": pattern})
    excluded = {type_of(value) for value in values}
    if "boolean" in allowed.types & excluded:
        found.append({"enum": [flag for flag in (True, False) if not listed(flag, values)]})
    if allowed.types & excluded & {"integer", "number", "array", "object"}:
        found.append(None)
    # A number that is no integer has the type "number", which allows integers as well.
    others = allowed.types - excluded - ({"number"} if "integer" in excluded else set())
    if "number" in allowed.types and "integer" in excluded:
        found.append(None)
    return [*found, {"type": sorted(others)}] if others else found


def disjoint(left: Facts, right: Facts, reader: Reader, beside: Container[str] | None) -> bool:
    """Whether these facts prove that no value fits both `left` and `right`.

    beside: further members that a value may have where a schema `closes` its objects; with None,
      only schemas that are `closed` by themselves forbid members.
    """
    for one, other in ((left, right), (right, left)):
        for group in one.branches:
            if all(disjoint(some, other, reader, beside) for some in group):
                return True
    types = common_types(left.types, right.types)
    if not types:
        return True
    if left.values is not None and right.values is not None:
        return not any(listed(value, right.values) for value in left.values)
    if types != {"object"}:
        return False
    for name in left.required | right.required:
        for one, other in ((left, right), (right, left)):
            closes = other.closes and beside is not None and name not in beside
            if name in one.required and (other.closed or closes) and name not in other.allowed:
                return True
            if name in one.required and any(s is False for s, _ in other.members.get(name, ())):
                return True
        pairs = itertools.product(left.members.get(name, ()), right.members.get(name, ()))
        if any(_values_differ(reader.facts(*a), reader.facts(*b)) for a, b in pairs):
            return True
    return False


def _values_differ(left: Facts, right: Facts) -> bool:
    if left.values is not None and right.values is not None:
        return not any(listed(value, right.values) for value in left.values)
    return not common_types(left.types, right.types)


def escaped(part: object) -> str:
    """Return a key or an index, escaped as a part of a JSON pointer."""
    return str(part).replace("~", "~0").replace("/", "~1")


def _is_text(some: object) -> bool:
    return isinstance(some, str)


def _schemas(schema: dict[str, Any], key: str) -> list[Any]:
    some = schema.get(key)
    return some if isinstance(some, list) else []


_CONTAINERS = {"object", "array"}
REFERENCE = "#/$defs/"


def without_endless(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return `schema` with `definitions`, without alternatives that only an endless text fits.

    Raises:
        SchemaError: no finite text fits the schema.
    """
    finite = _Finite(definitions)
    if not finite.has_value(schema):
        msg = "no finite text matches it"
        raise SchemaError(msg)
    kept = finite.pruned(schema)
    if not isinstance(kept, dict) or not definitions:
        return kept
    defined = {name: finite.pruned(some) for name, some in definitions.items()}
    return {**kept, "$defs": defined}


class _Finite:
    """Finds the definitions that have a finite value, as a least fixed point."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._known: set[str] = set()
        grown = True
        while grown:
            left = definitions.keys() - self._known
            found = {name for name in left if self.has_value(definitions[name])}
            self._known |= found
            grown = bool(found)

    def has_value(self, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"].removeprefix(REFERENCE) not in self._known:
            return False
        if not all(map(self.has_value, schema.get("allOf", ()))):
            return False
        if "anyOf" in schema and not any(map(self.has_value, schema["anyOf"])):
            return False
        if "const" in schema or "enum" in schema:
            return True
        types = schema.get("type", "string")
        types = {types} if isinstance(types, str) else set(types)
        if types - _CONTAINERS:
            return True
        fits = {"object": self._has_object, "array": self._has_array}
        return any(fits[name](schema) for name in types)

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        parts = list(self._parts(schema, 8))
        required = {name for part in parts for name in part.get("required", ())}
        return all(
            self.has_value(part["properties"][name])
            for part in parts
            for name in required
            if name in part.get("properties", ())
        )

    def _parts(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """Yield this schema and the schemas in its allOf and $ref; a value must fit all of them."""
        if isinstance(schema, bool) or not depth:
            return
        yield schema
        for part in schema.get("allOf", ()):
            yield from self._parts(part, depth - 1)
        if "$ref" in schema:
            named = self._definitions[schema["$ref"].removeprefix(REFERENCE)]
            yield from self._parts(named, depth - 1)

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        needed = [*first[:least], *([rest] if least > len(first) else [])]
        return all(map(self.has_value, needed))

    def pruned(self, schema: Any) -> Any:
        """Return a schema without the alternatives that have no finite value."""
        if isinstance(schema, bool) or not self.has_value(schema):
            return schema is True
        kept = dict(schema)
        for key in ("properties", "patternProperties"):
            if key in kept:
                kept[key] = {name: self.pruned(some) for name, some in kept[key].items()}
        for key in ("additionalProperties", "additionalItems", "items"):
            if key in kept and not isinstance(kept[key], list):
                kept[key] = self.pruned(kept[key])
        for key in ("prefixItems", "items", "allOf"):
            if isinstance(kept.get(key), list):
                kept[key] = list(map(self.pruned, kept[key]))
        if "anyOf" in kept:
            kept["anyOf"] = [some for some in map(self.pruned, kept["anyOf"]) if some is not False]
        return kept
