"""Convert prompts of llama.cpp, which may mix texts and token ids, to texts or token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from cpuserve.api.llamacpp.completion.schema import PromptItem, PromptObject
from cpuserve.base.errors import InvalidRequest
from cpuserve.media.kinds import KINDS
from cpuserve.serving.calls.call import Prompt, unsupported
from cpuserve.serving.prompts.chat_prompt import media_prompt
from cpuserve.serving.prompts.encode import encode
from cpuserve.serving.threads import run_sized
from cpuserve.tokenizer.conversation import MediaPart

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

# How many texts and token ids are looked at in a microsecond.
_ITEMS_PER_US = 8
# The text in a prompt_string in place of each of its images.
MEDIA_MARKER = "<__media__>"


async def flat_prompts(
    context: ModelContext, given: str | PromptObject | list[PromptItem], salt: str | None
) -> list[str | list[int] | Prompt]:
    """Return each prompt as a text or as token ids, or with its images.

    The tokenizer adds special tokens only to a text at the beginning of a prompt.

    salt: the cache_salt of the request (`api.route.salt_of`).

    Raises:
      InvalidRequest: a list is empty, or an image is refused.
    """
    if isinstance(given, str | PromptObject):
        return [await _one(context, given, "prompt", salt)]
    if any(isinstance(item, int) for item in given):
        return [await _ids(context, given)]
    if not given:
        msg = "prompt is an empty list: give text, token ids, or a list of either"
        raise InvalidRequest(msg, param="prompt")
    found: list[str | list[int] | Prompt] = []
    for index, item in enumerate(given):
        assert not isinstance(item, int)
        if isinstance(item, list):
            found.append(await _ids(context, item))
        else:
            found.append(await _one(context, item, f"prompt[{index}]", salt))
    return found


async def _one(
    context: ModelContext, item: str | PromptObject, where: str, salt: str | None
) -> str | Prompt:
    """Return a prompt as a text, or with its images; where: its place in the request."""
    if isinstance(item, str):
        return item
    given = item.multimodal_data
    if not given:
        return item.prompt_string
    reader, where = context.media, f"{where}.multimodal_data"
    if reader is None:
        msg = f"{where} is not possible: this model reads text only"
        raise unsupported(msg, "prompt")
    noun, pieces = KINDS["image"].noun, item.prompt_string.split(MEDIA_MARKER)
    if len(pieces) != len(given) + 1:
        msg = (
            f"{where} has {len(given)} {noun}s for {len(pieces) - 1} markers in prompt_string: "
            f"write {MEDIA_MARKER} once for each {noun}"
        )
        raise InvalidRequest(msg, param="prompt")
    text = reader.framed("image").join(pieces)
    (ids,) = await encode(context, [text], add_special_tokens=True)
    parts = [
        MediaPart(
            kind="image", type="image", noun=f"a {noun}", where=f"{where}[{index}]", data=data
        )
        for index, data in enumerate(given)
    ]
    return await media_prompt(reader, ids, parts, {}, "prompt", salt)


async def _ids(context: ModelContext, items: list[str | int] | list[PromptItem]) -> list[int]:
    """Return the token ids of one prompt, which is a list of texts and token ids."""
    texts = await run_sized(len(items) // _ITEMS_PER_US, lambda: _texts_of(items))
    if not texts:
        return cast("list[int]", items)
    encoded = await encode(context, texts, add_special_tokens=False)
    if isinstance(items[0], str):
        encoded[:1] = await encode(context, texts[:1], add_special_tokens=True)
    return await run_sized(len(items) // _ITEMS_PER_US, lambda: _joined(items, encoded))


def _texts_of(items: list[str | int] | list[PromptItem]) -> list[str]:
    """Return the texts of a prompt; InvalidRequest if it has more than texts and token ids."""
    if any(not isinstance(item, str | int) for item in items):
        msg = "prompt mixes token ids with lists or objects: give each prompt as a list of its own"
        raise InvalidRequest(msg, param="prompt")
    return [item for item in items if isinstance(item, str)]


def _joined(items: Sequence[object], encoded: Iterable[list[int]]) -> list[int]:
    """Return the items with token ids in place of texts. encoded: the ids of each text."""
    following = iter(encoded)
    found: list[int] = []
    for item in items:
        if isinstance(item, int):
            found.append(item)
        else:
            found += next(following)
    return found
