"""Reuse the tokens of a response in the prompt of the next turn.

A client sends the model's response back as a message, and the chat template writes it again.
The text may then be tokenized in another way than the model wrote it, and the arguments
of tool calls may have other white space. All tokens after the first difference would then have
to be computed again. So if the text of the prompt has the same content as the response, the prompt
gets the generated tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.serving.calls.events import Text, Thought
from cpuserve.serving.models.recent_prompts import RecentPrompt, ids_of, scope_of
from cpuserve.serving.prompts.encode import encode
from cpuserve.serving.threads import run_sized
from cpuserve.serving.tools.machine import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.core.media import MediaItem
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.cut import Cut
    from cpuserve.tokenizer.tokenizer import Tokenizer

# A template may write a response with more characters than the model generated.
# The search for the end of the response stops after _TIMES_LONGER times
# as many characters plus _CHARS_LONGER, because a client could send millions of them.
_TIMES_LONGER, _CHARS_LONGER = 4, 1024
# Below this temperature the engine chooses the most likely token (is_greedy in sample.h).
_GREEDY = 1e-5


async def chat_tokens(
    context: ModelContext,
    call: GenerateCall,
    text: str,
    opening: str,
    most: int | None,
    cut: Cut | None,
    digests: Sequence[bytes] = (),
) -> tuple[list[int], Sequence[MediaItem]]:
    """Return the tokens of the rendered prompt `text` and of `opening`, the response's beginning.

    The second result is the media items that already have their placeholders in these tokens,
    because an earlier prompt began with them. Each other item has one marker.

    digests: the digests of the media items in `text`, in order.
    text: the prompt with masks (tokenizer/masks.py).
    most: the most tokens that the prompt may have; None = the context length (see `encode`).
    cut: which of the tokens are kept; None = all.
    """
    given, known = text + opening, None
    add_special = bool(call.add_special_tokens)
    if cut is not None:
        (ids,) = await encode(
            context, [given], add_special_tokens=add_special, cut=cut, masked=True
        )
        return ids, ()
    if context.recent is not None and not add_special and not _is_repeatable(context, call):
        known = await _known(context, call, text, digests)
    if known is None:
        (ids,) = await encode(
            context, [given], add_special_tokens=add_special, most=most, masked=True
        )
        return ids, ()
    (rest,) = await encode(
        context, [given[known.num_chars :]], add_special_tokens=False, most=most, masked=True
    )
    return [*known.ids, *rest], known.media


def _is_repeatable(context: ModelContext, call: GenerateCall) -> bool:
    """Return whether earlier requests must not change the response: seeded or greedy sampling."""
    usual = context.default_sampling
    temperature = usual.get("temperature", 1) if call.temperature is None else call.temperature
    most = usual.get("top_k", 0) if call.top_k is None else call.top_k
    return call.seed is not None or temperature < _GREEDY or most == 1


@dataclass(frozen=True, slots=True)
class _KnownTokens:
    """The known tokens of the first `num_chars` characters of a prompt, and their media items.

    A special token follows these characters, so no token spans their end.
    """

    ids: list[int]
    num_chars: int
    media: Sequence[MediaItem]


async def _known(
    context: ModelContext, call: GenerateCall, text: str, digests: Sequence[bytes]
) -> _KnownTokens | None:
    """Return the tokens of the longest earlier prompt that `text` begins with, or None.

    The tokens of its response are among them if `text` continues with the same response.
    After a restart, earlier prompts are in the files of `context.kept`.
    """
    assert context.recent is not None
    whose = call.caller, scope_of(call)
    earlier = context.recent.beginning(*whose, text, digests)
    if context.kept is not None:
        longest = 0 if earlier is None else len(earlier.text)
        earlier = await context.kept.beginning(*whose, text, digests, longest) or earlier
    if earlier is None:
        return None
    size = _TIMES_LONGER * len(earlier.response)
    return await run_sized(size, lambda: _continued(context, earlier, text))


def _continued(context: ModelContext, earlier: RecentPrompt, text: str) -> _KnownTokens | None:
    """Return the result of `_known` for `text`, which begins with the text of `earlier`."""
    tokenizer, begin = context.get_tokenizer(), len(earlier.text)
    specials = tuple(filter(None, map(tokenizer.token_text, tokenizer.special_ids)))
    marks = set(map(tokenizer.token_text, context.shown_ids))
    masks = tokenizer.masks
    written = earlier.opening + masks.mask_decoded(earlier.response, context.decoder)
    end = begin + len(written)
    if not (text.startswith(written, begin) and text.startswith(specials, end)):
        most = end + (_TIMES_LONGER - 1) * len(written) + _CHARS_LONGER
        places = [text.find(token, begin, most) for token in specials if token not in marks]
        end = min((place for place in places if place >= 0), default=-1)
        pair = map(masks.unmask, (text[begin:end], written))
        if end < 0 or not _same_message(context, earlier, *pair):
            return _without_response(tokenizer, earlier, specials)
    return _KnownTokens(ids_of(earlier.ids), end, earlier.media)


def _without_response(
    tokenizer: Tokenizer, earlier: RecentPrompt, specials: Sequence[str]
) -> _KnownTokens | None:
    """Return the tokens of a prompt up to its last special token; None if that is not clear.

    The prompt may have tokens of earlier responses, which a tokenizer would not make.
    """
    place, last = max((earlier.text.rfind(token), token) for token in specials)
    if place <= 0 or any(token in earlier.opening for token in specials):
        return None
    ids = earlier.prompt_ids
    at = len(ids) - 1
    while at >= 0 and tokenizer.token_text(ids[at]) != last:
        at -= 1
    ends = [begin + count for each in earlier.media for begin, count in each.spans]
    if at < 0 or max(ends, default=0) > at:
        return None
    return _KnownTokens(ids[:at], place, earlier.media)


def _same_message(context: ModelContext, earlier: RecentPrompt, one: str, other: str) -> bool:
    """Return whether two texts are the same response: thoughts, text and calls."""
    return _said(context, earlier, one) == _said(context, earlier, other)


def _said(context: ModelContext, earlier: RecentPrompt, text: str) -> tuple[object, ...]:
    """Return (thoughts, text, calls) of a response; white space around them does not count."""
    found = context.learned_format
    used = found.calls or found.whole or PLAIN
    around = found.around(thinks=earlier.thinks, continues=earlier.continues)
    parser = used.parser(0, around=around)
    texts, thoughts = "", ""
    calls: list[list[str]] = []
    for piece in [*parser.push(text), *parser.flush()]:
        if isinstance(piece, Text):
            texts += piece.text
        elif isinstance(piece, Thought):
            thoughts += piece.text
        elif piece.name is not None:
            calls.append([piece.name, piece.arguments])
        else:
            calls[-1][1] += piece.arguments
    return thoughts.strip(), texts.strip(), [(name, _arguments(given)) for name, given in calls]


def _arguments(written: str) -> str:
    """Return JSON arguments of a tool call in a uniform spelling, and other texts unchanged."""
    try:
        return repr(json.loads(written, object_pairs_hook=tuple))  # repr, as 1 == True in Python
    except (ValueError, RecursionError):
        return written
