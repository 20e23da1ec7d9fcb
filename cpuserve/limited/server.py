"""ForkServer: the process that has loaded a module, and forks for each connection (child.py)."""

from __future__ import annotations

import socket
import subprocess
import threading
from typing import IO

from cpuserve.base.children import python_command
from cpuserve.base.log import relay, writes_json

BOOTSTRAP = """
from {module} import main
sys.exit(main())
"""


def _relay(stream: IO[bytes], module: str) -> None:
    with stream:
        for line in stream:
            relay(line.decode(errors="replace"), module)


class ForkServer:
    """A process that runs `main` of a module, and the socket to it.

    arguments: further arguments of the command line, for `main`.

    Raises OSError if it cannot be started.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                # Without a pipe, its lines go to stderr of this process as they are.
                stderr = subprocess.PIPE if writes_json() else None
                self._process = subprocess.Popen(
                    python_command(
                        BOOTSTRAP.format(module=module),
                        f"--control={theirs.fileno()}",
                        *arguments,
                    ),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # Ctrl-C must not interrupt the imports of the process
                )
        except OSError:
            self._control.close()
            raise
        if self._process.stderr is not None:
            relayed = threading.Thread(
                target=_relay,
                args=(self._process.stderr, module),
                name="cpuserve-stderr",
                daemon=True,
            )
            relayed.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """Return a socket to a new fork, which may not exist yet. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """End the process and its forks."""
        self._process.kill()
        self._process.wait()
        self._control.close()

    def leave(self) -> None:
        """Close the socket in a forked child; the process itself belongs to the parent."""
        self._process.returncode = 0  # only the parent may wait for the process
        self._control.close()
