"""deploy/bundle.sh writes a bundle that installs without an index, and only if it is whole."""

import base64
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/bundle.sh"
# Neither an index nor a proxy can be used: a download fails.
OFFLINE = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
PULL = """
import os, pathlib, sys

def main():
    if sys.argv[1] == "pull":
        folder = pathlib.Path(os.environ["CPUSERVE_CACHE"])
        (folder / sys.argv[2]).write_text("weights")
    print(*sys.argv[1:])
"""


def wheel(directory):
    """Write a small wheel named cpuserve, with a command that "downloads" a model."""
    name = "cpuserve-0.1.0"
    info = f"{name}.dist-info"
    files = {
        "cpuserve_stub.py": PULL,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: cpuserve\nVersion: 0.1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ncpuserve = cpuserve_stub:main\n",
    }
    record = ""
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{file},sha256={digest.decode()},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    path = directory / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def run(*command):
    return subprocess.run(
        [*map(str, command)], env=OFFLINE, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle")
    made = run(SCRIPT, directory / "bundle", wheel(directory), "some-model")
    assert made.returncode == 0, made.stderr
    return directory / "bundle"


@pytest.mark.deep  # three virtual environments with pip, 3 s of CPU each
def test_a_bundle_installs_the_server_and_its_models(bundle, tmp_path):
    done = run(bundle / "install.sh", tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "installed/models/some-model").read_text() == "weights"
    served = run(tmp_path / "installed/bin/cpuserve", "serve", "some-model")
    assert served.stdout == "serve some-model\n"
    assert f"{tmp_path}/installed/bin/cpuserve serve MODEL" in done.stdout


@pytest.mark.deep
@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_a_bundle_that_is_not_whole_installs_nothing(bundle, tmp_path, damage):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", bundle, copy], check=True)
    if damage == "changed":
        (copy / "models/some-model").write_text("weighty")
    elif damage == "missing":
        (copy / "models/some-model").unlink()
    else:
        (copy / "wheels/extra.whl").write_text("")
    done = run(copy / "install.sh", tmp_path / "installed")
    assert done.returncode == 1
    assert "nothing was installed" in done.stderr
    assert not (tmp_path / "installed").exists()


def test_wrong_arguments_are_explained(tmp_path):
    done = run(SCRIPT)
    assert done.returncode == 2
    assert done.stderr.startswith("Everything that a machine without a network needs")
    assert "usage: deploy/bundle.sh DIR REQUIREMENT [MODEL...]" in done.stderr
    done = run(SCRIPT, tmp_path, "cpuserve")
    assert (done.returncode, done.stderr) == (2, f"{tmp_path} exists: give a new directory\n")
