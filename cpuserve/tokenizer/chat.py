"""Renders chat messages to a prompt with the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.call_ids import with_ids
from cpuserve.tokenizer.conversation import (
    Content,
    ContentPart,
    ConversationMessage,
    MediaPart,
    join_texts,
    text_of,
)
from cpuserve.tokenizer.described import (
    ASKS_FOR_CALLS,
    WriteCalls,
    described,
    example_of,
    usual_calls,
)
from cpuserve.tokenizer.messages import template_messages
from cpuserve.tokenizer.rendering.client import (
    NESTED,
    RENDERER,
    TemplateRefused,
    TemplateStopped,
    is_out_of_time,
    limited_learning_time,
)
from cpuserve.tokenizer.traits import THOUGHTS, Traits, as_parts, find_traits

if TYPE_CHECKING:
    from cpuserve.tokenizer.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1_000_000
_INSTEAD = "start the server with --chat-template FILE, or use /v1/completions"
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Parameters of render functions in other servers: requests may not set them as template variables.
_REFUSED = frozenset(
    {"chat_template", "tokenize", "self", "raise_exception", "strftime_now", "rewrites_ids"}
)

_MARK = "c2f1tool"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class ChatTemplate:
    """A Jinja chat template. A process with limits on memory and time renders it."""

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        tool_source: str | None = None,
        *,
        parses_messages: bool = False,
    ) -> None:
        """source: the template, or None for a model without one; `render` then raises an error.

        tool_source: the template for requests with tools, if the model has a separate one.
        parses_messages: texts of control tokens in messages become these tokens.
        """
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(tokenizer.special_tokens)
        self._tokenizer = tokenizer
        self.parses_messages = parses_messages
        tokenizer.prepare_masks()
        self._turns: dict[str, str] = {}
        self._traits: dict[str, Traits | InvalidRequest] = {}
        self._examples: dict[str, str] = {}
        self._write: WriteCalls | None = None
        self._describes = False

    def write_calls(self, write: WriteCalls | None, *, describe: bool = False) -> None:
        """Write the calls of earlier turns with `write`, if the template writes none.

        write: None = in the usual format, if the template asks for it.

        describe: the template gets neither tools nor calls: the system message describes the tools
          with an example that `write` returns, and calls become texts.
        """
        self._write, self._describes = write, describe
        self._examples.clear()

    def render(
        self,
        messages: Any,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        rewrites_ids: bool = True,
        own_marks: Collection[str] = (),
        **kwargs: Any,
    ) -> str:
        """Return the prompt text, with masks for the control texts of messages (masks.py).

        The text includes BOS: encode it with `Tokenizer.encode_masked` and without special tokens.
        The call waits for another process.

        own_marks: texts of control tokens around thoughts and calls. An earlier response may have
          them, so the content of an assistant's message keeps them, unless they begin or end turns.
        rewrites_ids: whether ids of calls are changed to those that the template accepts
          (call_ids.py).
        kwargs: further template variables, such as enable_thinking, with JSON types.

        Raises:
            InvalidRequest: the messages, the variables or the template cannot be rendered.
            ServiceUnavailable: the process that renders templates cannot be started.
        """
        source = self.tool_source if tools else self.source
        if source is None:
            msg = f"this model has no chat template (a base model?); {_INSTEAD}"
            raise InvalidRequest(msg)
        traits = self._traits_of(source)
        checked = [
            self._masked_message(message, source, traits, own_marks)
            for message in template_messages(
                messages, keeps_developer=traits.developer, text_arguments=traits.text_arguments
            )
        ]
        tools = self._masked(tools)
        checked = self._described(checked, tools, source, traits)
        known = arranged(checked, traits if rewrites_ids else replace(traits, call_ids="any"))
        given = tools if traits.takes_tools else None
        further = {
            **self._masked(checked_variables(kwargs)),
            "tools": given or None,
            **_further_tools(source, given),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(source, known, further)
        except TemplateRefused as error:
            fewer = without_thoughts(known)
            if fewer is known:
                raise _cannot(error) from None
        try:
            return self._render(source, fewer, further)
        except TemplateRefused as error:
            raise _cannot(error) from None

    def _described(
        self,
        checked: list[ConversationMessage],
        tools: list[dict[str, Any]] | None,
        source: str,
        traits: Traits,
    ) -> list[ConversationMessage]:
        """Return messages with the tools and calls that the template does not write."""
        write = self._write or usual_calls
        if tools and not traits.tools:
            return described(checked, tools, traits, self._example(source, traits), write)
        if not traits.calls and (self._write or ASKS_FOR_CALLS.search(source)):
            return described(checked, None, traits, "", write)
        return checked

    def mask(self, text: str) -> str:
        """Return a text for a rendered prompt, with its control texts masked."""
        masked_text: str = self._masked(text)
        return masked_text

    def _masked(self, value: Any, but: Collection[str] = ()) -> Any:
        masks = self._tokenizer.masks
        try:
            return masks.mask_all(value, masks.texts if self.parses_messages else but)
        except RecursionError:
            raise TemplateStopped(NESTED) from None

    def _masked_message(
        self, message: ConversationMessage, source: str, traits: Traits, own_marks: Collection[str]
    ) -> ConversationMessage:
        masked: ConversationMessage = self._masked(message)
        if message["role"] != "assistant" or masked["content"] == message["content"]:
            return masked
        turn = self._turn(source, traits)
        kept = {text for text in own_marks if text not in turn}
        return {**masked, "content": self._masked(message["content"], kept)}

    def _turn(self, source: str, traits: Traits) -> str:
        """Return a turn of the user as a template writes it; "" if it refuses the turn."""
        if source not in self._turns:
            asked: list[ConversationMessage] = [{"role": "user", "content": "a"}]
            further = {"add_generation_prompt": False}
            try:
                self._turns[source] = self._render(source, arranged(asked, traits), further)
            except TemplateRefused:
                self._turns[source] = ""
        return self._turns[source]

    def fault(self) -> str | None:
        """Return which requests will be refused because a template is broken, and why, or None.

        The check also finds the traits of the templates, so that the first request need not wait.
        """
        uses = {"chat requests": self.source, "chat requests with tools": self.tool_source}
        with limited_learning_time():
            for which, source in uses.items():
                if source is not None:
                    try:
                        self._traits_of(source)
                    except InvalidRequest as error:
                        return f"{which} will be refused (400): {error.message}"
        return None

    def _traits_of(self, source: str) -> Traits:
        """Return the traits of a template; InvalidRequest if it is broken or reaches a limit."""
        found = self._traits.get(source)
        if found is None:
            with limited_learning_time():
                found = self._traits[source] = self._learned_traits(source)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message)
        if not self._describes:
            return found
        return replace(found, tools=False, takes_tools=False, calls=False)

    def _learned_traits(self, source: str) -> Traits | InvalidRequest:
        try:
            check_template(source)
            # A template for tools is never rendered without them.
            further = {"tools": [_TOOL]} if source != self.source else {}
            found = find_traits(source, partial(self._render, source, further=further))
            shown = self._shows_tools(source, found)
        except TemplateStopped as error:
            if not is_out_of_time():  # other processes may have slowed the template: retry later
                raise
            return error
        except InvalidRequest as error:
            return InvalidRequest(f"{error.message}; {_INSTEAD}")
        return replace(found, tools=bool(shown), takes_tools=shown is not None)

    def traits(self) -> Traits | None:
        """Return the kinds of messages that a request with tools can have; None = no template."""
        try:
            return self._traits_of(self.tool_source) if self.tool_source is not None else None
        except InvalidRequest:  # the template is broken
            return None

    def has_token(self, text: str) -> bool:
        """Return whether the model has a special token with this text."""
        tokenizer = self._tokenizer
        return any(tokenizer.token_text(i) == text for i in tokenizer.special_ids)

    @property
    def describes_tools(self) -> bool:
        """Whether the system message describes tools, because the template does not show them.

        Raises InvalidRequest if the template is broken.
        """
        return self.tool_source is not None and not self._traits_of(self.tool_source).tools

    def _shows_tools(self, source: str, traits: Traits) -> bool | None:
        """Return whether a template writes the tools into the prompt; None = it refuses tools.

        If it refuses the conversation without tools as well, the result is True.
        """
        tool = {**_TOOL, "function": {**_TOOL["function"], "name": _MARK}}
        asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        further = {"tools": [tool], **_further_tools(source, [tool])}
        try:
            return _MARK in self._render(source, arranged(asked, traits), further)
        except TemplateRefused:
            pass
        try:
            self._render(source, arranged(asked, traits), {})
        except TemplateRefused:
            return True
        return None

    def _example(self, source: str, traits: Traits) -> str:
        """Return an example of a call as the template writes it, for the description of tools."""
        if source not in self._examples:
            write = self._write or usual_calls

            def render(messages: list[dict[str, Any]]) -> str:
                further = {"add_generation_prompt": False}
                return self._render(source, arranged(messages, traits), further)

            try:
                self._examples[source] = example_of(render, traits, write)
            except TemplateRefused:
                self._examples[source] = example_of(render, replace(traits, calls=False), write)
        return self._examples[source]

    def _render(
        self, source: str, messages: list[dict[str, Any]], further: Mapping[str, Any]
    ) -> str:
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **further,
            "messages": messages,
        }
        return RENDERER.render(source, variables)


def _further_tools(source: str, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return further variables with the tools, for templates that do not read `tools`.

    SmolLM3 reads xml_tools. FireFunction reads functions and datetime.
    """
    if not tools:
        return {}
    found: dict[str, Any] = {"xml_tools": tools} if "xml_tools" in source else {}
    if re.search(r"\bfunctions\b", source) and not re.search(r"\btools\b", source):
        functions = [tool.get("function", tool) for tool in tools]
        found["functions"] = json.dumps(functions, indent=4, ensure_ascii=False)
        found["datetime"] = datetime.now().strftime("%Y-%m-%d")
    return found


def check_template(source: str) -> None:
    """Raise InvalidRequest if `source` is too long, has an error, or takes too much to compile."""
    if len(source) > MAX_TEMPLATE_CHARS:
        msg = (
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are "
            "accepted"
        )
        raise InvalidRequest(msg)
    try:
        RENDERER.check(source)
    except TemplateRefused as error:
        msg = f"the chat template is broken: {error.message[:300]}"
        raise InvalidRequest(msg) from None


def checked_variables(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `kwargs` unchanged; raise InvalidRequest if a key is reserved."""
    for name in kwargs:
        if name in _OWN or name in _REFUSED or not name.isidentifier() or name.startswith("_"):
            msg = f"chat_template_kwargs: {name[:80]!r} is reserved and cannot be set"
            raise InvalidRequest(msg, role="chat_template_kwargs")
    return kwargs


def _cannot(error: TemplateRefused) -> InvalidRequest:
    msg = f"the chat template cannot render these messages: {error.message}"
    return InvalidRequest(msg, role="messages")


# The text between messages that are merged, as in vLLM.
_GAP = "\n\n"


def arranged(messages: list[ConversationMessage], traits: Traits) -> list[ConversationMessage]:
    """Return the messages with the order, roles and kinds of content that the template accepts.

    messages: the content of each is a text or a list of content parts.
    """
    placed = _systems(with_ids(messages, traits.call_ids), traits)
    placed = _with_pictures_read(placed, traits)
    if traits.alternates:
        placed = _merged(placed, ("user", "assistant"))
    return [
        _with_calls(_formed(_with_thoughts(message, traits), traits), traits) for message in placed
    ]


def without_thoughts(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Return the messages without thoughts; the same list if there are none.

    Some templates refuse thoughts next to text and calls, which no client can know.
    """
    if not any(name in message for message in messages for name in THOUGHTS):
        return messages
    return [{k: v for k, v in m.items() if k not in THOUGHTS} for m in messages]


def _systems(messages: list[ConversationMessage], traits: Traits) -> list[ConversationMessage]:
    """Return the messages with system messages only where the template writes them.

    Agents insert instructions between turns. Some templates refuse or drop system messages there.
    System messages at the beginning are then merged, and later ones become user messages.
    A system message after a tool's result becomes a part of the result: a user message
    between calls would be a new question, and templates drop the thoughts before the last question.
    Without these thoughts, the later tokens of the prompt would not be in the prefix cache.
    """
    if traits.late_system and traits.system:
        return messages
    first = 0
    while first < len(messages) and messages[first]["role"] == "system":
        first += 1
    head = _merged(messages[:first], ("system",))
    if not traits.system:
        head = [_as_user(message) for message in head]
    placed = head
    for message in messages[first:]:
        if message["role"] != "system":
            placed.append(message)
        elif placed and placed[-1]["role"] == "tool":
            result = placed[-1]
            content = _joined(result["content"], message["content"])
            placed[-1] = {**result, "content": content}
        else:
            placed.append(_as_user(message))
    return placed


_BELOW = "[The picture follows.]"


def _with_pictures_read(
    messages: list[ConversationMessage], traits: Traits
) -> list[ConversationMessage]:
    """Return the messages with pictures only in roles that the template writes as parts.

    The pictures of other roles, such as results of tools, go to the beginning of the user's
    next message, or to a message of their own. A template whose user messages take no pictures
    gets none moved: a line of text says in their place that they were left out.
    """
    if "user" not in traits.parts or not any(_pictures(message) for message in messages):
        return messages
    placed: list[ConversationMessage] = []
    waiting: list[ContentPart] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if waiting and role == "user":
            own = [content] if isinstance(content, str) else content
            message = {**message, "content": [*waiting, *own]}
            waiting = []
        elif waiting and role != "tool":
            placed.append({"role": "user", "content": waiting})
            waiting = []
        if role != "user" and role not in traits.parts and (found := _pictures(message)):
            waiting += found
            texts = [part for part in content if isinstance(part, str)]
            message = {**message, "content": join_texts(texts or [_BELOW])}
        placed.append(message)
    return [*placed, {"role": "user", "content": waiting}] if waiting else placed


def _pictures(message: ConversationMessage) -> list[MediaPart]:
    content = message["content"]
    if isinstance(content, str):
        return []
    return [part for part in content if isinstance(part, MediaPart)]


def _as_user(message: ConversationMessage) -> ConversationMessage:
    return {**message, "role": "user"}


def _merged(
    messages: list[ConversationMessage], roles: tuple[str, ...]
) -> list[ConversationMessage]:
    """Return the messages, with adjacent messages of a role merged if the role is in `roles`."""
    merged: list[ConversationMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["role"] == message["role"]
            and message["role"] in roles
            and not last.get("tool_calls")  # results of calls come directly after the calls
        ):
            content = _joined(last["content"], message["content"])
            merged[-1] = {**last, **message, "content": content}
        else:
            merged.append(message)
    return merged


def _joined(one: Content, other: Content) -> Content:
    if isinstance(one, str) and isinstance(other, str):
        return _GAP.join(text for text in (one, other) if text)
    first, second = ([c] if isinstance(c, str) else c for c in (one, other))
    return [*first, *second]


def _with_thoughts(message: ConversationMessage, traits: Traits) -> ConversationMessage:
    """Return an assistant's message with its thoughts under each name that the template reads."""
    if message["role"] != "assistant" or not any(name in message for name in THOUGHTS):
        return message
    given = [message[name] for name in THOUGHTS if name in message]
    thought = next((text for text in given if isinstance(text, str) and text), None)
    rest = {key: value for key, value in message.items() if key not in THOUGHTS}
    return rest if thought is None else {**rest, **dict.fromkeys(traits.thoughts, thought)}


def _with_calls(message: ConversationMessage, traits: Traits) -> ConversationMessage:
    """Return a message changed so that the template writes its calls; the text may be dropped."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if traits.beside_calls != "text":
        message = {**message, "content": traits.beside_calls}
    if traits.json_arguments:
        written = [{**call, "function": _with_json(call["function"])} for call in calls]
        message = {**message, "tool_calls": written}
    return message


def _with_json(function: ConversationMessage) -> ConversationMessage:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return function
    return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _formed(message: ConversationMessage, traits: Traits) -> ConversationMessage:
    """Return a message with its content as a text or as parts, as the template reads it."""
    content: Content = message["content"]
    # A template probably writes a message of an unknown role like a message of the user.
    role = message["role"] if message["role"] in traits.texts | traits.parts else "user"
    texts, parts = role in traits.texts, role in traits.parts
    if parts and (isinstance(content, list) or not texts):
        said = [content] if isinstance(content, str) else content
        return {**message, "content": as_parts(*said)}
    return message if isinstance(content, str) else {**message, "content": text_of(content)}
