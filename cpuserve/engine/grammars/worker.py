"""The grammar process: `python -m cpuserve.engine.grammars.worker`, with inherited sockets.

It is a separate process because a grammar comes from a client. A schema can make llguidance use all
memory, compute for hours or overflow its stack. Loading a tokenizer holds the GIL for seconds.
Inside an engine, this would stop all streams or end the engine.

Each grammar is compiled twice, first in a fork with limits of CPU time and memory. A grammar
that stays below these limits is compiled again on a thread of this process, and kept. Meanwhile the
main thread fills bitmasks. This process forks only while its other threads do nothing: the threads
of llguidance, which fill bitmasks of several grammars, sleep then, and the fork does not use them.
All grammars that the engine sends are compiled at the same time. Forks begin before threads:
a fork has to wait for the threads that compile, and a thread for no fork.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cpuserve.base.affinity import move_to
from cpuserve.base.errors import LIMITS
from cpuserve.base.fault_points import fault
from cpuserve.engine.grammars.background import (
    NICE,
    STACK_BYTES,
    deep_thread,
    yield_to_streams,
)
from cpuserve.engine.grammars.compiler import (
    Compiler,
    GrammarError,
    MatchedText,
    Matcher,
    is_json,
    take,
)
from cpuserve.engine.grammars.json_masks import Mask, allows, only_id
from cpuserve.engine.grammars.messages import (
    ALIVE_S,
    Alive,
    Compile,
    Compiled,
    Drop,
    Fill,
    Filled,
    Guessed,
    Row,
    Start,
    inbound_frames,
)
from cpuserve.engine.ipc import encode_frame
from cpuserve.platforms.heap import bound_heaps, give_back
from cpuserve.sampling.structured import JSON, OPEN_JSON

READ_S = 0.25  # seconds between two readings, which cost as much as a bitmask (microseconds)


class Memory:
    """The growth of this process since the object was created, in bytes; 0 if it is unknown."""

    def __init__(self) -> None:
        self._before = _resident_bytes()
        self._grown = 0
        self._read_at = 0.0

    def grown(self) -> int:
        """Read the growth of the process and return it, in bytes."""
        self._read_at = time.monotonic()
        self._grown = max(_resident_bytes() - self._before, 0)
        return self._grown

    def grown_lately(self) -> int:
        """Return the growth in bytes from a reading that is at most READ_S seconds old."""
        return self.grown() if time.monotonic() - self._read_at > READ_S else self._grown


def limit_growth(num_bytes: int) -> None:
    """Limit the address space to its current size plus `num_bytes`, if the system supports this."""
    with suppress(OSError, ValueError):
        limit = _pages(0) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident_bytes() -> int:
    with suppress(OSError, ValueError):
        return _pages(1) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _pages(field: int) -> int:
    """Return a field of /proc/self/statm, in pages. Field 0 is address space, 1 resident memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[field])


PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 12
# Limits for the compilation of one grammar; a schema of 200 properties takes 50 ms. The time is
# limited because other clients wait, and the memory so that containers of 1 GiB are enough for the
# largest grammar of one caller; two that large are rare, and the system ends this process first.
MAX_CPU_S = 3
MAX_WAIT_S = 30.0  # seconds of wall-clock time, as other processes may use the CPU
MAX_GROWTH_BYTES = 512 << 20  # bytes of address space, while the fork compiles
MAX_GRAMMAR_BYTES = 128 << 20  # bytes of resident memory, after the fork has compiled
NOT_WANTED = "nobody waits for it"
INTERRUPTED = (
    "the process that compiles the grammar was killed by the system or its operator, perhaps "
    "because memory ran out: try again"
)
UNSAID = 3  # the exit code of a fork that could not write its result
# The stack of the fork is smaller than STACK_BYTES. A grammar that does not overflow the stack
# of the fork therefore does not overflow the stack of this process.
TRIAL_STACK_BYTES = 8 << 20


class Worker:
    """Serves one engine until it closes the connections."""

    def __init__(self, compiling: socket.socket, filling: socket.socket, memory: int) -> None:
        self._compiling, self._filling = compiling, filling
        self._memory = memory
        self._jobs: deque[Compile] = deque()
        self._running: dict[int, _Trial | _Compilation] = {}
        self._passed: deque[tuple[int, str]] = deque()  # grammars that wait for their thread
        self._grammars: dict[int, Any] = {}
        # Grammars for texts with JSON values, by number: whether the whole text is one.
        self._in_json: dict[int, bool] = {}
        self._matchers: dict[int, Matcher] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve the engine until it has ended."""
        frames = {self._compiling: inbound_frames(), self._filling: inbound_frames()}
        for sock in frames:
            self._selector.register(sock, selectors.EVENT_READ)
        while True:
            wait = ALIVE_S if self._running else None
            ready = {key.fileobj for key, _ in self._selector.select(wait)}
            for sock in [sock for sock in frames if sock in ready]:
                fault("grammar_process.receive")
                size = sock.recv_into(frames[sock].space)
                if not size:
                    return
                for message in frames[sock].arrived(size):
                    self._handle(message)
            self._advance_jobs()
            if self._running and time.monotonic() - self._alive_at > ALIVE_S:
                self._say_alive()

    def _handle(self, message: Start | Compile | Drop | Fill) -> None:
        match message:
            case Start():
                self._start(message)
            case Compile():
                self._jobs.append(message)
            case Drop():
                self._drop(message)
            case Fill():
                _send(self._filling, self._fill(message))

    def _start(self, start: Start) -> None:
        size = max(start.num_masks * start.mask_words * 4, 1)
        fault("grammar_process.map")
        shared = mmap.mmap(self._memory, size)
        masks = np.frombuffer(shared, np.int32, start.num_masks * start.mask_words)
        self._masks = masks.reshape(start.num_masks, start.mask_words)
        self._error = ""
        self._background_cpus = start.background_cpus

        # This thread keeps its normal priority, because the first request waits for it.
        move_to(start.background_cpus)
        path = Path(start.tokenizer_path)
        try:
            self._compiler = Compiler(path, start.vocab, start.eos_ids, start.threads)
        except Exception as error:  # the error becomes the reply to every Compile
            self._error = str(error)
        move_to(start.cpus)
        self._memory_of = Memory()
        self._say_alive()

    def _say_alive(self) -> None:
        self._alive_at = time.monotonic()
        _send(self._compiling, Alive())

    def _drop(self, message: Drop) -> None:
        for number in message.numbers:
            self._in_json.pop(number, None)
            self._grammars.pop(number, None)
            if (job := self._running.get(number)) is not None:
                job.cancel()
        for wanted in [job for job in self._jobs if job.number in message.numbers]:
            self._jobs.remove(wanted)
            self._reply(wanted.number, NOT_WANTED)
        for entry in [entry for entry in self._passed if entry[0] in message.numbers]:
            self._passed.remove(entry)
            self._reply(entry[0], NOT_WANTED)
        for number in message.gone:
            self._matchers.pop(number, None)
        give_back()  # glibc would keep the memory of these grammars

    # --- compilation --------------------------------------------------------------------------

    def _advance_jobs(self) -> None:
        """Continue to compile the current grammars, and begin with those that wait."""
        for job in list(self._running.values()):
            if job.is_over():
                self._unwatch(job)
                self._end(job)
        if not any(isinstance(job, _Compilation) for job in self._running.values()):
            while self._jobs:
                self._try(self._jobs.popleft())
        while self._passed and not self._jobs:
            self._compile(*self._passed.popleft())

    def _end(self, job: _Trial | _Compilation) -> None:
        """Reply to the engine after a compilation that is over, or let the second one wait."""
        if isinstance(job, _Trial):
            outcome = job.result()
            if outcome.error:
                self._reply(job.number, outcome.error, fault=outcome.fault)
            else:
                self._passed.append((job.number, outcome.prepared))
            return
        if job.matcher is not None:
            self._grammars[job.number] = job.matcher
        self._reply(job.number, job.error)

    def _try(self, job: Compile) -> None:
        """Begin the first compilation of a grammar, in a fork."""
        if self._error:
            self._reply(job.number, self._error)
            return
        if is_json(job.kind, job.text):
            self._in_json[job.number] = job.kind in (JSON, OPEN_JSON)
        held = (self._compiling, self._filling)
        try:
            self._watch(_Trial(self._compiler, job, held, self._background_cpus))
        except OSError as refused:
            error = f"no process can be forked to compile it: {refused} ({LIMITS})"
            self._reply(job.number, error, fault=False)

    def _compile(self, number: int, prepared: str) -> None:
        """Begin the second compilation of a grammar, on a thread."""
        try:
            self._watch(_Compilation(self._compiler, number, prepared, self._background_cpus))
        except (OSError, RuntimeError) as refused:
            error = f"no thread can be started to compile it: {refused} ({LIMITS})"
            self._reply(number, error, fault=False)

    def _watch(self, job: _Trial | _Compilation) -> None:
        self._running[job.number] = job
        self._selector.register(job.pipe, selectors.EVENT_READ)

    def _unwatch(self, job: _Trial | _Compilation) -> None:
        del self._running[job.number]
        self._selector.unregister(job.pipe)

    def _reply(self, number: int, error: str, *, fault: bool = True) -> None:
        memory = self._memory_of.grown()
        _send(self._compiling, Compiled(number, error, memory, fault))

    # --- bitmasks --------------------------------------------------------------------------------

    def _fill(self, message: Fill) -> Filled:
        for number in message.gone:
            self._matchers.pop(number, None)
        reply = Filled({}, [], 0)
        texts = []
        for row in sorted(message.rows, key=lambda row: row.grammar):
            try:
                texts.append(MatchedText(row, self._advance(row)))
            except Exception as error:
                self._fail(row, error, reply)
        while texts:  # each round fills one bitmask of each text
            rows = [(text.of.matcher, text.place) for text in texts]
            self._compiler.compute(self._masks, rows, len({text.row.grammar for text in texts}))
            texts = [text for text in texts if self._finish(text, reply)]
        reply.memory = self._memory_of.grown_lately()
        return reply

    def _finish(self, text: MatchedText, reply: Filled) -> bool:
        """Complete a bitmask of a text; return whether the next one is to be filled.

        After the last one, the matcher returns to its place before the draft tokens.
        """
        row, its, mask = text.row, text.of, self._masks[text.place]
        returns = True
        try:
            ends = self._compiler.finish(its.matcher, mask, its.stop_ids, text.tail, its.is_whole)
            if ends and not text.drafts:
                reply.ended.append(row.request)
            if not ends and self._go_on(text, mask):
                return True
        except Exception as error:
            if not text.drafts:
                self._fail(row, error, reply)
                return False
            text.cut(row.mask)
            returns = False
        if not returns or (text.drafts and not its.matcher.rollback(len(text.drafts))):
            self._begin_again(row, its, reply)
        if row.jumps or row.most_drafts:
            reply.guessed[row.request] = Guessed(text.jumped, text.drafts, text.only)
        return False

    def _go_on(self, text: MatchedText, mask: Mask) -> bool:
        """Let the matcher consume a sure token or a draft; False if no more of them is wanted."""
        row, its = text.row, text.of
        jumps = not text.drafts and len(text.jumped) < row.jumps
        if not jumps and len(text.drafts) >= row.most_drafts:
            return False
        only = only_id(mask)
        token = only if only >= 0 else text.next_draft
        if token < 0 or (only < 0 and not row.most_drafts):
            return False
        if self._compiler.ends(token, its.stop_ids) or not allows(mask, token):
            return False
        take(its.matcher, [token])
        text.pass_by(token)
        if its.tail is not None:
            text.tail = self._compiler.tails.after(text.tail or b"", [token])
        if jumps and only >= 0:
            its.tail = text.tail
            its.taken.append(token)
            text.jumped.append(token)
            return True
        text.drafts.append(token)
        text.only.append(only >= 0)
        text.place += 1
        return True

    def _begin_again(self, row: Row, its: Matcher, reply: Filled) -> None:
        """Replace a matcher that cannot return from the draft tokens."""
        its.matcher = self._grammars[row.grammar].deep_copy()
        try:
            take(its.matcher, its.taken)
        except GrammarError as error:
            self._fail(row, error, reply)

    def _fail(self, row: Row, error: Exception, reply: Filled) -> None:
        """Report an error for this request only; its bitmask allows no token."""
        self._masks[row.mask] = 0
        reply.failed[row.request] = str(error), isinstance(error, GrammarError)

    def _advance(self, row: Row) -> Matcher:
        """Return the matcher of a request after it has consumed the tokens of `row`."""
        if row.begins:
            copy = self._grammars[row.grammar].deep_copy()
            tail = b"" if row.grammar in self._in_json else None
            is_whole = self._in_json.get(row.grammar, False)
            self._matchers[row.request] = Matcher(copy, row.stop_ids, tail, is_whole)
        found = self._matchers[row.request]
        take(found.matcher, row.tokens)
        found.taken += row.tokens
        if found.tail is not None:
            found.tail = self._compiler.tails.after(found.tail, row.tokens)
        return found


def _send(sock: socket.socket, message: Alive | Compiled | Filled) -> None:
    fault("grammar_process.send")
    sock.sendall(encode_frame(message))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a fork: the prepared grammar, or an error; fault: the grammar is its cause."""

    error: str = ""
    prepared: str = ""
    fault: bool = True


class _Trial:
    """The first compilation of a grammar, in a fork that ends at a limit of time or memory.

    number: the number of the grammar.
    pipe: a pipe that is readable when there is a result.
    """

    def __init__(
        self,
        compiler: Compiler,
        wanted: Compile,
        held: tuple[socket.socket, ...],
        cpus: list[int] | None,
    ) -> None:
        self.number = wanted.number
        self.pipe, theirs = os.pipe()
        self._said = b""
        self._deadline = time.monotonic() + MAX_WAIT_S
        self._late = False
        self._cancelled = False
        try:
            fault("grammar_process.fork")
            self._child = os.fork()
        except OSError:
            os.close(self.pipe)
            os.close(theirs)
            raise
        if self._child == 0:
            os.close(self.pipe)
            # If the fork kept the sockets, the engine would not notice the end of this process.
            for sock in held:
                sock.close()
            _try_grammar(compiler, wanted, theirs, cpus)
        os.close(theirs)
        os.set_blocking(self.pipe, False)

    def cancel(self) -> None:
        """End the fork, because nobody waits for this grammar any more."""
        self._cancelled = True
        os.kill(self._child, signal.SIGKILL)

    def is_over(self) -> bool:
        """Whether the fork has ended."""
        if time.monotonic() > self._deadline and not self._late:
            self._late = True
            os.kill(self._child, signal.SIGKILL)
        with suppress(BlockingIOError):
            fault("grammar_process.read")
            while part := os.read(self.pipe, READ_BYTES):
                self._said += part
            return True
        return False

    def result(self) -> _Outcome:
        """Reap the fork and return its result."""
        os.close(self.pipe)
        _, status, usage = os.wait4(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        verdict, text = self._said[:1], self._said[1:].decode("utf-8", "replace")
        if self._cancelled:
            return _Outcome(NOT_WANTED)
        if code == UNSAID or (code == -signal.SIGKILL and not self._took_long(usage)):
            return _Outcome(INTERRUPTED, fault=False)
        if verdict == b"+" and code == 0:
            return _Outcome(prepared=text)
        if verdict == b"-":
            return _Outcome(text)
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return _Outcome(f"it is too complex: compiling it takes more than {MAX_CPU_S} s")
        why = "compiling it takes too much memory or nests too deeply"
        return _Outcome(f"it is too complex: {why}")

    def _took_long(self, usage: resource.struct_rusage) -> bool:
        """Whether a limit on time ended the fork, and not somebody else."""
        return self._late or usage.ru_utime + usage.ru_stime >= MAX_CPU_S


def _try_grammar(
    compiler: Compiler, wanted: Compile, pipe: int, cpus: list[int] | None
) -> NoReturn:
    """Compile in the fork; write "+" and the prepared grammar, or "-" and the error."""
    said, code = b"", 1
    try:
        os.nice(NICE)
        move_to(cpus)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
        limit_growth(MAX_GROWTH_BYTES)
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (a panic prints its trace)
        os.dup2(sys.stderr.fileno(), 2)
        said = b"-the compiler failed"
        memory = Memory()

        def attempt() -> None:
            nonlocal said
            try:
                prepared = compiler.prepare(wanted.kind, wanted.text)
                matcher = compiler.compile(prepared)
                compiler.fill(matcher.deep_copy(), np.zeros(compiler.words, np.int32), ())
                if memory.grown() > MAX_GRAMMAR_BYTES:
                    msg = "it is too complex: compiled, it takes too much memory"
                    raise GrammarError(msg)
                said = b"+" + prepared.encode()
            except GrammarError as error:
                said = b"-" + str(error).encode()

        deep_thread(attempt, TRIAL_STACK_BYTES).join()
        try:
            view = memoryview(said)
            while view:
                view = view[os.write(pipe, view[: fault("grammar_fork.write", len(view))]) :]
        except OSError:
            os._exit(UNSAID)
        code = 0
    finally:
        os._exit(code)


class _Compilation:
    """The second compilation of a grammar, on a thread, because llguidance releases the GIL.

    matcher: the result; None if there is an `error`.
    pipe: a pipe that is readable when the compilation is over.
    """

    def __init__(
        self, compiler: Compiler, number: int, prepared: str, cpus: list[int] | None
    ) -> None:
        self.number = number
        self.matcher: Any = None
        self.error = "the compiler failed"
        self._cancelled = False
        fault("grammar_process.thread")
        self.pipe, self._theirs = os.pipe()
        try:
            self._thread = deep_thread(lambda: self._run(compiler, prepared, cpus), STACK_BYTES)
        except RuntimeError:
            os.close(self.pipe)
            os.close(self._theirs)
            raise

    def _run(self, compiler: Compiler, prepared: str, cpus: list[int] | None) -> None:
        try:
            yield_to_streams(cpus)
            matcher = compiler.compile(prepared)
            # Filling the first bitmask builds most of the automaton, which all copies share.
            compiler.fill(matcher.deep_copy(), np.zeros(compiler.words, np.int32), ())
            self.matcher, self.error = matcher, ""
        except Exception as error:  # the error becomes the reply to Compile
            self.error = str(error)
        finally:
            os.close(self._theirs)

    def cancel(self) -> None:
        """Drop the result. The compilation ends by itself, as it did in the fork before."""
        self._cancelled = True

    def is_over(self) -> bool:
        """Whether the compilation and its thread have ended."""
        if not select.select([self.pipe], [], [], 0)[0]:
            return False
        self._thread.join()
        os.close(self.pipe)
        if self._cancelled:
            self.matcher = None
        return True


def main() -> int:
    """Run on the inherited sockets and memory until the engine has ended."""
    parser = argparse.ArgumentParser(prog="cpuserve-grammars")
    for name, what in {
        "--compiling": "socket for Compile messages",
        "--filling": "socket for Fill messages",
        "--memory": "shared memory with the bitmasks",
    }.items():
        parser.add_argument(name, type=int, required=True, help=f"file descriptor of the {what}")
    given = parser.parse_args()
    bound_heaps()
    # Ctrl-C sends these signals to the whole process group, but the engine ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        with suppress(OSError):  # if memory runs out, the system kills this process first
            Path("/proc/self/oom_score_adj").write_text("1000")
    compiling, filling = socket.socket(fileno=given.compiling), socket.socket(fileno=given.filling)
    try:
        Worker(compiling, filling, given.memory).run()
    except ConnectionError:  # the engine has ended
        return 0
    except OSError as error:  # the engine starts another process
        sys.stderr.write(f"the process for grammars ends, because the system refuses: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
