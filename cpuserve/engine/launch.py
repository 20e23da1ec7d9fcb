"""Start the process of an engine: it imports its modules and waits for its configuration."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from cpuserve.base.affinity import on_cpus
from cpuserve.base.children import python_command, start_child
from cpuserve.base.errors import TooLittleMemory
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger, level
from cpuserve.config.engine import EngineConfig
from cpuserve.core.kv.cache_folder import SharedMemory

# Less shared memory is not worth a tier. Containers have 64 MiB unless they are started with more.
_LEAST_SHARED = 16 << 20

log = get_logger("engine")

CHILD_MODULE = "cpuserve.engine.child"
# The most seconds that a spare process waits for an engine. A load may wait a minute for memory,
# and models that take turns in memory soon need the next process.
LONGEST_S = 300.0
BOOTSTRAP = (
    "from cpuserve.base.children import exit_now; from {module} import main; exit_now(main())"
)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A started process, and this process's end of the socket pair.

    module: the Python module that the started process runs.
    """

    process: subprocess.Popen[bytes]
    sock: socket.socket
    module: str

    def kill(self) -> None:
        """Kill the process, reap it, and close its socket and pipe."""
        self.process.kill()
        self.process.wait()
        self.sock.close()
        if self.process.stderr is not None:
            self.process.stderr.close()


def start_process(module: str = CHILD_MODULE) -> EngineProcess:
    """Start a process that waits for an EngineConfig.

    Raises:
        OSError, RuntimeError: the system refuses another process, file or thread.
    """
    code = BOOTSTRAP.format(module=module)
    with ExitStack() as undo:
        fault("children.connect")
        ours, theirs = map(undo.enter_context, socket.socketpair())
        fd = theirs.fileno()
        process = start_child(
            python_command(code, "--fd", str(fd), "--log-level", level()),
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        undo.pop_all()
    theirs.close()
    return EngineProcess(process, ours, module)


class SpareProcess:
    """At most one engine process that is started before its configuration is known.

    Imports take half of the start of an engine, so they run while the server still unloads another
    model. Only the thread of the event loop may use this object.

    keep: whether to start another process as soon as an engine has taken this one,
      because models take turns in memory.
    """

    def __init__(
        self, cpus: set[int], module: str = CHILD_MODULE, *, longest_s: float = LONGEST_S
    ) -> None:
        """`cpus`: the CPUs that engines may use.

        module: the Python module that the process runs.
        longest_s: seconds after which the process ends if no engine uses it.
        """
        self.cpus = cpus
        self.keep = False
        self._module = module
        self._longest_s = longest_s
        self._spare: EngineProcess | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start a process unless one is waiting; call this on the event loop."""
        if self._spare is not None and self._spare.process.poll() is None:
            return
        self._end()
        try:
            with on_cpus(self.cpus):
                self._spare = start_process(self._module)
        except (OSError, RuntimeError) as error:
            # The engine then starts its process itself, or reports why it cannot.
            log.debug("no process is started in advance: %s", error)
            return
        self._expiry = asyncio.get_running_loop().call_later(self._longest_s, self.close)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Start a process while a model is prepared; the engine of this model then takes it.

        If there is too little memory, another model has to end first, and `keep` is set.
        """
        self.start()
        try:
            yield
        except TooLittleMemory:
            self.keep = True
            raise

    def take(self, module: str) -> EngineProcess | None:
        """Return the waiting process if it is alive and runs `module`; the caller then owns it."""
        spare = self._spare
        if spare is None or spare.module != module or spare.process.poll() is not None:
            return None
        self._spare = None
        if self.keep:
            self.start()
        return spare

    def close(self) -> None:
        """End the waiting process if there is one, and start no more processes."""
        self.keep = False
        self._end()

    def _end(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()


def with_shared_memory(
    configs: Sequence[EngineConfig],
) -> tuple[SharedMemory, Sequence[EngineConfig]]:
    """Return the memory where engines share cached prefixes, and their configs with its directory.

    If there is no shared memory, or little of it is free, the engines share nothing.
    """
    made, most = SharedMemory(), configs[0].shared_prefix_bytes
    if not most:
        return made, configs
    try:
        path = made.create()
        _, _, free = shutil.disk_usage(path)
    except OSError as error:
        made.close()
        log.warning("the engines share no cached prefixes: %s", error)
        return made, configs
    # Each engine may exceed the limit by a sixteenth (DiskCache).
    most = min(most, free) * 16 // (16 + len(configs))
    if most < _LEAST_SHARED:
        made.close()
        log.warning("the engines share no cached prefixes: %s has %d bytes left", path.parent, free)
        return made, configs
    shared = {"shared_prefix_dir": str(path), "shared_prefix_bytes": most}
    return made, [msgspec.structs.replace(config, **shared) for config in configs]
