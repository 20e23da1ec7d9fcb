"""`cpuserve size --recommend`: known models, counted from their sizes and bounded by a machine."""

import json

import pytest

from cpuserve.cli import main as cli
from cpuserve.cli.recommend import KNOWN, LEAST_CONTEXT, advice, fit_of, weights_of
from cpuserve.cli.size import INSTANCES, Instance

GIB = 1 << 30
# The numbers of parameters that their authors publish, in billions; a tied head counts once.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.3618,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.711,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-32B": 32.76,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_the_parameters_that_its_authors_publish(name):
    weights = weights_of(name)
    count = (weights.matrices + weights.others) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=0.005)


def machine(gib, gb_per_s):
    return Instance("m", "cpu", 4, gib * GIB, gb_per_s * 1e9, "avx2")


def test_a_format_fits_with_a_context_and_is_precise_only_if_it_is_fast():
    weights = weights_of("Qwen/Qwen3-4B")
    fits = {
        bandwidth: fit_of(machine(64, bandwidth), weights).format for bandwidth in (20, 50, 200)
    }
    assert [fits[b].format for b in (20, 50, 200)] == ["int4/q4_k", "int8/q8_0", "bf16"]
    for bandwidth, found in fits.items():
        bits = {"bf16": 16, "int8/q8_0": 8.5, "int4/q4_k": 4.5}[found.format]
        rate = bandwidth * 1e9 / (weights.read * bits / 8)
        assert found.decode_tokens_per_s == pytest.approx(rate)
        assert found.context >= LEAST_CONTEXT
    assert fit_of(machine(2, 200), weights).format is None


def test_a_mixture_reads_only_its_chosen_experts():
    dense, mixture = weights_of("Qwen/Qwen3-32B"), weights_of("Qwen/Qwen3-30B-A3B")
    assert dense.read / mixture.read > 8


def test_the_advice_is_the_largest_model_that_writes_as_fast_as_people_read():
    fits = [fit_of(machine(16, 50), weights_of(name)) for name in KNOWN]
    assert "cpuserve run Qwen/Qwen3-8B --quantization int4" in advice(fits)
    slow = [fit_of(machine(16, 0.1), weights_of(name)) for name in KNOWN]
    assert "no known model reaches" in advice(slow)


def test_the_command_prints_the_models_of_a_machine_and_takes_no_other_option(capsys):
    assert cli.main(["size", "--recommend", "--instance", "c7i.4xlarge"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in KNOWN)
    assert "cpuserve run" in out
    assert cli.main(["size", "--recommend", "--instance", "c7i.4xlarge", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["memory_bytes"] == INSTANCES["c7i.4xlarge"].memory_bytes
    assert [each["model"] for each in found["models"]] == [*KNOWN]
    assert cli.main(["size", "smollm2:135m", "--recommend"]) == 2
    assert "has no effect on --recommend" in capsys.readouterr().err
