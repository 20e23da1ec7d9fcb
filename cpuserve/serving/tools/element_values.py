"""Values that are written as tags inside of tags, with the keys as the names of the tags.

    <days><item>1</item><item>2</item></days><place><city>Paris</city></place>

Strings, numbers, true, false and null have no tags inside.
MiniMax M3 writes a further text before the `<` of each tag (TagTexts.prefix).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from cpuserve.serving.tools.base import JsonSchema
from cpuserve.serving.tools.tag_texts import KEY, TagTexts, escaped
from cpuserve.serving.tools.values import as_json, parts_of, types_of

_DEEPEST = 32
_MOST_PARTS = 1000
_KEY = re.compile(r"[^<>/\s]{1,128}")
# Keywords of lists and objects that the grammar cannot express.
_WITHOUT_GRAMMAR = (
    "const", "contains", "dependentRequired", "dependentSchemas", "enum", "if", "maxItems",
    "maxProperties", "minItems", "minProperties", "not", "patternProperties", "prefixItems",
    "propertyNames", "unevaluatedItems", "uniqueItems",
)  # fmt: skip
TagNode = tuple[str, list[Any], list[str]]  # a tag's name, the tags inside of it, and its texts


def written(value: Any, tags: TagTexts) -> str:
    """Return a value as text in the way that a template writes it."""
    if isinstance(value, Mapping):
        return "".join(element(key, inner, tags) for key, inner in value.items())
    if isinstance(value, list):
        return "".join(element(tags.item, inner, tags) for inner in value)
    return value if isinstance(value, str) else json.dumps(value)


def element(key: str, value: Any, tags: TagTexts) -> str:
    """Return a value between the tags of its key, as a template writes it."""
    inner = tags.inner.of_key(key)
    return f"{inner.open}{key}{inner.heads[0][1]}{written(value, tags)}{inner.tail}"


def json_of_elements(text: str, tags: TagTexts, schema: Any, root: JsonSchema) -> str:
    """Return JSON for a value that is written as tags, with the types of its schema."""
    nodes = _nodes(text, tags)
    return _plain(text, schema, root) if nodes is None else _json(nodes, tags, schema, root)


def _nodes(text: str, tags: TagTexts) -> list[TagNode] | None:
    """Return the tags that a text consists of, or None if it also has text outside of tags."""
    begin, end = tags.inner.open, tags.inner.heads[0][1]
    top: TagNode = ("", [], [])
    stack, place = [top], 0
    for found in re.finditer(f"{re.escape(begin)}(/?)({_KEY.pattern}){re.escape(end)}", text):
        stack[-1][2].append(text[place : found.start()])
        place = found.end()
        if not found[1]:
            node: TagNode = (found[2], [], [])
            stack[-1][1].append(node)
            stack.append(node)
        elif len(stack) == 1 or stack.pop()[0] != found[2]:
            return None
        if len(stack) > _DEEPEST:
            return None
    is_plain = len(stack) > 1 or not top[1] or "".join([*top[2], text[place:]]).strip()
    return None if is_plain else top[1]


def _json(nodes: list[TagNode], tags: TagTexts, schema: Any, root: JsonSchema) -> str:
    """Return the JSON list or object that tags represent."""
    types = types_of(schema, root)
    is_list = all(node[0] == tags.item for node in nodes) and (
        "array" in types or "object" not in types
    )
    values = []
    for key, inner, texts in nodes:
        of_value = member_schema(schema, root, None if is_list else key)
        value = (
            _json(inner, tags, of_value, root) if inner else _plain("".join(texts), of_value, root)
        )
        values.append(value if is_list else f"{json.dumps(key, ensure_ascii=False)}: {value}")
    return f"[{', '.join(values)}]" if is_list else f"{{{', '.join(values)}}}"


def _plain(text: str, schema: Any, root: JsonSchema) -> str:
    """Return JSON for a value without tags inside; the text "" may be an empty list or object."""
    types = types_of(schema, root)
    if not text.strip() and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return as_json(text, types)


def member_schema(schema: Any, root: JsonSchema, key: str | None) -> Any:
    """Return the schema of a member of an object, or (key None) of the items of a list, or None."""
    for part in parts_of(schema, root):
        found = part.get("items") if key is None else part.get("properties")
        if key is not None:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


def check_size(schema: JsonSchema) -> None:
    """Raise ValueError if a schema has too many parts; each reference to a part counts."""
    waiting: list[Any] = [schema]
    for _ in range(_MOST_PARTS):
        if not waiting:
            return
        for part in parts_of(waiting.pop(), schema):
            properties = part.get("properties")
            waiting += properties.values() if isinstance(properties, Mapping) else ()
            waiting += [part["items"]] if "items" in part else []
    msg = f"more than {_MOST_PARTS} parts are not supported in this model's format of calls"
    raise ValueError(msg)


ValueRule = Callable[[TagTexts, str, Any, JsonSchema], str]


def nested_rule(
    tags: TagTexts, rule: str, schema: Any, root: JsonSchema, value_rule: ValueRule
) -> str:
    """Return the Lark rule of a list or an object, and of the end tag (tail) after it.

    value_rule: a function that returns the rule of an item or a member.

    Raises:
      ValueError: a grammar cannot express the schema.
    """
    parts = list(parts_of(schema, root))
    end, inner, head = json.dumps(tags.tail), tags.inner, tags.heads[0][1]
    objects = [part for part in parts if isinstance(part.get("properties"), Mapping)]
    refused = [word for word in _WITHOUT_GRAMMAR if any(word in part for part in parts)]
    is_list = "array" in types_of(schema, root)
    if refused or len(objects) > 1:
        what = refused[0] if refused else "a union of objects"
        msg = f"{what} is not supported in this model's format of calls"
        raise ValueError(msg)
    if not (is_list or objects):  # an object with any members: tags, or no text if it is empty
        return rf"{rule}[suffix={end}]: /({escaped(inner.open)}(.|\n)*{escaped(head)})?/"
    if is_list:
        begin = json.dumps(f"{inner.open}{tags.item}{head}")
        of_item = member_schema(schema, root, None)
        items = value_rule(inner.of_key(tags.item), f"{rule}_i", of_item, root)
        return f"{rule}: ( {begin} {rule}_i )* {end}\n{items}"
    members, rules = member_rules(inner, rule, objects[0], root, value_rule)
    return "\n".join([f"{rule}: {members} {end}", *rules])


def member_rules(
    tags: TagTexts, rule: str, schema: JsonSchema, root: JsonSchema, value_rule: ValueRule
) -> tuple[str, list[str]]:
    """Return the Lark expression of the members of an object, and the rules that it refers to."""
    parts, rules = [], []
    properties, required = schema.get("properties"), schema.get("required") or ()
    for k, (key, of_value) in enumerate(
        properties.items() if isinstance(properties, Mapping) else ()
    ):
        if KEY in tags.tail and not _KEY.fullmatch(key):
            msg = f"the key {key[:80]!r} is not supported in this model's format of calls"
            raise ValueError(msg)
        head = json.dumps(f"{tags.open}{key}{tags.head_of(types_of(of_value, root))}")
        parts.append(f"( {head} {rule}_{k} )" + ("" if key in required else "?"))
        rules.append(value_rule(tags.of_key(key), f"{rule}_{k}", of_value, root))
    return " ".join(parts) or '""', rules
