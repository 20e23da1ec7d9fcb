"""The prompts and responses of the last requests, by caller.

The prompts have two uses. The next turn of a conversation reuses the tokens of its last response
(known_tokens.py), and if a request finds less in the prefix cache
than an earlier request could have left there, the response explains why.

A caller only ever gets its own texts. Without API keys a caller is an address, which clients
of a proxy share. Earlier texts of an address are shown only to a request of the same session,
or with the id of the earlier response, if other clients cannot guess these ids (`as_shown`).
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from cpuserve.core.media import DIGEST_BYTES, MediaItem, without_payload
from cpuserve.serving.callers.holdings import Holdings
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall, Prompt

MAX_PROMPTS = 256
MAX_PROMPTS_OF_CALLER = 32
MAX_BYTES = 1 << 26
# A prompt ends with the beginning of the response, such as a header or the start of a thought.
# Templates may write it differently once the response is an earlier message of the conversation.
# Clients cannot change that: differences in the last tokens of an earlier prompt are not reported.
_GENERATION_PROMPT_TOKENS = 16
# Prompts with fewer equal tokens at the beginning belong to different conversations,
# unless the end of the earlier prompt is in the later prompt.
# The compared end has _END_CHARS characters, and leaves out the last _SKIPPED_CHARS of the prompt.
_LEAST_COMMON = 32
_END_CHARS, _SKIPPED_CHARS = 256, 64
# The prefix cache has whole blocks only, so a hit may be up to this number of tokens shorter
# than the beginning that two prompts share.
_PARTS_OF_BLOCKS = 64
_SHOWN_TOKENS, _SHOWN_CHARS = 16, 80
# The beginning of GenerateCall.caller if the caller has an API key; else the caller is an address.
_KEYED = "key-"
# Matches a random number in an id. Other clients may guess an id without a random number:
# applications send one session id for all their users, and clients choose their request ids.
_RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_ID_BYTES = array("i").itemsize
# How many tokens of a prompt are compared per microsecond with all earlier prompts of its caller.
_COMPARED_PER_US = 8
# Session ids with more characters are ignored: ids stay in memory,
# and the memory limit of RecentPrompts does not include them.
_LONGEST_SESSION = 1024
_PAIR_BYTES = 120  # the memory of two numbers in a tuple
_json = msgspec.json.Encoder(enc_hook=str).encode

Decode = Callable[[Sequence[int]], str]
# (adapter, its scale, cache_salt)
Scope = tuple[str, float, str]


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Digests of the parts that a prompt was made of. chat: the prompt was made from messages."""

    system: bytes = b""
    tools: bytes = b""
    settings: bytes = b""
    chat: bool = True


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """The first difference between a prompt and an earlier one.

    reason: the part of the request that differs.
    token: the position of the first token that differs.
    missed: the number of tokens of the earlier prompt from this position to its end.
    total: the number of tokens of the earlier prompt.
    before, now: the beginning of the earlier and of the new text from this position on;
      before is None if the earlier text may be another client's.
    """

    reason: str
    token: int
    missed: int
    total: int
    before: str | None
    now: str


@dataclass(slots=True, eq=False)
class RecentPrompt:
    """A prompt, and the response to it once the response has ended.

    caller: who sent the request (GenerateCall.caller).
    scope: the Scope of its request; only prompts of one scope share a cache.
    text: the prompt as the chat template rendered it;
      earlier responses in it may be written in another way than in `ids` (known_tokens.py).
    opening: the beginning of the response, which the prompt has after `text`.
    media: the media items of the prompt, without payloads.
      All items of a kind have the same text, and equal tokens.
    ids: the tokens of the prompt and of the response, int32.
    thinks: whether the prompt ends within a thought.
    continues: whether the prompt ends with the beginning of the response's text.
    response_id: the id of the response, which the client knows.
    session: the id of the client's session, "" = no session.
    difference: the first difference from the most similar earlier prompt of the caller.
    repeated: if there is no difference, how many tokens the earlier prompt has,
      all of them expected in the cache; else 0.
    """

    caller: str
    scope: Scope
    text: str
    ids: bytes
    shape: PromptShape
    opening: str = ""
    thinks: bool = False
    continues: bool = False
    num_prompt: int = 0
    response_id: str = ""
    session: str = ""
    difference: PromptDifference | None = None
    repeated: int = 0
    media: Sequence[MediaItem] = ()

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return ids_of(self.ids[: self.num_prompt * _ID_BYTES])

    @property
    def response(self) -> list[int]:
        """The tokens of the response, without the token that ended it."""
        return ids_of(self.ids[self.num_prompt * _ID_BYTES :])

    @property
    def num_bytes(self) -> int:
        """The memory that the text and the tokens take."""
        media = sum(DIGEST_BYTES + _bytes_of_item(item) for item in self.media)
        return sys.getsizeof(self.text) + len(self.ids) + media

    def is_in(self, later: RecentPrompt) -> bool:
        """Whether `later` contains the end of this prompt, so both belong to one conversation."""
        end = self.text[:-_SKIPPED_CHARS][-_END_CHARS:]
        return len(end) >= _SKIPPED_CHARS and end in later.text

    def miss(self, cached_tokens: int | None) -> dict[str, object] | None:
        """Return why tokens of an earlier prompt are computed again, as JSON; None = they are not.

        cached_tokens: how many tokens came from the cache, if that is known.
        """
        found = self.difference
        if found is not None:
            place = {"reason": found.reason, "token": found.token, "of": found.total}
            before = {} if found.before is None else {"before": found.before}
            return {**place, **before, "now": found.now}
        if cached_tokens is None or cached_tokens + _PARTS_OF_BLOCKS >= self.repeated:
            return None
        return {"reason": "not_cached", "token": cached_tokens, "of": self.repeated}


class RecentPrompts:
    """The last prompts: at most MAX_PROMPTS in MAX_BYTES, and MAX_PROMPTS_OF_CALLER of a caller."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[int, RecentPrompt] = OrderedDict()  # key: id(); oldest first
        # The bytes of each when it is added: Python may keep the UTF-8 of a text beside it later.
        self._sizes: dict[int, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    async def record(
        self, call: GenerateCall, prompt: Prompt, decode: Decode
    ) -> RecentPrompt | None:
        """Return the record of a prompt, compared with the earlier prompts of its caller.

        None: the prompt has no text. decode: returns the text of token ids.
        """
        text = prompt.text if prompt.rendered is None else prompt.rendered
        if text is None:
            return None
        session = call.session or ""
        made = RecentPrompt(
            call.caller,
            scope_of(call),
            text,
            bytes_of(prompt.ids),
            _shape(call),
            prompt.opening,
            prompt.thinks,
            prompt.continues,
            len(prompt.ids),
            session=session if len(session) <= _LONGEST_SESSION else "",
            media=without_payload(prompt.media),
        )
        size = len(prompt.ids) // _COMPARED_PER_US
        others = self.of(made.caller, made.scope)  # this may change while the thread below runs
        await run_sized(size, lambda: compare(made, others, decode))
        return made

    def remember(self, made: RecentPrompt, ids: Sequence[int], ends: Collection[int]) -> None:
        """Remember a prompt with its response. ids: all tokens of the response, which ends end."""
        response = list(ids)
        if response and response[-1] in ends:
            response.pop()  # it is not in the KV cache, and templates may write another end
        made.ids += bytes_of(response)
        self.add(made)

    def add(self, prompt: RecentPrompt) -> None:
        """Remember a prompt with its response, and forget old ones beyond the limits (Holdings)."""
        size = prompt.num_bytes
        if size > MAX_BYTES:
            return
        self._prompts[id(prompt)] = prompt
        self._sizes[id(prompt)] = size
        self._num_bytes += size
        own = [key for key, each in self._prompts.items() if each.caller == prompt.caller]
        for key in own[:-MAX_PROMPTS_OF_CALLER]:
            self._forget(key)
        if len(self._prompts) <= MAX_PROMPTS and self._num_bytes <= MAX_BYTES:
            return
        holdings = Holdings[int]()
        for key, each in self._prompts.items():
            holdings.add(each.caller, self._sizes[key], None if each is prompt else key)
        while len(self._prompts) > MAX_PROMPTS or self._num_bytes > MAX_BYTES:
            dropped = holdings.drop(too_many_bytes=self._num_bytes > MAX_BYTES)
            if dropped is None:
                return
            self._forget(dropped)

    def _forget(self, key: int) -> None:
        del self._prompts[key]
        self._num_bytes -= self._sizes.pop(key)

    def of(self, caller: str, scope: Scope) -> list[RecentPrompt]:
        """Return the prompts of a caller, last one first."""
        return [
            prompt
            for prompt in reversed(self._prompts.values())
            if prompt.caller == caller and prompt.scope == scope
        ]

    def beginning(
        self, caller: str, scope: Scope, text: str, digests: Sequence[bytes] = ()
    ) -> RecentPrompt | None:
        """Return the prompt with the longest text that is a proper prefix of `text`, or None.

        digests: the digests of the media items of the new prompt.
          The first ones are also the items of the prompt that is found.
        """
        found = None
        for prompt in self.of(caller, scope):
            longer = len(prompt.text) > (len(found.text) if found is not None else 0)
            if longer and len(prompt.text) < len(text) and text.startswith(prompt.text):
                own = [item.digest for item in prompt.media]
                if own == list(digests[: len(own)]):
                    found = prompt
        return found

    def named(self, caller: str, response_id: str) -> RecentPrompt | None:
        """Return the prompt of the response with this id, if it was the caller's."""
        for prompt in reversed(self._prompts.values()):
            if prompt.response_id == response_id and prompt.caller == caller:
                return prompt
        return None


def compare(prompt: RecentPrompt, others: Sequence[RecentPrompt], decode: Decode) -> None:
    """Set `difference` and `repeated` of a new prompt; others: earlier prompts, last one first."""
    most, earlier = _LEAST_COMMON - 1, None
    for other in others:
        common = _common(other, prompt)
        if common > most:
            most, earlier = common, other
            if common >= other.num_prompt:
                break  # `prompt` continues the conversation of `other`
    if earlier is None:
        earlier = next((other for other in others if other.is_in(prompt)), None)
    if earlier is None:
        return
    same = prompt.session if prompt.session == earlier.session else ""
    found = as_shown(difference(earlier, prompt, decode), prompt.caller, same)
    prompt.difference = found
    prompt.repeated = 0 if found is not None else earlier.num_prompt


def as_shown(found: PromptDifference | None, caller: str, known: str) -> PromptDifference | None:
    """Return a difference without the earlier text if it may be the text of another client.

    known: an id that both requests have, of a session or of the earlier response; "" = no id.
    """
    if found is None or caller.startswith(_KEYED) or _RANDOM.search(known):
        return found
    return replace(found, before=None)


def difference(before: RecentPrompt, now: RecentPrompt, decode: Decode) -> PromptDifference | None:
    """Return what differs between two prompts; None if `now` begins with `before`.

    The generation prompt at the end of `before` may differ; the scope may not.

    decode: returns the text of token ids.
    """
    token = _common(before, now)
    total = before.num_prompt
    if token >= total - min(_GENERATION_PROMPT_TOKENS, total // 2) and before.scope == now.scope:
        return None
    texts = [
        decode(ids_of(each.ids[token * _ID_BYTES : (token + _SHOWN_TOKENS) * _ID_BYTES]))
        for each in (before, now)
    ]
    shown = [text[:_SHOWN_CHARS] for text in texts]
    return PromptDifference(_reason(before, now), token, total - token, total, *shown)


def _reason(before: RecentPrompt, now: RecentPrompt) -> str:
    """Return the first part of a request that differs, in the words of the Messages API."""
    one, other = before.shape, now.shape
    if before.scope != now.scope:
        return "model_changed"
    if one.tools != other.tools:
        return "tools_changed"
    if one.system != other.system:
        return "system_changed"
    if one.settings != other.settings:
        return "settings_changed"
    return "messages_changed" if other.chat else "prompt_changed"


def _common(before: RecentPrompt, now: RecentPrompt) -> int:
    """Return how many tokens at the beginning are equal, and their media as well."""
    common = common_tokens(before.ids, now.ids)
    for one, other in zip(before.media, now.media, strict=False):
        if (one.digest, one.spans) != (other.digest, other.spans):
            return min(common, one.spans[0][0], other.spans[0][0])
    return common


def _bytes_of_item(item: MediaItem) -> int:
    return _PAIR_BYTES * len(item.spans) + sys.getsizeof(item.form)


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens at the beginning are equal; each token has _ID_BYTES bytes."""
    low, high = 0, min(len(one), len(other)) // _ID_BYTES
    if one[: high * _ID_BYTES] == other[: high * _ID_BYTES]:
        return high
    while low + 1 < high:  # the first `low` tokens are equal, the first `high` tokens are not
        middle = (low + high) // 2
        if one[low * _ID_BYTES : middle * _ID_BYTES] == other[low * _ID_BYTES : middle * _ID_BYTES]:
            low = middle
        else:
            high = middle
    return low


def bytes_of(ids: Sequence[int]) -> bytes:
    """Return token ids as RecentPrompt stores them."""
    return array("i", ids).tobytes()


def ids_of(stored: bytes) -> list[int]:
    """Return the token ids that bytes_of has stored."""
    return array("i", stored).tolist()


def scope_of(call: GenerateCall) -> Scope:
    """Return the scope of a call's prompts (RecentPrompt.scope)."""
    return call.adapter or "", call.adapter_scale, call.cache_salt or ""


def _shape(call: GenerateCall) -> PromptShape:
    messages = call.messages
    if messages is None:
        return PromptShape(chat=False)
    first = 0
    while first < len(messages) and messages[first].get("role") in ("system", "developer"):
        first += 1
    settings = [call.chat_template_kwargs, call.reasoning_effort, call.tool_choice == "none"]
    return PromptShape(_digest(messages[:first]), _digest(call.tools), _digest(settings))


def _digest(value: Sequence[object] | None) -> bytes:
    try:
        return hashlib.blake2b(_json(value), digest_size=16).digest()
    except (ValueError, RecursionError):  # an unused field may have half of a surrogate pair
        return b""
