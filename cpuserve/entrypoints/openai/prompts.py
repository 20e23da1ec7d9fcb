"""From messages or prompts to token ids."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve.entrypoints.openai.protocol import MAX_PROMPTS
from cpuserve.entrypoints.openai.sampling import check_fits
from cpuserve.entrypoints.openai.threads import run_sized
from cpuserve.errors import InvalidRequest
from cpuserve.tokenizer.chat import checked_variables
from cpuserve.tokenizer.messages import message_text
from cpuserve.tokenizer.tokenizer import LONG_CHARS

if TYPE_CHECKING:
    from cpuserve.entrypoints.openai.protocol import (
        ChatRequest,
        CompletionRequest,
        TokenizeRequest,
    )
    from cpuserve.entrypoints.openai.serving import Serving


Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they came from if it was text."""

    ids: list[int]
    text: str | None = None


async def encode(
    serving: Serving, texts: list[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each text; many or long texts do not hold up the event loop."""
    tokenizer, num_chars = serving.get_tokenizer(), sum(map(len, texts))
    unlocked = len(texts) > 1 and num_chars > LONG_CHARS

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens, unlocked=unlocked) for text in texts]

    return await run_sized(num_chars, encode_all)


async def completion_prompts(serving: Serving, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion, in order; InvalidRequest for an empty or mixed-up list."""
    given = _listed(request.prompt, serving.max_model_len)
    texts = [item for item in given if isinstance(item, str)]
    add_special = request.add_special_tokens is not False
    encoded = iter(await encode(serving, texts, add_special_tokens=add_special))
    return [
        Prompt(next(encoded), item) if isinstance(item, str) else Prompt(item) for item in given
    ]


def _listed(given: str | list[str | int | list[int]], max_model_len: int) -> list[str | list[int]]:
    """`given` as a list of prompts; too many ids are refused before anything looks at them."""
    if isinstance(given, str):
        return [given]
    if not given:
        msg = "prompt is an empty list: give text, token ids, or a list of either"
        raise InvalidRequest(msg, param="prompt")
    if isinstance(given[0], int):
        check_fits(len(given), max_model_len)
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) == len(given):
            return [ids]
    elif len(given) > MAX_PROMPTS:
        msg = f"prompt has {len(given)} prompts: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, param="prompt")
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) < len(given):
        msg = "prompt mixes token ids with prompts: give one list of ids, or a list of prompts"
        raise InvalidRequest(msg, param="prompt")
    for item in prompts:
        if isinstance(item, list):
            check_fits(len(item), max_model_len)
    return prompts


async def chat_prompt(
    serving: Serving, request: ChatRequest | TokenizeRequest, num_bytes: int
) -> Prompt:
    """The messages rendered with the model's chat template, and their ids.

    num_bytes: of the request's body, which bounds what checking and rendering it may take: messages
    without text count too.
    """
    text = await run_sized(num_bytes, lambda: render_chat(serving, request))
    add_special = bool(request.add_special_tokens)
    (ids,) = await encode(serving, [text], add_special_tokens=add_special)
    return Prompt(ids, text)


def render_chat(serving: Serving, request: ChatRequest | TokenizeRequest) -> str:
    """The prompt text of the messages; InvalidRequest if they or the template are at fault."""
    continue_final = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continue_final
    if continue_final and generation_prompt:
        msg = "add_generation_prompt and continue_final_message cannot both be true"
        raise InvalidRequest(msg, param="continue_final_message")
    kwargs = checked_variables(request.chat_template_kwargs or {})
    render = serving.get_chat_template().render
    if not (continue_final and request.messages):
        return render(request.messages, add_generation_prompt=generation_prompt, **kwargs)
    marked, mark = _marked(request.messages)
    return _cut(render(marked, add_generation_prompt=False, **kwargs), mark)


def _marked(messages: list[Message]) -> tuple[list[Message], str]:
    """Copies with a mark at the end of the last text, and the mark.

    Looking for the text itself would find the same words elsewhere, in an end marker too; and the
    mark keeps its trailing space, which is the user's, from templates that trim.
    """
    final = messages[-1]
    mark = f"end{uuid.uuid4().hex}"
    text = message_text(final, f"messages[{len(messages) - 1}]") + mark
    return [*messages[:-1], {**final, "content": text}], mark


def _cut(text: str, mark: str) -> str:
    """`text` up to the mark, so that the model goes on writing the last message."""
    at = text.rfind(mark)
    if at < 0:
        msg = "continue_final_message: the chat template does not show the last message's content"
        raise InvalidRequest(msg, param="continue_final_message")
    return text[:at].replace(mark, "")  # a template may show the text twice
