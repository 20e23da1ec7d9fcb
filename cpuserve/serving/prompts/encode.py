"""Turn texts into token ids, or into tokens with their places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import CUT_ADVICE, InvalidRequest, PromptTooLong
from cpuserve.serving.threads import run_tokenizing
from cpuserve.tokenizer.cut import Cut
from cpuserve.tokenizer.length import cannot_fit
from cpuserve.tokenizer.unlocked import LONG_CHARS

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.coder import TokenSpan

# A request that only counts the tokens of a text may always have a text of this many tokens.
# Each token takes about 300 bytes while it is counted.
_MOST_COUNTED = 1 << 17
# Bytes per token in most texts, to estimate in an error how many tokens an untokenized text has.
_USUAL_BYTES = 4


async def encode(
    context: ModelContext,
    texts: list[str],
    *,
    add_special_tokens: bool,
    most: int | None = None,
    cut: Cut | None = None,
    places: list[int] | None = None,
    embed: bool = False,
    masked: bool = False,
) -> list[list[int]]:
    """Return the token ids of each text; many or long texts are encoded on another thread.

    masked: the texts are rendered prompts, with masks for control texts of messages.
    cut: which tokens are kept of each text; None = all tokens.
    places: the index of each text among the prompts of the request, for the error message.
    embed: the request is for embeddings.

    Raises:
      InvalidRequest: a text certainly has more than `most` tokens (None: max_model_len).
    """
    tokenizer, num_chars = context.get_tokenizer(), sum(map(len, texts))
    unlocked = len(texts) > 1 and num_chars > LONG_CHARS
    longest = context.max_model_len if most is None else most
    encode_one = tokenizer.encode_masked if masked else tokenizer.encode

    def encode_all() -> list[list[int]]:
        for index, given in enumerate(texts):
            text = tokenizer.masks.unmask(given) if masked else given
            if cut is None and cannot_fit(tokenizer, text, longest):
                at = None if places is None else places[index]
                raise too_long(text, longest, context.max_model_len, at, embed=embed)
        return [
            encode_one(
                text,
                add_special_tokens,
                unlocked=unlocked,
                most=None if cut is None else cut.most,
                left=cut is not None and cut.left,
            )
            for text in texts
        ]

    return await run_tokenizing(num_chars, encode_all, waits=tokenizer.waits)


async def encode_spans(
    context: ModelContext, texts: list[str], *, add_special_tokens: bool = True
) -> list[list[TokenSpan]]:
    """Return the tokens of each text with their positions; long texts are read on another thread.

    Raises:
      InvalidRequest: the texts have more than most_counted(context) tokens together.
    """
    tokenizer, num_chars = context.get_tokenizer(), sum(map(len, texts))
    most = most_counted(context)

    def encode_all() -> list[list[TokenSpan]]:
        found, left = [], most
        for index, text in enumerate(texts):
            fits = not cannot_fit(tokenizer, text, left)
            spans = tokenizer.encode_spans(text, add_special_tokens, left) if fits else None
            if spans is None:
                raise too_long(text, left, context.max_model_len, index)
            found.append(spans)
            left -= len(spans)
        return found

    return await run_tokenizing(num_chars, encode_all, waits=tokenizer.waits)


def cut_of(context: ModelContext, call: GenerateCall) -> Cut | None:
    """Return how the prompts of a call are cut; None = they are not cut.

    Raises:
      InvalidRequest: truncate_prompt_tokens or truncation_side is invalid.
    """
    side = call.truncation_side
    if side not in (None, "left", "right"):
        msg = f'truncation_side must be "left" or "right", got {side[:80]!r}'
        raise InvalidRequest(msg, role="truncation_side")
    asked, most = call.truncate_prompt_tokens, context.max_model_len
    if asked is None:
        return None
    if asked != -1 and not 1 <= asked <= most:
        msg = f"truncate_prompt_tokens must be -1 or between 1 and {most}, got {asked}"
        raise InvalidRequest(msg, role="truncate_prompt_tokens")
    reads = call.embed or call.pairs is not None  # these calls generate nothing
    if asked == -1:
        new = 0 if reads else max(call.max_tokens or call.default_max_tokens or 1, 1)
        asked = most - new if new < most else 1
    return Cut(asked, left=side == "left" or (side is None and not reads))


def too_long(
    text: str, most: int, max_model_len: int, index: int | None = None, *, embed: bool = True
) -> PromptTooLong:
    """Return the error for a text; index: its position in the request, None if it is alone."""
    what = "The text" if index is None else f"{'Input' if embed else 'Prompt'} {index}"
    more = "" if index is None or not embed else CUT_ADVICE
    msg = (
        f"This model's maximum context length is {max_model_len} tokens. {what} has {len(text)} "
        f"characters, which is more than {most} tokens: shorten it{more}"
    )
    about = len(text.encode("utf-8", "replace")) // _USUAL_BYTES
    return PromptTooLong(msg, num_tokens=max(most + 1, about), most=most)


def most_counted(context: ModelContext) -> int:
    """Return how many tokens a text may have if the request only counts its tokens.

    The limit is above the context, because clients count tokens to find out how much fits into it.
    """
    return max(4 * context.max_model_len, _MOST_COUNTED)


def check_count(context: ModelContext, name: str, count: int) -> None:
    """Raise InvalidRequest if the field `name` has more token ids than `most_counted` allows."""
    if count > (most := most_counted(context)):
        msg = f"{name} has {count} token ids: at most {most} are allowed. Send fewer in one request"
        raise InvalidRequest(msg, role=name)
