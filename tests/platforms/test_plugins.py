"""Plug-ins from packages that pip installed, valid and broken ones, in a new process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample_platform"
SMALL = ("--kv-cache-memory=16MiB", "--max-num-batched-tokens=64")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A directory with the sample package as pip installs it, offline."""
    source = tmp_path_factory.mktemp("source")
    for file in SAMPLE.iterdir():  # the build writes files into the source directory
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    target = tmp_path_factory.mktemp("site")
    offline = ("--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", target, source]
    subprocess.run(command, check=True, timeout=PATIENCE_S, env={**os.environ, "PIP_USER": "0"})
    return target


def package(site, name, points, source=""):
    """Write an installed package: metadata, entry points and one module."""
    info = site / f"{name}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    groups = "".join(
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
        for group, entries in points.items()
    )
    (info / "entry_points.txt").write_text(groups)
    (site / f"{name}.py").write_text(source)
    return site


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama", dtype="bfloat16"))


def run(command, *arguments, sites=(), **environ):
    path = os.pathsep.join(map(str, (*sites, ROOT)))
    argv = [sys.executable, "-m", "cpuserve", command, *arguments]
    env = {**os.environ, "PYTHONPATH": path, **environ}
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=PATIENCE_S, env=env, check=False
    )


def decisions(done):
    assert done.returncode == 0, done.stderr
    return {row["field"]: row for row in json.loads(done.stdout)}


@pytest.mark.deep
def test_an_installed_platform_wins_over_the_floor_and_says_so(sample, model):
    done = run("config", model, "--json", sites=[sample])
    rows = decisions(done)
    assert rows["platform"]["got"] == "sample"
    assert rows["max_num_seqs"]["got"] == 1
    assert "platform sample REPLACES cpu: the sample device is there" in done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("by", deep_but(["flag"], ["flag", "variable"]))
@pytest.mark.parametrize("name", ["cpu", "sample"])
def test_a_platform_is_forced_by_name(sample, model, name, by):
    flag = (f"--platform={name}",) if by == "flag" else ()
    environ = {"CPUSERVE_PLATFORM": name} if by == "variable" else {}
    done = run("config", model, "--json", *flag, sites=[sample], **environ)
    assert decisions(done)["platform"]["got"] == name
    assert "REPLACES" not in done.stderr


@pytest.mark.deep
def test_a_platform_that_cannot_run_loses_and_cannot_be_forced(sample, model):
    done = run("config", model, "--json", sites=[sample], SAMPLE_PLATFORM="absent")
    assert decisions(done)["platform"]["got"] == "cpu"
    assert "platform sample is not used: the sample device is absent" in done.stderr
    done = run("config", model, "--platform=sample", sites=[sample], SAMPLE_PLATFORM="absent")
    assert done.returncode == 2
    assert "'sample' cannot be used (the sample device is absent)" in done.stderr
    assert "set --platform to one of: cpu, sample" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.deep
def test_two_packages_with_one_name_are_both_refused_and_the_floor_serves(sample, model, tmp_path):
    twin = package(tmp_path, "twin", {"cpuserve.platforms": {"sample": "twin:Platform"}})
    arguments = ("--prompt=a", "--max-tokens=1", *SMALL)
    done = run("generate", model, *arguments, sites=[sample, twin])
    assert done.returncode == 0
    assert (
        "platform sample is not used: cpuserve-sample-platform 1.0 and twin 2.0 both claim this "
        "name: uninstall one" in done.stderr
    )
    done = run("config", model, "--platform=sample", sites=[sample, twin])
    assert done.returncode == 2
    assert "both claim this name" in done.stderr


# What a package has under its entry point, and the line that it gives.
BAD = {
    "shadow": (
        "cpu",
        "",
        "platform cpu is not used: the plug-in of bad 2.0 has the name of a built-in",
    ),
    "raises": (
        "fast",
        "raise RuntimeError('no driver')",
        "platform fast is not used: the plug-in of bad 2.0 does not load: RuntimeError: no driver",
    ),
    "lacks": (
        "fast",
        "class Platform:\n    name = device_type = 'x'\n    def probe(self): return True, ''",
        "platform fast is not used: the plug-in of bad 2.0 lacks host, capabilities, kernels, "
        "resolve",
    ),
    "empty": ("fast", "", "AttributeError: module 'bad' has no attribute 'Platform'"),
    "probe": (
        "fast",
        "from cpuserve.platforms.cpu import CpuPlatform\n"
        "class Platform(CpuPlatform):\n    def probe(self): return 1 / 0",
        "platform fast is not used: its probe failed: ZeroDivisionError",
    ),
    "constructor": (
        "fast",
        "class Platform:\n    def __init__(self, device): ...\n    name = device_type = 'x'\n"
        "    probe = host = capabilities = kernels = resolve = None",
        "its probe failed: TypeError",
    ),
}


@pytest.mark.parametrize("how", deep_but(["probe"], BAD))
def test_a_bad_platform_gives_its_line_and_the_floor_serves(model, tmp_path, how):
    name, source, line = BAD[how]
    site = package(tmp_path, "bad", {"cpuserve.platforms": {name: "bad:Platform"}}, source)
    done = run("config", model, "--json", sites=[site])
    assert decisions(done)["platform"]["got"] == "cpu"
    assert line in done.stderr


@pytest.mark.deep
def test_a_broken_neighbour_does_not_disturb_a_platform_that_was_named(sample, model, tmp_path):
    site = package(
        tmp_path, "bad", {"cpuserve.platforms": {"bad": "bad:P"}}, "raise RuntimeError('x')"
    )
    done = run("config", model, "--json", "--platform=sample", sites=[sample, site])
    assert decisions(done)["platform"]["got"] == "sample"
    assert "RuntimeError" not in done.stderr


# -- models, by the same mechanism ----------------------------------------------------------------


@pytest.fixture(scope="module")
def sample_model(model, tmp_path_factory):
    """The tiny Llama under the name of an architecture that only the package knows."""
    copy = shutil.copytree(model, tmp_path_factory.mktemp("model") / "sample")
    config = json.loads((copy / "config.json").read_text())
    config |= {"architectures": ["SampleForCausalLM"], "model_type": "sample"}
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.mark.deep
def test_a_model_family_of_a_package_is_served(sample, sample_model):
    arguments = ("--platform=cpu", "--prompt=a", "--max-tokens=1", *SMALL)
    done = run("generate", sample_model, *arguments, sites=[sample])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        (
            "SampleForCausalLM",
            "raise RuntimeError('x')",
            "the plug-in of bad 2.0 does not load: RuntimeError",
        ),
        ("SampleForCausalLM", "class Model: spec = 1", "the plug-in of bad 2.0 lacks build"),
    ],
)
def test_a_bad_model_family_is_one_line(sample_model, tmp_path, name, source, line):
    site = package(tmp_path, "bad", {"cpuserve.models": {name: "bad:Model"}}, source)
    done = run("config", sample_model, sites=[site])
    assert done.returncode == 2
    assert f"architecture {name}: {line}" in done.stderr


def test_a_model_family_claimed_twice_names_both(sample, sample_model, tmp_path):
    twin = package(tmp_path, "twin", {"cpuserve.models": {"SampleForCausalLM": "twin:Model"}})
    done = run("config", sample_model, sites=[sample, twin])
    assert done.returncode == 2
    assert "cpuserve-sample-platform 1.0 and twin 2.0 both claim" in done.stderr


@pytest.mark.deep
def test_a_model_family_that_shadows_a_built_in_is_refused_and_the_built_in_serves(model, tmp_path):
    site = package(tmp_path, "bad", {"cpuserve.models": {"LlamaForCausalLM": "bad:Model"}})
    done = run("config", model, "--json", sites=[site])
    assert decisions(done)["model_impl"]["why"] == "cpuserve implements LlamaForCausalLM"
    assert "architecture LlamaForCausalLM: the plug-in of bad 2.0 has the name" in done.stderr
