"""Packages of npm that tests run, in a directory outside the checkout."""

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.downloads import tried
from tests.helpers.patience import PATIENCE_S

INSTALL_S = 4 * PATIENCE_S  # packages of 100 MB through a busy network, below pytest's timeout


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time install packages in a folder, or run there: workers share it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def npm_folder(*packages: str) -> Path:
    """Return a directory with these packages, installed once and kept; without npm, skip.

    packages: names with versions, such as "openai@6".
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    key = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"cpuserve-test-npm-{key}"
    folder.mkdir(exist_ok=True)
    with _alone(folder):
        if not (folder / "installed").exists():
            _install(folder, packages)
    return folder


def _install(folder: Path, packages: tuple[str, ...]) -> None:
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    command = ["npm", "install", "--no-audit", "--no-fund", *packages]
    options = {"capture_output": True, "text": True, "timeout": INSTALL_S, "check": True}
    try:
        tried(lambda: subprocess.run(command, cwd=folder, **options), subprocess.CalledProcessError)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"npm cannot install {packages}: {error.stderr.strip().splitlines()[-1:]}")
    (folder / "installed").touch()


def run_node(folder: Path, program: Path, *arguments: str) -> str:
    """Return what a program prints; it finds the packages of `folder`. It must end with 0.

    Modules are looked for next to the program, so it is copied there.
    """
    with _alone(folder):
        shutil.copy(program, folder / program.name)
        done = subprocess.run(
            ["node", program.name, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout
