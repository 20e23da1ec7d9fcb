"""Runs an unpacked container image with runc, as Docker does, and with as few rights as possible.

The root file system is read-only, and /tmp is a tmpfs. The process runs as the user of the image,
has no capabilities, and cannot gain privileges. System calls that Docker refuses without
CAP_SYS_NICE or CAP_SYS_ADMIN are refused. The network is the network of the caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_cgroups import Memory

NAME = "cpuserve"
GROUP = f"cpuserve-test-{os.getpid()}"
PERIOD_US = 100_000  # the period of a quota of CPU time
REFUSED = (
    "bpf", "get_mempolicy", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl",
    "mbind", "migrate_pages", "mount", "move_pages", "perf_event_open", "pivot_root", "ptrace",
    "set_mempolicy", "setns", "umount2", "unshare", "userfaultfd",
)  # fmt: skip
MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
SHM_KIB = 65_536  # what Docker gives without --shm-size
# The fields of /proc/PID/status, and the values that every process in the container must have.
RIGHTS = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}


@dataclass(frozen=True)
class Limits:
    """What a container may use: `docker run --memory` and `--cpus`."""

    memory_bytes: int
    cpus: int


@dataclass(frozen=True)
class Image:
    """An image's configuration and, unpacked, its root directory."""

    root: Path
    config: dict[str, Any]

    @property
    def user(self) -> int:
        """The number of the user that the image names."""
        return int(self.config["User"])

    @property
    def health_check(self) -> list[str]:
        """The command of the image's HEALTHCHECK."""
        kind, *command = self.config["Healthcheck"]["Test"]
        if kind != "CMD":
            raise SystemExit(f"the health check is no plain command: {kind}")
        return command


class Container:
    """A container that runs, and what can be asked of it."""

    def __init__(self, bundle: Path, image: Image) -> None:
        self._runc = ("runc", "--root", str(bundle / "state"))
        self._user = image.user
        self._health_check = image.health_check
        self.memory = Memory(GROUP)
        self.process = self._start("run", "--bundle", str(bundle), NAME)

    def kill(self, name: str) -> None:
        """Send a signal to process 1, as `docker stop` does."""
        subprocess.run([*self._runc, "kill", NAME, name], check=True)

    def health(self) -> tuple[int, str]:
        """Run the image's health check as Docker does: its exit code and what it prints."""
        check = self._start("exec", NAME, *self._health_check)
        output = check.communicate()[0]
        return check.returncode, output

    def check_rights(self) -> None:
        """SystemExit if the processes have more rights than they should."""
        listed = self._start("ps", "--format", "json", NAME).communicate()[0]
        pids = json.loads(listed)
        if len(pids) < len(("tini", "the server", "its engine")):
            raise SystemExit(f"only {len(pids)} processes run in the container")
        for pid in pids:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            wrong = {key: status[key] for key, value in RIGHTS.items() if status[key] != value}
            if set(status["Uid"].split()) != {str(self._user)} or wrong:
                raise SystemExit(f"process {pid} runs as {status['Uid']} with {wrong}")
            mounts = map(str.split, Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
            options = next(mount[5] for mount in mounts if mount[4] == "/")
            if "ro" not in options.split(","):
                raise SystemExit(f"the root of process {pid} can be written")

    def _start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._runc, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@contextmanager
def running(
    image: Image, limits: Limits, models: Path, arguments: Sequence[str] = ()
) -> Iterator[Container]:
    """Run the image with `models` at /models; kill what is left at the end."""
    with tempfile.TemporaryDirectory(prefix="cpuserve-oci-") as made:
        bundle = Path(made)
        (bundle / "config.json").write_text(json.dumps(_config(image, limits, models, arguments)))
        container = Container(bundle, image)
        try:
            yield container
        finally:
            if container.process.poll() is None:
                container.kill("KILL")
                container.process.communicate()


def wait_healthy(container: Container) -> None:
    """Return when the health check passes; SystemExit if the container ends or it never does."""
    for _ in range(300):
        if container.process.poll() is not None:
            raise SystemExit(f"the container ended: {container.process.communicate()[0]}")
        code, output = container.health()
        if code == 0:
            return
        time.sleep(0.2)
    raise SystemExit(f"the health check never passed: {output}")


def _config(image: Image, limits: Limits, models: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration of the container for runc."""
    config = image.config
    kinds = ("bounding", "effective", "inheritable", "permitted", "ambient")
    return {
        "ociVersion": "1.0.0",
        "process": {
            "args": [*config["Entrypoint"], *arguments],
            "env": config["Env"],
            "cwd": config["WorkingDir"],
            "user": {"uid": image.user, "gid": image.user},
            "capabilities": {kind: [] for kind in kinds},
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.root), "readonly": True},
        "mounts": [
            _mount("/proc", "proc"),
            _mount("/dev", "tmpfs", "nosuid", "mode=755", "size=65536k"),
            _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", f"size={SHM_KIB}k"),
            _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            _mount("/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "ro"),
            _mount("/tmp", "tmpfs", "nosuid", "nodev", "mode=1777"),
            _mount("/models", "none", "rbind", "rw", source=str(models)),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "cgroupsPath": f"/{GROUP}",
            "resources": {
                "memory": {"limit": limits.memory_bytes},
                "cpu": {"quota": limits.cpus * PERIOD_US, "period": PERIOD_US},
            },
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{"names": list(REFUSED), "action": "SCMP_ACT_ERRNO"}],
            },
        },
    }


def _mount(where: str, kind: str, *options: str, source: str | None = None) -> dict[str, Any]:
    return {
        "destination": where,
        "type": kind,
        "source": source or kind,
        "options": list(options),
    }
