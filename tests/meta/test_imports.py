"""What the tests import: the installed package, and helpers in every process."""

import subprocess
import sys
from pathlib import Path

import pytest

import cpuserve
from tests.helpers.children import child_options

ROOT = Path(__file__).parents[2]


def package(root, *files):
    (root / "cpuserve").mkdir(parents=True)
    for name in ("__init__.py", *files):
        (root / "cpuserve" / name).touch()
    return str(root)


@pytest.fixture
def without_bare_checkout(pytestconfig):
    """The function of tests/conftest.py; `conftest` may be the name of another file's module."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    return conftest.without_bare_checkout


def test_a_checkout_without_an_extension_gives_way_to_the_installed_package(
    tmp_path, monkeypatch, without_bare_checkout
):
    installed = package(tmp_path / "site", "_C.so")
    bare = package(tmp_path / "bare", "_C.pyi")
    built = package(tmp_path / "built", "_C.cpython.so")
    assert without_bare_checkout([bare, installed], Path(bare)) == [installed]
    assert without_bare_checkout([built, installed], Path(built)) == [built, installed]
    assert without_bare_checkout([bare, "/nowhere"], Path(bare)) == [bare, "/nowhere"]
    monkeypatch.chdir(bare)
    assert without_bare_checkout(["", installed], Path(bare)) == [installed]


@pytest.mark.parametrize("how", [["-c"], ["-m", "child"]], ids=["command", "module"])
def test_a_child_has_the_same_cpuserve_and_the_helpers(how, tmp_path, monkeypatch):
    code = "import cpuserve, tests.helpers.steps as s; print(cpuserve.__file__, s.__file__)"
    (tmp_path / "child.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    command = [sys.executable, *how, *([code] if how == ["-c"] else [])]
    done = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    helper = ROOT / "tests" / "helpers" / "steps.py"
    assert done.stdout.split() == [str(Path(cpuserve.__file__).resolve()), str(helper)]
