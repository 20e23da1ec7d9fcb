"""Convert custom tools of the OpenAI API to functions, the only tools of chat templates."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.structured import InputGrammar
from cpuserve.serving.tools.custom import as_function
from cpuserve.serving.tools.use import check_function

_FORMATS = (
    '{"type": "text"} or a grammar: {"type": "grammar", "syntax": "lark" or "regex", '
    '"definition": ...}'
)


class Offer(NamedTuple):
    """Functions in chat completion format, and the grammars of custom tools by function name."""

    functions: list[dict[str, Any]]
    custom: dict[str, InputGrammar]


def custom_function(
    given: dict[str, Any], name: str, where: str
) -> tuple[dict[str, Any], InputGrammar]:
    """Return the function that replaces a custom tool, and the grammar of the tool's input text.

    given: the object with the members of the tool, at the path `where` of the request.
    name: the function name that the model sees.

    Raises:
      InvalidRequest: a member of the tool is invalid.
    """
    description = given.get("description")
    if not isinstance(description, str | None):
        _refuse(f"{where}.description must be a string")
    grammar = _grammar(given.get("format"), f"{where}.format")
    function = as_function(name, description, grammar)
    check_function(function, where)
    return function, grammar


def _grammar(form: Any, where: str) -> InputGrammar:
    """Return the grammar in a tool's `format`; its members may be nested in `grammar`."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return InputGrammar()
    if kind != "grammar":
        _refuse(f"{where} must be {_FORMATS}")
    inner = form.get("grammar")
    given = inner if isinstance(inner, dict) else form
    syntax, definition = given.get("syntax"), given.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
        _refuse(f"{where} must be {_FORMATS}")
    return InputGrammar(syntax, definition)


def _refuse(why: str) -> NoReturn:
    raise InvalidRequest(why, param="tools")
