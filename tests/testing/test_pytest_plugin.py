"""The fixtures for pytest, in a project where cpuserve is installed, and examples/testing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cpuserve
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import default_model
from tests.helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "testing"


@pytest.fixture
def project(tmp_path):
    """An empty project, and a folder that makes its Python see cpuserve as an installed package."""
    installed = tmp_path / "installed"
    about = installed / "cpuserve-0.1.0.dist-info"
    about.mkdir(parents=True)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    entry = re.search(r"\[project\.entry-points\.pytest11\]\n(.+)\n", pyproject)[1]
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpuserve\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[pytest11]\n" + entry.replace('"', ""))
    (about / "RECORD").write_text("cpuserve/__init__.py,,\n")
    (installed / "cpuserve").symlink_to(Path(cpuserve.__file__).parent)
    made = tmp_path / "project"
    made.mkdir()
    return made


def run(project, *arguments):
    """Run pytest in the project; return its exit code and output."""
    options = child_options()
    path = [str(project.parent / "installed"), options["env"]["PYTHONPATH"]]
    options["env"].update(PYTHONPATH=os.pathsep.join(path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    options["env"].pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    options["cwd"] = project
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)
    return done.returncode, done.stdout + done.stderr


def write(project, text, **settings):
    (project / "test_it.py").write_text(text)
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (project / "pytest.ini").write_text(f"[pytest]\naddopts =\n{lines}")


def test_a_project_that_uses_no_fixture_imports_nothing_else(project):
    write(
        project,
        "import sys\n"
        "def test():\n"
        "    assert 'cpuserve.testing.pytest_plugin' in sys.modules\n"
        "    ours = {name for name in sys.modules if name.startswith('cpuserve')}\n"
        "    assert ours == {'cpuserve', 'cpuserve.testing', 'cpuserve.testing.pytest_plugin'}\n"
        "    assert not {'fastapi', 'numpy', 'msgspec', 'uvicorn'} & sys.modules.keys()\n",
    )
    code, output = run(project, "-p", "no:hypothesispytest")
    assert code == 0, output


@pytest.mark.deep
def test_a_script_is_empty_at_each_test_and_is_checked_at_its_end(project):
    write(
        project,
        "import urllib.request\n"
        "def test_one(cpuserve_script):\n"
        "    cpuserve_script.add('never used')\n"
        "def test_two(cpuserve_script):\n"
        "    urllib.request.urlopen(cpuserve_script.url + '/health').close()\n"
        "    assert len(cpuserve_script.exchanges) == 1\n",
    )
    code, output = run(project)
    assert code == 1
    assert "2 passed, 1 error" in output
    assert "no request used 1 replies" in output


SERVED = """
import urllib.request
def test_it(cpuserve_server):
    assert cpuserve_server.model == "tiny"
    urllib.request.urlopen(cpuserve_server.url + "/health").close()
"""


@pytest.mark.deep
def test_the_settings_select_the_model_and_a_flag_selects_a_running_server(project):
    from cpuserve.testing import scripted

    write(project, SERVED, cpuserve_model=tiny_model("llama"), cpuserve_options="--model-name=tiny")
    with scripted(model="tiny", strict=False) as server:
        code, output = run(project, f"--cpuserve-url={server.openai_url}")
        assert code == 0, output
        assert [e.path for e in server.exchanges] == ["/v1/models", "/health"]
    write(
        project,
        SERVED,
        cpuserve_model=tiny_model("llama"),
        cpuserve_options="--served-model-name tiny",
    )
    code, output = run(project)
    assert code == 0, output


EARLY = """
import gc
from cpuserve.testing.local_server import ServerStart
STARTS = [each for each in gc.get_objects() if isinstance(each, ServerStart)]
def test_it(request):
    assert len(STARTS) == {starts}
    assert "cpuserve_server" not in request.fixturenames
"""


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ([], 1),
        pytest.param(["-k", "it"], 0, marks=pytest.mark.deep),
        pytest.param(["test_it.py::test_it"], 0, marks=pytest.mark.deep),
    ],
)
def test_the_server_starts_before_a_module_that_names_it_unless_tests_are_selected(
    project, options, starts
):
    write(project, EARLY.format(starts=starts), cpuserve_model=tiny_model("llama"))
    code, output = run(project, *options)
    assert code == 0, output


@pytest.mark.deep
@pytest.mark.network
def test_the_example_project_passes(project):
    default_model()
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, project)
    code, output = run(project)
    assert code == 0, output
    assert "4 passed" in output
