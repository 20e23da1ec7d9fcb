"""The comparisons with other engines: the list of comparisons, and the printed table."""

import argparse
import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from cpuserve.bench.driver import Timing

PEERS = Path(__file__).parents[2] / "benchmarks/peers"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.setitem(sys.modules, "run", load("run"))
    return load("suite")


def load(name):
    spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_model_gives_every_comparison(suite):
    found = suite.comparisons("DIR", ["m.bf16.gguf", "m-Q8_0.gguf", "m.Q4_0.gguf"])
    assert list(found) == ["bf16", "Q8_0", "Q4_0", "w8a8"]
    assert found["bf16"] == [
        "DIR",
        "--peers",
        "vllm",
        "llama",
        "--from-dir",
        "--gguf",
        "m.bf16.gguf",
    ]
    assert found["Q4_0"] == ["DIR", "--gguf", "m.Q4_0.gguf", "--peers", "llama", "openvino"]
    assert "--own=--quantization=w8a8" in found["w8a8"]


def test_without_files_there_is_bf16_against_vllm(suite):
    assert suite.comparisons("DIR", []) == {"bf16": ["DIR", "--peers", "vllm"]}


def test_a_file_says_its_type(suite):
    assert suite.type_of("a/SmolLM2-135M-Instruct.Q4_1.gguf") == "Q4_1"
    with pytest.raises(SystemExit, match="its type"):
        suite.type_of("model.gguf")


def test_a_failed_comparison_does_not_stop_the_others(suite, monkeypatch, capsys):
    def main(argv):
        if "--gguf" not in argv:
            raise SystemExit("vllm did not start")
        print("a table")

    monkeypatch.setattr(suite.run, "main", main)
    assert suite.main(["DIR", "m.Q4_0.gguf", "--rounds", "1"]) == 1
    out = capsys.readouterr().out
    assert "failed: vllm did not start" in out
    assert "## Q4_0\n\na table" in out
    with pytest.raises(SystemExit, match="no comparison"):
        suite.main(["DIR", "--only", "Q9"])


def test_ratios_are_of_rounds_and_the_best_peer_of_each(suite, capsys):
    rates = {"cpuserve": [10, 40, 30], "llama": [5, 10, 30], "openvino": [4, 20, 10]}
    samples = {
        name: [{"decode": v, "8 streams": v} for v in values] for name, values in rates.items()
    }
    for sample in samples["openvino"]:
        del sample["8 streams"]
    suite.run.table(samples)
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert rows["llama"] == "| llama | 10.0 | 2.00 x | 10.0 | 2.00 x |"
    assert rows["openvino"] == "| openvino | 10.0 | 2.50 x |  |  |"
    assert rows["the best of them"] == "| the best of them | 20.0 | 2.00 x | 10.0 | 2.00 x |"


@pytest.mark.parametrize(("name", "scenario"), [("run", "rates"), ("prefix", "ratios")])
def test_prompts_are_ordinary_ids_of_any_vocabulary(monkeypatch, suite, name, scenario):
    asked = []

    async def complete(_, prompt, tokens):
        asked.extend(prompt)
        stamps = [1.0 + i for i in range(tokens)]
        return Timing(0.5, stamps, [1] * tokens)

    module = load(name)
    monkeypatch.setattr(module, "complete", complete)
    args = argparse.Namespace(vocab=120, prompt_tokens=16, output_tokens=4, streams=[2])
    found = asyncio.run(getattr(module, scenario)(None, args))
    assert all(value > 0 for value in found.values())
    assert max(asked) < 120


def test_a_peer_that_fails_says_why():
    engine = load("run").ScriptEngine("llama", "llama_bench.py", ())
    engine.command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(SystemExit, match="llama ended with exit code 1: no such model"):
        engine.measure(None)
    engine.command = [sys.executable, "-c", "print('loading'); print('{\"decode\": 2}')"]
    assert engine.measure(None) == {"decode": 2}
