"""The `docker run` lines of the documents start a server, without rights that vLLM's image needs.

These tests resolve them for a machine that is described as data.
"""

import json
import re
import shlex

import pytest

from tests.config.test_vllm_commands import IMAGE, start
from tests.helpers.docker_line import ROOT, UNNEEDED, documented_lines, parse
from tests.helpers.hosts import got

# The lines of vLLM's pages for its CPU image, and what each line must have here.
OF_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "-e VLLM_CPU_KVCACHE_SPACE=",
    "VLLM_CPU_OMP_THREADS_BIND": "-e VLLM_CPU_OMP_THREADS_BIND=",
    "the cache of the hub": "-v ~/.cache/huggingface:",
    "the token of the hub": "-e HF_TOKEN=",
    "--dtype": "--dtype=bfloat16",
}


@pytest.mark.parametrize("line", documented_lines())
def test_a_documented_line_needs_no_rights_and_starts(line):
    assert not any(flag in line for flag in UNNEEDED)
    run = parse(line)
    assert all(volume.split(":")[1].startswith("/models") for volume in run.volumes)
    arguments = list(run.arguments)
    if not arguments:
        arguments.insert(0, "facebook/opt-125m")
    words = [f"{name}={value}" for name, value in run.environment.items()]
    resolved, _ = start(shlex.join([*words, IMAGE, *arguments]))
    assert got(resolved, "executor") == "native"


@pytest.mark.parametrize("piece", OF_VLLM.values(), ids=OF_VLLM)
def test_what_vllms_lines_set_can_be_set_here(piece):
    assert any(piece in line for line in documented_lines())


def test_the_image_runs_the_command_that_the_lines_assume():
    text = (ROOT / "Dockerfile.cpu").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert json.loads(command) == ["tini", "--", "cpuserve", "serve", "--host", "0.0.0.0"]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]


def test_the_last_stage_which_docker_builds_by_default_has_no_torch():
    text = (ROOT / "Dockerfile.cpu").read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    assert stages[-2:] == [("runtime", "torch"), ("runtime", "cpu")]
    last = text[text.index(" AS cpu\n") :]
    assert "COPY --from=build-cpu " in last
    assert "torch" not in last


def test_a_line_with_an_unknown_flag_is_not_passed_over():
    with pytest.raises(ValueError, match="--privileged"):
        parse("docker run --privileged cpuserve")
