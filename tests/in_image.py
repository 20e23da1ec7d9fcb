"""Builds the container image with buildah and serves from it, by hand, as root and on Debian.

usage: python tests/in_image.py [--wheel WHEEL] [--target cpu|torch] [--base IMAGE] [--models DIR]

Without --wheel the image's own build compiles cpuserve, as `docker build` does by default. The base
is made of packages of this machine's Debian, like the image debian:bookworm-slim, so that no
registry is needed; its Python, which the image gets, must be the one of the wheel. pip gets its
packages from a folder and uses no network.

The image may have MOST_MB. It runs with runc: read-only, as its own user, without capabilities, in
a control group of 1 GiB of memory and one CPU, and without a network except for its own loopback.
There it answers a question with the default model (from DIR, by default the user's cache), its
health check follows the port, and at SIGTERM it finishes a stream and ends with 0.

Needs the Debian packages buildah, runc, iproute2 and mmdebstrap, and 5 GB for temporary files (10
for the target torch).
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.oci import Container, Image, Limits, running, wait_healthy  # noqa: E402
from in_bochs import debian_mirror  # noqa: E402
from in_cgroups import MIB, ask, wait_ready  # noqa: E402
from in_wheel import QUESTION, build_requirements, run  # noqa: E402

MOST_MB = {"cpu": 300, "torch": 1400}
LIMITS, PORT = Limits(memory_bytes=1024 * MIB, cpus=1), 8000
STREAMED = 400  # tokens of the answer that SIGTERM must not cut short
MODEL = "SmolLM2-135M-Instruct.Q4_1"
DEBIAN_PYTHON = "/usr/bin/python3"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# What Debian's images for Docker leave out, too.
SLIM = """path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
path-include=/usr/share/locale/locale.alias
path-exclude=/usr/share/man/*
"""
# Nothing in the image compiles or installs.
UNWANTED = ("cc", "c++", "gcc", "g++", "ld", "make", "cmake", "ninja", "pip", "pip3")


class Store:
    """buildah with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self._options = ("--root", folder / "storage", "--runroot", folder / "run")

    def run(self, *words: str | Path) -> None:
        """Run a command of buildah; SystemExit if it fails."""
        run(*self._command(*words))

    def ask(self, *words: str | Path) -> str:
        """Run a command of buildah; return what it prints."""
        command = [str(word) for word in self._command(*words)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def _command(self, *words: str | Path) -> list[str | Path]:
        return ["buildah", *self._options, "--storage-driver", "vfs", *words]


def main() -> None:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="install this instead of compiling")
    parser.add_argument("--target", choices=sorted(MOST_MB), default="cpu")
    parser.add_argument("--base", help="the base image, instead of one made of Debian's packages")
    cache = Path.home() / ".cache/cpuserve"
    parser.add_argument("--models", type=Path, default=cache, help="where the default model is")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cpuserve-image-") as made:
        work = Path(made)
        store = Store(work)
        base = asked.base or make_base(store, work)
        name = build(store, work, base, asked.wheel, asked.target)
        image = unpack(store, name)
        check_contents(image, asked.target)
        check_size(store, work, name, asked.target)
        models = copy_model(asked.models, work, image.user)
        leave_network()
        serves(image, models)
        follows_the_port(image, models)
    print(f"image: all checks of the target {asked.target} passed")


def make_base(store: Store, work: Path) -> str:
    """Make an image of Debian's smallest set of packages; return its name."""
    uri, keyring = debian_mirror()
    suite = release("VERSION_CODENAME")
    slim, sources, root = work / "slim", work / "base.list", work / "base.tar"
    slim.write_text(SLIM)
    lines = (
        f"deb [signed-by={keyring}] {uri} {name} main\n" for name in (suite, f"{suite}-updates")
    )
    sources.write_text("".join(lines))
    hook = "/usr/share/mmdebstrap/hooks/merged-usr"  # otherwise bookworm's tools for it bring perl
    options = ("--variant=minbase", f"--dpkgopt={slim}", f"--hook-dir={hook}", "--quiet")
    run("mmdebstrap", *options, suite, root, sources)
    container = store.ask("from", "scratch")
    store.run("add", "--quiet", container, root, "/")
    store.run("commit", "--quiet", "--rm", container, "localhost/base")
    return "localhost/base"


def release(key: str) -> str:
    """Return a value of /etc/os-release."""
    lines = Path("/etc/os-release").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)[key].strip('"')


def build(store: Store, work: Path, base: str, wheel: Path | None, target: str) -> str:
    """Build the image from the files that git knows; return its name."""
    context = work / "context"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in filter(None, names.stdout.decode().split("\0")):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, context / name)
    arguments = [f"--build-arg=BASE={base}"]
    if wheel is not None:
        version = wheel.name.split("-")[1]
        arguments.append(f"--build-arg=CPUSERVE=cpuserve=={version}")
    download(context / "dist", wheel, target)
    pip = work / "pip.conf"
    pip.write_text("[global]\nno-index = true\n")
    name = f"localhost/cpuserve:{target}"
    store.run(
        "build", "--isolation=chroot", "--format=docker", f"--volume={pip}:/etc/pip.conf:ro",
        *arguments, "--target", target, "--tag", name,
        "--file", context / "Dockerfile.cpu", context,
    )  # fmt: skip
    return name


def download(dist: Path, wheel: Path | None, target: str) -> None:
    """Download what pip installs in the image, for Debian's Python."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        import tomllib

        project = tomllib.load(file)["project"]
    wanted = list(project["dependencies"])
    if target == "torch":
        wanted += project["optional-dependencies"]["torch"]
    dist.mkdir()
    if wheel is None:
        wanted += [*build_requirements(), "cmake>=3.25", "ninja>=1.11"]
    else:
        shutil.copy2(wheel, dist)
    pip = (sys.executable, "-m", "pip", "--python", DEBIAN_PYTHON)
    run(*pip, "download", "--quiet", "--only-binary=:all:", "--dest", dist, *wanted)


def unpack(store: Store, name: str) -> Image:
    """Unpack the image and read its configuration."""
    config = json.loads(store.ask("inspect", "--type=image", name))["Docker"]["config"]
    return Image(Path(store.ask("mount", store.ask("from", name))), config)


def check_contents(image: Image, target: str) -> None:
    """SystemExit if the image has what it does not need, or lacks what it promises."""
    folders = [image.root / name for name in ("usr/bin", "usr/local/bin", "opt/cpuserve/bin")]
    found = [name for name in UNWANTED for folder in folders if os.path.lexists(folder / name)]
    if found:
        raise SystemExit(f"the image has {', '.join(found)}")
    if "8000/tcp" not in image.config["ExposedPorts"] or "/models" not in image.config["Volumes"]:
        raise SystemExit(f"the image lacks its port or its volume: {image.config}")
    (packages,) = image.root.glob("opt/cpuserve/lib/python3*/site-packages")
    if (packages / "torch").exists() != (target == "torch"):
        raise SystemExit(f"the target {target} is the one with torch, or lacks it")


def check_size(store: Store, work: Path, name: str, target: str) -> None:
    """Print the sizes of the image and its layers; SystemExit if it is too large."""
    folder = work / "pushed"
    store.run("push", "--quiet", name, f"oci:{folder}")
    (manifest,) = json.loads((folder / "index.json").read_text())["manifests"]
    layers = json.loads(blob(folder, manifest).read_text())["layers"]
    sizes = [unpacked_size(blob(folder, layer)) for layer in layers]
    mb, packed = sum(sizes) / 1e6, sum(layer["size"] for layer in layers) / 1e6
    each = ", ".join(f"{size / 1e6:.0f}" for size in sizes)
    print(f"{name}: {mb:.0f} MB (layers: {each}), {packed:.0f} MB to download", flush=True)
    if mb > MOST_MB[target]:
        raise SystemExit(f"the image has more than {MOST_MB[target]} MB")


def blob(folder: Path, described: dict[str, str]) -> Path:
    """Return the file of a manifest or layer in a directory with the layout of OCI."""
    return folder / "blobs" / described["digest"].replace(":", "/")


def unpacked_size(layer: Path) -> int:
    """Return the bytes of a layer's archive, which is what `docker images` counts."""
    with gzip.open(layer) as file:
        return sum(len(part) for part in iter(lambda: file.read(MIB), b""))


def copy_model(cache: Path, work: Path, user: int) -> Path:
    """Copy the default model to a directory of its own, which belongs to `user`."""
    models = work / "models"
    models.mkdir()
    os.chown(models, user, user)
    for file in cache.glob(f"{MODEL}.*"):
        shutil.copy2(file, models)
        os.chown(models / file.name, user, user)
    if not (models / f"{MODEL}.gguf").exists():
        raise SystemExit(f"{cache} lacks {MODEL}.gguf: run `cpuserve pull smollm2:135m`")
    return models


def leave_network() -> None:
    """Move this thread and the processes it will start to a network with nothing but loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        raise SystemExit(f"unshare: {os.strerror(ctypes.get_errno())}")
    run("ip", "link", "set", "lo", "up")


def check_levels(machine: dict[str, object]) -> None:
    """SystemExit if the image lacks the kernels of an ISA level of its architecture."""
    arm = machine["arch"] == "aarch64"
    levels = {path.stem for path in (ROOT / "csrc/kernels/isa").glob("*.cpp")}
    ours = {name for name in levels if name == "scalar" or name.startswith("neon") == arm}
    if missing := ours - set(machine["built_levels"]):
        raise SystemExit(f"the image has no kernels for {', '.join(sorted(missing))}")


def serves(image: Image, models: Path) -> None:
    """It answers within the limits, and SIGTERM does not cut an answer short."""
    patience = ("--drain-timeout", "300")  # the machine may be busy
    with running(image, LIMITS, models, patience) as container:
        url = f"http://127.0.0.1:{PORT}"
        wait_ready(url, container.process)
        container.check_rights()
        check_health(container, healthy=True)
        answer = ask(f"{url}/v1/chat/completions", messages=QUESTION, max_tokens=16)
        text = answer["choices"][0]["message"]["content"]
        if "Paris" not in text:
            raise SystemExit(f"a wrong answer: {text}")
        cpu = ask(f"{url}/v1/cpu")
        check_levels(cpu["machine"])
        threads = len(cpu["live"]["threads_on"])
        if threads != LIMITS.cpus:
            raise SystemExit(f"{threads} threads compute on {LIMITS.cpus} CPU")
        memory = container.memory
        peak, kills = memory.peak, memory.kills
        finishes_at_sigterm(container, url)
    if kills:
        raise SystemExit(f"the kernel killed {kills} processes for memory")
    print(
        f"served in {LIMITS.memory_bytes // MIB} MB and {LIMITS.cpus} CPU (cgroup "
        f"{memory.version}): {text} Peak {peak // MIB} MB, page cache included"
    )


def check_health(container: Container, *, healthy: bool) -> None:
    """SystemExit if the health check says otherwise."""
    code, output = container.health()
    if code != (0 if healthy else 1) or ("no answer" in output) == healthy:
        raise SystemExit(f"the health check ended with {code}: {output}")


def finishes_at_sigterm(container: Container, url: str) -> None:
    """A stream that runs at SIGTERM ends with its last token, and the container with 0."""
    body = {
        "messages": QUESTION, "max_tokens": STREAMED, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        response.readline()
        container.kill("TERM")
        check_health(container, healthy=False)  # the port is closed, so this runs before the end
        events = [line[6:] for line in response.read().decode().splitlines() if line]
    if events[-1] != "[DONE]":
        raise SystemExit(f"the stream ended with {events[-1]}")
    tokens = json.loads(events[-2])["usage"]["completion_tokens"]
    if tokens != STREAMED:
        raise SystemExit(f"the stream has {tokens} tokens instead of {STREAMED}")
    ends_with_zero(container)


def follows_the_port(image: Image, models: Path) -> None:
    """The health check finds a port that the system chose."""
    with running(image, LIMITS, models, ("--port", "0")) as container:
        wait_healthy(container)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                raise SystemExit(f"--port 0 chose {PORT}, so this shows nothing: try again")
        container.kill("TERM")
        ends_with_zero(container)


def ends_with_zero(container: Container) -> None:
    """SystemExit unless the container ends with 0."""
    output, _ = container.process.communicate(timeout=60)
    if container.process.returncode != 0:
        raise SystemExit(f"the container ended with {container.process.returncode}: {output}")


if __name__ == "__main__":
    main()
