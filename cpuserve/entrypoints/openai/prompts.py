"""From messages or prompts to token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve.entrypoints.openai.protocol import MAX_PROMPTS
from cpuserve.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.entrypoints.openai.protocol import (
        ChatRequest,
        CompletionRequest,
        TokenizeRequest,
    )
    from cpuserve.entrypoints.openai.serving import Serving

# Above this many characters tokenizing takes longer than a token of a running stream may wait
# (about 1 us a character), so it moves to a thread.
_INLINE_CHARS = 4096
# Parameters of ChatTemplate.render itself.
_OWN_KWARGS = frozenset({"self", "messages", "add_generation_prompt", "tools"})

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they came from if it was text."""

    ids: list[int]
    text: str | None = None


async def encode(serving: Serving, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`; long texts do not hold up the event loop."""
    tokenizer = serving.get_tokenizer()
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def completion_prompts(serving: Serving, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion, in order; InvalidRequest for an empty or mixed-up list."""
    given = request.prompt
    add_special = request.add_special_tokens is not False
    if isinstance(given, str):
        return [Prompt(await encode(serving, given, add_special_tokens=add_special), given)]
    if not given:
        msg = "prompt is an empty list: give text, token ids, or a list of either"
        raise InvalidRequest(msg, param="prompt")
    if all(isinstance(item, int) for item in given):
        return [Prompt([i for i in given if isinstance(i, int)])]
    if len(given) > MAX_PROMPTS:
        msg = f"prompt has {len(given)} prompts: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, param="prompt")
    prompts = []
    for item in given:
        if isinstance(item, str):
            ids = await encode(serving, item, add_special_tokens=add_special)
            prompts.append(Prompt(ids, item))
        elif isinstance(item, list):
            prompts.append(Prompt(item))
        else:
            msg = "prompt mixes token ids with prompts: give one list of ids, or a list of prompts"
            raise InvalidRequest(msg, param="prompt")
    return prompts


async def chat_prompt(serving: Serving, request: ChatRequest | TokenizeRequest) -> Prompt:
    """The messages rendered with the model's chat template, and their ids."""
    if sum(map(_size, request.messages or ())) <= _INLINE_CHARS:
        text = render_chat(serving, request)
    else:
        text = await asyncio.to_thread(render_chat, serving, request)
    add_special = bool(request.add_special_tokens)
    return Prompt(await encode(serving, text, add_special_tokens=add_special), text)


def _size(message: Message) -> int:
    """About how many characters a message adds to the prompt."""
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(repr(content))


def render_chat(serving: Serving, request: ChatRequest | TokenizeRequest) -> str:
    """The prompt text of the messages; InvalidRequest if they or the template are at fault."""
    continue_final = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continue_final
    if continue_final and generation_prompt:
        msg = "add_generation_prompt and continue_final_message cannot both be true"
        raise InvalidRequest(msg, param="continue_final_message")
    kwargs = request.chat_template_kwargs or {}
    if reserved := sorted(_OWN_KWARGS & kwargs.keys()):
        msg = f"chat_template_kwargs: {reserved[0]!r} cannot be set"
        raise InvalidRequest(msg, param="chat_template_kwargs")
    text = serving.get_chat_template().render(
        request.messages, add_generation_prompt=generation_prompt, **kwargs
    )
    return _cut_after_final(text, request.messages or []) if continue_final else text


def _cut_after_final(text: str, messages: list[Message]) -> str:
    """`text` up to the end of the last message's content, so that the model goes on writing it."""
    final = messages[-1].get("content")
    if isinstance(final, str):
        for content in (final, final.strip()):
            at = text.rfind(content) if content else -1
            if at >= 0:
                return text[: at + len(content)]
    msg = "continue_final_message: the chat template does not show the last message's content"
    raise InvalidRequest(msg, param="continue_final_message")
