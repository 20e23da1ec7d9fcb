"""Presets: texts and parameters of a created model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuserve.tokenizer.conversation import ConversationMessage

_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Preset:
    """Messages, a template and sampling defaults that apply to requests for a created model.

    system: the system message of requests without one.
    messages: messages that go before the messages of each request.
    sampling: values of SamplingParams for requests that set none.
    template: the chat template; None = the template of the model that it is made from.
    created: the Unix time when the model was created.
    """

    system: str = ""
    messages: Sequence[ConversationMessage] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    created: int = 0

    def opened(self, messages: Sequence[ConversationMessage]) -> list[ConversationMessage]:
        """Return the messages of the preset, and then the messages of a request."""
        if messages and messages[0].get("role") in _SYSTEM:
            return [messages[0], *self.messages, *messages[1:]]
        whole = [*self.messages, *messages]
        if self.system and not (whole and whole[0].get("role") in _SYSTEM):
            whole.insert(0, {"role": "system", "content": self.system})
        return whole
