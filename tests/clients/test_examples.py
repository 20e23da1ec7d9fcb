"""The programs in examples/ run as a user runs them, against a server with the default model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import DEFAULT_MODEL, default_model

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.network

EXPECTED = {
    "chat.py": "Paris",
    "structured.py": "'continent': ",
    "messages.py": "Paris",
    "curl.sh": "vllm:generation_tokens_total",
}


@pytest.fixture(scope="module")
def server(shared_server):
    default_model()
    return shared_server(DEFAULT_MODEL)


def output_of(*command):
    options = child_options()
    options["env"]["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", deep_but(["chat.py", "curl.sh"], EXPECTED))
def test_an_example_runs_against_a_server(name, server):
    program = [sys.executable] if name.endswith(".py") else ["bash"]
    assert EXPECTED[name] in output_of(*program, str(EXAMPLES / name), server.url)


@pytest.mark.deep
def test_the_offline_example_generates_text():
    assert "The capital of France is -> Paris" in output_of(
        sys.executable, str(EXAMPLES / "offline.py")
    )


def test_every_example_is_run_and_listed():
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    # tests/api/test_api_pictures_served.py runs the last one, with a model that reads pictures.
    assert programs == {*EXPECTED, "offline.py", "scans_to_markdown.py"}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in programs)
