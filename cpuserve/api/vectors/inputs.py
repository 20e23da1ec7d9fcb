"""What requests for vectors and labels share: texts, token ids or messages, and how they run."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.openai.chat.conversation import chat_messages
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS

Messages = list[dict[str, Any]]


class VectorInputs(msgspec.Struct, kw_only=True):
    """The fields of all requests for vectors or labels; inputs are either `input` or `messages`.

    input: a text, token ids, or a list of either.
    messages: a conversation, or a list of conversations. Each becomes one text by the chat
      template of the model, with pictures where the model reads pictures (fields of vLLM).
    add_generation_prompt: whether the text ends with the beginning of a response; false if unset.
    continue_final_message: whether the last message stays open.
    chat_template_kwargs: variables of the chat template.
    mm_processor_kwargs: settings of the preprocessing of pictures.
    use_activation: false = the results are not scaled to length 1, or are raw logits.
    """

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any] | Messages] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    model: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None

    @property
    def num_inputs(self) -> int:
        """The number of results that the response has."""
        if self.messages is not None:
            return len(self.messages) if _are_several(self.messages) else 1
        inputs = self.input
        several = isinstance(inputs, list) and bool(inputs) and not isinstance(inputs[0], int)
        return len(inputs) if several and inputs is not None else 1


_OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


def inputs_of(body: VectorInputs) -> dict[str, Any]:
    """Return the fields of a GenerateCall for the inputs of a body.

    Raises:
      InvalidRequest: the body has no inputs, or both kinds; or a conversation is no list of
        messages.
    """
    if body.messages is None:
        if body.input is None:
            msg = "the request has nothing to read: send input, or messages"
            raise InvalidRequest(msg, param="input", code="missing_required_parameter")
        for name in _OF_MESSAGES:
            if getattr(body, name):
                msg = f"{name} is about messages, and the request has input: omit it"
                raise InvalidRequest(msg, param=name)
        return {"prompt": body.input}
    if body.input is not None:
        msg = "input and messages are two ways to send texts: send one of them"
        raise InvalidRequest(msg, param="messages")
    more = {"add_generation_prompt": bool(body.add_generation_prompt)}
    if not body.messages:
        msg = "messages is an empty list: send at least one message"
        raise InvalidRequest(msg, param="messages")
    if not _are_several(body.messages):
        return {**more, "messages": chat_messages(_conversation(body.messages, "messages"))}
    if len(body.messages) > MAX_PROMPTS:
        msg = f"messages has {len(body.messages)} conversations: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, param="messages")
    conversations = [
        chat_messages(_conversation(messages, f"messages[{index}]"))
        for index, messages in enumerate(body.messages)
    ]
    return {**more, "conversations": conversations}


def _are_several(messages: list[dict[str, Any] | Messages]) -> bool:
    return bool(messages) and isinstance(messages[0], list)


def _conversation(messages: Any, where: str) -> Messages:
    """Return the messages of a conversation. Raises InvalidRequest if there are none."""
    if not isinstance(messages, list) or not messages:
        msg = f"{where} must be a list of messages, and have at least one"
        raise InvalidRequest(msg, param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            msg = f"{where}[{index}] is a list beside messages: send messages, or lists of them"
            raise InvalidRequest(msg, param="messages")
    return messages
