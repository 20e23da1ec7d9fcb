"""Turn the messages, prompts or pairs of a call into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import CUT_ADVICE, InvalidRequest, PromptTooLong
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall, Prompt
from cpuserve.serving.calls.params import check_fits, check_input_fits
from cpuserve.serving.prompts.chat_prompt import chat_prompt
from cpuserve.serving.prompts.continued import continued
from cpuserve.serving.prompts.decision_prompts import decision_prompts
from cpuserve.serving.prompts.encode import cut_of, encode, most_counted, too_long
from cpuserve.serving.threads import run_tokenizing
from cpuserve.serving.tools.use import tool_use
from cpuserve.tokenizer.infill import infill_prompt, infill_tokens
from cpuserve.tokenizer.length import cannot_fit
from cpuserve.tokenizer.tokenizer import named_prompt

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.use import ToolUse
    from cpuserve.tokenizer.cut import Cut

# The longest prompt in tokens that may be truncated. No request body can hold a longer one.
MAX_CUT_TOKENS = 1 << 30


async def prompts_of(
    context: ModelContext,
    call: GenerateCall,
    num_bytes: int,
    tools: ToolUse | None = None,
) -> list[Prompt]:
    """Return the prompts of a call in order.

    num_bytes: the size of the request's body.
    tools: has the forced beginning of the response; None = nothing is forced.

    Raises:
      InvalidRequest: the messages, the template or the list of prompts are invalid or too long.
    """
    if call.pairs is not None:
        return await _pair_prompts(context, call, call.pairs)
    if call.decisions is not None:
        return await decision_prompts(context, call, call.decisions, num_bytes)
    if call.conversations is not None:
        each = [
            msgspec.structs.replace(call, messages=messages, conversations=None)
            for messages in call.conversations
        ]
        return [await chat_prompt(context, one, num_bytes, tools) for one in each]
    if call.messages is not None:
        return [await chat_prompt(context, call, num_bytes, tools)]
    if call.suffix:
        return await _infill_prompts(context, call, call.suffix)
    if call.earlier is not None and isinstance(call.prompt, str):
        ids = await continued(context, call.earlier, call.prompt, masked=False)
        return [Prompt(ids)]
    cut = cut_of(context, call)
    longest = context.max_model_len if cut is None else MAX_CUT_TOKENS
    given = _listed("" if call.prompt is None else call.prompt, longest, embed=call.embed)
    before = _prompt_text(context, call) if call.embed else ""
    texts = [before + item for item in given if isinstance(item, str)]
    add_special = call.add_special_tokens is not False
    is_named = call.embed or len(given) > 1
    places = [i for i, item in enumerate(given) if isinstance(item, str)] if is_named else None
    found = await encode(
        context,
        texts,
        add_special_tokens=add_special,
        cut=cut,
        places=places,
        embed=bool(call.embed),
    )
    encoded = iter(found)
    return [
        # A text that was cut is echoed as its tokens.
        Prompt(next(encoded), None if cut else item) if isinstance(item, str) else _cut(item, cut)
        for item in given
    ]


def _cut(item: list[int] | Prompt, cut: Cut | None) -> Prompt:
    if isinstance(item, Prompt):
        return item
    return Prompt(cut.apply(item) if cut else item)


async def counted_prompt(context: ModelContext, call: GenerateCall, num_bytes: int) -> Prompt:
    """Return the prompt of a call with messages, without a generation.

    The prompt may be longer than the context, but not longer than most_counted(context) tokens.

    num_bytes: the size of the request's body.

    Raises:
      InvalidRequest: the messages, the tools or the template are invalid, or the prompt is longer.
    """
    tools = tool_use(call, context.learned_format, context.thoughts)
    if tools is not None:
        tools = replace(tools, opens_after_thought=False)
    most = most_counted(context)
    return await chat_prompt(context, call, num_bytes, tools, most=most, measures=True)


async def _infill_prompts(context: ModelContext, call: GenerateCall, suffix: str) -> list[Prompt]:
    """Return the prompts that make the model write the text between each prompt and `suffix`.

    Raises:
      InvalidRequest: the model cannot fill in, or the request asks for a prompt that is cut.
    """
    tokenizer = context.get_tokenizer()
    tokens = infill_tokens(tokenizer)
    if call.truncate_prompt_tokens is not None:
        msg = "truncate_prompt_tokens is not possible with suffix: omit one of them"
        raise InvalidRequest(msg, role="truncate_prompt_tokens")
    most = context.max_model_len
    given = _listed("" if call.prompt is None else call.prompt, most, embed=False)
    texts = [suffix, *(item for item in given if isinstance(item, str))]
    end, *found = await encode(context, texts, add_special_tokens=False)
    encoded = iter(found)
    return [
        Prompt(infill_prompt(tokenizer, tokens, next(encoded), end), item)
        if isinstance(item, str)
        else Prompt(infill_prompt(tokenizer, tokens, item, end))
        for item in given
        if not isinstance(item, Prompt)  # no API has both media and a suffix
    ]


def _prompt_text(context: ModelContext, call: GenerateCall) -> str:
    """Return the checkpoint's prompt that goes before each text to be embedded."""
    return named_prompt(context.get_tokenizer().prompts, call.prompt_name)


async def _pair_prompts(
    context: ModelContext, call: GenerateCall, pairs: Sequence[tuple[str, ...]]
) -> list[Prompt]:
    """Return the prompt of each pair of texts, or of each single text.

    Raises:
      InvalidRequest: a pair is longer than the context, or the model takes no instruction.
    """
    encoder, most, cut = context.get_pairs(), context.max_model_len, cut_of(context, call)
    num_chars = sum(len(text) for pair in pairs for text in pair)

    def encode_all() -> list[Prompt]:
        return [encoded(index, pair) for index, pair in enumerate(pairs)]

    def encoded(index: int, pair: tuple[str, ...]) -> Prompt:
        for text in pair:
            if cut is None and cannot_fit(encoder.tokenizer, text, most):
                raise too_long(text, most, most)
        if len(pair) == 1:
            ids = encoder.encode_single(pair[0], cut)
        else:
            ids = encoder.encode(pair[0], pair[1], call.instruction, cut)
        if len(ids) > most:
            what = f"Pair {index} (a query and its document)" if len(pair) == 2 else f"Text {index}"
            msg = (
                f"This model's maximum context length is {most} tokens. {what} has {len(ids)} "
                f"tokens: shorten it{CUT_ADVICE}"
            )
            raise PromptTooLong(msg, num_tokens=len(ids), most=most)
        return Prompt(ids)

    return await run_tokenizing(num_chars, encode_all, waits=encoder.tokenizer.waits)


def _listed(
    given: str | list[str | int | list[int] | Prompt], max_model_len: int, *, embed: bool
) -> list[str | list[int] | Prompt]:
    """Return `given` as a list of prompts; refuse a list of too many ids before looking at its ids.

    Raises:
      InvalidRequest: the list is empty, has too many prompts, or mixes ids with texts.
      PromptTooLong: a prompt has too many ids.
    """
    if isinstance(given, str):
        return [given]
    kind = "texts" if embed else "prompts"
    if not given:
        msg = "prompt is an empty list: give text, token ids, or a list of either"
        raise InvalidRequest(msg, role="prompt")
    if isinstance(given[0], int):
        _check_ids_fit(0, len(given), max_model_len, embed=embed, several=False)
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) == len(given):
            return [ids]
    elif len(given) > MAX_PROMPTS:
        msg = f"prompt has {len(given)} {kind}: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, role="prompt")
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) < len(given):
        msg = f"prompt mixes token ids with {kind}: give one list of ids, or a list of {kind}"
        raise InvalidRequest(msg, role="prompt")
    for index, item in enumerate(prompts):
        if isinstance(item, list):
            _check_ids_fit(index, len(item), max_model_len, embed=embed, several=len(prompts) > 1)
    return prompts


def _check_ids_fit(
    index: int, num_tokens: int, max_model_len: int, *, embed: bool, several: bool
) -> None:
    if embed:
        check_input_fits(index, num_tokens, max_model_len)
    else:
        check_fits(num_tokens, max_model_len, index=index if several else None)
