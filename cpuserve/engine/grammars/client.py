"""The engine's client of the grammar process: it gets compiled grammars, and bitmasks for steps.

The process, the library and the bitmasks are created for the first request with a grammar.

`add` decides whether a request is ready. Threads start the process and wait for compilations,
and `collect` returns the results so far. Each request slot has a bitmask for the next token,
and one after each draft token. Right after a step, `begin_fill` asks for the bitmasks of the
running requests; `begin_step` takes them before the next step, `take_guess` has the tokens that
the grammars determine, and `masks_for` returns the bitmasks. If they are late, requests with
grammars wait, and other requests run. A process that ends, or does not reply for REPLY_S seconds,
is replaced. The grammars in use are then compiled again, and their requests continue.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from cpuserve.base.errors import LIMITS, SourceChanged
from cpuserve.base.ids import RequestId
from cpuserve.base.log import get_logger
from cpuserve.config.engine import EngineConfig
from cpuserve.core.request import Delta, Request
from cpuserve.engine.grammars.grammar_queue import AT_A_TIME, GrammarQueue
from cpuserve.engine.grammars.messages import Compile, Fill, Guessed, Row, Start
from cpuserve.engine.grammars.process import GrammarInterrupted, GrammarProcessLost, Process
from cpuserve.loader.source_files import check_same
from cpuserve.runtime.executor import Int32, mask_words

MAX_GRAMMARS = 64  # above this number, the oldest grammars that no request uses are dropped
# If all compiled grammars take more than MAX_KEPT_BYTES, grammars that no request uses are dropped.
# Above MAX_USED_BYTES, no grammar is compiled until a request has ended. A compiled schema
# of 160 kB takes 5 MB, and a grammar may grow to 40 MB while it matches many different texts.
MAX_KEPT_BYTES = 128 << 20
MAX_USED_BYTES = 512 << 20
# A step waits at most GRACE_S seconds for its bitmasks: ten times the time of the slowest bitmask.
GRACE_S = 0.1
# The grammar of a request may be the reason that the process ended. A request therefore fails
# when the process has ended twice while it had a matcher for this request.
MAX_LOSSES = 1
MOST_JUMPS = 16  # the most tokens of a request that a step computes without sampling them

Key = tuple[str, str]
log = get_logger("engine")


@dataclass(slots=True, eq=False)
class _Grammar:
    """A grammar and the unfinished requests that use it.

    process: the process that has compiled the grammar; None = not compiled yet.
    users: the unfinished requests that use the grammar.
    waiting: the users that wait for the compilation.
    dropped: whether no request needs the grammar any more.
    """

    number: int
    key: Key
    salt: str
    error: str = ""
    process: Process | None = None
    users: set[RequestId] = field(default_factory=set)
    waiting: list[RequestId] = field(default_factory=list)
    dropped: bool = False

    @property
    def place(self) -> tuple[Key, str]:
        """Where it is kept: no time shows which grammars requests with other salts had."""
        return self.key, self.salt

    @property
    def is_compiling(self) -> bool:
        return self.process is None and not self.error


@dataclass(slots=True)
class _GrammarRequest:
    """An unfinished request with a grammar.

    taken: how many output tokens of the request its matcher has consumed;
      -1 = the request has no matcher yet.
    filled: (the slot of the bitmask for the next token, the number of preemptions of the request
      when this bitmask was filled).
    guessed: the tokens that may follow, by the grammar; None = the bitmasks are late.
    losses: how often its matcher was lost because the process ended.
    """

    grammar: _Grammar
    taken: int = -1
    filled: tuple[int, int] = (-1, 0)
    guessed: Guessed | None = None
    losses: int = 0

    def forget_matcher(self) -> None:
        """Let the next bitmask come from a new matcher."""
        self.taken, self.filled, self.guessed = -1, (-1, 0), None


@dataclass(slots=True)
class Verdict:
    """The result of compiling a request's grammar, or of filling a bitmask with it.

    error: why it failed; "" = the grammar is ready.
    fault: whether the client's grammar is the cause of the error.
    """

    request: RequestId
    error: str = ""
    fault: bool = True


class Grammars:
    """The grammars of one engine. Every method is called from the engine's thread.

    wake: makes the engine's loop look at `has_done`; another thread calls it.
    """

    def __init__(
        self, config: EngineConfig, vocab: int, eos_ids: Iterable[int], wake: Callable[[], None]
    ) -> None:
        slots, asked = min(config.max_num_seqs, config.max_num_batched_tokens), config.speculation
        # A slot has a bitmask for the next token, and one after each draft token.
        self._places = 1 if asked is None else asked.rows_of_sequence
        num_masks = slots * self._places
        ends, words = sorted(eos_ids), mask_words(vocab)
        # Use half of the cores: on two busy cores, a second thread cost more time than it saved.
        cpus, threads = config.compute_cpus, max(config.threads // 2, 1)
        behind = config.frontend_cpus or cpus
        self._start = Start(
            config.tokenizer_path, vocab, ends, num_masks, words, cpus, threads, behind
        )
        self._sources = config.sources
        self._wake = wake
        self._known: OrderedDict[tuple[Key, str], _Grammar] = OrderedDict()
        self._requests: dict[RequestId, _GrammarRequest] = {}
        self._num_grammars = 0
        self._queue: GrammarQueue[_Grammar] = GrammarQueue()
        # An event that is set while there is memory for another grammar.
        self._room = threading.Event()
        self._room.set()
        self._done: deque[tuple[_Grammar, Process | None, str, bool]] = deque()
        self._threads: list[threading.Thread] = []
        # The grammar process; only the threads that compile set it, one at a time.
        self._process: Process | None = None
        self._starting = threading.Lock()
        self._closing = False
        self._live: Process | None = None  # the grammar process that has the grammars in use
        self._again: set[int] = set()  # numbers of the used grammars that are compiled again
        self._gone: list[int] = []  # requests that have ended, but have a matcher in the process
        self._asked = False  # whether a Fill message has no reply yet
        self._errors: dict[RequestId, Verdict] = {}
        self._ended: set[RequestId] = set()

    # --- compilation --------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Set whether `request` is ready; return why its grammar cannot be compiled, or "".

        Raises:
            QueueFull: too many grammars wait for compilation.
        """
        wanted = request.params.structured_outputs
        assert wanted is not None, "the request has no grammar"
        self._look_for_loss()
        place = wanted.key, request.params.cache_salt or ""
        grammar = self._known.get(place)
        if grammar is None:
            grammar = self._compile(*place, request.params.caller)
        self._known.move_to_end(place)
        if grammar.error:
            return grammar.error
        self._requests[request.id] = _GrammarRequest(grammar)
        grammar.users.add(request.id)
        request.ready = not grammar.is_compiling
        if grammar.is_compiling:
            grammar.waiting.append(request.id)
        return ""

    def _compile(self, key: Key, salt: str, caller: str) -> _Grammar:
        self._queue.check(caller)
        self._num_grammars += 1
        grammar = _Grammar(self._num_grammars, key, salt)
        self._known[grammar.place] = grammar
        while len(self._threads) < AT_A_TIME:  # all at once, so that their number is steady
            name = f"cpuserve-grammars-{len(self._threads)}"
            thread = threading.Thread(target=self._run_queue, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._queue.put(grammar, caller)
        return grammar

    def _run_queue(self) -> None:
        """Compile waiting grammars one after another; the threads run this method."""
        while (taken := self._queue.take()) is not None:
            caller, grammar = taken
            self._room.wait()
            began = time.monotonic()
            if not grammar.dropped:
                self._done.append((grammar, *self._compiled(grammar)))
            self._queue.took(caller, time.monotonic() - began)
            self._wake()

    def _compiled(self, grammar: _Grammar) -> tuple[Process | None, str, bool]:
        """Compile a grammar.

        Returns (the process that has compiled it, the error or "", whether the grammar is the
        cause of the error).
        """
        process, error = None, ""
        for _ in range(1 + MAX_LOSSES):
            if self._closing:
                break
            try:
                process = self._started()
                return process, process.compile(Compile(grammar.number, *grammar.key)), True
            except GrammarInterrupted as interrupted:
                error = str(interrupted)
            except GrammarProcessLost as lost:
                error = str(lost)
                if process is not None:
                    process.end()
            except SourceChanged as changed:
                error = str(changed)
                break
            except (OSError, RuntimeError) as refused:
                error = f"the process for grammars cannot be started: {refused} ({LIMITS})"
                break
        return process, error, False

    def _started(self) -> Process:
        """Return the grammar process, and start one if there is none.

        Raises:
            SourceChanged: the files of the tokenizer are others.
            GrammarProcessLost, OSError, RuntimeError: it cannot be started.
        """
        with self._starting:
            if self._process is None or self._process.lost:
                check_same(self._sources)  # the process reads the tokenizer
                self._process = Process(self._start)
            return self._process

    @property
    def has_done(self) -> bool:
        """Whether `collect` has results of compilations."""
        return bool(self._done)

    def collect(self) -> list[Verdict]:
        """Return a verdict for each waiting request with a newly compiled grammar."""
        found: list[Verdict] = []
        if not self._done:
            return found
        while self._done:
            grammar, process, error, fault = self._done.popleft()
            self._look_for_loss()
            if not (error or grammar.dropped) and process is not None and process.lost:
                self._queue.put(grammar, "")  # another thread has seen the end of the process
                continue
            self._again.discard(grammar.number)
            if grammar.dropped:
                self._drop_from(process, [grammar.number])
                continue
            grammar.error = error
            if not error:
                grammar.process = self._live = process
            found += [Verdict(number, error, fault) for number in grammar.waiting]
            if error:
                self._refuse(grammar, fault)
            grammar.waiting.clear()
        self._forget_old()
        return found

    def _refuse(self, grammar: _Grammar, fault: bool) -> None:
        """Drop the requests that wait for this grammar, and end running requests that use it."""
        for number in grammar.waiting:
            del self._requests[number]
            grammar.users.discard(number)
        self._errors.update({n: Verdict(n, grammar.error, fault) for n in grammar.users})
        if not fault:
            # The next request with this grammar tries to compile it again.
            del self._known[grammar.place]

    # --- grammars that stay in memory ---------------------------------------------------------

    def forget_all_but(self, requests: Container[RequestId]) -> None:
        """Drop the grammars and matchers of every request that is not in `requests`."""
        gone = [number for number in self._requests if number not in requests]
        for number in gone:
            ended = self._requests.pop(number)
            if ended.taken >= 0:
                self._gone.append(number)
            self._errors.pop(number, None)
            self._ended.discard(number)
            self._leave(ended.grammar, number)
        if gone:
            self._forget_old()

    def _leave(self, grammar: _Grammar, number: RequestId) -> None:
        """Note that a request does not need this grammar; stop a compilation that none needs."""
        grammar.users.discard(number)
        if number in grammar.waiting:
            grammar.waiting.remove(number)
        if grammar.users or not grammar.is_compiling:
            return
        grammar.dropped = True
        del self._known[grammar.place]
        self._again.discard(grammar.number)
        if not self._queue.drop(grammar):
            self._drop_from(self._process, [grammar.number])

    def _forget_old(self) -> None:
        """Drop the least recently used grammars, except those in use."""
        live = self._live
        ready = [g for g in self._known.values() if not g.is_compiling]
        idle = [g for g in ready if not g.users]
        number = len(ready) - MAX_GRAMMARS
        if live is not None and live.memory > MAX_KEPT_BYTES:
            # The size of each grammar is not known, so assume equal sizes until the next report.
            share = 1 - MAX_KEPT_BYTES / live.memory
            number = max(number, int(share * len(ready)) + 1)
        old = idle[: max(number, 0)]
        for grammar in old:
            del self._known[grammar.place]
        self._drop_from(live, [g.number for g in old if g.process is live])
        if live is not None:
            live.memory -= live.memory * len(old) // max(len(ready), 1)
        # A request cannot end (and free memory) while its grammar is compiled again.
        # So a compilation of this kind must not wait for memory.
        is_free = live is None or live.memory <= MAX_USED_BYTES or len(old) == len(ready)
        if is_free or self._again:
            self._room.set()
        else:
            self._room.clear()

    def _drop_from(self, process: Process | None, numbers: list[int]) -> None:
        if process is None or not numbers:
            return
        gone = []
        if process is self._live:
            gone, self._gone = self._gone, []
        with suppress(GrammarProcessLost):
            process.drop(numbers, gone)

    # --- bitmasks ----------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether a request with a grammar runs or waits."""
        return bool(self._requests)

    def begin_fill(self, requests: Iterable[Request], jumps: int = 0) -> None:
        """Ask for the missing bitmasks of these running requests, which sample in the next step.

        This method does not wait for the reply.
        jumps: how many tokens each of them may take that no step samples (`take_guess`).
        """
        if not self.settle(0.0):
            return
        rows: list[Row] = []
        for request in requests:
            entry = self._requests[request.id]
            where = (request.slot, request.num_preemptions)
            if entry.guessed is not None and entry.guessed.jumped:
                self._renew(entry, request.id)
            if entry.filled == where and entry.taken == request.num_output:
                continue
            if request.id in self._errors:
                continue
            assert entry.grammar.process is self._live, "the grammar is not ready"
            begins = entry.taken < 0
            new = request.token_ids[request.num_prompt + max(entry.taken, 0) :]
            ends = request.params.stop_token_ids if begins else []
            row = Row(
                request.id, entry.grammar.number, self._places * request.slot, new, begins, ends
            )
            left = request.max_tokens - request.num_output - 1
            if request.can_jump:
                row.jumps = max(min(jumps, MOST_JUMPS, left), 0)
            row.drafts, row.most_drafts = request.drafts, request.most_drafts
            rows.append(row)
            entry.taken, entry.filled, entry.guessed = request.num_output, where, None
        if rows:
            self._ask(rows)

    def _ask(self, rows: list[Row]) -> None:
        assert self._live is not None, "there is no process"
        gone, self._gone = self._gone, []
        try:
            self._live.ask(Fill(rows, gone))
            self._asked = True
        except GrammarProcessLost as lost:
            self._lose(self._live, str(lost))

    def settle(self, wait_s: float) -> bool:
        """Receive the reply to the last Fill message if it comes within `wait_s` seconds.

        Returns True if no reply is outstanding any more and all grammars in use are ready.
        """
        self._look_for_loss()
        if self._again:
            time.sleep(wait_s)
            return False
        if not self._asked:
            return True
        assert self._live is not None, "there is no process"
        try:
            filled = self._live.reply(wait_s)
        except GrammarProcessLost as lost:
            self._lose(self._live, str(lost))
            return not self._again
        if filled is None:
            return False
        self._asked = False
        for number, (error, fault) in filled.failed.items():
            self._errors[RequestId(number)] = Verdict(RequestId(number), error, fault)
        self._ended.update(map(RequestId, filled.ended))
        for number, guessed in filled.guessed.items():
            if (entry := self._requests.get(RequestId(number))) is not None:
                entry.guessed = guessed
        if self._live.memory > MAX_KEPT_BYTES:
            self._forget_old()
        return True

    def _look_for_loss(self) -> None:
        """Replace the grammar process if the thread that talks to it has seen that it ended."""
        if self._live is not None and self._live.lost:
            self._lose(self._live, "the process for grammars has ended")

    def _lose(self, process: Process, why: str) -> None:
        """Compile the grammars in use again, in another process."""
        log.warning("%s and is started again: answers with grammars wait for it", why)
        process.end()
        self._live, self._asked = None, False
        self._gone.clear()
        self._room.set()
        for grammar in [g for g in self._known.values() if g.process is process]:
            grammar.process = None
            if grammar.users:
                self._again.add(grammar.number)
                self._queue.put(grammar, "")
            else:
                del self._known[grammar.place]
        for number, entry in self._requests.items():
            if entry.taken < 0:
                continue
            entry.forget_matcher()
            entry.losses += 1
            if entry.losses > MAX_LOSSES:
                again = (
                    f"{why}, as it did before in this response: send a simpler form, or try again"
                )
                self._errors[number] = Verdict(number, again, fault=False)

    def begin_step(self, *, late: bool) -> bool:
        """Wait shortly for the bitmasks of a step; False if they are late.

        late: whether they have been late before, so that this does not wait.
        """
        return self.settle(0.0 if late else GRACE_S)

    def take_guess(self, request: Request, room: int) -> Guessed | None:
        """Return the tokens that may follow a request by its grammar, which they are taken from.

        None = the drafts of the request have bitmasks as they are. It jumps over at most `room`
        tokens: with more, or without bitmasks for the request as it is now, nothing may follow.
        """
        entry = self._requests[request.id]
        guessed, entry.guessed = entry.guessed, None
        filled = entry.filled == (request.slot, request.num_preemptions)
        current = filled and entry.taken == request.num_output
        if guessed is None:
            return None if current else Guessed([], [], [])
        if not current or len(guessed.jumped) > room:
            if guessed.jumped:
                self._renew(entry, request.id)
            return Guessed([], [], [])
        entry.taken += len(guessed.jumped)
        return guessed

    def _renew(self, entry: _GrammarRequest, number: RequestId) -> None:
        """Drop a matcher that has consumed tokens which its request has not taken."""
        entry.forget_matcher()
        self._ended.discard(number)

    def masks_for(self, requests: Sequence[Request]) -> Int32 | None:
        """Return the bitmasks [slots, places, words] for a step where these requests sample.

        A bitmask that could not be filled allows no token; `add_error` has the reason.
        Returns None if the bitmasks are late, until `settle` returns True.
        """
        ready = self.settle(GRACE_S)
        if ready:
            self.begin_fill(requests)
            ready = self.settle(GRACE_S)
        if not ready:
            return None
        if self._live is None:  # there is no process, so all of these requests have errors
            shape = (self._start.num_masks // self._places, self._places, self._start.mask_words)
            return np.zeros(shape, np.int32)
        masks = self._live.masks.reshape(-1, self._places, self._start.mask_words)
        for request in requests:
            if request.id in self._errors:
                masks[request.slot] = 0
        return masks

    def add_error(self, delta: Delta) -> None:
        """Put the reason why no bitmask could be filled, if it is known, into the last delta."""
        failed = self._errors.get(delta.request.id)
        wanted = delta.request.params.structured_outputs
        if failed is None or wanted is None:
            return
        delta.error, delta.fault = f"the form cannot be kept: {failed.error}", None
        delta.unavailable = not failed.fault
        if failed.fault:
            delta.fault = wanted.role_of(failed.error)
            delta.error = (
                f"{delta.fault} cannot be kept up to the end of the response: {failed.error}. "
                "Send a simpler one"
            )

    def is_complete(self, request: Request) -> bool:
        """Whether the text of a request is complete: its grammar allows only the end."""
        return request.id in self._ended

    def close(self) -> None:
        """End the process and the threads that compile."""
        self._closing = True
        self._queue.close()
        self._room.set()
        for thread in self._threads:
            while thread.is_alive():
                if self._process is not None:
                    self._process.end()  # this also ends a compilation that the thread waits for
                thread.join(0.05)
        if self._process is not None:
            self._process.end()
