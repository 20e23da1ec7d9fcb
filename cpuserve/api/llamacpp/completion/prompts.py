"""Convert prompts of llama.cpp, which may mix texts and token ids, to texts or token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.llamacpp.completion.schema import PromptItem, PromptObject
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import unsupported
from cpuserve.serving.encode import encode

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext


async def flat_prompts(
    context: ModelContext, given: str | PromptObject | list[PromptItem]
) -> list[str | list[int]]:
    """Return each prompt as a text or as token ids.

    The tokenizer adds special tokens only to a text at the beginning of a prompt.

    Raises:
      InvalidRequest: a list is empty, or a prompt has multimodal data.
    """
    if not isinstance(given, list):
        return [_text(given)]
    if any(isinstance(item, int) for item in given):
        return [await _ids(context, given)]
    if not given:
        msg = "prompt is an empty list: give text, token ids, or a list of either"
        raise InvalidRequest(msg, param="prompt")
    found: list[str | list[int]] = []
    for item in given:
        if isinstance(item, list):
            found.append(await _ids(context, item))
        else:
            found.append(_text(item))
    return found


def _text(item: PromptItem) -> str:
    if isinstance(item, PromptObject):
        if item.multimodal_data:
            msg = "multimodal_data is not supported: this model reads text only"
            raise unsupported(msg, "prompt")
        return item.prompt_string
    assert isinstance(item, str)
    return item


async def _ids(context: ModelContext, items: list[str | int] | list[PromptItem]) -> list[int]:
    """Return the token ids of one prompt, which is a list of texts and token ids."""
    if any(not isinstance(item, str | int) for item in items):
        msg = "prompt mixes token ids with lists or objects: give each prompt as a list of its own"
        raise InvalidRequest(msg, param="prompt")
    texts = [item for item in items if isinstance(item, str)]
    if not texts:
        return [item for item in items if isinstance(item, int)]
    encoded = await encode(context, texts, add_special_tokens=False)
    if isinstance(items[0], str):
        encoded[:1] = await encode(context, texts[:1], add_special_tokens=True)
    following = iter(encoded)
    found: list[int] = []
    for item in items:
        found += [item] if isinstance(item, int) else next(following)
    return found
