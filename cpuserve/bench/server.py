"""Start a `cpuserve serve` process for a measurement, and stop it afterwards."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from cpuserve.base.children import python_command, start_child
from cpuserve.base.errors import StartupError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0


def serve_command(arguments: Sequence[str], module: str = "cpuserve.cli.main") -> list[str]:
    """Return the command of `cpuserve serve`, which imports the same packages in any directory.

    module: the module with the `main` function of the command line.
    """
    return python_command(f"from {module} import main; sys.exit(main())", "serve", *arguments)


def private_flags(port: int, key: str) -> list[str]:
    """Return flags for address and API key, which override the environment and config files."""
    own = ["--host=127.0.0.1", f"--port={port}", "--uds=none", f"--api-key={key}"]
    return [*own, "--access-log-format=text"]  # the banner says when the server is ready


def stop(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM to the process, and kill it if it does not end in STOP_TIMEOUT_S seconds."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class ServerProcess:
    """A context manager that runs `cpuserve serve` on a free port of 127.0.0.1.

    key: the random API key of this server. When the server is ready, `url` is its address,
    and `ready_s` is the time from process start to banner in seconds.
    The server has then finished its roofline probes, which could disturb a measurement.
    SIGTERM and SIGHUP stop the server before they end this process;
    otherwise the server would keep its memory and cores.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        module: str = "cpuserve.cli.main",
        under: Sequence[str] = (),
    ) -> None:
        """`arguments`, `module`: as in serve_command.

        under: the command of a program that runs the server, such as valgrind.
        """
        self.started = time.perf_counter()
        self.ready_s = 0.0
        self.url = ""
        self.key = secrets.token_hex(8)
        # Python can set signal handlers only in the main thread. The caller's own handlers stay.
        in_main = threading.current_thread() is threading.main_thread()
        ending = (signal.SIGTERM, signal.SIGHUP) if in_main else ()
        self._handled = [n for n in ending if signal.getsignal(n) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, _end)
        command = [*under, *serve_command([*arguments, *private_flags(0, self.key)], module)]
        self.process = start_child(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> ServerProcess:
        """Wait until the server is ready; StartupError if it ends, with its error on stderr."""
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        finally:
            watchdog.cancel()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server process."""
        self._stop()

    def _stop(self) -> None:
        stop(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)

    def _wait(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.match(r"cpuserve \S+ is ready: (https?://\S+)/v1", line)
            if found:
                self.url = found[1]
                self.ready_s = time.perf_counter() - self.started
            if line.strip().startswith("roofline "):  # printed after the roofline probes
                return
        code = self.process.wait()
        msg = f"the server to measure ended with exit code {code} before it was ready"
        raise StartupError(msg)
