"""Converts JSON schemas to the keywords that llguidance enforces.

All values that fit the result of `convert` fit the client's schema. llguidance lacks not, if,
dependentRequired, dependentSchemas, propertyNames, contains, uniqueItems, unevaluatedProperties,
unevaluatedItems, $dynamicRef, unknown formats, a oneOf whose types overlap, and a number of members
beside optional ones (tests/engine/test_grammar_library.py shows each of these facts).
Keywords that it lacks are expressed by other keywords. This may exclude some valid values
(comments say where), but never admits invalid values. Annotations are left out. A keyword
that cannot be enforced is refused, and the error has its JSON pointer. Objects are closed: without
additionalProperties, they have only the members that their schema declares. The reason is that
small models invent further members until max_tokens, and vLLM and llama.cpp close objects as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cpuserve.engine.grammars.schema_choices import Choices, distinct, with_count
from cpuserve.engine.grammars.schema_facts import (
    REFERENCE,
    Facts,
    Reader,
    SchemaError,
    common_types,
    escaped,
    without_endless,
)
from cpuserve.engine.grammars.schema_values import (
    check_value,
    checked_pattern,
    formatted,
    names_pattern,
    number,
)

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# The most members of `dependencies`, and the largest minContains, as both enlarge the grammar.
MAX_DEPENDENCIES = 8
MAX_CONTAINS = 64

Schema = dict[str, Any] | bool

_ONE_OF, _UNEVALUATED = "oneOf", "unevaluatedProperties"
_MIN_PROPERTIES = "minProperties"
_MIN_CONTAINS, _MAX_CONTAINS = "minContains", "maxContains"


def convert(text: str, *, closed: bool = True) -> dict[str, Any]:
    """Return the schema in keywords that llguidance enforces.

    closed: whether objects without additionalProperties have only the members of their schema,
    and whether a schema with properties (or items) allows only objects (or arrays).

    Raises:
        SchemaError: it is not a JSON schema, cannot be enforced, or has no finite value.
    """
    try:
        root = json.loads(text, parse_constant=_no_constant)
        return _Converter(root, closed).whole()
    except RecursionError as error:
        msg = "it is too complex: it nests too deeply"
        raise SchemaError(msg) from error
    except ValueError as error:  # invalid JSON, or an integer with thousands of digits
        msg = f"it is no JSON: {error}"
        raise SchemaError(msg) from error


def _no_constant(name: str) -> None:
    msg = f"{name} is no number of JSON"
    raise ValueError(msg)


class _Converter:
    """Converts the schemas of one JSON document.

    A schema with references to it becomes one or two definitions. One definition is closed by
    itself, and the other one is a part of another schema that is closed as a whole.
    """

    def __init__(self, root: Any, closed: bool) -> None:
        self._root = root
        self.closed = closed
        self.reader = Reader(root, closed)
        self._names: dict[tuple[str, bool], str] = {}
        self._definitions: dict[str, Schema] = {}

    def whole(self) -> dict[str, Any]:
        """Return the converted document."""
        schema = self.place(self._root, "#", self.rest)
        if (name := self._names.get(("#", self.closed))) is not None:  # the root refers to itself
            schema = {"$ref": REFERENCE + name}
        whole = without_endless(schema, self._definitions)
        return whole if isinstance(whole, dict) else {}

    @property
    def rest(self) -> Schema | None:
        """The schema for members that a complete schema does not describe; None = any value."""
        return False if self.closed else None

    def reference(self, to: Any, at: str, whole: bool) -> Schema:
        """Return a reference to the converted target of the reference `to` at pointer `at`."""
        place, schema = self.reader.find(to, at)
        if isinstance(schema, bool):
            return schema
        key = place, whole and self.closed
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            self._definitions[name] = self.place(schema, place, self.rest if whole else None)
        return {"$ref": REFERENCE + self._names[key]}

    def place(
        self, schema: Any, at: str, rest: Schema | None, beside: tuple[str, ...] = ()
    ) -> Schema:
        """Return the converted `schema`, which is at the JSON pointer `at` of the document.

        rest: the schema for members that this schema does not describe. None: this schema is a part
          of another schema, which determines these members.
        beside: the members that the other parts of that schema describe.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            msg = f"{at}: a schema is an object or a boolean"
            raise SchemaError(msg)
        return _Place(self, schema, at, rest, beside).converted()


class _Place:
    """Converts a schema. _out: its converted keywords; _more: schemas that must hold as well."""

    def __init__(
        self,
        of: _Converter,
        schema: dict[str, Any],
        at: str,
        rest: Schema | None,
        beside: tuple[str, ...],
    ) -> None:
        self._of, self._schema, self._at = of, schema, at
        self._reader = of.reader
        self._facts = self._reader.facts(schema, at)
        self._given, self._beside = rest, beside
        self._parts = [key for key in schema if key in _APPLICATORS and self._applies(key)]
        self._rest = self._rest_of(rest)
        self._out: dict[str, Any] = {}
        self._more: list[Schema] = []

    def _applies(self, key: str) -> bool:
        if key == "if":
            return "then" in self._schema or "else" in self._schema
        return bool(self._schema[key])

    def _rest_of(self, rest: Schema | None) -> Schema | None:
        """Return the schema for members not described here; None if this schema is not closed."""
        schema, facts = self._schema, self._facts
        asked = schema.get(_UNEVALUATED, True)
        if "additionalProperties" in schema or "object" not in facts.types:
            return None
        if not self._branches and facts.is_open:
            return None
        if asked is not True:
            choices = facts.branches or {"if", "dependentSchemas"} & set(self._parts)
            if choices and not self._branches:
                raise self._refuse(_UNEVALUATED, "cannot be kept beside nested choices")
            return self._of.place(asked, f"{self._at}/{_UNEVALUATED}", self._of.rest)
        if _UNEVALUATED in schema or rest is None or "propertyNames" in schema:
            return None
        most = len(facts.allowed) + len(self._beside)
        if not facts.patterns and schema.get("minProperties", 0) > most:
            return None
        return rest if facts.has_properties or self._beside else None

    @property
    def _branches(self) -> bool:
        """Whether to close the alternatives of the only anyOf or oneOf instead of this schema."""
        return self._parts in (["anyOf"], ["oneOf"])

    @property
    def _is_one_part(self) -> bool:
        """Whether exactly one other schema (by $ref, or an allOf of one) describes the members."""
        if (
            len(self._parts) != 1
            or self._beside
            or _MEMBERS & self._schema.keys() != set(self._parts)
        ):
            return False
        part = self._schema[self._parts[0]]
        return not isinstance(part, list) or len(part) == 1

    def converted(self) -> Schema:
        """Return this schema in keywords that llguidance enforces."""
        out = self._out
        for key, value in self._schema.items():
            keep = _KEYWORDS.get(key)
            if keep is not None:
                keep(self, key, value)
        if self._of.closed and "type" not in out:
            self._imply_type()
        if self._rest is not None and not self._branches and not self._is_one_part:
            self._close(self._rest)
        self._unique()
        self._count_members()
        if self._more:
            out["allOf"] = [*out.get("allOf", ()), *self._more]
        return out

    def _described(self, facts: Facts) -> dict[str, None]:
        """Return the members that an object may have if this schema allows no others."""
        return facts.names if _UNEVALUATED in self._schema else facts.allowed

    def _close(self, rest: Schema) -> None:
        properties = self._out.setdefault("properties", {})
        for name in (*self._described(self._facts), *self._beside):
            properties.setdefault(name, True)
        if self._facts.patterns:
            patterns = self._out.setdefault("patternProperties", {})
            for pattern in self._facts.patterns:
                patterns.setdefault(pattern, True)
        self._out["additionalProperties"] = rest

    def _count_members(self) -> None:
        """Remove minProperties and maxProperties if they have no effect.

        Raises:
            SchemaError: one of them has an effect that a grammar cannot enforce.
        """
        out, facts = self._out, self._facts
        least, most = out.get("minProperties", 0), out.get("maxProperties")
        optional = [name for name in facts.names if name not in facts.required]
        closed = out.get("additionalProperties") is False and "patternProperties" not in out
        if least <= len(facts.required):
            least = out.pop("minProperties", 0) and 0
        if closed and most is not None and most >= len(facts.allowed):
            most = out.pop("maxProperties") and None
        if not least and most is None:
            return
        if closed and least <= 1 and most in (None, 1) and not facts.required:
            return
        if optional and (closed or most is None):
            num = len(facts.required)
            most_left = None if most is None else most - num
            if (options := with_count(optional, max(0, least - num), most_left)) is not None:
                out.pop("minProperties", None)
                out.pop("maxProperties", None)
                self._more.append({"anyOf": options})
                return
        if least > len(facts.required) + 1:
            why = "cannot be kept: a grammar does not see that two members have the same name"
            raise self._refuse(_MIN_PROPERTIES, why)
        if optional:
            key = "maxProperties" if most is not None else "minProperties"
            why = "cannot be kept beside optional properties: list those that are required"
            raise self._refuse(key, why)

    def _child(self, value: Any, *path: object) -> Schema:
        """Convert the schema of a member or an item; `path` leads to it from this schema."""
        return self._of.place(value, "/".join([self._at, *map(escaped, path)]), self._of.rest)

    def _part(self, value: Any, *path: object) -> Schema:
        """Convert another schema for the same value; it is closed only as a part of this schema."""
        rest = self._given if self._is_one_part else None
        return self._of.place(value, "/".join([self._at, *map(escaped, path)]), rest)

    def _refuse(self, key: str, why: str) -> SchemaError:
        return SchemaError(f"{key} at {self._at} {why}")

    def _object(self, members: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with the keywords `members`; of type "object" if only objects fit."""
        return {"type": "object", **members} if self._facts.types == {"object"} else members

    def _imply_type(self) -> None:
        """Add the type "object" to a schema with properties, and "array" to one with items."""
        if self._parts or {"enum", "const"} & self._schema.keys():
            return
        if "properties" in self._schema:
            self._out["type"] = "object"
        elif {"items", "prefixItems"} & self._schema.keys():
            self._out["type"] = "array"

    # --- keywords -----------------------------------------------------------------------------

    def _copy(self, key: str, value: Any) -> None:
        self._out[key] = value

    def _type(self, key: str, value: Any) -> None:
        types = value if isinstance(value, list) else [value]
        for name in types:
            if name not in TYPES:
                raise self._refuse(key, f"is {json.dumps(name)[:100]}: use {', '.join(TYPES)}")
        if types:
            self._out[key] = value
        else:
            raise self._refuse(key, "is an empty list")

    def _values(self, key: str, value: Any) -> None:
        if key == "enum" and not isinstance(value, list):
            raise self._refuse(key, "must be a list")
        for some in value if key == "enum" else [value]:
            if why := check_value(some):
                raise self._refuse(key, why)
        self._out[key] = value

    def _reference(self, _key: str, value: Any) -> None:
        whole = self._is_one_part and self._given is not None
        found = self._of.reference(value, self._at, whole)
        if isinstance(found, bool):
            self._more.append(found)
        else:
            self._out["$ref"] = found["$ref"]

    def _all_of(self, key: str, value: Any) -> None:
        parts = self._list(key, value)
        self._out[key] = [self._part(part, key, i) for i, part in enumerate(parts)]

    def _any_of(self, key: str, value: Any) -> None:
        parts = self._list(key, value)
        own = self._reader.facts({k: v for k, v in self._schema.items() if k != key}, self._at)
        beside = tuple(dict.fromkeys([*self._described(own), *self._beside]))
        rest = self._rest if self._branches else None
        opposites: list[list[Schema]] = [[] for _ in parts]
        if key == "oneOf":
            parts, opposites = self._separated(parts, own.types, None if rest is None else beside)
        made = [
            self._of.place(part, f"{self._at}/{key}/{i}", rest, () if rest is None else beside)
            for i, part in enumerate(parts)
        ]
        made = [
            {"allOf": [a, *more]} if more else a for a, more in zip(made, opposites, strict=True)
        ]
        if "anyOf" in self._out:
            self._more.append({"anyOf": made})
        else:
            self._out["anyOf"] = made

    def _separated(
        self, parts: list[Any], types: set[str], beside: tuple[str, ...] | None
    ) -> tuple[list[Any], list[list[Schema]]]:
        """Return the schemas of a oneOf and their opposites, so that no value fits two of them."""
        places = [(part, f"{self._at}/oneOf/{i}") for i, part in enumerate(parts)]
        facts = [self._reader.facts(*place) for place in places]
        for of_part in facts:
            of_part.types = common_types(of_part.types, types)
        choices = Choices(places, facts, self._reader, beside)
        if (both := choices.separate()) is not None:
            why = (
                f"cannot be kept: a value may fit both {both[0]} and {both[1]} of its schemas. Use "
                f"anyOf, or give each a property with another const"
            )
            raise self._refuse(_ONE_OF, why)
        parts = [
            self._reader.requiring(part, at, names)
            for (part, at), names in zip(places, choices.names, strict=True)
        ]
        return parts, choices.opposites

    def _not(self, key: str, value: Any) -> None:
        kept = self._reader.negated(value, self._facts, f"{self._at}/{key}")
        if kept is None:
            raise self._refuse(key, "cannot be kept: it can only exclude values, types and members")
        self._more.append(kept)

    def _if(self, key: str, value: Any) -> None:
        """Express if, then, else as an anyOf: (`if` and `then`), or (`else` and not `if`).

        Where `not if` cannot be expressed for all values, others fit if they fit `then` and `else`.
        """
        then, other = self._schema.get("then", True), self._schema.get("else", True)
        if then is True and other is True:
            return
        place = f"{self._at}/{key}"
        against = self._reader.negated(value, self._facts, place)
        options = [[self._part(value, key), self._part(then, "then")]]
        if against is None:
            against = self._reader.negated(value, self._facts, place, partly=True)
            options.append([self._part(then, "then"), self._part(other, "else")])
        if against is not None:
            options.append([against, self._part(other, "else")])
        self._more.append({"anyOf": [{"allOf": option} for option in options]})

    def _properties(self, key: str, value: Any) -> None:
        names = self._schema.get("propertyNames", True)
        members = self._dict(key, value)
        self._out[key] = {
            name: self._child(some, key, name) if self._fits_name(names, name) else False
            for name, some in members.items()
        }

    def _fits_name(self, names: Any, name: str) -> bool:
        return names is True or self._reader.name_fits(names, name, f"{self._at}/propertyNames")

    def _patterns(self, key: str, value: Any) -> None:
        kept = self._out.setdefault(key, {})
        for pattern, some in self._dict(key, value).items():
            try:
                kept[checked_pattern(pattern)] = self._child(some, key, pattern)
            except ValueError as error:
                raise self._refuse(key, str(error)) from error

    def _additional(self, key: str, value: Any) -> None:
        if "propertyNames" not in self._schema:
            self._out[key] = self._child(value, key)

    def _property_names(self, key: str, value: Any) -> None:
        """Allow other members only if propertyNames permits them: by a pattern, or by name."""
        other = self._schema.get(
            "additionalProperties", self._schema.get("unevaluatedProperties", True)
        )
        names = self._reader.names(value, f"{self._at}/{key}")
        if names is True:
            if "additionalProperties" in self._schema:
                self._out["additionalProperties"] = self._child(other, "additionalProperties")
            return
        if "patternProperties" in self._schema and names:
            raise self._refuse(key, "cannot be kept beside patternProperties")
        if isinstance(names, list):
            known = self._schema.get("properties", {})
            more = {n: self._child(other, "additionalProperties") for n in names if n not in known}
            self._out.setdefault("properties", {}).update(more)
        elif names is not False:
            try:
                pattern = names_pattern(names)
            except ValueError as error:
                raise self._refuse(key, str(error)) from error
            if pattern is None:
                why = "cannot be kept: use one of pattern, enum, const, and of bounds of the length"
                raise self._refuse(key, why)
            self._out["patternProperties"] = {pattern: self._child(other, "additionalProperties")}
        self._out["additionalProperties"] = False

    def _required(self, key: str, value: Any) -> None:
        self._out[key] = self._names_in(key, value)

    def _names_in(self, key: str, value: Any) -> list[str]:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return list(dict.fromkeys(value))
        raise self._refuse(key, "must be a list of names")

    def _dependent(self, key: str, value: Any) -> None:
        """Express a dependency as an anyOf: its requirements hold, or its member is absent."""
        needs = self._dict(key, value)
        if len(needs) > MAX_DEPENDENCIES:
            raise self._refuse(
                key, f"has {len(needs)} members: at most {MAX_DEPENDENCIES} can be kept"
            )
        for name, needed in needs.items():
            if isinstance(needed, list):
                with_it = self._object({"required": [name, *self._names_in(key, needed)]})
            else:
                with_it = {
                    "allOf": [self._object({"required": [name]}), self._part(needed, key, name)]
                }
            without: dict[str, Any] = self._object({"properties": {name: False}})
            if needed and needed is not True:
                self._more.append({"anyOf": [with_it, without]})

    def _count(self, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
            raise self._refuse(
                key, f"is {json.dumps(value)[:100]}: it must be a whole number from 0 on"
            )
        self._out[key] = int(value)

    def _number(self, key: str, value: Any) -> None:
        whole = self._facts.types == {"integer"}
        try:
            for name, bound in number(key, value, self._schema, whole=whole).items():
                self._out[name] = bound
        except ValueError as error:
            raise self._refuse(key, str(error)) from error

    def _pattern(self, key: str, value: Any) -> None:
        try:
            self._out["pattern"] = checked_pattern(value, self._schema.get("format"))
        except ValueError as error:
            raise self._refuse(key, str(error)) from error

    def _format(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise self._refuse(key, "must be a text")
        kept = formatted(value)
        if "pattern" in kept and "pattern" in self._schema:
            self._more.append(
                {"type": "string", **kept} if self._facts.types == {"string"} else kept
            )
        else:
            self._out.update(kept)

    def _items(self, key: str, value: Any) -> None:
        if isinstance(value, list):
            self._out[key] = [self._child(some, key, i) for i, some in enumerate(value)]
        else:
            self._out[key] = self._child(value, key)

    def _unevaluated_items(self, key: str, value: Any) -> None:
        if value is True or "items" in self._schema:
            return
        if self._parts or "contains" in self._schema:
            raise self._refuse(key, "cannot be kept beside schemas of the same array: use items")
        self._out["items"] = self._child(value, key)

    def _unique(self) -> None:
        """Keep uniqueItems by listing all arrays of a few values."""
        most = self._out.get("maxItems")
        if not self._schema.get("uniqueItems", False) or (most is not None and most <= 1):
            return
        facts = self._reader.facts(self._schema.get("items", True), f"{self._at}/items")
        values = [] if "prefixItems" in self._schema or facts.values is None else facts.values
        options = distinct(values, self._out.get("minItems", 0), most)
        if not options:
            key, why = "uniqueItems", "cannot be kept: a grammar compares only a few listed values"
            raise self._refuse(key, why)
        self._more.append({"anyOf": options})

    def _contains(self, key: str, value: Any) -> None:
        """Require the contained items at the start of an array; later ones do not count."""
        least, most = self._schema.get(_MIN_CONTAINS, 1), self._schema.get(_MAX_CONTAINS)
        if most is not None and not (value is True and "maxItems" not in self._schema):
            raise self._refuse(_MAX_CONTAINS, "cannot be kept")
        if most is not None:
            self._out["maxItems"] = most
        if not least:
            return
        if not isinstance(least, int) or least > MAX_CONTAINS:
            raise self._refuse(_MIN_CONTAINS, f"must be a number up to {MAX_CONTAINS}")
        first = self._schema.get("prefixItems", self._schema.get("items", ()))
        skip = range(len(first) + 1 if isinstance(first, list) else 1)
        item = self._child(value, key)
        options = [
            {"prefixItems": [True] * n + [item] * least, "minItems": n + least} for n in skip
        ]
        if self._facts.types == {"array"}:
            options = [{"type": "array", **option} for option in options]
        self._more.append(options[0] if len(options) == 1 else {"anyOf": options})

    def _dynamic(self, key: str, value: Any) -> None:
        self._reference("$ref", self._reader.dynamic(key, value, self._at))

    def _list(self, key: str, value: Any) -> list[Any]:
        if isinstance(value, list) and value:
            return value
        raise self._refuse(key, "must be a list of schemas")

    def _dict(self, key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        raise self._refuse(key, "must be an object")


# Keywords with more schemas for the same value, and keywords about the members of an object.
_APPLICATORS = {
    "allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas",
    "dependencies",
}  # fmt: skip
_MEMBERS = _APPLICATORS | {
    "properties", "patternProperties", _UNEVALUATED, "required", "minProperties", "maxProperties",
}  # fmt: skip

# All other keywords have no effect on values, or are read together with another keyword.
_KEYWORDS: dict[str, Callable[[_Place, str, Any], None]] = {
    "type": _Place._type,
    "const": _Place._values,
    "enum": _Place._values,
    "$ref": _Place._reference,
    "$dynamicRef": _Place._dynamic,
    "$recursiveRef": _Place._dynamic,
    "allOf": _Place._all_of,
    "anyOf": _Place._any_of,
    "oneOf": _Place._any_of,
    "not": _Place._not,
    "if": _Place._if,
    "properties": _Place._properties,
    "patternProperties": _Place._patterns,
    "additionalProperties": _Place._additional,
    "propertyNames": _Place._property_names,
    "required": _Place._required,
    "dependentRequired": _Place._dependent,
    "dependentSchemas": _Place._dependent,
    "dependencies": _Place._dependent,
    "minProperties": _Place._count,
    "maxProperties": _Place._count,
    "items": _Place._items,
    "prefixItems": _Place._items,
    "additionalItems": _Place._items,
    "unevaluatedItems": _Place._unevaluated_items,
    "contains": _Place._contains,
    "minItems": _Place._count,
    "maxItems": _Place._count,
    "minLength": _Place._count,
    "maxLength": _Place._count,
    "pattern": _Place._pattern,
    "format": _Place._format,
    "minimum": _Place._number,
    "maximum": _Place._number,
    "exclusiveMinimum": _Place._number,
    "exclusiveMaximum": _Place._number,
    "multipleOf": _Place._number,
}
