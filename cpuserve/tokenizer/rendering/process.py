"""The processes that render chat templates: one that forks, and forks of it that render.

A template comes with a model, and its messages come from a client. Together they can use
all memory, compute for hours or overflow the stack of C. No check in Python can foresee this,
as one call of json.dumps is enough. So the kernel ends a process when its render reaches a limit.

The first process has loaded Jinja, has one thread and renders nothing, so a fork of it is ready
in a millisecond. A fork serves one connection, one job after another, until it is closed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateRuntimeError

from cpuserve.tokenizer.rendering.sandbox import (
    NO_NAMESPACE,
    ChatEnvironment,
    assignable,
    with_masks,
)
from cpuserve.tokenizer.rendering.wire import (
    READY,
    REFUSED,
    RENDERED,
    STOPPED,
    UNLIMITED,
    RenderJob,
    receive,
    send,
    unpacked,
)

PR_SET_PDEATHSIG = 1
MAX_ERROR_CHARS = 500
# Bytes of all masks in UTF-8, and in the JSON that `packed` makes; others may have them too.
_MASKS = re.compile(rb"\xf4|\\udb")


def main() -> int:
    """Fork a process for each connection that arrives, until the server has ended."""
    parser = argparse.ArgumentParser(prog="cpuserve-templates")
    parser.add_argument("--control", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args().control)
    # The server, which gets these signals as well, decides when its processes end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes forks that have ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if memory runs out, the kernel should end this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    ChatEnvironment().from_string("{{ [x] | tojson }}").render(x=1)  # imports modules of Jinja
    gc.collect()
    gc.freeze()
    server = os.getpid()
    while True:
        word, given, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return 0
        with suppress(OSError):  # fork was refused: the client sees the end of its connection
            if os.fork() == 0:
                control.close()
                _serve(socket.socket(fileno=given[0]), server)
        os.close(given[0])


def _serve(sock: socket.socket, server: int) -> NoReturn:
    """Do the jobs of one connection in this fork."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != server:
                os._exit(0)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)  # drop the interpreter's messages when memory runs out
        worker = _Worker()
        send(sock, READY if worker.address_space else UNLIMITED)
        while (body := receive(sock)) is not None:
            kind, text = worker.do(body)
            send(sock, kind, text)
    except OSError:  # nobody waits for the reply
        pass
    finally:
        os._exit(0)


class _Worker:
    """The state of a fork: its compiled templates, and its initial address space in bytes."""

    def __init__(self) -> None:
        self._templates: dict[bytes, Template] = {}
        self.address_space = _address_space()

    def do(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the kind and the text of the reply to a job."""
        job = msgspec.msgpack.decode(body, type=RenderJob)
        del body
        self._begin(job)
        try:
            return self._render(job)
        except MemoryError:
            return STOPPED, b"it needs more than %d MB of memory" % (job.memory_bytes >> 20)
        except RecursionError:
            return STOPPED, b"it nests too deeply"
        except Exception as error:  # any error of a template must only fail its request
            return REFUSED, str(error)[:MAX_ERROR_CHARS].encode("utf-8", "replace")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _begin(self, job: RenderJob) -> None:
        """Let the kernel end this process at the limits of a job.

        RLIMIT_CPU counts the CPU seconds of the whole process, so a timer is used for each job.
        """
        if self.address_space:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = self.address_space + job.memory_bytes
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            with suppress(OSError, ValueError):  # macOS has no such limit
                resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        signal.setitimer(signal.ITIMER_PROF, job.cpu_s)  # SIGPROF ends the process
        signal.setitimer(signal.ITIMER_REAL, job.wall_s)  # SIGALRM ends it as well

    def _render(self, job: RenderJob) -> tuple[bytes, bytes]:
        if job.source is not None:
            source = job.source.decode("utf-8", "surrogatepass")
            self._templates[job.template] = ChatEnvironment().from_string(source)
        if job.variables is None:
            return RENDERED, b""
        template = self._templates[job.template]
        try:
            text = template.render(_variables(job.variables))
        except TemplateRuntimeError as error:
            if NO_NAMESPACE not in str(error):
                raise
            text = template.render(assignable(_variables(job.variables)))
        if len(text) > job.max_bytes:
            return STOPPED, b"it writes %d characters; at most %d are allowed here" % (
                *(len(text), job.max_bytes),
            )
        return RENDERED, text.encode("utf-8", "surrogatepass")


def _variables(data: bytes) -> dict[str, Any]:
    found = unpacked(data)
    if _MASKS.search(data) is not None:
        found = with_masks(found)
    return found


def _address_space() -> int:
    """Return how much address space this process has, in bytes; 0 if that is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 0
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
