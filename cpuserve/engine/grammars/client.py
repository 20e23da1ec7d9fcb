"""The engine's side of grammars: which ones are compiled, and the masks of the next step.

Nothing of this exists before the first request with a grammar: no process, no library, no masks.

`add` decides whether a request is ready. A thread starts the process and waits for compilations,
and `collect` hands over what has come. There is one mask for each slot. `begin_fill` asks for the
masks of the requests that run, right after a step, and `masks_for` waits for them before the next.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from cpuserve.config.engine import EngineConfig
from cpuserve.core.request import Request
from cpuserve.engine.grammars.messages import Compile, Fill, Row, Start
from cpuserve.engine.grammars.process import Lost, Process
from cpuserve.errors import LIMITS
from cpuserve.ids import RequestId
from cpuserve.log import get_logger
from cpuserve.runtime.executor import Int32, mask_words

MAX_GRAMMARS = 64  # compiled grammars that are kept, beside those in use

Key = tuple[str, str]
log = get_logger("engine")


@dataclass(slots=True)
class _Grammar:
    """A grammar, and the requests that wait for it. process: where it is ready, if it is."""

    number: int
    key: Key
    error: str = ""
    process: Process | None = None
    waiting: list[RequestId] = field(default_factory=list)

    @property
    def is_compiling(self) -> bool:
        return self.process is None and not self.error


@dataclass(slots=True)
class _Answer:
    """An unfinished request with a grammar.

    taken: how many of its output tokens the matcher has; -1 = there is no matcher yet. filled: the
    slot whose mask is for what follows them, and how often the request had been preempted then.
    """

    grammar: _Grammar
    taken: int = -1
    filled: tuple[int, int] = (-1, 0)


@dataclass(slots=True)
class Verdict:
    """What became of the grammar of a request. error: "" = ready. fault: it is the client's."""

    request: RequestId
    error: str = ""
    fault: bool = True


class Grammars:
    """The grammars of one engine. Every method is called from the engine's thread.

    wake: makes the engine look at `has_done`; it is called from another thread.
    """

    def __init__(
        self, config: EngineConfig, vocab: int, eos_ids: Iterable[int], wake: Callable[[], None]
    ) -> None:
        num_masks = min(config.max_num_seqs, config.max_num_batched_tokens)
        ends, words = sorted(eos_ids), mask_words(vocab)
        # Of two cores, with others at work on them, a second thread cost more than it gained.
        cpus, threads = config.cpus, max(config.threads // 2, 1)
        behind = config.frontend_cpus or cpus
        self._start = Start(
            config.tokenizer_path, vocab, ends, num_masks, words, cpus, threads, behind
        )
        self._wake = wake
        self._known: OrderedDict[Key, _Grammar] = OrderedDict()
        self._answers: dict[RequestId, _Answer] = {}
        self._num_grammars = 0
        self._jobs: queue.SimpleQueue[_Grammar | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Grammar, Process | None, str, bool]] = deque()
        self._thread: threading.Thread | None = None
        self._process: Process | None = None  # assigned by the thread alone
        self._gone: list[int] = []
        self._asked: Process | None = None  # of which an answer to Fill is expected
        self._errors: dict[RequestId, str] = {}
        self._ended: set[RequestId] = set()

    # --- compilation --------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Set whether `request` is ready; return why its grammar cannot be compiled, or ""."""
        wanted = request.params.structured_outputs
        assert wanted is not None, "the request has no grammar"
        grammar = self._known.get(wanted.key)
        if grammar is None or (grammar.process is not None and grammar.process.lost):
            grammar = self._compile(wanted.key)
        self._known.move_to_end(wanted.key)
        if grammar.error:
            return grammar.error
        self._answers[request.id] = _Answer(grammar)
        request.ready = not grammar.is_compiling
        if grammar.is_compiling:
            grammar.waiting.append(request.id)
        return ""

    def _compile(self, key: Key) -> _Grammar:
        self._forget_old()
        self._num_grammars += 1
        grammar = self._known[key] = _Grammar(self._num_grammars, key)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_jobs, name="cpuserve-grammars", daemon=True
            )
            self._thread.start()
        self._jobs.put(grammar)
        return grammar

    def _forget_old(self) -> None:
        """Drop the grammars that were used least recently, except those in use."""
        used = {answer.grammar.number for answer in self._answers.values()}
        old = [g for g in self._known.values() if not g.is_compiling and g.number not in used]
        for grammar in old[: max(len(self._known) - MAX_GRAMMARS + 1, 0)]:
            del self._known[grammar.key]
            if grammar.process is not None:
                with suppress(Lost):
                    grammar.process.drop([grammar.number])

    def _run_jobs(self) -> None:
        """Compile what is wanted, one after another; the body of the thread."""
        while (grammar := self._jobs.get()) is not None:
            fault = False
            try:
                if self._process is None or self._process.lost:
                    self._process = Process(self._start)
                wanted = Compile(grammar.number, *grammar.key)
                error, fault = self._process.compile(wanted), True
            except Lost as lost:
                error = str(lost)
                if self._process is not None:
                    self._process.end()
            except (OSError, RuntimeError) as refused:
                error = f"the process for grammars cannot be started: {refused} ({LIMITS})"
            self._done.append((grammar, self._process, error, fault))
            self._wake()

    @property
    def has_done(self) -> bool:
        """Whether `collect` has something to hand over."""
        return bool(self._done)

    def collect(self) -> list[Verdict]:
        """Return what became of the requests whose grammars have been compiled since the last."""
        found: list[Verdict] = []
        while self._done:
            grammar, process, error, fault = self._done.popleft()
            grammar.error, grammar.process = error, None if error else process
            waiting = [number for number in grammar.waiting if number in self._answers]
            found += [Verdict(number, error, fault) for number in waiting]
            grammar.waiting.clear()
            if error:
                for number in waiting:
                    del self._answers[number]
                if not fault and self._known.get(grammar.key) is grammar:
                    del self._known[grammar.key]  # the next request tries again
        return found

    # --- masks --------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether a request with a grammar runs or waits."""
        return bool(self._answers)

    def forget_all_but(self, requests: Container[RequestId]) -> None:
        """Forget every request that is not in `requests`."""
        for number in [number for number in self._answers if number not in requests]:
            if self._answers.pop(number).taken >= 0:
                self._gone.append(number)
            self._errors.pop(number, None)
            self._ended.discard(number)

    def begin_fill(self, requests: Iterable[Request]) -> None:
        """Ask for the masks of these running requests, if they are not known; do not wait.

        All of them sample in the next step.
        """
        rows: dict[Process, list[Row]] = {}
        for request in requests:
            answer = self._answers[request.id]
            where = (request.slot, request.num_preemptions)
            if answer.filled == where and answer.taken == request.num_output:
                continue
            if request.id in self._errors:
                continue
            process, begins = answer.grammar.process, answer.taken < 0
            assert process is not None, "the grammar is not ready"
            new = request.token_ids[request.num_prompt + max(answer.taken, 0) :]
            ends = request.params.stop_token_ids if begins else []
            row = Row(request.id, answer.grammar.number, request.slot, new, begins, ends)
            rows.setdefault(process, []).append(row)
            answer.taken, answer.filled = request.num_output, where
        for process, some in rows.items():
            self._wait()
            self._ask(process, some)

    def _ask(self, process: Process, rows: list[Row]) -> None:
        gone, self._gone = self._gone, []
        try:
            process.ask(Fill(rows, gone))
            self._asked = process
        except Lost as lost:
            self._lose(process, lost)

    def _wait(self) -> None:
        """Take the answer to the last Fill, if one is expected."""
        process, self._asked = self._asked, None
        if process is None:
            return
        try:
            filled = process.answer()
        except Lost as lost:
            self._lose(process, lost)
            return
        for number, error in filled.failed.items():
            self._errors[RequestId(number)] = error
        self._ended.update(map(RequestId, filled.ended))

    def _lose(self, process: Process, lost: Lost) -> None:
        log.error("%s: requests with grammars end with an error", lost)
        process.end()
        for number, answer in self._answers.items():
            if answer.grammar.process is process:
                self._errors[number] = str(lost)

    def masks_for(self, requests: Sequence[Request]) -> Int32:
        """Return the masks [slots, words] for a step in which these requests sample.

        A mask that could not be filled allows nothing; `error_of` says why.
        """
        self._wait()
        self.begin_fill(requests)
        self._wait()
        working = [r for r in requests if r.id not in self._errors]
        if not working:
            return np.zeros((self._start.num_masks, self._start.mask_words), np.int32)
        process = self._answers[working[-1].id].grammar.process
        assert process is not None, "the grammar is not ready"
        for request in requests:
            if request.id in self._errors:
                process.masks[request.slot] = 0
        return process.masks

    def error_of(self, request: Request) -> str | None:
        """Return why the mask of a request could not be filled, if it could not."""
        return self._errors.get(request.id)

    def is_complete(self, request: Request) -> bool:
        """Whether nothing but an end can follow in the text of a request."""
        return request.id in self._ended

    def close(self) -> None:
        """End the process."""
        self._jobs.put(None)
        while self._thread is not None and self._thread.is_alive():
            if self._process is not None:
                self._process.end()  # also ends a compilation that the thread waits for
            self._thread.join(0.05)
        if self._process is not None:
            self._process.end()
