"""Turn texts into token ids, as many at the same time as the memory allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.errors import PromptTooLong
from cpuserve.serving.threads import run_sized
from cpuserve.tokenizer.length import cannot_fit
from cpuserve.tokenizer.tokenizer import LONG_CHARS

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext

# Of texts with more characters than this, only LARGE_TEXTS_AT_ONCE are tokenized at the same time,
# because it takes much memory.
LARGE_TEXT_CHARS = 1 << 17
# The lowest limit of tokens that are only counted, for any model: each takes about 300 bytes for a
# moment.
_MOST_COUNTED = 1 << 17
# Bytes of a token in most texts: an error estimates how many a text has that is not tokenized.
_USUAL_BYTES = 4


async def encode(
    context: ModelContext,
    texts: list[str],
    *,
    add_special_tokens: bool,
    most: int | None = None,
    cut: int | None = None,
    places: list[int] | None = None,
) -> list[list[int]]:
    """Return the token ids of each text; many or long texts are encoded on another thread.

    cut: the number of tokens that are kept of a text, of any length; None: all. places: the
    index of each text among the inputs to be embedded, for the message.

    Raises:
      InvalidRequest: a text certainly has more than `most` tokens (None: max_model_len).
    """
    tokenizer, num_chars = context.get_tokenizer(), sum(map(len, texts))
    unlocked = len(texts) > 1 and num_chars > LONG_CHARS
    longest = context.max_model_len if most is None else most

    def encode_all() -> list[list[int]]:
        for index, text in enumerate(texts):
            if cut is None and cannot_fit(tokenizer, text, longest):
                at = None if places is None else places[index]
                raise too_long(text, longest, context.max_model_len, at)
        return [
            tokenizer.encode(text, add_special_tokens, unlocked=unlocked, most=cut)
            for text in texts
        ]

    if num_chars <= LARGE_TEXT_CHARS:
        return await run_sized(num_chars, encode_all)
    async with context.large_texts:
        return await run_sized(num_chars, encode_all)


def too_long(text: str, most: int, max_model_len: int, index: int | None = None) -> PromptTooLong:
    """Return the error; index: of the input to be embedded that the text is."""
    what = "The text" if index is None else f"Input {index}"
    more = "" if index is None else ", or set truncate_prompt_tokens (-1 cuts it to the context)"
    msg = (
        f"This model's maximum context length is {max_model_len} tokens. {what} has {len(text)} "
        f"characters, which is more than {most} tokens: shorten it{more}"
    )
    about = len(text.encode("utf-8", "replace")) // _USUAL_BYTES
    return PromptTooLong(msg, num_tokens=max(most + 1, about), most=most)


def most_counted(context: ModelContext) -> int:
    """Return how many tokens a text may have that is counted, and not answered.

    They are more than the context, because clients count tokens to find out how much of it fits.
    """
    return max(4 * context.max_model_len, _MOST_COUNTED)
