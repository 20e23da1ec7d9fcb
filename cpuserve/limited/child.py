"""The side of the process: fork for each connection, and let the kernel end a job at its limits."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def serve_forks(
    name: str,
    serve: Callable[[socket.socket], None],
    prepare: Callable[[], object],
    accepting: Callable[[], int],
    forking: Callable[[], object],
) -> int:
    """Call `serve` in a fork for each connection that arrives, until the server has ended.

    name: the name of the program. prepare: imports the modules that all forks need.
    accepting, forking: call the fault points of these system calls; accepting: returns 1.
    """
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--control", type=int, required=True)
    control = socket.socket(fileno=parser.parse_known_args()[0].control)
    # The server, which gets these signals as well, decides when its processes end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes forks that have ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if memory runs out, the kernel should end this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    prepare()
    gc.collect()
    gc.freeze()
    server = os.getpid()
    while True:
        # `given` is empty if this process may open no more files: the client then sees the end of
        # its connection.
        word, given, _, _ = socket.recv_fds(control, 1, accepting())
        if not word:
            return 0
        with suppress(OSError):  # fork was refused: the client sees the end of its connection
            forking()
            if given and os.fork() == 0:
                control.close()
                _serve(serve, socket.socket(fileno=given[0]), server)
        for descriptor in given:
            os.close(descriptor)


def _serve(serve: Callable[[socket.socket], None], sock: socket.socket, server: int) -> NoReturn:
    """Serve one connection in this fork; the client sees an error as the end of its connection."""
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != server:
                os._exit(0)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)  # drop the interpreter's messages when memory runs out
        serve(sock)
        code = 0
    except OSError:  # nobody waits for the reply
        code = 0
    finally:
        os._exit(code)


def address_space() -> int:
    """Return how much address space this process has, in bytes; 0 if that is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 0
    return pages * resource.getpagesize()


def limit_memory(limit: int) -> None:
    """Limit the address space of this process to this number of bytes, where the system can."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_time(cpu_s: float, wall_s: float) -> None:
    """Let the kernel end this process after these seconds; 0 = no limit.

    RLIMIT_CPU counts the CPU seconds of the whole process, so a timer is used for each job.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
    signal.setitimer(signal.ITIMER_REAL, wall_s)  # SIGALRM ends it as well
