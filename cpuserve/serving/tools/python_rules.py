"""The grammar of values and arguments in the syntax of Python."""

from __future__ import annotations

from cpuserve.serving.tools.base import OptionalSchemas
from cpuserve.serving.tools.layout import lark
from cpuserve.serving.tools.value_rules import ValueSyntax, call_rules

_ESCAPE = r"\\(['\"\\\/nrtbf]|u[0-9a-fA-F]{4})"
PYTHON_VALUES = ValueSyntax(
    name="py",
    text="PY_TEXT",
    # Some models write the words of JSON.
    words={
        True: '( "True" | "true" )',
        False: '( "False" | "false" )',
        None: '( "None" | "null" )',
    },
    comma='"," " "?',
    colon='":" " "?',
    key="PY_TEXT",
    key_quotes=("'", '"'),
    terminals=(
        rf"""PY_TEXT: /'([^'\\]|{_ESCAPE})*'/ | /"([^"\\]|{_ESCAPE})*"/""",
        r"PY_NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    ),
    quotes=("'", '"'),
)


def python_rules(schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
    """Return Lark expressions of arguments, ")" and `end`, and all Lark rules (Writing.rules)."""
    return call_rules(PYTHON_VALUES, schemas, "=", "PY_NAME", f'")" {lark(end)}')
