"""The engine's end of the process for grammars: its connections, and the memory of the masks."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress

import msgspec
import numpy as np

from cpuserve.engine.grammars.messages import (
    Compile,
    Compiled,
    Drop,
    Fill,
    Filled,
    Start,
    outbound_frames,
)
from cpuserve.engine.ipc import encode_frame
from cpuserve.runtime.executor import Int32

MODULE = "cpuserve.engine.grammars.worker"
# Importing what the process needs takes a quarter of a second: streams come first.
BOOTSTRAP = """
import importlib, json, sys
sys.path[:], cpus = json.loads(sys.argv.pop(1))
from cpuserve.engine.grammars.background import gently
gently(lambda: importlib.import_module("{module}"), cpus)
sys.exit(sys.modules["{module}"].main())
"""
RECEIVE_BYTES = 1 << 16
# A mask takes 50 us, and at most 10 ms. Longer waits mean that the process does not run at all.
FILL_S = 10.0
COMPILE_S = 120.0  # loading a tokenizer, and two compilations with their limits


class Lost(Exception):
    """The process for grammars has ended or does not answer."""


class Process:
    """The process, its two connections, and the memory that it fills."""

    def __init__(self, start: Start) -> None:
        self.lost = False
        size = max(start.num_masks * start.mask_words * 4, 1)
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
        self._compiling.settimeout(COMPILE_S)
        self._filling.settimeout(FILL_S)
        self._frames = {sock: outbound_frames() for sock in (self._compiling, self._filling)}
        self._send(self._compiling, start)

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._process.pid

    def compile(self, grammar: Compile) -> str:
        """Return why a grammar does not compile, or "" if it is ready.

        Raises Lost if the process does not answer.
        """
        self._send(self._compiling, grammar)
        answer = self._receive(self._compiling)
        assert isinstance(answer, Compiled), f"{answer} is no answer to Compile"
        assert answer.number == grammar.number, "an answer to another Compile"
        return answer.error

    def drop(self, numbers: list[int]) -> None:
        """Forget these grammars. Raises Lost if the process does not answer."""
        self._send(self._filling, Drop(numbers))

    def ask(self, fill: Fill) -> None:
        """Ask for masks; `answer` must follow. Raises Lost if the process does not answer."""
        self._send(self._filling, fill)

    def answer(self) -> Filled:
        """Wait for the masks that were asked for. Raises Lost if the process does not answer."""
        answer = self._receive(self._filling)
        assert isinstance(answer, Filled), f"{answer} is no answer to Fill"
        return answer

    def _send(self, sock: socket.socket, message: msgspec.Struct) -> None:
        try:
            sock.sendall(encode_frame(message))
        except OSError as error:
            raise Lost(self._how(error)) from error

    def _receive(self, sock: socket.socket) -> Compiled | Filled:
        frames = self._frames[sock]
        try:
            while True:
                data = sock.recv(RECEIVE_BYTES)
                if not data:
                    raise Lost(self._how(None))
                for message in frames.feed(data):
                    found: Compiled | Filled = message
                    return found
        except OSError as error:
            raise Lost(self._how(error)) from error

    def _how(self, error: OSError | None) -> str:
        late = isinstance(error, TimeoutError)
        return f"the process for grammars {'does not answer' if late else 'has ended'}"

    def end(self) -> None:
        """End the process."""
        self.lost = True
        self._process.kill()
        self._process.wait()
        for sock in (self._compiling, self._filling):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            sock.close()


def _shared_memory(size: int) -> int:
    """Return a descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("cpuserve-masks")
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
    command = [sys.executable, "-c", code, json.dumps([sys.path, cpus])]
    command += [f"--{name}={number}" for name, number in zip(names, passed, strict=True)]
    return subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
