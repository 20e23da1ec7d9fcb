"""Child processes run the modules of this process, not files of the working directory."""

import asyncio
import subprocess
import sys

import pytest

from cpuserve.bench.server import serve_command
from cpuserve.engine.process import ProcessClient
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.tokenizer.rendering.client import Renderer
from tests.engine.test_grammars import Engine
from tests.engine.test_process import MODULE
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config

SHADOWS = ("json", "importlib", "socket", "argparse", "msgspec", "cpuserve")


def render():
    own = Renderer()
    try:
        assert own.render("{{ x }}", {"x": 1}) == "1"
    finally:
        own.close()


def start_engine():
    async def main():
        client = ProcessClient.spawn(fake_config(), module=MODULE)
        try:
            await client.wait_ready()
        finally:
            await client.close()

    asyncio.run(main())


def compile_grammar():
    made = Engine()
    try:
        number = made.add(structured_outputs=StructuredOutputs(regex="(ab){100}"))
        made.run(lambda: len(made.outputs.get(number, ())) == 3)
    finally:
        made.core.close()


def run_server():
    done = subprocess.run([*serve_command([]), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


USES = {
    "templates": render,
    "engine": start_engine,
    "grammars": compile_grammar,
    "bench": run_server,
}


@pytest.mark.parametrize("use", deep_but(["engine", "grammars"], USES))
def test_files_of_the_working_directory_are_not_run(use, tmp_path, monkeypatch):
    """A model's directory may have them, and `cpuserve serve .` starts there."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open('{name}.ran', 'w').close()\n")
    USES[use]()
    assert not [*tmp_path.glob("*.ran")]


@pytest.mark.parametrize("use", deep_but(["engine"], USES))
def test_entries_of_the_path_that_are_no_text_are_left_out(use, tmp_path, monkeypatch):
    """Notebooks add a Path, which imports skip."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    USES[use]()
