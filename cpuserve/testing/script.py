"""Scripts for scripted models: they select a reply for each request."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest, RequestError
from cpuserve.engine.ipc import Output
from cpuserve.testing.engine import EngineStep, ScriptedEngine, logprob_of
from cpuserve.testing.replies import ScriptedReply, reply
from cpuserve.testing.vocabulary import end_id
from cpuserve.testing.writing import RenderedTurn, tool_names, turns_of, written_reply

if TYPE_CHECKING:
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.tokenizer.tokenizer import Tokenizer

TOKENS_PER_OUTPUT = 4
BLOCK = 16  # the number of tokens in a block of the prefix cache
_SHOWN_CHARS = 200
_REPLIES_KEPT = 1024  # earlier replies, for requests that continue an earlier request


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A sequence that a scripted model generates; a request with `n` choices has n sequences.

    number: the number of the sequence, from 0.
    prompt: the text of the rendered prompt.
    turns: the conversation in the prompt; a prompt of /v1/completions is one user turn.
    tools: the name of each function that the request offers.
    params: the sampling parameters of the sequence.
    begun: the beginning of the reply, if the prompt already contains it.
    continues: whether the server continues an earlier request,
      to force a tool call after a thought or to end a thought.
    """

    number: int
    prompt: str
    turns: tuple[RenderedTurn, ...]
    tools: tuple[str, ...]
    params: SamplingParams
    begun: str
    continues: bool = False

    @property
    def last(self) -> str:
        """The text of the last turn of the conversation."""
        return self.turns[-1].text if self.turns else ""


# A function that returns the reply to a request; it may raise a RequestError instead.
Responder = Callable[[ScriptedRequest], ScriptedReply]


def read_request(
    number: int, prompt: str, params: SamplingParams, *, continues: bool
) -> ScriptedRequest:
    """Parse the rendered prompt of a request."""
    turns = turns_of(prompt)
    is_open = turns[-1].role == "assistant"
    begun = turns.pop().text if is_open else ""
    offered = tuple(tool_names(turns))
    said = tuple(turn for turn in turns if turn.role != "tools")
    return ScriptedRequest(number, prompt, said, offered, params, begun, continues)


class ReplyQueue:
    """Replies in order, one per request; `faults` lists deviations from the script.

    Methods may be called from any thread.

    default: the reply to requests after the last reply; None = these requests are refused.
    respond: a function that replies to all requests in place of the queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: deque[ScriptedReply] = deque()
        self._given: deque[tuple[str, ScriptedReply]] = deque(maxlen=_REPLIES_KEPT)
        self.default: ScriptedReply | None = None
        self.respond: Callable[[ScriptedRequest], ScriptedReply | str] | None = None
        self.faults: list[str] = []

    def add(self, *replies: ScriptedReply | str) -> None:
        """Append replies to the queue."""
        with self._lock:
            self._replies += map(_as_reply, replies)

    def set_default(self, given: ScriptedReply | str | None) -> None:
        """Set the reply to requests after the last queued reply."""
        self.default = None if given is None else _as_reply(given)

    def clear(self) -> None:
        """Remove all replies, the default reply, the function and the faults."""
        with self._lock:
            self._replies.clear()
            self._given.clear()
            self.default = self.respond = None
            self.faults = []

    @property
    def left(self) -> list[ScriptedReply]:
        """The queued replies that no request has used."""
        with self._lock:
            return list(self._replies)

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        """Return the reply to `request`; InvalidRequest if the script has none."""
        if request.continues:
            for prompt, reply in reversed(self._given):
                if request.prompt.startswith(prompt):
                    return reply
        reply = self._next(request)
        self._given.append((request.prompt, reply))
        return reply

    def _next(self, request: ScriptedRequest) -> ScriptedReply:
        if self.respond is not None:
            return self._responded(request)
        with self._lock:
            if self._replies:
                return self._replies.popleft()
        if self.default is not None:
            return self.default
        shown = " ".join(request.last.split())
        msg = (
            f"the script has no reply left for request {request.number}, which ended with "
            f"{shown[:_SHOWN_CHARS]!r}; add a reply, or set a default"
        )
        raise self.fault(msg)

    def _responded(self, request: ScriptedRequest) -> ScriptedReply:
        assert self.respond is not None
        try:
            return _as_reply(self.respond(request))
        except RequestError:
            raise
        except Exception as error:
            msg = f"the function of the script raised {type(error).__name__}: {error}"
            raise self.fault(msg) from error

    def fault(self, text: str) -> InvalidRequest:
        """Record a fault, and return it as an error of status 400, which clients do not retry."""
        self.faults.append(text)
        return InvalidRequest(text)


def _as_reply(given: object) -> ScriptedReply:
    if isinstance(given, ScriptedReply):
        return given
    if isinstance(given, str):
        return reply(given)
    msg = f"a reply must be a text, or made with reply(), raw() or failure(), not {given!r:.100}"
    raise TypeError(msg)


def matching_text(reply: ScriptedReply, request: ScriptedRequest) -> str:
    """Return the text that a model would generate for `reply`.

    Raises:
        ValueError: the reply is not possible, for example because the request offers no tools.
    """
    if reply.raw is not None:
        return reply.raw
    if reply.calls and not request.tools:
        called = ", ".join(call.name for call in reply.calls)
        msg = f"the script calls {called}, but request {request.number} offers no tools"
        raise ValueError(msg)
    text = written_reply(reply, request.begun)
    if text is None:
        msg = (
            f"request {request.number} forces a call ({' '.join(request.begun.split())}), which "
            "the reply of the script does not have"
        )
        raise ValueError(msg)
    return text


class ScriptedModel:
    """An EngineScript that generates the replies of `respond`. pace_s: pause after outputs."""

    def __init__(self, tokenizer: Tokenizer, respond: Responder, pace_s: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._respond = respond
        self.pace_s = pace_s
        self.reset()

    def reset(self) -> None:
        """Forget all earlier prompts, as a new server would."""
        self._cache = _PrefixCache()
        self._num_requests = 0

    def __call__(
        self, engine: ScriptedEngine, number: int, prompt: list[int], params: SamplingParams
    ) -> Iterator[EngineStep]:
        """Yield the outputs of one sequence, and update the token counts of the engine."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        try:
            continues = engine.continued[number]
            self._num_requests += not continues
            request = read_request(self._num_requests - 1, text, params, continues=continues)
            reply = self._respond(request)
            written = self._written(reply, request)
        except RequestError as error:
            yield error
            return
        if reply.delay_s:
            yield reply.delay_s
        if reply.error is None or written:
            yield from self._outputs(engine, number, prompt, params, reply, written)
        if reply.error is not None:
            yield reply.error

    def _written(self, reply: ScriptedReply, request: ScriptedRequest) -> str:
        try:
            return matching_text(reply, request)
        except ValueError as error:
            if isinstance(self._respond, ReplyQueue):
                raise self._respond.fault(str(error)) from None
            raise InvalidRequest(str(error)) from None

    def _outputs(
        self,
        engine: ScriptedEngine,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        reply: ScriptedReply,
        text: str,
    ) -> Iterator[EngineStep]:
        cached = self._cache.find(prompt, params)
        stats = engine.stats
        stats.prompt_tokens += len(prompt) - cached
        stats.prefix_queries += len(prompt)
        stats.prefix_hits += cached
        room = engine.info["max_model_len"] - len(prompt)
        tokens, finish, stop_id = self._tokens(text, reply, params, room)
        self._cache.add([*prompt, *tokens], params)
        stats.generation_tokens += len(tokens)
        most, top = params.logprobs, params.prompt_logprobs
        scores = None
        if top is not None:
            scores = [None, *(logprob_of(token, top) for token in prompt[1:])]
        for start in range(0, max(1, len(tokens)), TOKENS_PER_OUTPUT):
            some = tokens[start : start + TOKENS_PER_OUTPUT]
            is_last = start + TOKENS_PER_OUTPUT >= len(tokens) and reply.error is None
            yield Output(
                number,
                some,
                finish if is_last else None,
                stop_id if is_last else None,
                logprobs=None if most is None else [logprob_of(token, most) for token in some],
                prompt_logprobs=None if start else scores,
                cached_tokens=0 if start else cached,
            )
            yield max(self.pace_s, reply.pace_s)

    def _tokens(
        self, text: str, reply: ScriptedReply, params: SamplingParams, room: int
    ) -> tuple[list[int], str, int | None]:
        """Return the tokens of a response, the finish reason, and the stop token that ended it."""
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if params.ignore_eos or len(ids) < params.min_tokens:  # repeat a short text
            size = most if params.ignore_eos else params.min_tokens
            ids = list(itertools.islice(itertools.cycle(ids or [0]), size))
        for at, token in enumerate(ids[:most]):
            if token in params.stop_token_ids and at + 1 > params.min_tokens:
                return ids[: at + 1], "stop", token
        if len(ids) >= most:
            return ids[:most], "length", None
        if reply.finish == "length" or reply.error is not None:
            return ids, "length", None
        return [*ids, end_id(self._tokenizer)], "stop", None


class _PrefixCache:
    """The blocks of tokens that the engine has seen, each identified with all tokens before it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def find(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Return the number of cached tokens; the last token of a prompt is never cached."""
        known = itertools.takewhile(self._seen.__contains__, self._keys(ids[:-1], params))
        return BLOCK * sum(1 for _ in known)

    def add(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Add the full blocks of `ids` to the cache."""
        self._seen.update(self._keys(ids, params))

    def _keys(self, ids: Sequence[int], params: SamplingParams) -> Iterator[int]:
        key = hash((params.cache_salt, params.adapter))
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, *ids[start : start + BLOCK]))
            yield key
