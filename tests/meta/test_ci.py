"""What `.ci/run` runs again: the C++ steps only after a change of what they compile."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.depth import deep_but

ROOT = Path(__file__).parents[2]
CPP = {"sanitize", "arm", "models", "native"}
PYTHON = {"tests", "deep", "ray", "deploy", "docs", "lint"}
FILES = (
    *("CMakeLists.txt", "cmake/Isa.cmake", "csrc/kernels/a.h", "tests/cpp/test_a.cpp"),
    *("tests/amx/tile_model.h", "tests/instructions.py", "benchmarks/a_bench.cpp"),
    *("benchmarks/CMakeLists.txt", "cpuserve/a.py", "tests/test_a.py", "benchmarks/a.py"),
)
# Runs all steps, each of which prints its name, and fails if it is $FAILING.
SCRIPT = """
. .ci/run
WHOLE=${CI_FULL:-}
renice() { :; }
for name in $PYTHON_STEPS $CPP_STEPS; do
  eval "step_$name() { echo ran $name; [ $name != ${FAILING:-none} ]; }"
done
: >"$WORK/passed"
run_all
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a repository with `.ci/run` and a file for each kind of source."""
    folder = tmp_path / "checkout"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".ci").mkdir()
    shutil.copy2(ROOT / ".ci/run", folder / ".ci")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    assert steps_run(folder) == CPP | PYTHON
    return folder


def git(folder, *words):
    subprocess.run(["git", *words], cwd=folder, check=True)


def steps_run(folder, code=0, **variables):
    """Run all steps; return the names of those that ran."""
    done = subprocess.run(
        ["bash", "-c", SCRIPT],
        cwd=folder,
        env={**os.environ, "CI_WORK": str(folder.parent / "work"), "CI_FULL": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return {line.removeprefix("ran ") for line in done.stdout.splitlines() if line[:4] == "ran "}


def test_what_is_unchanged_is_left_out_and_said(checkout):
    assert steps_run(checkout) == PYTHON
    assert steps_run(checkout, CI_FULL="1") == CPP | PYTHON
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@a", "commit", "-qm", "a")
    assert steps_run(checkout) == PYTHON  # a commit changes no file


FEW, MORE = ("csrc/new.cpp", "cpuserve/a.py"), ("csrc/new.cpp", "cpuserve/new.py", ".ci/run")


@pytest.mark.parametrize("name", deep_but(FEW, [*FILES, *MORE]))
def test_a_change_of_a_source_runs_the_steps_that_compile_it(checkout, name):
    python_only = name.endswith(".py") and name != "tests/instructions.py"
    with (checkout / name).open("a") as file:
        file.write("\n# changed\n")
    assert steps_run(checkout) == (PYTHON if python_only else CPP | PYTHON)
    assert steps_run(checkout) == PYTHON


def test_a_file_that_is_gone_is_a_change(checkout):
    (checkout / "csrc/kernels/a.h").unlink()
    assert steps_run(checkout) == CPP | PYTHON


def test_a_step_that_failed_runs_again_with_those_after_it(checkout):
    (checkout / "csrc/kernels/a.h").write_text("wrong")
    assert steps_run(checkout, code=1, FAILING="arm") == PYTHON | {"sanitize", "arm"}
    assert steps_run(checkout) == PYTHON | {"arm", "models", "native"}
    assert steps_run(checkout) == PYTHON


def test_another_compiler_is_a_change(checkout, tmp_path):
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    assert steps_run(checkout, CXX=str(other)) == CPP | PYTHON


def test_the_minimums_are_tested_with_the_installed_package():
    """`python -m pytest` in the checkout would import the package there, which has no kernels."""
    step = (ROOT / ".ci/run").read_text().partition("step_minimums() {")[2].partition("\n}")[0]
    assert '"$bin/pytest" -m quick' in step
    assert "-m pytest" not in step


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 1)])
def test_a_registry_that_fails_once_or_twice_is_asked_again(tmp_path, failures, code):
    script = f"cd {ROOT}; . .ci/run; trap - EXIT; fetch() {{ echo x >>{tmp_path}/asked"
    script += f"; [ $(wc -l <{tmp_path}/asked) -gt {failures} ]; }}; again fetch"
    environment = {**os.environ, "CI_WORK": str(tmp_path), "CI_PAUSE": "0"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    assert len((tmp_path / "asked").read_text().splitlines()) == 3


def test_the_line_of_the_readme_asks_again_for_packages(tmp_path):
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text(
        f"#!/bin/sh\necho $* >>{tmp_path}/asked\nmkdir {tmp_path}/once && exit 1\nexit 0\n"
    )
    pytest_ = pip.with_name("pytest")
    pytest_.write_text(f"#!/bin/sh\necho ran pytest >>{tmp_path}/asked\n")
    for program in (pip, pytest_):
        program.chmod(0o755)
    environment = {**os.environ, "CI_WORK": str(tmp_path), "CI_PAUSE": "0"}
    environment["PATH"] = os.pathsep.join([str(pip.parent), os.environ["PATH"]])
    script = f"cd {ROOT}; . .ci/run; trap - EXIT; step_tests"
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    install = "install .[test]"
    assert (tmp_path / "asked").read_text().splitlines() == [install, install, "ran pytest"]
