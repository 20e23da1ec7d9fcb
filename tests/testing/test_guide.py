"""The examples of docs/testing-your-code.md run as they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import default_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "github-actions.yml"
PAGE = (ROOT / "docs" / "testing-your-code.md").read_text(encoding="utf-8")


def examples(language, word):
    """Return the code blocks of the page in `language` that contain `word`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [block for of, block in blocks if of == language and word in block]


def output_of(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        **child_options(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_the_script_of_the_page_runs():
    (example,) = examples("python", "with scripted(")
    output_of(example)


@pytest.mark.deep
@pytest.mark.network
def test_the_real_server_of_the_page_runs():
    default_model()
    (example,) = examples("python", "with serve(")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1 smollm2:135m\n", output_of(example))


@pytest.mark.deep
@pytest.mark.network
def test_code_that_imports_vllm_gets_cpuserve():
    default_model()
    (recipe,) = examples("python", 'sys.modules["vllm"]')
    code = (
        "from vllm import LLM, SamplingParams\n"
        "llm = LLM(model='smollm2:135m', max_model_len=512, gpu_memory_utilization=0.5)\n"
        "params = SamplingParams(temperature=0, max_tokens=4)\n"
        "print(llm.generate(['The capital of France is'], params)[0].outputs[0].text)\n"
    )
    assert "Paris" in output_of(recipe + code)


def test_the_workflow_is_the_one_in_examples():
    """`.ci/run lint` checks that file with actionlint."""
    (workflow,) = examples("yaml", "actions/checkout")
    assert EXAMPLE.read_text(encoding="utf-8").partition("\n")[2] == workflow
    assert "examples/github-actions.yml" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
