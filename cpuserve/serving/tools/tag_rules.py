"""The grammar of calls with a tag for each argument."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from cpuserve.sampling.grammar_marks import INPUT_GRAMMAR, PARAMETERS_OF, RAW_TEXT, WHITE_SPACE
from cpuserve.serving.tools.base import JsonSchema, OptionalSchemas, definitions
from cpuserve.serving.tools.element_values import (
    check_size,
    member_rules,
    nested_rule,
)
from cpuserve.serving.tools.layout import lark
from cpuserve.serving.tools.tag_texts import KEY, TagTexts, escaped
from cpuserve.serving.tools.value_rules import PYTHON_VALUES, ValueRules
from cpuserve.serving.tools.values import Types, parts_of, types_of


def tag_rules(tags: TagTexts, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
    """Return a Lark expression for each function's arguments and `end`, and all Lark rules.

    Raises:
      ValueError: a grammar cannot express a schema.
    """
    found, rules = [], []
    for i, (name, schema) in enumerate(schemas.items()):
        if schema is None:
            found.append("free")
            continue
        if tags.item:
            check_size(schema)
        members, of_values = member_rules(tags, f"value_{i}", schema, schema, value_rule)
        found.append(f"arguments_{i} {lark(end)}")
        rules += [_marked(rule, name) for rule in of_values]
        rules.append(f"arguments_{i}: {members}")
    if tags.python:
        rules += PYTHON_VALUES.shared()
    if any("]: TEXT" in rule or " TEXT " in rule for rule in rules):
        rules.append(_text(tags, end))
    if None in schemas.values():
        rules.append(_free(tags, end))
    return found, rules


def _marked(rules: str, name: str) -> str:
    """Return `rules` with PARAMETERS_OF and `name` after each JSON schema and the last rule."""
    *lines, last = rules.split("\n")
    return "\n".join([
        *(line + (PARAMETERS_OF + name) * (" %json " in line) for line in lines),
        last + PARAMETERS_OF + name,
    ])  # fmt: skip


def _text(tags: TagTexts, end: str) -> str:
    """Return the Lark rule of a string without tags, because a tag would end the string."""
    tail = end if tags.loose else tags.tail
    texts = [tags.tail.partition(KEY)[0]] if KEY in tags.tail else [tags.open, tail]
    ends = "|".join(escaped(end.strip()) for end in texts)
    return rf"TEXT: /(.|\n)*/ & ~/(.|\n)*({ends})(.|\n)*/"


def _free(tags: TagTexts, end: str) -> str:
    """Return the Lark rule of arguments without a schema, and of the text `end` after them."""
    if tags.item or tags.loose:  # tags inside of tags: no single tag marks the end
        return f"free[suffix={json.dumps(end)}]: /(.|\\n)*/"
    heads = " | ".join(dict.fromkeys(json.dumps(head) for _, head in tags.heads))
    stop = escaped(tags.heads[0][1].strip()[0])
    return "\n".join([
        f"free: ( {json.dumps(tags.open)} key head any_value )* {lark(end)}",
        rf"key: /[^{stop}\r\n]{{1,128}}/",
        f"head: {heads}",
        rf"any_value[suffix={json.dumps(tags.tail)}]: /(.|\n)*/",
    ])  # fmt: skip


def value_rule(tags: TagTexts, rule: str, schema: Any, of_all: JsonSchema) -> str:
    """Return the Lark rule of a value and of the end tag (tail) after it."""
    end = json.dumps(tags.tail)
    types = types_of(schema, of_all)
    if tags.item and not types:
        return rf"{rule}[suffix={end}]: /(.|\n)*/"
    if tags.item and types & {"array", "object"}:
        return nested_rule(tags, rule, schema, of_all, value_rule)
    if "string" not in types:
        return _other_value_rule(tags, rule, schema, of_all, types)
    choices: list[Any] = []
    for part in parts_of(schema, of_all):
        for word in ("pattern", "format", "minLength", "maxLength"):
            if word in part:
                msg = f"{word} of a string is not supported in this model's format of calls"
                raise ValueError(msg)
        choices += [part["const"]] if "const" in part else part.get("enum") or ()
    if choices:
        return f"{rule}: ( {_listed(tags, choices, types)} ) {end}"
    before, behind = tags.quote
    begin = f"{rule}: {json.dumps(before)} {rule}_text\n{rule}_text" if before else rule
    if isinstance(schema, dict) and INPUT_GRAMMAR in schema:  # the input of a custom tool
        asked = {**schema[INPUT_GRAMMAR], "end": behind + tags.tail}
        return f"{begin}: {RAW_TEXT} {json.dumps(asked)}"
    return f"{begin}[suffix={json.dumps(behind + tags.tail)}]: TEXT"


def _other_value_rule(
    tags: TagTexts, rule: str, schema: Any, of_all: JsonSchema, types: Types
) -> str:
    """Return the Lark rule of a value that is no string, and of the end tag after it."""
    end = json.dumps(tags.tail)
    if tags.python:
        values = ValueRules(PYTHON_VALUES, f"{rule}_v", of_all)
        with suppress(ValueError):  # these rules allow JSON too, but not all keywords of schemas
            return "\n".join([f"{rule}: {values.value(schema)} {end}", *values.lines])
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    json_rule = f"{rule}_json: %json {_dumped(schema, definitions(of_all), options)}"
    is_free = not any({"enum", "const"} & part.keys() for part in parts_of(schema, of_all))
    words = ["True", "False"] * ("boolean" in types) + ["None"] * ("null" in types)
    # Templates write these words as Python does, also where lists and objects are JSON.
    more = "".join(f" | {json.dumps(word)}" for word in words) if is_free else ""
    return f"{rule}: ( {rule}_json{more} ) {end}\n{json_rule}"


def _listed(tags: TagTexts, choices: list[Any], types: Types) -> str:
    """Return Lark alternatives for `choices` as the format writes them, and null if allowed."""
    before, behind = tags.quote
    texts = [f"{before}{c}{behind}" if isinstance(c, str) else json.dumps(c) for c in choices]
    return " | ".join(map(json.dumps, dict.fromkeys([*texts, *(["null"] * ("null" in types))])))


def _dumped(schema: Any, *more: dict[str, Any]) -> str:
    whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
    for members in more:
        whole |= members
    return json.dumps(whole)
