"""The commands and programs of README and guides run as they are, or have a reason why not.

A page runs in order: a block with `cpuserve serve` starts the server for the blocks after it. A
block that cannot run here has the comment `<!-- not run: REASON -->` before it.
"""

import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import DEFAULT_MODEL, default_model, running_server

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLACE = "127.0.0.1:8000"
ADDRESS = f"http://{PLACE}"
RUN = ("index.md", *(f"guides/{path.name}" for path in sorted((DOCS / "guides").glob("*.md"))))
# Guides that other tests run, and the test of each.
ELSEWHERE = {
    "deploy.md": "tests/deploy",
    "agents.md": "tests/clients/agents",
    "testing-your-code.md": "tests/testing",
}
# The code blocks of the README by their first words, and the place that runs each.
README = {
    "pip install . && cpuserve serve": ".ci/run",
    "curl http": "tests/cli/test_readme.py",
    "from openai": "tests/cli/test_readme.py",
    "cpuserve serve Qwen": "tests/meta/test_docs.py",  # understood; the models are large downloads
    "from cpuserve": "tests/cli/test_readme.py",
    "docker build": "tests/in_image.py",
}
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; reason: why it is not run, or None."""

    language: str
    code: str
    reason: str | None


def blocks(text):
    return [Block(m["language"], m["code"], m["reason"]) for m in BLOCK.finditer(text)]


def page(name):
    return blocks((DOCS / name).read_text(encoding="utf-8"))


def serve_arguments(code):
    """(variables, arguments) of a block that is `NAME=value cpuserve serve ...`, else None."""
    words = shlex.split(code)
    if "cpuserve" not in words or words[(at := words.index("cpuserve")) + 1 :][:1] != ["serve"]:
        return None
    assert code.count("\n") == 1, "a block with a server has one line"
    return words[:at], words[at + 2 :] or [DEFAULT_MODEL]


def test_every_guide_is_run_here_or_elsewhere():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("!!python/name:", "")
    (guides,) = (part["Guides"] for part in yaml.safe_load(text)["nav"] if "Guides" in part)
    listed = {name for guide in guides for name in guide.values()}
    assert listed == {*RUN, *ELSEWHERE} - {"index.md"}
    assert [place for place in ELSEWHERE.values() if not (ROOT / place).exists()] == []


def test_every_block_of_the_readme_runs_somewhere():
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) >= len(README)
    for block in found:
        (place,) = (place for words, place in README.items() if block.code.startswith(words))
        assert (ROOT / place).exists()


@pytest.mark.parametrize("name", RUN)
def test_a_block_that_runs_has_a_language_and_a_server_before_it(name):
    served = False
    for block in page(name):
        if block.reason is None:
            assert block.language in ("bash", "python")
            served |= block.language == "bash" and serve_arguments(block.code) is not None
            assert served or PLACE not in block.code


def run(block, directory, url):
    """Run a block against the server at `url`; an HTTP error is a failure."""
    options = child_options(CURL_HOME=str(directory))
    options["env"]["PATH"] = f"{directory}:{options['env']['PATH']}"
    options["cwd"] = directory
    code = block.code.replace(PLACE, urlsplit(url).netloc)
    command = ["bash", "-euo", "pipefail", "-c", code]
    if block.language == "python":
        command = [sys.executable, "-c", code]
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, (code, done.stdout, done.stderr)
    assert done.stdout.strip(), code


@pytest.mark.network
@pytest.mark.deep
@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run(name, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    default_model()
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    command = tmp_path / "cpuserve"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cpuserve "$@"\n')
    command.chmod(0o755)
    with ExitStack() as stack:
        url = ADDRESS
        for block in page(name):
            if block.reason is not None:
                continue
            served = serve_arguments(block.code) if block.language == "bash" else None
            if served is None:
                run(block, tmp_path, url)
                continue
            stack.close()  # a page has one server at a time
            variables, arguments = served
            prefix = ["env", *variables] if variables else ()
            url = stack.enter_context(running_server(*arguments, prefix=prefix)).url
