"""Turn messages or prompts into token ids."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from cpuserve.errors import InvalidRequest, PromptTooLong
from cpuserve.serving.call import MAX_PROMPTS, GenerateCall, Message, Prompt
from cpuserve.serving.params import check_fits, check_input_fits
from cpuserve.serving.threads import run_rendering, run_sized
from cpuserve.serving.tools.thoughts import (
    THINK,
    ThinkTags,
    begins_thought,
    ends_thought,
    leaves_thought_open,
)
from cpuserve.tokenizer.chat import checked_variables
from cpuserve.tokenizer.length import cannot_fit
from cpuserve.tokenizer.messages import message_content
from cpuserve.tokenizer.tokenizer import LONG_CHARS, named_prompt

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext


# Of texts with more characters than this, only LARGE_TEXTS_AT_ONCE are tokenized at the same time,
# because it takes much memory.
LARGE_TEXT_CHARS = 1 << 17
# Token ids of a prompt that is to be cut; more do not fit in a request.
MAX_CUT_TOKENS = 1 << 30
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# The lowest limit of tokens that are only counted, for any model: each takes about 300 bytes for a
# moment.
_MOST_COUNTED = 1 << 17
# Bytes of a token in most texts: an error estimates how many a text has that is not tokenized.
_USUAL_BYTES = 4


def most_counted(context: ModelContext) -> int:
    """Return how many tokens a text may have that is counted, and not answered.

    They are more than the context, because clients count tokens to find out how much of it fits.
    """
    return max(4 * context.max_model_len, _MOST_COUNTED)


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
                raise _too_long(text, longest, context.max_model_len, at)
        return [
            tokenizer.encode(text, add_special_tokens, unlocked=unlocked, most=cut)
            for text in texts
        ]

    if num_chars <= LARGE_TEXT_CHARS:
        return await run_sized(num_chars, encode_all)
    async with context.large_texts:
        return await run_sized(num_chars, encode_all)


def _too_long(text: str, most: int, max_model_len: int, index: int | None = None) -> PromptTooLong:
    """Return the error; index: of the input to be embedded that the text is."""
    what = "The text" if index is None else f"Input {index}"
    more = "" if index is None else ", or set truncate_prompt_tokens (-1 cuts it to the context)"
    msg = (
        f"This model's maximum context length is {max_model_len} tokens. {what} has {len(text)} "
        f"characters, which is more than {most} tokens: shorten it{more}"
    )
    about = len(text.encode("utf-8", "replace")) // _USUAL_BYTES
    return PromptTooLong(msg, num_tokens=max(most + 1, about), most=most)


async def prompts_of(
    context: ModelContext,
    call: GenerateCall,
    num_bytes: int,
    opening: str = "",
    *,
    waits: bool = False,
) -> list[Prompt]:
    """Return the prompts of a call in order.

    num_bytes, opening, waits: see chat_prompt.

    Raises:
      InvalidRequest: the messages, the template or the list of prompts are invalid or too long.
    """
    if call.pairs is not None:
        return await _pair_prompts(context, call, call.pairs)
    if call.messages is not None:
        return [await chat_prompt(context, call, num_bytes, opening=opening, waits=waits)]
    cut = _kept_tokens(context, call)
    longest = context.max_model_len if cut is None else MAX_CUT_TOKENS
    given = _listed("" if call.prompt is None else call.prompt, longest, embed=call.embed)
    before = _prompt_text(context, call) if call.embed else ""
    texts = [before + item for item in given if isinstance(item, str)]
    add_special = call.add_special_tokens is not False
    places = [i for i, item in enumerate(given) if isinstance(item, str)] if call.embed else None
    found = await encode(context, texts, add_special_tokens=add_special, cut=cut, places=places)
    encoded = iter(found)
    return [
        Prompt(next(encoded), item) if isinstance(item, str) else Prompt(item[:cut])
        for item in given
    ]


def _kept_tokens(context: ModelContext, call: GenerateCall) -> int | None:
    """Return to how many tokens the texts of a call are cut; None: they are not."""
    asked, most = call.truncate_prompt_tokens, context.max_model_len
    if asked is None or asked == -1:
        return None if asked is None else most
    if not 1 <= asked <= most:
        msg = f"truncate_prompt_tokens must be -1 or between 1 and {most}, got {asked}"
        raise InvalidRequest(msg, param="truncate_prompt_tokens")
    return asked


def _prompt_text(context: ModelContext, call: GenerateCall) -> str:
    """Return the text that goes before those to be embedded."""
    return named_prompt(context.get_tokenizer().prompts, call.prompt_name)


async def _pair_prompts(
    context: ModelContext, call: GenerateCall, pairs: list[tuple[str, str]]
) -> list[Prompt]:
    """Return the prompt of each pair of texts.

    Raises:
      InvalidRequest: a pair is longer than the context, or the model takes no instruction.
    """
    encoder, most, cut = context.get_pairs(), context.max_model_len, _kept_tokens(context, call)
    num_chars = sum(len(query) + len(document) for query, document in pairs)

    def encode_all() -> list[Prompt]:
        return [encoded(index, *pair) for index, pair in enumerate(pairs)]

    def encoded(index: int, query: str, document: str) -> Prompt:
        for text in (query, document):
            if cut is None and cannot_fit(encoder.tokenizer, text, most):
                raise _too_long(text, most, most)
        ids = encoder.encode(query, document, call.instruction, most=cut)
        if len(ids) > most:
            msg = (
                f"This model's maximum context length is {most} tokens. Pair {index} (a query and "
                f"its document) has {len(ids)} tokens: shorten it, or set truncate_prompt_tokens"
            )
            raise PromptTooLong(msg, num_tokens=len(ids), most=most)
        return Prompt(ids)

    if num_chars <= LARGE_TEXT_CHARS:
        return await run_sized(num_chars, encode_all)
    async with context.large_texts:
        return await run_sized(num_chars, encode_all)


def _listed(
    given: str | list[str | int | list[int]], max_model_len: int, *, embed: bool
) -> list[str | list[int]]:
    """Return `given` as a list of prompts; too many ids are rejected before they are read."""
    if isinstance(given, str):
        return [given]
    name, kind = ("input", "texts") if embed else ("prompt", "prompts")  # the client's words
    if not given:
        msg = f"{name} is an empty list: give text, token ids, or a list of either"
        raise InvalidRequest(msg, param="prompt")
    if isinstance(given[0], int):
        _check_ids_fit(0, len(given), max_model_len, embed=embed)
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) == len(given):
            return [ids]
    elif len(given) > MAX_PROMPTS:
        msg = f"{name} has {len(given)} {kind}: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, param="prompt")
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) < len(given):
        msg = f"{name} mixes token ids with {kind}: give one list of ids, or a list of {kind}"
        raise InvalidRequest(msg, param="prompt")
    for index, item in enumerate(prompts):
        if isinstance(item, list):
            _check_ids_fit(index, len(item), max_model_len, embed=embed)
    return prompts


def _check_ids_fit(index: int, num_tokens: int, max_model_len: int, *, embed: bool) -> None:
    if embed:
        check_input_fits(index, num_tokens, max_model_len)
    else:
        check_fits(num_tokens, max_model_len)


async def chat_prompt(
    context: ModelContext,
    call: GenerateCall,
    num_bytes: int,
    *,
    most: int | None = None,
    opening: str = "",
    waits: bool = False,
) -> Prompt:
    """Return the token ids of the messages, rendered with the chat template; most: see `encode`.

    opening: the beginning of the response, which is not the model's choice. waits: it, and the form
    of the response, come after a thought if the prompt allows one.

    num_bytes: the size of the request's body. It decides which renders this one waits for.
    """
    text = await run_rendering(num_bytes, lambda: render_chat(context, call))
    add_special = bool(call.add_special_tokens)
    thinks, continues = _thinks(context, call, text), bool(call.continue_final_message)
    waits = waits and (thinks or not (continues or ends_thought(text, _tags(context))))
    given = text if waits else text + opening
    (ids,) = await encode(context, [given], add_special_tokens=add_special, most=most)
    return Prompt(ids, thinks=thinks, continues=continues, waits=waits)


def _tags(context: ModelContext) -> ThinkTags:
    return context.answers.tags or THINK


def _thinks(context: ModelContext, call: GenerateCall, text: str) -> bool:
    """Return whether the rendered messages end within a thought, which the model continues."""
    tags = _tags(context)
    if call.continue_final_message and call.messages:
        content = message_content(call.messages[-1], "messages")
        return leaves_thought_open(content if isinstance(content, str) else "".join(content), tags)
    return begins_thought(text, tags)


def render_chat(context: ModelContext, call: GenerateCall) -> str:
    """Return the prompt text; InvalidRequest if the messages or the template are invalid."""
    continue_final = bool(call.continue_final_message)
    generation_prompt = call.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continue_final
    if continue_final and generation_prompt:
        msg = (
            "add_generation_prompt and continue_final_message cannot both be true: set one of them"
        )
        raise InvalidRequest(msg, param="continue_final_message")
    kwargs = {**_effort(call), **checked_variables(call.chat_template_kwargs or {})}
    render, messages = context.get_chat_template().render, call.messages
    tools = None if call.tool_choice == "none" else call.tools
    if not (continue_final and messages):
        return render(messages, add_generation_prompt=generation_prompt, tools=tools, **kwargs)
    marked, mark = _marked(messages)
    return _cut(render(marked, add_generation_prompt=False, tools=tools, **kwargs), mark)


def _effort(call: GenerateCall) -> dict[str, Any]:
    """Return the template variables that reasoning_effort sets; a template reads one."""
    effort = call.reasoning_effort
    if effort is None:
        return {}
    if effort not in REASONING_EFFORTS:
        known = ", ".join(REASONING_EFFORTS)
        msg = f"reasoning_effort must be one of {known}, got {effort[:80]!r}"
        raise InvalidRequest(msg, param="reasoning_effort")
    thinking = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinking}


def _marked(messages: list[Message]) -> tuple[list[Message], str]:
    """Return copies of the messages with a unique mark at the end of the last text, and the mark.

    A search for the text itself could find it elsewhere, for example in an end-of-turn marker. The
    mark also protects trailing spaces of the text from templates that strip it.
    """
    final = messages[-1]
    if final.get("tool_calls"):
        msg = (
            "The last message cannot be continued, because it has tool_calls, which end it: send "
            "the results of the calls behind it, or set continue_final_message to false"
        )
        raise InvalidRequest(msg, param="continue_final_message")
    mark = f"end{uuid.uuid4().hex}"
    content = message_content(final, f"messages[{len(messages) - 1}]")
    if isinstance(content, str):
        marked: str | list[str] = content + mark
    else:
        marked = [*content[:-1], "".join(content[-1:]) + mark]
    return [*messages[:-1], {**final, "content": marked}], mark


def _cut(text: str, mark: str) -> str:
    """Return `text` up to the mark, so that the model continues the last message."""
    at = text.rfind(mark)
    if at < 0:
        msg = (
            "continue_final_message is not possible, because the chat template omits the content "
            "of the last message: set it to false"
        )
        raise InvalidRequest(msg, param="continue_final_message")
    return text[:at].replace(mark, "")  # a template may contain the text twice
