"""The examples of the README run unchanged against a server with the default model."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import DEFAULT_MODEL, default_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.network
DEFAULT_ADDRESS = "http://127.0.0.1:8000"


def examples(language, word):
    """Return the README's code blocks in `language` that contain `word`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for of, block in blocks if of == language and word in block]


def output_of(command):
    done = subprocess.run(
        command, **child_options(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(shared_server):
    default_model()
    return shared_server(DEFAULT_MODEL)


def test_the_curl_example_answers(server):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (example,) = examples("", "curl")
    assert DEFAULT_ADDRESS in example
    answer = output_of(["sh", "-c", example.replace(DEFAULT_ADDRESS, server.url)])
    assert "Paris" in answer


def test_the_openai_client_example_answers(server):
    (example,) = examples("python", "openai")
    assert DEFAULT_ADDRESS in example
    answer = output_of([sys.executable, "-c", example.replace(DEFAULT_ADDRESS, server.url)])
    assert "Paris" in answer


def test_the_offline_example_answers():
    default_model()
    (example,) = examples("python", "LLM")
    assert "Paris" in output_of([sys.executable, "-c", example])
