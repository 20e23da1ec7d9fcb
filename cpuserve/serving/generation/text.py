"""Turn the engine's outputs into events: detokenization, stop strings, end of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest, RequestError, ServiceUnavailable
from cpuserve.serving.calls.events import (
    REPETITION_FOUND,
    Embedding,
    Event,
    Finish,
    PromptScores,
    Text,
    Thought,
    ToolCallDelta,
)
from cpuserve.serving.calls.line_limits import LineLimits, LineRules
from cpuserve.tokenizer.detokenize import Detokenizer

if TYPE_CHECKING:
    from cpuserve.engine.ipc import Output
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.tools.base import Piece, ToolParser
    from cpuserve.tokenizer.tokenizer import Tokenizer


class StopFilter:
    """Finds stop strings in text that arrives in pieces; holds back text that may begin one.

    The result does not depend on how the text is split. The stop string
    that is complete first wins, or the longest one if several end at the same character.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._matches = [_Match(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that may be shown now; sets `matched` when a stop string is complete."""
        num_seen, text = len(self._held), self._held + text
        new_text, matches = text[num_seen:], []
        for match in self._matches:
            if end := match.push(new_text):
                matches.append((num_seen + end, num_seen + end - len(match.stop), match.stop))
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        num_shown = len(text) - max((match.length for match in self._matches), default=0)
        self._held = text[num_shown:]
        return text[:num_shown]

    @property
    def holds(self) -> bool:
        """Whether the filter holds back text that may begin a stop string."""
        return bool(self._held)

    def flush(self) -> str:
        """Return the text that is still held back; called once, after the last piece."""
        held_text, self._held = self._held, ""
        return held_text


class _Match:
    """Tracks the longest prefix of `stop` that ends the text so far; `length`: of this prefix.

    This is the Knuth-Morris-Pratt algorithm: its time depends on new characters only.
    """

    __slots__ = ("_shorter", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # _shorter[k]: length of the longest proper prefix of stop[:k + 1] that is also its suffix.
        # The list is extended only as far as the text has matched,
        # since few texts match much of a long stop string.
        self._shorter = [0]

    def push(self, text: str) -> int:
        """Read more text; return the index in `text` after the first complete stop string, or 0."""
        stop, length, position = self.stop, self.length, 0
        while position < len(text):
            if not length:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            elif text[position] != stop[length]:
                length = self._shorter[length - 1]
                continue
            length += 1
            position += 1
            if length == len(stop):
                self.length = 0
                return position
            if length > len(self._shorter):
                self._extend()
        self.length = length
        return 0

    def _extend(self) -> None:
        """Append the next entry to the failure function of the algorithm, `_shorter`."""
        stop, shorter = self.stop, self._shorter
        next_char = stop[len(shorter)]
        length = shorter[-1]
        while length and next_char != stop[length]:
            length = shorter[length - 1]
        shorter.append(length + (next_char == stop[length]))


class NextTurn(Enum):
    """Why a sequence must go on as another engine request (see sequence.py).

    ENDED: the thought of the sequence has ended.
    OPEN: the server must end the thought.
    NONE: the sequence has no thought.
    """

    ENDED = "ended"
    OPEN = "open"
    NONE = "none"


def check_failed(output: Output) -> None:
    """Raise the error that an output reports, if it reports one.

    Raises:
      InvalidRequest: a field of the request was the cause.
      ServiceUnavailable: the engine could not serve the request, and may do so later.
      RequestError: the engine ended the request with an error.
    """
    if output.unavailable:
        msg = output.error or "the engine cannot serve this request now"
        raise ServiceUnavailable(msg)
    if output.fault is not None:
        raise InvalidRequest(output.error or "the request is invalid", role=output.fault)
    if output.finish == "error":
        raise RequestError(output.error or "the engine ended this request with an error")


class TextProcessor:
    """Turns the token ids of one sequence, choice `index` of the response, into events."""

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
        self.num_reasoning = 0  # the number of tokens in thoughts
        self._index = index
        self.finish: str | None = None
        self._calls: ToolParser | None = None
        self._tells_thoughts = True
        self._budget: int | None = None
        self._opens_after_thought = False
        self._lines: LineLimits | None = None
        self._thought = False  # whether the response has contained a thought
        self.turn: NextTurn | None = None

    def find_calls(
        self, parser: ToolParser, shown_ids: frozenset[int], *, tells_thoughts: bool = True
    ) -> None:
        """Find thoughts and tool calls in the text; parser.most_calls tool calls end the sequence.

        shown_ids: special tokens that the parser must see as text.
        tells_thoughts: False = no events for thoughts, but their tokens are counted.
        """
        self._calls = parser
        self._tells_thoughts = tells_thoughts
        self._detokenizer.show(shown_ids)

    def limit_lines(self, rules: LineRules) -> None:
        """End the response where LineRules end it; its finish reason is then "length"."""
        self._lines = LineLimits(rules)

    def watch_thought(self, budget: int | None, *, opens_after_thought: bool) -> None:
        """Set `turn` after `budget` tokens of a thought and, if opens_after_thought, at its end."""
        assert self._calls is not None
        self._budget, self._thought = budget, self._calls.in_thought
        self._opens_after_thought = opens_after_thought
        if budget == 0 and self._thought:
            self.turn = NextTurn.OPEN

    @property
    def is_undecided(self) -> bool:
        """Whether a forced beginning or a grammar waits for a thought that may still begin."""
        return self._opens_after_thought and self.turn is None and not self._thought

    def go_on(
        self,
        ids: Sequence[int],
        opening: str,
        after: Callable[[ToolParser], ToolParser],
        *,
        is_last: bool,
    ) -> list[Event]:
        """Return the events of the tokens `ids`, which the server adds before the model goes on.

        opening: the end of the added text, which begins a tool call or a structured output.
          The client does not see this text.
        after: returns the parser of the text after `opening`.
        is_last: these tokens reach max_tokens, so the response ends.
        """
        assert self._calls is not None
        self.turn, self._budget, self._opens_after_thought = None, None, False
        text = self._detokenizer.push(ids)
        pieces = self._calls.push(text.removesuffix(opening))
        pieces += self._calls.force(opening)
        self._calls = after(self._calls)
        self._num_tokens += len(ids)
        events: list[Event] = [Text(self._index, "", list(ids)), *self._shown(pieces)]
        if is_last:
            self.finish = "length"
            events.append(Finish(self._index, "length"))
        return events

    def push(self, output: Output) -> tuple[list[Event], int]:
        """Return the events of the engine's next output, and how many of its tokens are kept.

        The Text comes first, or after PromptScores; the Finish, if any, is the last. After a stop
        string `finish` is set while the engine still runs the request: the caller has to abort it.

        Raises:
            InvalidRequest: a field of the request was the cause.
            RequestError: the engine ended the request with an error.
        """
        check_failed(output)
        finish = output.finish
        text = Text(self._index, "", output.tokens, output.logprobs)
        events: list[Event] = [text]
        if output.prompt_logprobs is not None:
            events.insert(0, PromptScores(self._index, output.prompt_logprobs))
        if output.vector is not None:
            events.append(Embedding(self._index, output.vector))
        num_shown = output.tokens
        if finish == "stop" and not self._include:
            num_shown = num_shown[:-1]  # the text of a stop token is not part of the response
        pieces = self._read(num_shown, text)
        if self.turn is None and self._opens_after_thought and finish == "stop":
            self.turn = NextTurn.OPEN if self._thought else NextTurn.NONE
            text.token_ids = text.token_ids[: len(num_shown)]
        count = len(text.token_ids)
        self._num_tokens += count
        if self.turn is not None:
            return [*events, *self._shown(pieces)], count
        if finish is not None or self._has_ended():
            pieces += self._rest(text, is_cut=finish not in (None, "stop"))
        stop: str | int | None = REPETITION_FOUND if finish == "repetition" else output.stop_id
        if self._stops is not None and self._stops.matched is not None:
            finish, stop = "stop", self._stops.matched
        elif self._lines is not None and self._lines.ended:
            finish, stop = "length", None
        elif self._calls is not None and self._calls.is_full:
            finish = finish if finish is not None and count == len(output.tokens) else "stop"
        pieces = self._shown(pieces)
        if pieces and isinstance(piece := pieces[0], Text):
            text.text = piece.text
            pieces = pieces[1:]
        events += pieces
        reason, calls = finish, self._calls
        # Clients run the tool calls of a response with the reason tool_calls, so the last call
        # must be complete. A limit may have cut off text or a further call after it.
        if calls is not None and (
            (finish in ("stop", "length") and (calls.is_full or calls.ends_with_call))
            or (finish == "stop" and calls.last_closed)
        ):
            reason, stop = "tool_calls", None
        if finish is not None:
            self.finish = finish
            events.append(Finish(self._index, reason or finish, stop))
        return events, count

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces that the client gets; adjacent pieces of one type are joined."""
        if not self._tells_thoughts:
            pieces = [piece for piece in pieces if not isinstance(piece, Thought)]
        return _joined(pieces) if len(pieces) > 1 else pieces

    def _read(self, shown_ids: list[int], event: Text) -> list[Piece]:
        """Return the pieces of new tokens; without a parser, their text is added to `event`.

        The end of the response is looked for after each token,
        because tokens after the end are not a part of the response.
        """
        stops, parser = self._stops, self._calls
        if stops is None and parser is None and self._lines is None:
            event.text += self._detokenizer.push(shown_ids)
            return []
        pieces: list[Piece] = []
        logprobs, spoken = event.logprobs, []
        for index, token in enumerate(shown_ids):
            thought = parser is not None and parser.in_thought
            text = self._detokenizer.push_one(token)
            if stops is not None and self._num_tokens + index >= self._min_tokens:
                pieces += self._stopped(stops, text, event)
            else:
                pieces += self._told(text, event)
            if thought or (parser is not None and parser.in_thought):
                self.num_reasoning += 1
            elif logprobs is not None:
                spoken.append(logprobs[index])
            if self._watches:
                self.turn = self._turn(pieces)
            if self.turn is not None or self._has_ended():
                event.token_ids = event.token_ids[: index + 1]
                break
        if logprobs is not None:
            # The logprobs of an end token, which is not shown, come last.
            event.logprobs = spoken + logprobs[len(shown_ids) : len(event.token_ids)]
        return pieces

    @property
    def _watches(self) -> bool:
        return self._opens_after_thought or self._budget is not None

    def _turn(self, pieces: list[Piece]) -> NextTurn | None:
        """Return why another engine request must follow the last token; None = no request must.

        Text before a structured output that waits for the end of the thought is dropped.
        """
        assert self._calls is not None
        if self._calls.in_thought:
            self._thought = True
            spent = self._budget is not None and self.num_reasoning >= self._budget
            return NextTurn.OPEN if spent else None
        if not self._opens_after_thought:
            return None
        said = any(not isinstance(piece, Thought) for piece in pieces)
        if said:
            pieces[:] = [piece for piece in pieces if isinstance(piece, Thought)]
        if self._thought:
            return NextTurn.ENDED
        return NextTurn.NONE if said else None

    def _stopped(self, stops: StopFilter, text: str, event: Text) -> list[Piece]:
        """Return the pieces of a text up to a stop string; thoughts may contain stop strings."""
        parser = self._calls
        if parser is None:
            return self._told(stops.push(text), event)
        pieces: list[Piece] = []
        # The text is read by single characters, so that the result does not depend on where
        # it is cut. For most tokens, one step for the whole text has the same result
        # in a third of the time.
        may_fill = parser.most_calls is not None or parser.ends_at_repeat
        alike = not may_fill and parser.stops_alike(text)
        for part in (text,) if alike and (parser.in_thought or not stops.holds) else text:
            pieces += parser.push(stops.push(part) if parser.may_stop(part) else part)
            if self._has_ended():
                break
        return pieces

    def _told(self, text: str, event: Text) -> list[Piece]:
        """Return the pieces that the parser finds; without a parser, add the text to `event`."""
        if self._lines is not None:
            text = self._lines.push(text)
        return self._passed(text, event)

    def _passed(self, text: str, event: Text) -> list[Piece]:
        """Return the pieces of the text that LineLimits lets through."""
        if self._calls is not None:
            return self._calls.push(text)
        event.text += text
        return []

    def _has_ended(self) -> bool:
        """Whether a stop string, a line limit or the last allowed call has ended the response."""
        stopped = self._stops is not None and self._stops.matched is not None
        stopped = stopped or (self._lines is not None and self._lines.ended)
        return stopped or (self._calls is not None and self._calls.is_full)

    def _rest(self, event: Text, *, is_cut: bool) -> list[Piece]:
        """Return the pieces of the text that is still held back at the end of the response.

        is_cut: a limit such as max_tokens has ended the response.
        """
        stops, pieces = self._stops, []
        if not self._has_ended():
            text = self._detokenizer.flush()
            if stops is not None:
                pieces = self._stopped(stops, text, event)
                text = stops.flush()
            pieces += self._told(text, event)
        if self._lines is not None:
            pieces += self._passed(self._lines.flush(), event)
        if self._calls is not None and not self._calls.is_full:
            pieces += self._calls.flush(cut=is_cut and not self._has_ended())
        return pieces


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces, with adjacent pieces of one type joined."""
    joined = pieces[:1]
    for piece in pieces[1:]:
        last_piece = joined[-1]
        if isinstance(piece, Text) and isinstance(last_piece, Text):
            joined[-1] = Text(piece.index, last_piece.text + piece.text, [])
        elif isinstance(piece, Thought) and isinstance(last_piece, Thought):
            joined[-1] = Thought(piece.index, last_piece.text + piece.text)
        elif (
            isinstance(piece, ToolCallDelta)
            and isinstance(last_piece, ToolCallDelta)
            and piece.id is None
        ):
            arguments = last_piece.arguments + piece.arguments
            joined[-1] = ToolCallDelta(
                piece.index,
                last_piece.call,
                arguments,
                last_piece.id,
                last_piece.name,
                last_piece.custom,
            )
        else:
            joined.append(piece)
    return joined
