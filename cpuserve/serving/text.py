"""Turn the engine's outputs into events: detokenization, stop strings, end of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest, RequestError
from cpuserve.serving.events import Embedding, Event, Finish, PromptScores, Text
from cpuserve.tokenizer.detokenize import Detokenizer

if TYPE_CHECKING:
    from cpuserve.engine.ipc import Output
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.tools.base import Piece, ToolParser
    from cpuserve.tokenizer.tokenizer import Tokenizer


class StopFilter:
    """Finds stop strings in text that arrives in pieces, and holds back any part of one.

    The result does not depend on how the text is split: the stop string that is complete first
    wins, and of several that end at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._matches = [_Match(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that may be shown now; sets `matched` when a stop string is complete."""
        seen, text = len(self._held), self._held + text
        new, found = text[seen:], []
        for match in self._matches:
            if end := match.push(new):
                found.append((seen + end, seen + end - len(match.stop), match.stop))
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        shown = len(text) - max((match.length for match in self._matches), default=0)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back, after the last piece."""
        held, self._held = self._held, ""
        return held


class _Match:
    """Tracks the longest prefix of `stop` that ends the text so far; `length` is its length.

    This is the Knuth-Morris-Pratt algorithm: its time depends on new characters only.
    """

    __slots__ = ("_shorter", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # _shorter[k]: length of the longest proper prefix of stop[:k + 1] that is also its suffix.
        # It is computed only as far as the text has matched, since few texts match much of a long
        # stop string.
        self._shorter = [0]

    def push(self, text: str) -> int:
        """Continue with `text`; return where in it the stop string is first complete, or 0."""
        stop, length, at = self.stop, self.length, 0
        while at < len(text):
            if not length:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            elif text[at] != stop[length]:
                length = self._shorter[length - 1]
                continue
            length += 1
            at += 1
            if length == len(stop):
                self.length = 0
                return at
            if length > len(self._shorter):
                self._extend()
        self.length = length
        return 0

    def _extend(self) -> None:
        """Compute the next entry of _shorter."""
        stop, shorter = self.stop, self._shorter
        last = stop[len(shorter)]
        length = shorter[-1]
        while length and last != stop[length]:
            length = shorter[length - 1]
        shorter.append(length + (last == stop[length]))


class TextProcessor:
    """The text side of one sequence, choice `index` of its response."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        index: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._include = params.include_stop_str_in_output
        self._stops = StopFilter(params.stop, self._include) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._index = index
        self.finish: str | None = None
        self._calls: ToolParser | None = None

    def find_calls(self, parser: ToolParser, shown_ids: frozenset[int]) -> None:
        """Find tool calls in the text; the sequence ends where the parser is full.

        shown_ids: special tokens that the parser must see as text.
        """
        self._calls = parser
        self._detokenizer.show(shown_ids)

    def push(self, output: Output) -> tuple[list[Event], int]:
        """Return the events of the engine's next output, and how many tokens of it count.

        The Text comes first, or after PromptScores; the Finish, if any, is the last. After a stop
        string `finish` is set while the engine still runs the request: the caller has to abort it.

        Raises:
            InvalidRequest: a field of the request was the cause.
            RequestError: the engine ended the request with an error.
        """
        finish = output.finish
        if output.fault is not None:
            raise InvalidRequest(output.error or "the request is invalid", param=output.fault)
        if finish == "error":
            raise RequestError(output.error or "the engine ended this request with an error")
        text = Text(self._index, "", output.tokens, output.logprobs)
        events: list[Event] = [text]
        if output.prompt_logprobs is not None:
            events.insert(0, PromptScores(self._index, output.prompt_logprobs))
        if output.vector is not None:
            events.append(Embedding(self._index, output.vector))
        shown = output.tokens
        if finish == "stop" and not self._include:
            shown = shown[:-1]  # the text of a stop token is not part of the response
        pieces = self._read(shown, text)
        count = len(text.token_ids)
        self._num_tokens += count
        if finish is not None or self._has_ended():
            pieces += self._rest(text)
        stop: str | int | None = output.stop_id
        if self._stops is not None and self._stops.matched is not None:
            finish, stop = "stop", self._stops.matched
        elif self._calls is not None and self._calls.is_full:
            finish = finish if finish is not None and count == len(output.tokens) else "stop"
        if pieces and isinstance(first := pieces[0], Text):
            text.text = first.text
            pieces = pieces[1:]
        events += pieces
        reason, calls = finish, self._calls
        # A client runs the calls of such a response, so the last one must not be cut off. After
        # it, a limit may have cut off text or another call.
        if calls is not None and (
            (finish in ("stop", "length") and (calls.is_full or calls.ends_with_call))
            or (finish == "stop" and calls.last_closed)
        ):
            reason, stop = "tool_calls", None
        if finish is not None:
            self.finish = finish
            events.append(Finish(self._index, reason or finish, stop))
        return events, count

    def _read(self, shown: list[int], event: Text) -> list[Piece]:
        """Return the text and calls of new tokens; without tools, the text goes to `event`.

        The end of the response is looked for after each token, because tokens after the end are
        not a part of the response.
        """
        stops, calls, pieces = self._stops, self._calls, []
        if stops is None and (calls is None or calls.most_calls is None):
            return self._told(self._detokenizer.push(shown), event)
        for index, token in enumerate(shown):
            text = self._detokenizer.push([token])
            if stops is not None and self._num_tokens + index >= self._min_tokens:
                text = stops.push(text)
            pieces += self._told(text, event)
            if self._has_ended():
                _cut(event, index + 1)
                break
        return pieces

    def _told(self, text: str, event: Text) -> list[Piece]:
        """Return the pieces that the parser finds; without one, add the text to `event`."""
        if self._calls is not None:
            return self._calls.push(text)
        event.text += text
        return []

    def _has_ended(self) -> bool:
        """Whether a stop string or the last call that may be has ended the response."""
        stopped = self._stops is not None and self._stops.matched is not None
        return stopped or (self._calls is not None and self._calls.is_full)

    def _rest(self, event: Text) -> list[Piece]:
        """Return the pieces that were held back, at the end of the response."""
        stops, pieces = self._stops, []
        if not self._has_ended():
            text = self._detokenizer.flush()
            if stops is not None:
                text = stops.push(text) + stops.flush()
            pieces = self._told(text, event)
        if self._calls is not None and not self._calls.is_full:
            pieces += self._calls.flush()
        return pieces


def _cut(event: Text, count: int) -> None:
    """Drop what comes after the `count`-th new token."""
    event.token_ids = event.token_ids[:count]
    if event.logprobs is not None:
        event.logprobs = event.logprobs[:count]
