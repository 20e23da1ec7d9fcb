"""From the engine's tokens to text: detokenization, stop strings, the end of a sequence."""

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
    """What one output added: `text` may lag behind `token_ids` (half characters, stop strings).

    logprobs: one per token id, if wanted. finish_reason: None, "stop", "length" or "abort".
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
    """Finds stop strings in a text that comes in pieces, and lets no part of one through.

    The answer does not depend on how the text is cut: the first stop string to be complete wins,
    the longest of those that end at the same character.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._matches = [_Match(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now; sets `matched` when a stop string is complete."""
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
        """What was held back, when nothing can follow any more."""
        held, self._held = self._held, ""
        return held


class _Match:
    """The longest beginning of `stop` that the text so far ends with; `length` is its length.

    Knuth, Morris and Pratt's matcher: time for new characters only, however much is held back.
    """

    __slots__ = ("_shorter", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # _shorter[k]: length of the longest beginning of `stop` that ends stop[:k + 1], and is
        # shorter. Made as far as the text has matched: few texts get far into a long stop string.
        self._shorter = [0]

    def push(self, text: str) -> int:
        """Go on with `text`: where in it the stop string first becomes complete, or 0."""
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
        """One more entry of _shorter."""
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
        """Text of the engine's next output.

        After a stop string the delta has a finish_reason that `output` does not know of: the
        caller aborts the request.

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
        """Token by token, so that the tokens after a stop string are not counted."""
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
    """The sequence ends with its `count`-th new token, by the stop string `stop`."""
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
    """The deltas of one sequence (params.n is the caller's business); closing it aborts it.

    timeout_s, progress: as EngineClient.generate has them.

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
