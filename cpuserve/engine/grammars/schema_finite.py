"""Finds the schemas with a finite value: a schema that requires itself has none.

llguidance begins the texts of such a schema, and they never end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cpuserve.engine.grammars.schema_facts import SchemaError

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
