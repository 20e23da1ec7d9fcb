"""The arguments of `LLM`: prompts, conversations and parameters in each type that it accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams

PromptInput = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


def chosen_tool(choice: str | dict[str, Any]) -> tuple[str, str | None]:
    """Return the tool choice of a GenerateCall, and the name of the forced function, or None."""
    if isinstance(choice, str):
        return choice, None
    function = choice.get("function") if choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        msg = (
            'tool_choice must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": NAME}}'
        )
        raise InvalidRequest(msg, param="tool_choice")
    return "required", name


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return the prompts as a list. A list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def text_and_ids(prompt: PromptInput) -> tuple[str | None, list[int] | None]:
    """Return (text, token ids) of a prompt; one of them may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is None and ids is None:
            msg = f'a prompt has neither "prompt" nor "prompt_token_ids": {list(prompt)}'
            raise InvalidRequest(msg, param="prompts")
        return text, None if ids is None else _ids(ids)
    return None, _ids(prompt)


def _ids(ids: Any) -> list[int]:
    try:
        return msgspec.convert(list(ids), list[int])
    except (TypeError, msgspec.ValidationError) as error:
        msg = f"a prompt must be text or a list of token ids: {error}"
        raise InvalidRequest(msg, param="prompts") from None


def conversations_of(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return the conversations as a list; a list of messages is one conversation."""
    listed: list[Any] = list(messages)
    if listed and isinstance(listed[0], Mapping):
        return [listed]
    return listed


def one_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Return one SamplingParams per prompt; InvalidRequest if a list has not `count` items."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        msg = f"{len(given)} sampling_params for {count} prompts"
        raise InvalidRequest(msg, param="sampling_params")
    return list(given)
