"""The engine's end of the connections to the grammar process, and the memory of the bitmasks."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec
import numpy as np

from cpuserve.base.children import python_command, start_child
from cpuserve.base.fault_points import fault
from cpuserve.engine.grammars.messages import (
    MODULE,
    Alive,
    Compile,
    Compiled,
    Drop,
    Fill,
    Filled,
    Outbound,
    Start,
    outbound_frames,
)
from cpuserve.engine.ipc import encode_frame
from cpuserve.runtime.executor import Int32

# The first request with a grammar waits for the start of this process, so it has normal priority.
# With the lowest priority, the start took at least twice as long while streams ran.
BOOTSTRAP = """
import importlib, json
cpus = json.loads(sys.argv.pop(1))
from cpuserve.base.affinity import move_to
move_to(cpus)
importlib.import_module("{module}")
sys.exit(sys.modules["{module}"].main())
"""
# A bitmask takes 50 us, and at most 10 ms. During a compilation, Alive comes every ALIVE_S seconds.
# After REPLY_S seconds without a message, the process does not run at all.
REPLY_S = 2.0
START_S = 60.0  # for the first reply: imports, and loading a tokenizer

ENDED = "the process for grammars has ended"
SILENT = "the process for grammars does not answer"


class GrammarProcessLost(Exception):
    """The grammar process has ended or does not reply."""


class GrammarProcessSilent(GrammarProcessLost):
    """The grammar process has not replied in time."""


class GrammarInterrupted(Exception):
    """A grammar was not compiled, because the system refused or ended the fork that does it."""


class Process:
    """The grammar process, its two connections, and the shared memory with the bitmasks.

    memory: bytes of the grammars and matchers of the process, as of its last reply.
    """

    def __init__(self, start: Start) -> None:
        self.lost = False
        self.memory = 0
        self._asked = 0.0
        size = max(start.num_masks * start.mask_words * 4, 1)
        fault("grammars.share")
        memory = _shared_memory(size)
        try:
            shared = mmap.mmap(memory, size)
            masks = np.frombuffer(shared, np.int32, start.num_masks * start.mask_words)
            self.masks: Int32 = masks.reshape(start.num_masks, start.mask_words)
            self._compiling, compiling = socket.socketpair()
            self._filling, filling = socket.socketpair()
            with compiling, filling:
                sockets = compiling.fileno(), filling.fileno()
                self._process = _spawn(sockets, memory, start.background_cpus)
        finally:
            os.close(memory)
        self._frames = {sock: outbound_frames() for sock in (self._compiling, self._filling)}
        self._messages: dict[socket.socket, deque[Outbound]]
        self._messages = {sock: deque() for sock in self._frames}
        self._patience_s = START_S
        self._sending = threading.Lock()
        # Replies to Compile by number. One of the threads that wait receives for all of them.
        self._compiled: dict[int, Compiled] = {}
        self._arrived = threading.Condition()
        self._is_receiving = False
        try:
            self._send(self._compiling, start, START_S)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def compile(self, grammar: Compile) -> str:
        """Return why a grammar does not compile, or "" if it is ready; for any number of threads.

        Raises:
            GrammarProcessLost: the process does not reply.
            GrammarInterrupted: the grammar was not compiled; its text is not the cause.
        """
        with self._sending:
            self._send(self._compiling, grammar, self._patience_s)
        reply = self._reply_to(grammar.number)
        self.memory = reply.memory
        if reply.error and not reply.fault:
            raise GrammarInterrupted(reply.error)
        return reply.error

    def _reply_to(self, number: int) -> Compiled:
        """Wait for the reply to a Compile message, and receive those of other threads meanwhile."""
        with self._arrived:
            while number not in self._compiled:
                if self._is_receiving:
                    self._arrived.wait()
                else:
                    self._receive_compiled()
            return self._compiled.pop(number)

    def _receive_compiled(self) -> None:
        """Receive the next message about compilations; the condition is held, but not meanwhile."""
        self._is_receiving = True
        self._arrived.release()
        try:
            reply = self._receive(self._compiling, self._patience_s)
        finally:
            self._arrived.acquire()
            self._is_receiving = False
            self._arrived.notify_all()
        if isinstance(reply, Alive):
            self._patience_s = REPLY_S  # the process has started
        else:
            assert isinstance(reply, Compiled), f"{reply} is no reply to Compile"
            self._compiled[reply.number] = reply

    def drop(self, numbers: list[int], gone: list[int]) -> None:
        """Delete these grammars, and the matchers of the requests in `gone`.

        Raises GrammarProcessLost if the process does not take the message.
        """
        self._send(self._filling, Drop(numbers, gone), REPLY_S)

    def ask(self, fill: Fill) -> None:
        """Ask for bitmasks; `reply` must be called to get them.

        Raises GrammarProcessLost if the process does not take the message.
        """
        self._asked = time.monotonic()
        self._send(self._filling, fill, REPLY_S)

    def reply(self, wait_s: float = REPLY_S) -> Filled | None:
        """Return the reply to Fill, or None if it does not come within `wait_s`.

        Raises GrammarProcessLost if the process has ended, or has not replied for REPLY_S.
        """
        try:
            reply = self._receive(self._filling, wait_s)
        except GrammarProcessSilent:
            if time.monotonic() - self._asked < REPLY_S:
                return None
            raise
        assert isinstance(reply, Filled), f"{reply} is no reply to Fill"
        self.memory = reply.memory
        return reply

    def _send(self, sock: socket.socket, message: msgspec.Struct, wait_s: float) -> None:
        try:
            sock.settimeout(wait_s)
            fault("grammars.send")
            sock.sendall(encode_frame(message))
        except TimeoutError as error:
            raise GrammarProcessSilent(SILENT) from error
        except OSError as error:
            raise GrammarProcessLost(ENDED) from error

    def _receive(self, sock: socket.socket, wait_s: float) -> Outbound:
        """Return the next message; GrammarProcessSilent if none comes within `wait_s`."""
        messages = self._messages[sock]
        try:
            sock.settimeout(wait_s)
            while not messages:
                fault("grammars.receive")
                size = sock.recv_into(self._frames[sock].space)
                if not size:
                    raise GrammarProcessLost(ENDED)
                messages += self._frames[sock].arrived(size)
        except (TimeoutError, BlockingIOError) as error:
            raise GrammarProcessSilent(SILENT) from error
        except OSError as error:
            raise GrammarProcessLost(ENDED) from error
        found: Outbound = messages.popleft()
        return found

    def end(self) -> None:
        """End the process."""
        self.lost = True
        self._process.kill()
        self._process.wait()
        for sock in (self._compiling, self._filling):
            with suppress(OSError):
                # The shutdown wakes a thread that waits for a reply on this socket.
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _shared_memory(size: int) -> int:
    """Return the file descriptor of new shared memory with `size` bytes."""
    if hasattr(os, "memfd_create"):
        memory: int = os.memfd_create("cpuserve-masks")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


def _spawn(
    sockets: tuple[int, int], memory: int, cpus: list[int] | None
) -> subprocess.Popen[bytes]:
    code = BOOTSTRAP.format(module=MODULE)
    passed = (*sockets, memory)
    names = ("compiling", "filling", "memory")
    command = python_command(code, json.dumps(cpus))
    command += [f"--{name}={number}" for name, number in zip(names, passed, strict=True)]
    return start_child(command, pass_fds=passed, stdin=subprocess.DEVNULL)
