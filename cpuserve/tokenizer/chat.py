"""Renders chat messages to a prompt with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from cpuserve.errors import InvalidRequest
from cpuserve.tokenizer.messages import template_messages

if TYPE_CHECKING:
    from jinja2 import Template

    from cpuserve.tokenizer.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1_000_000
_INSTEAD = "start the server with --chat-template FILE, or use /v1/completions"
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Parameters of render functions in other servers; a template must not get them as variables.
_REFUSED = frozenset({"chat_template", "tokenize", "self", "raise_exception", "strftime_now"})


# Messages that show what a template makes of a system message behind the first one.
_MARK = "c2f1late"
_LATE = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": _MARK},
    {"role": "user", "content": "b"},
]
# Messages that show what a template makes of the arguments of a call that was cut off.
_CUT_OFF = '{"c2f1": "c2f1'
_FUNCTION = {"name": "f", "arguments": _CUT_OFF}
_CALL = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "callc2f1a", "type": "function", "function": _FUNCTION}],
    },
    {"role": "tool", "tool_call_id": "callc2f1a", "content": "b"},
    {"role": "user", "content": "c"},
]


class ChatTemplate:
    """A Jinja chat template, rendered in a sandbox with limits on time and output."""

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, tool_source: str | None = None
    ) -> None:
        """source: the template, or None for a model without one; `render` then raises an error.

        tool_source: the template for requests with tools, if it is another one.
        """
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(tokenizer.special_tokens)
        self._templates: dict[str, Template] = {}
        self._late_system: dict[str, bool] = {}
        self._text_arguments: dict[str, bool] = {}
        self._lock = Lock()

    def render(
        self,
        messages: Any,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. Encode it with add_special_tokens=False, because it contains its BOS.

        kwargs: further template variables (enable_thinking). Raises InvalidRequest if the messages,
        the variables or the template cannot be rendered.
        """
        source = self.tool_source if tools else self.source
        template = self._compiled(source)
        known = template_messages(
            messages,
            keeps_developer="developer" in (source or ""),
            text_arguments=lambda: self._takes_text_arguments(source or "", template),
        )
        if _has_late_system(known) and not self._shows_late_system(source or "", template):
            known = [known[0], *map(_as_user, known[1:])]
        variables = {
            **self._special_tokens,
            **checked_variables(kwargs),
            "messages": known,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(template, variables)

    def fault(self) -> str | None:
        """Return which requests will be refused because a template is broken, and why, or None.

        It compiles the templates, which the first request would do otherwise.
        """
        uses = {"chat requests": self.source, "chat requests with tools": self.tool_source}
        for which, source in uses.items():
            if source is not None:
                try:
                    self._compiled(source)
                except InvalidRequest as error:
                    return f"{which} will be refused (400): {error.message}"
        return None

    def _shows_late_system(self, source: str, template: Template) -> bool:
        """Return whether the template writes a system message that is not the first message."""
        if source not in self._late_system:
            variables = {**self._special_tokens, "messages": _LATE, "add_generation_prompt": True}
            try:
                self._late_system[source] = _MARK in _render(template, variables)
            except InvalidRequest:
                self._late_system[source] = False
        return self._late_system[source]

    def _takes_text_arguments(self, source: str, template: Template) -> bool:
        """Return whether the template writes the arguments of a call unchanged if they are text."""
        if source not in self._text_arguments:
            variables = {**self._special_tokens, "messages": _CALL, "add_generation_prompt": True}
            try:
                self._text_arguments[source] = _CUT_OFF in _render(template, variables)
            except InvalidRequest:
                self._text_arguments[source] = False
        return self._text_arguments[source]

    def _compiled(self, source: str | None) -> Template:
        if source is None:
            msg = f"this model has no chat template (a base model?); {_INSTEAD}"
            raise InvalidRequest(msg)
        with self._lock:
            if source not in self._templates:
                try:
                    self._templates[source] = _compile(source)
                except InvalidRequest as error:
                    msg = f"{error.message}; {_INSTEAD}"
                    raise InvalidRequest(msg) from error
            return self._templates[source]


def check_template(source: str) -> None:
    """Raise InvalidRequest if `source` is too long or has a syntax error."""
    _compile(source)


def _has_late_system(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    """Return a system message as one of the user.

    Agents give instructions between turns. Some templates refuse system messages there, or leave
    them out, which would lose the instructions.
    """
    return {**message, "role": "user"} if message["role"] == "system" else message


def _compile(source: str) -> Template:
    # Imported late, because base models have no template and need no Jinja.
    from jinja2 import TemplateError

    from cpuserve.tokenizer.sandbox import BudgetedEnvironment

    if len(source) > MAX_TEMPLATE_CHARS:
        msg = (
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are "
            "accepted"
        )
        raise InvalidRequest(msg)
    try:
        return BudgetedEnvironment().from_string(source)
    except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
        msg = f"the chat template is broken: {str(error)[:300]}"
        raise InvalidRequest(msg) from error


def _render(template: Template, variables: dict[str, Any]) -> str:
    from cpuserve.tokenizer.sandbox import Budget, spending

    try:
        with spending(Budget(_text_size(variables))):
            return template.render(variables)
    except InvalidRequest:
        raise
    except Exception as error:
        # Any error in a template must only fail the request, not the server.
        msg = f"the chat template cannot render these messages: {str(error)[:500]}"
        raise InvalidRequest(msg, param="messages") from error


def checked_variables(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`kwargs` unchanged; InvalidRequest if one of the names is reserved."""
    for name in kwargs:
        if name in _OWN or name in _REFUSED or not name.isidentifier() or name.startswith("_"):
            msg = f"chat_template_kwargs: {name[:80]!r} is reserved and cannot be set"
            raise InvalidRequest(msg, param="chat_template_kwargs")
    return kwargs


def _text_size(value: Any) -> int:
    """Total number of characters in the strings of nested lists and dicts."""
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            todo.extend(item.keys())
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)
    return total
