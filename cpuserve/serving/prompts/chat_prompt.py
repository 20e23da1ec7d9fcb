"""Turn the messages of a call into the token ids of a prompt, with the chat template."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall, Prompt
from cpuserve.serving.documents import with_texts
from cpuserve.serving.media.places import placed
from cpuserve.serving.media.reader import DECODING, nouns_of, payload_of, refuse_markers
from cpuserve.serving.prompts.continued import continued
from cpuserve.serving.prompts.encode import cut_of, encode
from cpuserve.serving.prompts.known_tokens import chat_tokens
from cpuserve.serving.threads import run_rendering
from cpuserve.serving.tools.thoughts import THINK, ThinkTags
from cpuserve.tokenizer.chat import checked_variables
from cpuserve.tokenizer.conversation import (
    Content,
    ConversationMessage,
    MediaPart,
    join_texts,
    left_out,
    readable_kinds,
    text_of,
)
from cpuserve.tokenizer.messages import message_content

if TYPE_CHECKING:
    from cpuserve.core.media import MediaItem
    from cpuserve.serving.media.reader import MediaReader, ReadItem
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.use import ToolUse

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def chat_prompt(
    context: ModelContext,
    call: GenerateCall,
    num_bytes: int,
    tools: ToolUse | None = None,
    *,
    most: int | None = None,
    measures: bool = False,
) -> Prompt:
    """Return the token ids of the messages, rendered with the chat template.

    tools: has the forced beginning of the response, such as the start of a tool call.
    most: the most tokens that the prompt may have; None = the context length (see `encode`).
    measures: the prompt is only counted, so damaged data of media is not noticed.

    num_bytes: the size of the request's body; small and large requests render on separate threads.
    """
    messages, items = await read_media(context, call, measures=measures)
    text = await run_rendering(num_bytes, lambda: render_chat(context, call, messages))
    if items and (reader := context.media) is not None:
        text = reader.with_markers(text, (item.kind for item in items))
        if unmarked := reader.unmarked(text, items):
            shown, marks = _with_marks(reader, messages, unmarked)
            text = await run_rendering(num_bytes, lambda: render_chat(context, call, shown))
            text = reader.marked(text, marks)
        text = reader.spaced(text)
    thinks, continues = _thinks(context, call, text), bool(call.continue_final_message)
    may_think = thinks or not (continues or ends_thought(text, _tags(context)))
    opening, later = ("", None) if tools is None else tools.begin(may_think=may_think)
    if items:
        _check_uncut(call, items)
    elif call.earlier is not None:
        ids = await continued(context, call.earlier, text + opening, masked=True)
        return Prompt(ids, thinks=thinks, opening=opening, later=later)
    digests = [item.digest for item in items]
    cut = cut_of(context, call)
    ids, earlier = await chat_tokens(context, call, text, opening, most, cut, digests)
    media: Sequence[MediaItem] = ()
    if context.media is not None:
        ids, media = await _with_placeholders(
            context, context.media, items, ids, earlier, text + opening
        )
    # A prompt that was cut has fewer tokens than `text`, so it has no `rendered` text.
    rendered = text if cut is None else None
    return Prompt(
        ids,
        thinks=thinks,
        continues=continues,
        rendered=rendered,
        opening=opening,
        later=later,
        media=media,
        shown=[item.seen for item in items],
        payload_of=payload_of(items) if items else None,
    )


def _with_marks(
    reader: MediaReader, messages: list[ConversationMessage], kinds: Collection[str]
) -> tuple[list[ConversationMessage], dict[str, str]]:
    """Return messages with a unique mark, on a line of its own, for each item, and the marks.

    This is for templates that write texts and no media, such as InternVL and Vicuna have.

    kinds: the kinds of items that get marks.
    """
    marks = {kind: f"{kind}{uuid.uuid4().hex}" for kind in kinds}
    marked = list[ConversationMessage]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                marks.get(reader.part_kinds[part.kind], part) if reader.reads(part) else part
                for part in content
            ]
            message = {**message, "content": join_texts(parts)}
        marked.append(message)
    return marked, marks


async def read_media(
    context: ModelContext, call: GenerateCall, *, measures: bool
) -> tuple[list[ConversationMessage], list[ReadItem]]:
    """Return the messages of a call, with a part for each media item, and the items in order.

    Raises InvalidRequest if an item is refused; see MediaReader.read.
    """
    messages = call.messages or []
    if not any(_has_parts(message) for message in messages):
        return messages, []
    reader = context.media
    if reader is not None:
        messages = placed(messages, reader)
    own = _own_turn([message.get("role") for message in messages])
    messages = await with_texts(messages, own, DECODING, sees=context.sees)
    if reader is None:
        return messages, []
    salt = call.cache_salt or ""
    return await reader.read(messages, own, call.mm_processor_kwargs, measures=measures, salt=salt)


async def media_prompt(
    reader: MediaReader,
    ids: list[int],
    parts: Sequence[MediaPart],
    settings: Mapping[str, Any],
    param: str,
    salt: str | None,
) -> Prompt:
    """Return a prompt of token ids with one marker for each item, which becomes placeholders.

    param: the field of the request with the prompt.
    salt: the cache_salt of the request; see MediaReader.read.

    Raises InvalidRequest: an item is refused, or the number of markers is another one.
    """
    message: ConversationMessage = {"role": "user", "content": list(parts)}
    _, items = await reader.read([message], (0,), settings, measures=False, salt=salt or "")
    expanded = reader.expanded(ids, items, ())
    if expanded is None:
        nouns = nouns_of(items)
        msg = (
            f"a prompt has {reader.count_markers(ids)} markers for {len(items)} {nouns}: write the "
            f"marker of this model once for each {nouns.removesuffix('s')}"
        )
        raise InvalidRequest(msg, param=param)
    whole, media = expanded
    shown = [item.seen for item in items]
    return Prompt(whole, media=media, shown=shown, payload_of=payload_of(items))


def _has_parts(message: ConversationMessage) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, MediaPart) and not part.why for part in content
    )


def _check_uncut(call: GenerateCall, items: Sequence[ReadItem]) -> None:
    """Raise InvalidRequest if a call with media asks for a prompt that has no place for them."""
    nouns = nouns_of(items)
    if call.truncate_prompt_tokens is not None:
        msg = f"truncate_prompt_tokens is not possible with {nouns}: omit it"
        raise InvalidRequest(msg, role="truncate_prompt_tokens")
    if call.earlier is not None:
        msg = f"messages with {nouns} cannot continue the tokens of an earlier response: omit them"
        raise InvalidRequest(msg, role="messages")


async def _with_placeholders(
    context: ModelContext,
    reader: MediaReader,
    items: Sequence[ReadItem],
    ids: list[int],
    earlier: Sequence[MediaItem],
    text: str,
) -> tuple[list[int], Sequence[MediaItem]]:
    """Return the tokens with the placeholders of media; see MediaReader.expanded.

    text: the text of all tokens, for an earlier response in `ids` that has a marker itself.
    """
    found = reader.expanded(ids, items, earlier)
    if found is None:
        (again,) = await encode(context, [text], add_special_tokens=False, masked=True)
        found = reader.expanded(again, items, ())
    if found is None:
        refuse_markers(items)
    return found


def _tags(context: ModelContext) -> ThinkTags:
    return context.learned_format.tags or THINK


def render_chat(
    context: ModelContext, call: GenerateCall, messages: list[ConversationMessage] | None = None
) -> str:
    """Return the prompt text, with masks (see ChatTemplate.render).

    messages: the messages after `read_media`; None = the call's, without media.

    Raises:
      InvalidRequest: the messages or the template are invalid.
    """
    continue_final = bool(call.continue_final_message)
    generation_prompt = call.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continue_final
    if continue_final and generation_prompt:
        msg = (
            "add_generation_prompt and continue_final_message cannot both be true: set one of them"
        )
        raise InvalidRequest(msg, role="continue_final_message")
    kwargs = {**_effort(call), **checked_variables(call.chat_template_kwargs or {})}
    render = partial(context.get_chat_template().render, own_marks=context.own_marks)
    given = (call.messages or []) if messages is None else messages
    if context.preset is not None and call.earlier is None:
        given = context.preset.opened(given)
    reads: Collection[str] = () if context.media is None else context.media.part_kinds
    messages = with_time_last(readable(given, reads))
    tools = None if call.tool_choice == "none" else call.tools
    if not (continue_final and messages):
        return render(messages, add_generation_prompt=generation_prompt, tools=tools, **kwargs)
    marked, mark = _marked(messages)
    return _cut(render(marked, add_generation_prompt=False, tools=tools, **kwargs), mark)


def _effort(call: GenerateCall) -> dict[str, Any]:
    """Return the template variables that reasoning_effort sets."""
    effort = call.reasoning_effort
    if effort is None:
        return {}
    if effort not in REASONING_EFFORTS:
        known = ", ".join(REASONING_EFFORTS)
        msg = f"reasoning_effort must be one of {known}, got {effort[:80]!r}"
        raise InvalidRequest(msg, role="reasoning_effort")
    thinking = dict.fromkeys(("enable_thinking", "thinking"), False) if effort == "none" else {}
    return {"reasoning_effort": effort, **thinking}


def _marked(messages: list[ConversationMessage]) -> tuple[list[ConversationMessage], str]:
    """Return copies of the messages with a unique mark at the end of the last text, and the mark.

    A search for the text itself could find it elsewhere, for example in an end-of-turn marker.
    The mark also protects trailing spaces of the text from templates that strip it.
    """
    final = messages[-1]
    if final.get("tool_calls"):
        msg = (
            "The last message cannot be continued, because it has tool_calls, which end it: send "
            "the results of the calls behind it, or set continue_final_message to false"
        )
        raise InvalidRequest(msg, role="continue_final_message")
    mark = f"end{uuid.uuid4().hex}"
    content = message_content(final, f"messages[{len(messages) - 1}]")
    if isinstance(content, str):
        marked: Content = content + mark
    elif content and isinstance(content[-1], str):
        marked = [*content[:-1], content[-1] + mark]
    else:
        marked = [*content, mark]
    return [*messages[:-1], {**final, "content": marked}], mark


def _cut(text: str, mark: str) -> str:
    """Return `text` up to the mark, so that the model continues the last message."""
    at = text.rfind(mark)
    if at < 0:
        msg = (
            "continue_final_message is not possible, because the chat template omits the content "
            "of the last message: set it to false"
        )
        raise InvalidRequest(msg, role="continue_final_message")
    return text[:at].replace(mark, "")  # a template may contain the text twice


def _thinks(context: ModelContext, call: GenerateCall, text: str) -> bool:
    """Return whether the rendered messages end within a thought, which the model continues."""
    tags = _tags(context)
    if call.continue_final_message and call.messages:
        content = message_content(call.messages[-1], "messages")
        return leaves_thought_open(text_of(content), tags)
    return begins_thought(text, tags)


def begins_thought(prompt: str, tags: ThinkTags) -> bool:
    """Return whether a rendered prompt ends with the beginning of a thought."""
    return prompt[-256:].rstrip().endswith(tags.open)


def ends_thought(prompt: str, tags: ThinkTags) -> bool:
    """Return whether a rendered prompt ends with a whole thought: an empty one forbids thinking."""
    return prompt[-256:].rstrip().endswith(tags.close)


def leaves_thought_open(text: str, tags: ThinkTags) -> bool:
    """Return whether the text of a response, which the model continues, ends within a thought."""
    return text.rfind(tags.open) > text.rfind(tags.close)


def readable(
    messages: list[ConversationMessage], reads: Collection[str] = ()
) -> list[ConversationMessage]:
    """Return the messages with a line of text in the place of each part that the model cannot read.

    reads: the kinds of parts, besides text, that the model reads.

    Results of tools and earlier turns stay in a conversation,
    so refusing a part in them would make the whole conversation unusable.
    A part in the user's last turn is refused, because the model could only guess its content.

    Raises:
      InvalidRequest: the user's own last turn has a part that the model cannot read.
    """
    found, own = messages, None
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        unread = next((part for part in content if _is_unread(part, reads)), None)
        if unread is None:
            continue
        if own is None:
            own = _own_turn([message.get("role") for message in messages])
        if index in own:
            _refuse(unread, reads)
        if found is messages:
            found = list(messages)
        lines = [left_out(p, reads) if _is_unread(p, reads) else p for p in content]
        found[index] = {**message, "content": join_texts(lines)}
    return found


def _is_unread(part: object, reads: Collection[str]) -> TypeGuard[MediaPart]:
    return isinstance(part, MediaPart) and (part.kind not in reads or bool(part.why))


def _refuse(part: MediaPart, reads: Collection[str]) -> NoReturn:
    usual = f"has type {part.type[:40]!r}; this model reads {readable_kinds(reads)}"
    hint = f": {part.hint}" if part.hint else ""
    msg = f"{part.where} {part.why or usual + hint}"
    raise InvalidRequest(msg, role="messages")


def _own_turn(roles: Sequence[object]) -> Sequence[int]:
    """Return the indices of the user's last turn, which the response is for.

    The turn counts as empty after a tool's result, because clients put the tool's output there.
    A last message of the assistant, which the response continues, does not count.
    """
    end = len(roles)
    if end and roles[-1] == "assistant":
        end -= 1
    start = end
    while start and roles[start - 1] not in ("assistant", "tool", "function"):
        start -= 1
    return range(start, end) if not start or roles[start - 1] == "assistant" else ()


_TIME = (
    r"(?i:the )?(?i:current)(?i: date and| local)? (?i:date|time)(?i: is|:)[^\n]{0,40}"
    r"\b\d{1,2}:\d\d\b[^\n]{0,80}"
)
_FIRST = re.compile(rf"({_TIME})\n+")
_LAST = re.compile(rf"\n+({_TIME})\s*$")
# Only this many characters at the beginning and at the end of a text are searched for the line.
_LONGEST = 256


def with_time_last(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Return the messages with the line about the time before the user's last message."""
    if not messages or not isinstance(messages[0], dict) or messages[0].get("role") != "system":
        return messages
    head = messages[0]
    at = max((i for i, m in enumerate(messages) if _role(m) == "user"), default=0)
    found = _without_time(head.get("content"))
    if not at or found is None:
        return messages
    content, line = found
    moved: ConversationMessage = {"role": "system", "content": line}
    return [{**head, "content": content}, *messages[1:at], moved, *messages[at:]]


def _role(message: Any) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _without_time(content: Any) -> tuple[Any, str] | None:
    """Return (the content without the line, the line), or None if there is no such line."""
    if isinstance(content, str):
        return _split(content)
    if not isinstance(content, list) or not content:
        return None
    for at in (0, -1):
        part = content[at]
        text = part.get("text") if isinstance(part, dict) else part
        found = _split(text) if isinstance(text, str) else None
        if found is not None:
            rest, line = found
            parts = list(content)
            parts[at] = {**part, "text": rest} if isinstance(part, dict) else rest
            return parts, line
    return None


def _split(text: str) -> tuple[str, str] | None:
    if first := _FIRST.match(text[:_LONGEST]):
        return text[first.end() :], first[1]
    begin = max(0, len(text) - _LONGEST)
    if last := _LAST.search(text, begin):
        return text[: last.start()], last[1].rstrip()
    return None
