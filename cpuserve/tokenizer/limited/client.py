"""LimitedCoder: encodes with a tokenizer that is not plain, in its own processes (process.py).

The first process loads the tokenizer, and a fork of it encodes one text after another. A text that
takes too much ends its fork only. The texts of tokens are known here.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import msgspec

from cpuserve.base.errors import LIMITS, InvalidRequest, ModelError, ServiceUnavailable
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.limited.server import ForkServer
from cpuserve.limited.wire import receive, send
from cpuserve.tokenizer.coder import TokenSpan
from cpuserve.tokenizer.limited.wire import (
    BROKEN,
    DONE,
    FAILED,
    STOPPED,
    UNLIMITED,
    AddedEntry,
    Description,
    EncodeJob,
    Tokens,
    unpacked_ids,
)
from cpuserve.tokenizer.masks import new_nonces
from cpuserve.tokenizer.parts import Parts

MODULE = "cpuserve.tokenizer.limited.process"
# Limits of one text. A character takes about 1 us, and 60 to 200 bytes; other processes may use
# the CPU meanwhile.
CPU_S, CPU_S_PER_CHAR = 2.0, 1e-5
WALL_S, WALL_PER_CPU = 10.0, 4.0
MEMORY_BYTES, MEMORY_PER_CHAR = 128 << 20, 512
MAX_MEMORY_BYTES = 2 << 30
# Adding the control tokens again takes 30 us for each; a fork does so once.
CPU_S_PER_TOKEN, MEMORY_PER_TOKEN = 3e-4, 4096
# Limits of loading. A vocabulary of 262,144 tokens (33 MB) takes 1.5 s and 400 MB.
LOAD_CPU_S, LOAD_CPU_S_PER_BYTE = 10.0, 5e-7
LOAD_BYTES, LOAD_PER_BYTE = 512 << 20, 16
SILENT_S = 5.0  # seconds after its limit until a process that sends no reply is ended
MAX_IDLE = 4  # forks that are kept for further texts
LARGE_BYTES = 1 << 20  # a fork that has encoded such a text ends, so that its memory is free again
TRIES = 2
_LATE = 0.95  # a fork that ends after this part of its time has reached the limit
log = get_logger("tokenizer")


class _Lost(Exception):
    """A fork has ended, or sends nothing."""


@dataclass(slots=True, eq=False)
class _Fork:
    """The socket to a fork; begun: whether it knows the nonces."""

    server: ForkServer
    sock: socket.socket
    begun: bool = False

    @property
    def alive(self) -> bool:
        """Whether the process still waits for a job: a waiting process sends nothing."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def ask(self, job: EncodeJob) -> tuple[bytes, bytes]:
        """Send a job; return the kind and the content of the reply. Raises _Lost, TimeoutError."""
        self.sock.settimeout(job.wall_s + SILENT_S)
        body = msgspec.msgpack.encode(job)
        try:
            fault("tokenizers.send")
            send(self.sock, body)
            fault("tokenizers.receive")
            reply = receive(self.sock)
        except TimeoutError:
            raise
        except OSError:
            raise _Lost from None
        if reply is None:
            raise _Lost
        return reply[:1], reply[1:]


class _Processes:
    """The first process, its forks that wait for a job, and the process that has started them."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self.idle: list[_Fork] = []
        self._owner = os.getpid()

    def end(self) -> None:
        """End them; in a forked child of the owner only forget them."""
        for fork in self.idle:
            fork.sock.close()
        self.idle.clear()
        server, self.server = self.server, None
        if server is not None:
            if os.getpid() == self._owner:
                server.close()
            else:
                server.leave()


class LimitedCoder:
    """A Coder that encodes in processes with limits; any thread may use it.

    reason: the part of the tokenizer that needs limits, for messages.
    """

    waits = True

    def __init__(self, path: Path, reason: str) -> None:
        """Load the tokenizer.json of a directory.

        Raises:
            ModelError: it is broken, or loading it takes too much.
        """
        self._path, self._why = path, reason
        size = (path / "tokenizer.json").stat().st_size
        self._load_cpu_s = LOAD_CPU_S + LOAD_CPU_S_PER_BYTE * size
        self._load_bytes = min(LOAD_BYTES + LOAD_PER_BYTE * size, MAX_MEMORY_BYTES)
        self._lock = Lock()
        self._processes = _Processes()
        self._closed = False
        self._nonces: dict[str, str] = {}
        _ALL.add(self)
        weakref.finalize(self, self._processes.end)
        try:
            fork, self.description = self._started()
        except (OSError, _Lost) as error:
            raise self._not_loaded(error) from None
        except BaseException:
            self._processes.end()
            raise
        self._put_back(fork, keep=True)
        self._ids = {text: i for i, text in self.description.texts.items()} | self.description.ids

    def added(self) -> Mapping[int, AddedEntry]:
        """Return the added tokens by id."""
        return self.description.added

    def text_of(self, token_id: int) -> str | None:
        """Return the token as written in the vocabulary; None for an id without a token."""
        return self.description.texts.get(token_id)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary; None if there is none."""
        return self._ids.get(token)

    def encode(
        self,
        text: str | tuple[str, str],
        *,
        add_special_tokens: bool,
        unlocked: bool,  # noqa: ARG002  waiting for the process never holds the GIL
    ) -> Tokens:
        """Return the tokens of a text, or of a pair of texts; see Coder.

        Raises:
            InvalidRequest: the text takes too much time or memory.
            ServiceUnavailable: the process does not run, or is too slow.
        """
        text_a, text_b = (text, None) if isinstance(text, str) else text
        return Tokens(self._done("tokens", text_a, text_b, add_special_tokens=add_special_tokens))

    def spans(
        self, text: str, *, add_special_tokens: bool, most: int | None
    ) -> list[TokenSpan] | None:
        """Return the tokens of a text with their places; for the errors see `encode`."""
        data = self._done("spans", text, add_special_tokens=add_special_tokens, most=most)
        return msgspec.msgpack.decode(data, type=list[TokenSpan]) if data else None

    def ordinary(self, control: Mapping[str, int]) -> LimitedOrdinary:
        """Return an encoder that treats the texts of these control tokens as ordinary."""
        if self._nonces.keys() != control.keys():
            self._nonces = new_nonces(control)
        return LimitedOrdinary(self, self._nonces)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of a text with nonces; for the errors see `encode`."""
        return unpacked_ids(memoryview(self._done("ordinary", text)))

    def most_bytes(self) -> int | None:
        """Return the maximum number of UTF-8 bytes of text per token; None if there is none."""
        return self.description.most_bytes

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        return self._done("json", "", more_bytes=self._load_bytes).decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """End the processes; the texts that are being encoded fail."""
        with self._lock:
            self._closed = True
            self._processes.end()

    def leave(self) -> None:
        """Forget the forks in a forked child, which would otherwise read the parent's replies."""
        self._lock = Lock()  # another thread of the parent may have held the lock
        self._processes.end()
        self._processes = _Processes()

    def _done(
        self,
        what: Literal["tokens", "spans", "ordinary", "json"],
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = False,
        most: int | None = None,
        more_bytes: int = 0,
    ) -> bytes:
        """Return the content of the reply to a job."""
        chars = len(text) + len(second or "")
        job = EncodeJob(what, text, second, add_special_tokens, most, 0.0, 0.0, 0)
        deaths = 0
        for _ in range(TRIES + 1):
            fork = self._take()
            is_first = what == "ordinary" and not fork.begun
            job.nonces = self._nonces if is_first else None
            tokens = len(self.description.added) if is_first else 0
            job.cpu_s = CPU_S + CPU_S_PER_CHAR * chars + CPU_S_PER_TOKEN * tokens
            job.wall_s = WALL_S + WALL_PER_CPU * job.cpu_s
            memory = MEMORY_BYTES + MEMORY_PER_CHAR * chars + MEMORY_PER_TOKEN * tokens + more_bytes
            job.memory_bytes = min(memory, MAX_MEMORY_BYTES)
            start_s = time.monotonic()
            try:
                kind, content = fork.ask(job)
            except TimeoutError:
                fork.sock.close()
                with self._lock:
                    if self._processes.server is fork.server:
                        self._processes.end()
                raise self._slow(job) from None
            except _Lost:
                fork.sock.close()
                took = time.monotonic() - start_s
                if took > _LATE * job.wall_s:
                    raise self._slow(job) from None
                if took > _LATE * job.cpu_s:
                    raise self._too_much(job, chars, late=True) from None
                deaths += fork.server.alive  # else the process itself has ended
                if deaths == TRIES:  # the system may have killed the first one
                    raise self._too_much(job, chars) from None
                continue
            except BaseException:  # a lone surrogate, or Ctrl-C: nobody waits for the reply
                fork.sock.close()
                raise
            fork.begun = fork.begun or is_first
            self._put_back(fork, keep=kind == DONE and chars + len(content) < LARGE_BYTES)
            return self._content(kind, content, job, chars)
        msg = "the process that encodes texts was killed twice: try again"
        raise ServiceUnavailable(msg)

    def _content(self, kind: bytes, content: bytes, job: EncodeJob, chars: int) -> bytes:
        if kind == STOPPED:
            raise self._too_much(job, chars)
        if kind == FAILED:
            msg = f"the model's tokenizer failed on this text: {content.decode('utf-8', 'replace')}"
            raise InvalidRequest(msg)
        return content

    def _too_much(self, job: EncodeJob, chars: int, *, late: bool = False) -> InvalidRequest:
        limit = f"{job.cpu_s:.3g} s" if late else f"{job.memory_bytes >> 20} MB of memory"
        return InvalidRequest(
            f"the tokenizer of this model takes more than {limit} for a text of {chars} "
            f"characters ({self._why}): send a shorter text, or serve the model with another "
            "tokenizer (--tokenizer)"
        )

    def _slow(self, job: EncodeJob) -> ServiceUnavailable:
        msg = f"encoding the text took more than {job.wall_s:.3g} s on this busy machine: try again"
        return ServiceUnavailable(msg)

    def _take(self) -> _Fork:
        """Return a process that is free. Raises ServiceUnavailable."""
        with self._lock:
            while self._processes.idle:
                fork = self._processes.idle.pop()
                if fork.alive:
                    return fork
                fork.sock.close()
            if self._closed:
                msg = "the model is being unloaded: try again"
                raise ServiceUnavailable(msg)
            reason: object = "it does not respond"
            for _ in range(TRIES):
                try:
                    return self._started()[0]
                except (OSError, _Lost, ModelError) as error:
                    reason = str(error) or reason
                    self._processes.end()
            msg = f"the process of this model's tokenizer cannot be started: {reason} ({LIMITS})"
            raise ServiceUnavailable(msg)

    def _started(self) -> tuple[_Fork, Description]:
        """Return a new fork of the process, which is started if it does not run.

        Raises:
            OSError, _Lost: there are none. ModelError: the tokenizer is broken.
        """
        wall_s = WALL_S + WALL_PER_CPU * self._load_cpu_s
        server = self._processes.server
        if server is None:
            fault("tokenizers.start")
            server = self._processes.server = ForkServer(
                MODULE,
                f"--path={self._path}",
                f"--memory={self._load_bytes}",
                f"--cpu={self._load_cpu_s}",
                f"--wall={wall_s}",
            )
        fault("tokenizers.connect")
        sock = server.connect()
        try:
            sock.settimeout(wall_s + SILENT_S)
            greeting = receive(sock)
            if greeting is None:
                raise _Lost
            if greeting[:1] == BROKEN:
                raise ModelError(greeting[1:].decode("utf-8", "replace"))
            if greeting[:1] == UNLIMITED:
                log.warning(
                    "this system cannot limit the memory of a process: load only models that you "
                    "trust"
                )
            return _Fork(server, sock), self._described(greeting)
        except BaseException:
            sock.close()
            raise

    def _described(self, greeting: bytes) -> Description:
        description: Description | None = getattr(self, "description", None)
        return description or msgspec.msgpack.decode(greeting[1:], type=Description)

    def _not_loaded(self, error: BaseException) -> ModelError:
        self._processes.end()
        reason = f"the process that loads it cannot be started: {error} ({LIMITS})"
        if isinstance(error, _Lost):
            reason = (
                f"loading it, or encoding a short text, takes more than {self._load_cpu_s:.3g} s "
                f"of CPU time or {self._load_bytes >> 20} MB of memory ({self._why})"
            )
        return ModelError(f"tokenizer {self._path}: {reason}")

    def _put_back(self, fork: _Fork, *, keep: bool) -> None:
        with self._lock:
            idle = self._processes.idle
            if keep and len(idle) < MAX_IDLE and self._processes.server is fork.server:
                idle.append(fork)
                return
        fork.sock.close()


class LimitedOrdinary:
    """Encodes texts with nonces for control tokens; see Ordinary."""

    def __init__(self, coder: LimitedCoder, nonces: Mapping[str, str]) -> None:
        self.nonces = nonces
        self._coder = coder

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with nonces; for the errors see LimitedCoder.encode."""
        return self._coder.encode_ordinary(text)


def limited_parts(path: Path, reason: str) -> Parts:
    """Return the tokenizer of a directory, which is used in processes with limits.

    Raises:
        ModelError: it is broken, or loading it takes too much.
    """
    coder: Any = LimitedCoder(path, reason)
    description = coder.description
    return Parts(
        core=coder,
        scheme=description.scheme,
        vocab_size=description.vocab_size,
        special_ids=description.special_ids,
        bos_id=description.bos_id,
        special_tokens=description.special_tokens,
        chat_template=description.chat_template,
        tool_template=description.tool_template,
        add_bos=description.add_bos,
        strips_leading_space=description.strips_leading_space,
        prompts=description.prompts,
    )


_ALL: weakref.WeakSet[LimitedCoder] = weakref.WeakSet()


def _leave_all() -> None:
    for coder in list(_ALL):
        coder.leave()


os.register_at_fork(after_in_child=_leave_all)
