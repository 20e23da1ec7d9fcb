"""Events: the parts of a response, which all dialects receive in the same order.

An engine output of one sequence becomes a list of events: `[PromptProgress]`,
or `[PromptScores?, Text, (Thought | ToolCallDelta | Text)*, Finish?, TokenUsage?]`,
or for an embedding `[Text, Embedding, Finish]`. Searches for tools come as `[ToolSearched, ...]`.
The last list of a response is `[TokenUsage]`. `Text` comes once for each output, even without text,
since it carries the token ids and logprobs. Its text may come later, because a character
may have its bytes in several tokens, and text that may begin a stop string is held back.
A response that is not streamed is made of the same events as a stream, so the two cannot differ.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.media.kinds import SeenItem
    from cpuserve.serving.calls.call import Prompt


# The stop_reason of a text that ended because it repeats itself, as in vLLM.
REPETITION_FOUND = "repetition_detected"


class PromptProgress(msgspec.Struct, gc=False):
    """`processed` of the `total` prompt tokens are in the KV cache; `cached` were prefix hits.

    tiles, tiles_read: the parts of all media items in the prompt, and of those that are computed.
    """

    index: int
    total: int
    cached: int
    processed: int
    elapsed_ms: int
    tiles: int = 0
    tiles_read: int = 0


class PromptScores(msgspec.Struct):
    """The logprobs of the prompt's tokens; entry 0 is None (nothing predicts the first token)."""

    index: int
    scores: list[TokenLogprob | None]


class Text(msgspec.Struct, gc=False):
    """Text of the response, the new token ids, and their logprobs if they were requested.

    Tokens of thoughts have no logprobs.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class Thought(msgspec.Struct, gc=False):
    """A piece of a thought of the model, without the tags around the thought."""

    index: int
    text: str


class ToolCallDelta(msgspec.Struct, gc=False):
    """A part of the arguments of tool call number `call`; the first part has the id and the name.

    custom: the tool is a custom tool, and `arguments` is the text of its input, not JSON.
    """

    index: int
    call: int
    arguments: str
    id: str | None = None
    name: str | None = None
    custom: bool = False


class ToolSearched(msgspec.Struct):
    """The model has called a search for tools, which the server has run (tool_catalog.py).

    id, name, arguments: the call of the search, as in ToolCallDelta.
    found: the name of each found tool.
    error: why the search failed.
    after: the number of pieces of text before the search in its choice.
    """

    index: int
    id: str
    name: str
    arguments: str
    found: list[str]
    error: str = ""
    after: int = 0


class Embedding(msgspec.Struct, gc=False):
    """The vector, scores or logits of a prompt (SamplingParams.vectors): fp32, little-endian."""

    index: int
    vector: bytes


def floats_of(vector: bytes) -> array[float]:
    """Return the fp32 numbers of an embedding in the byte order of this machine."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class Finish(msgspec.Struct, gc=False):
    """The sequence has ended: "stop", "length", "repetition", "tool_calls", "pause" or "abort".

    "pause": the model searched for tools until the limit.
      The client continues the response with a further request that contains it.
    stop_reason: the stop string or stop token id that ended the sequence, or REPETITION_FOUND.
    """

    index: int
    reason: str
    stop_reason: str | int | None = None


class TokenUsage(msgspec.Struct, gc=False):
    """Token counts so far, over all choices; each prompt counts once.

    reasoning: how many tokens of the completion are thoughts.
    media: what became of the media items in the prompts.
    drafts, accepted: how many draft tokens there were, and how many of them were right.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0
    media: Sequence[SeenItem] = ()
    drafts: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence failed, which ends the whole response: the reader of events raises `error`."""

    error: BaseException


Event: TypeAlias = (
    PromptProgress
    | PromptScores
    | Text
    | Thought
    | ToolCallDelta
    | ToolSearched
    | Embedding
    | Finish
    | TokenUsage
)


_INTERRUPTIONS = (ToolCallDelta, ToolSearched)


@dataclass(slots=True)
class Thoughts:
    """A whole thought; `after`: the number of pieces of text before the thought in its choice."""

    text: list[str] = field(default_factory=list)
    after: int = 0


THOUGHT_GAP = "\n\n"  # between thoughts with text or calls between them, in one field of a response


@dataclass(slots=True)
class ThoughtGaps:
    """Writes the gaps between the thoughts of a choice in a stream, as `Choice.reasoning` does."""

    _thought: bool = False  # whether the choice has a thought
    _interrupted: bool = False  # whether text or a call follows its last thought

    def before(self, event: Event) -> str:
        """Return the gap before the text of this event; "" unless another thought begins."""
        if isinstance(event, Thought):
            gap = THOUGHT_GAP if self._interrupted else ""
            self._thought, self._interrupted = True, False
            return gap
        says = bool(event.text) if isinstance(event, Text) else isinstance(event, _INTERRUPTIONS)
        self._interrupted = self._interrupted or (self._thought and says)
        return ""


@dataclass(slots=True)
class WholeToolCall:
    """A whole tool call; `after`: the number of pieces of text before this call in its choice.

    custom: the tool is a custom tool, so `arguments` is the text of its input, not JSON.
    """

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    after: int = 0
    custom: bool = False


@dataclass(slots=True)
class Choice:
    """All events of one sequence, joined.

    scorer: the index of the choice that computed the prompt logprobs for this choice.
    """

    index: int
    prompt: Prompt
    scorer: int
    text: list[str] = field(default_factory=list)
    calls: list[WholeToolCall] = field(default_factory=list)
    thoughts: list[Thoughts] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob | None] | None = None
    vector: bytes = b""
    reason: str | None = None
    stop_reason: str | int | None = None
    # The thoughts, tool calls and searches for tools, in their order in the response.
    _inner: list[Thoughts | WholeToolCall | ToolSearched] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Append the next event of this sequence."""
        match event:
            case Text():
                if event.text:
                    self.text.append(event.text)
                self.token_ids += event.token_ids
                self.logprobs += event.logprobs or ()
            case Thought():
                last = self._inner[-1] if self._inner else None
                if not (isinstance(last, Thoughts) and last.after == len(self.text)):
                    last = Thoughts(after=len(self.text))
                    self.thoughts.append(last)
                    self._inner.append(last)
                last.text.append(event.text)
            case ToolCallDelta(id=str() as number, name=str() as name):
                begun, custom = len(self.text), event.custom
                call = WholeToolCall(number, name, [event.arguments], begun, custom)
                self.calls.append(call)
                self._inner.append(call)
            case ToolCallDelta():
                self.calls[event.call].arguments.append(event.arguments)
            case ToolSearched():
                event.after = len(self.text)
                self._inner.append(event)
            case PromptScores():
                self.scores = event.scores
            case Embedding():
                self.vector = event.vector
            case Finish():
                self.reason, self.stop_reason = event.reason, event.stop_reason
            case PromptProgress() | TokenUsage():
                pass

    @property
    def values(self) -> array[float]:
        """The numbers of the vector."""
        return floats_of(self.vector)

    @property
    def mean_logprob(self) -> float:
        """The mean of the logprobs of the tokens; 0 if there are none."""
        return math.fsum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))

    @property
    def reasoning(self) -> str:
        """All thoughts as one text."""
        return THOUGHT_GAP.join("".join(thought.text) for thought in self.thoughts)

    @property
    def parts(self) -> list[str | Thoughts | WholeToolCall | ToolSearched]:
        """The thoughts, tool calls, tool searches and non-empty texts of the response, in order."""
        found: list[str | Thoughts | WholeToolCall | ToolSearched] = []
        begin = 0
        for inner in self._inner:
            found += ["".join(self.text[begin : inner.after]), inner]
            begin = inner.after
        found.append("".join(self.text[begin:]))
        return [part for part in found if part]


@dataclass(slots=True)
class WholeResponse:
    """All events of a response, joined by choice. left_out: see `keep_best`."""

    choices: list[Choice]
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(0, 0, 0))
    left_out: list[Choice] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        """Add the next list of events to their choices."""
        for event in events:
            if isinstance(event, TokenUsage):
                self.usage = event
            else:
                self.choices[event.index].add(event)

    def keep_best(self, n: int, num_best: int) -> None:
        """Keep num_best of the n choices of each prompt: those with the highest mean logprob.

        The best choice of a prompt becomes its first one.
        """
        kept: list[Choice] = []
        for start in range(0, len(self.choices), n):
            ranked = sorted(self.choices[start : start + n], key=lambda c: -c.mean_logprob)
            kept += ranked[:num_best]
            self.left_out += ranked[num_best:]
        self.choices = kept

    @property
    def num_shown(self) -> int:
        """The number of token ids, vector elements and logprobs that the response may contain."""
        return sum(
            len(choice.token_ids)
            + len(choice.vector) // 4
            + num_entries(choice.logprobs)
            + num_entries(choice.scores)
            for choice in (*self.choices, *self.left_out)
        )


def json_object(written: str) -> msgspec.Raw:
    """Return the arguments of a tool call unchanged if they are a JSON object, else {}."""
    try:
        msgspec.json.decode(written, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(written.encode())


def num_entries(rows: list[TokenLogprob] | list[TokenLogprob | None] | None) -> int:
    """Return the number of logprobs in `rows`, alternatives included."""
    last = rows[-1] if rows else None
    return 0 if rows is None or last is None else len(rows) * (1 + len(last.top))
