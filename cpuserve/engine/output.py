"""Turn the engine's tokens into text: detokenization, stop strings, end of a sequence."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.engine.ipc import Output, TokenLogprob
from cpuserve.errors import RequestError
from cpuserve.tokenizer.detokenize import Detokenizer

if TYPE_CHECKING:
    from cpuserve.engine.client import EngineClient
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class TextDelta:
    """What one output added. `text` may lag behind `token_ids` (half characters, stop strings).

    logprobs: one per token id, if requested. finish_reason: None, "stop", "length" or "abort".
    stop_reason: the stop string or stop token id that ended it. scheduled: time.monotonic() when
    the request first ran, with its first delta. processed: prompt tokens done, in a delta without
    tokens that only reports progress; else 0.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    scheduled: float = 0.0
    processed: int = 0


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
    """Tracks the longest prefix of `stop` with which the text so far ends; `length` is its length.

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


class OutputProcessor:
    """The text side of one sequence."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._include = params.include_stop_str_in_output
        self._stops = StopFilter(params.stop, self._include) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, output: Output) -> TextDelta:
        """Return the text of the engine's next output.

        After a stop string the delta has a finish_reason, while the engine still runs the request:
        the caller has to abort it.

        Raises:
            RequestError: the engine ended the request with an error.
        """
        if output.finish == "error":
            raise RequestError(output.error or "the engine ended this request with an error")
        delta = TextDelta(
            "",
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            output.finish,
            output.stop_id,
            output.cached_tokens,
            output.scheduled,
            output.processed,
        )
        if output.processed:
            return delta
        shown = output.tokens
        if output.finish == "stop" and not self._include:
            shown = shown[:-1]  # the text of a stop token is not part of the answer
        if self._stops is None:
            delta.text = self._detokenizer.push(shown)
            if output.finish is not None:
                delta.text += self._detokenizer.flush()
        else:
            self._push_filtered(delta, shown, self._stops)
        self._num_tokens += len(delta.token_ids)
        return delta

    def _push_filtered(self, delta: TextDelta, shown: list[int], stops: StopFilter) -> None:
        """Detokenize token by token, so that tokens after a stop string are not counted."""
        for index, token in enumerate(shown):
            text = self._detokenizer.push([token])
            if self._num_tokens + index < self._min_tokens:
                delta.text += text
                continue
            delta.text += stops.push(text)
            if stops.matched is not None:
                _cut(delta, index + 1, stops.matched)
                return
        if delta.finish_reason is not None:
            delta.text += stops.push(self._detokenizer.flush()) + stops.flush()
            if stops.matched is not None:
                _cut(delta, len(delta.token_ids), stops.matched)


def _cut(delta: TextDelta, count: int, stop: str) -> None:
    """End the sequence after its `count`-th new token, because of the stop string `stop`."""
    delta.token_ids = delta.token_ids[:count]
    if delta.logprobs is not None:
        delta.logprobs = delta.logprobs[:count]
    delta.finish_reason = "stop"
    delta.stop_reason = stop


async def generate_text(
    client: EngineClient,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    params: SamplingParams,
    priority: int = 0,
    *,
    timeout_s: float | None = None,
    progress: bool = False,
) -> AsyncGenerator[TextDelta, None]:
    """Yield the deltas of one sequence (params.n is ignored); closing the iterator aborts it.

    timeout_s, progress: see EngineClient.generate.

    Raises:
        InvalidRequest: the engine could never run it.
        RequestError: the engine ended it with an error; EngineDead if the engine itself ended;
            DeadlineExceeded.
    """
    processor = OutputProcessor(tokenizer, prompt_ids, params)
    source = client.generate(prompt_ids, params, priority, timeout_s=timeout_s, progress=progress)
    async with aclosing(source) as outputs:
        async for output in outputs:
            delta = processor.push(output)
            yield delta
            if delta.finish_reason is not None:
                return
