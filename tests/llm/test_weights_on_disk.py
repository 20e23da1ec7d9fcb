"""Weights in files: the same bits as packed ones, at the next start too, and after damage."""

import json
import subprocess
import sys
import threading

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base import fault_points
from cpuserve.base.errors import StartupError
from cpuserve.loader import packed_files
from cpuserve.runtime import packed_cache
from tests.helpers.answers import exact_answers
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.once import Once
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(5 + 20 * n)] for n in range(3)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
# An engine of another process, which says whether it packed the weights.
CHILD = """
import json, sys
from cpuserve import LLM, SamplingParams
from cpuserve.base.log import configure
configure("info")
prompts, model = json.loads(sys.argv[1]), sys.argv[2]
with LLM(model, executor="native", weights_on_disk="always", max_model_len=256) as llm:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    print(json.dumps([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]))
"""


@pytest.fixture
def folder(folder, monkeypatch):
    """The directory of the files, which have small models too."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    return folder


def make(family="qwen3-moe", **options):
    path = tiny_model(family, dtype="bfloat16")
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(str(path), executor="native", **{**sizes, **options})


def answers(llm):
    return exact_answers(llm, PROMPTS, PARAMS)


def in_memory(**options):
    with make(weight_cache_size="0", **options) as llm:
        return answers(llm)


def wait_for_file():
    """Wait until the thread that writes the file has ended."""
    for thread in threading.enumerate():
        if thread.name == "cpuserve-weights":
            thread.join()


@pytest.mark.parametrize("scheme", [None, "int4_mixed"])
@pytest.mark.parametrize("ranks", deep_but([2], [1, 2]))
def test_mapped_weights_give_the_same_bits_now_and_at_the_next_start(folder, scheme, ranks, caplog):
    expected = in_memory(quantization=scheme)
    options = {"quantization": scheme, "weights_on_disk": "always", "tensor_parallel_size": ranks}
    if ranks == 2:
        options["omp_threads_bind"] = "nobind"
        options["omp_num_threads"] = 2
    with caplog.at_level("INFO", "cpuserve"), make(**options) as llm:
        assert answers(llm) == expected
    assert "the weights are mapped from" in caplog.text
    assert "read packed weights" not in caplog.text
    (file,) = folder.glob("*.weights")
    with caplog.at_level("INFO", "cpuserve"), make(**options) as llm:
        assert answers(llm) == expected
    assert f"read packed weights from {file}" in caplog.text


@pytest.mark.parametrize("scheme", deep_but(["int4"], ["int8", "w8a8", "int4"]))
def test_quantized_weights_are_read_at_the_next_start(folder, scheme, caplog):
    expected = in_memory(quantization=scheme)
    for _ in range(2):
        with caplog.at_level("INFO", "cpuserve"), make(quantization=scheme) as llm:
            assert answers(llm) == expected
            wait_for_file()
    assert caplog.text.count("are kept for the next start in") == 1
    assert caplog.text.count("read packed weights from") == 1


def test_another_model_of_the_same_shape_gets_its_own_file(folder):
    with make(quantization="int8"):
        wait_for_file()
    other = tiny_model("qwen3-moe", dtype="bfloat16", seed=1)
    options = {"executor": "native", "quantization": "int8", "max_model_len": 256}
    with LLM(str(other), weight_cache_size="0", **options) as llm:
        expected = answers(llm)
    with LLM(str(other), **options) as llm:
        wait_for_file()
        assert answers(llm) == expected
    assert len(list(folder.glob("*.weights"))) == 2


@pytest.mark.parametrize("mapped", deep_but(["always"], ["always", "never"]))
@pytest.mark.parametrize("damage", ["byte", "cut"])
def test_a_damaged_file_is_made_anew_with_one_line(folder, mapped, damage, caplog):
    options = {"quantization": "int8", "weights_on_disk": mapped}
    with make(**options) as llm:
        expected = answers(llm)
        wait_for_file()
    (file,) = folder.glob("*.weights")
    with file.open("r+b") as stream:
        if damage == "cut":
            stream.truncate(file.stat().st_size - 4096)
        else:
            stream.seek(packed_files.HEADER_BYTES + 100_000)
            byte = stream.read(1)[0]
            stream.seek(packed_files.HEADER_BYTES + 100_000)
            stream.write(bytes([byte ^ 64]))
    with make(**options) as llm:
        assert answers(llm) == expected
        wait_for_file()
    warnings = [r for r in caplog.records if r.levelname == "WARNING" and "anew" in r.message]
    assert len(warnings) == 1
    with make(**options) as llm:
        assert answers(llm) == expected
    assert len([r for r in caplog.records if "anew" in r.message]) == 1


def test_a_folder_that_cannot_be_used_costs_one_line_or_is_refused(folder, caplog):
    folder.write_text("in the way")
    with make(quantization="int8") as llm:
        wait_for_file()
        assert answers(llm) == in_memory(quantization="int8")
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == 1
    assert lines[0].startswith("the quantized weights are not kept for the next start: ")
    with pytest.raises(StartupError, match="CPUSERVE_CACHE to a directory with room"):
        make(weights_on_disk="always")


@pytest.mark.parametrize("action", ["ENOSPC", "EIO", "short"])
def test_a_write_that_fails_leaves_no_file_and_a_short_one_goes_on(
    folder, action, caplog, monkeypatch
):
    fails = Once("packed.write", action)
    monkeypatch.setattr(fault_points, "_hook", fails)
    with make(quantization="int8") as llm:
        wait_for_file()
        expected = answers(llm)
    assert fails.fired
    assert len(list(folder.glob("*.weights"))) == (action == "short")
    assert not list(folder.glob(".*.tmp"))
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == (action != "short")
    with make(quantization="int8") as llm:
        assert answers(llm) == expected
        wait_for_file()
    assert len(list(folder.glob("*.weights"))) == 1


def test_adapters_keep_weights_out_of_files(folder):
    with make("llama", quantization="int8", allow_runtime_lora_updating=True):
        wait_for_file()
    assert not folder.exists()


@pytest.mark.deep
def test_engines_that_start_at_once_share_one_file(tmp_path):
    model = tiny_model("qwen3-moe", dtype="bfloat16")
    command = [sys.executable, "-c", CHILD, json.dumps(PROMPTS), str(model)]
    children = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **child_options(CPUSERVE_CACHE=str(tmp_path)),
        )
        for _ in range(3)
    ]
    ends = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], ends
    assert len({out for out, _ in ends}) == 1
    assert len(list((tmp_path / packed_cache.FOLDER).glob("*.weights"))) == 1
    assert sum("read packed weights from" in log for _, log in ends) == 2
