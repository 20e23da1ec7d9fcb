"""benchmarks/make_drafts.py: drafters for its models are right as often as the factor says."""

from __future__ import annotations

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from tests.bench.test_engine_benches import script
from tests.helpers.tiny import tiny_model

SIZES = {"vocab_size": 2048, "dtype": "bfloat16"}
SOURCES = {
    "qwen2": {"num_hidden_layers": 6, "hidden_size": 128, "num_key_value_heads": 1},
    "gemma4": {"hidden_size": 512, "vocab_size_per_layer_input": 2048},
}
# The model, what guesses for it, and from which family both are made.
MADE = {
    "draft": ("qwen2", "model", {"model": "draft"}),
    "head": ("qwen2", "head", {"method": "mtp"}),
    "eagle": ("qwen2", "tapped", {"method": "eagle3", "model": "eagle"}),
    "assistant": ("gemma4", "model", {"method": "mtp", "model": "assistant"}),
}
PARAMS = SamplingParams(max_tokens=100, temperature=1.0, seed=1, ignore_eos=True)


def right(directory, name, damping):
    """Return the share of right guesses of a pair that is made with this factor."""
    family, model, asked = MADE[name]
    asked = {**asked, "num_speculative_tokens": 3}
    if "model" in asked:
        asked["model"] = str(directory / asked["model"])
    source = tiny_model(family, **SIZES, **SOURCES[family])
    flags = [f"--damping={damping}", "--known=512"]
    assert script("make_drafts").main([str(source), str(directory), *flags]) == 0
    options = {"max_model_len": 256, "speculate": "auto", "speculative_config": asked}
    with LLM(str(directory / model), **options) as llm:
        (output,) = llm.generate([[5, 9, 30]], PARAMS, use_tqdm=False)
        stats = llm._client.stats
        assert stats.draft_tokens > 50
    assert len(set(output.outputs[0].token_ids)) > 50  # the text does not repeat a few tokens
    return stats.accepted_tokens / stats.draft_tokens


@pytest.mark.deep
@pytest.mark.parametrize("name", MADE)
def test_the_factor_sets_how_often_guesses_are_right(hasty, monkeypatch, tmp_path, name):
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))
    found = [right(tmp_path / str(damping), name, damping) for damping in (0.0, 0.1)]
    assert found[0] > 0.8 > found[1] + 0.1, found


def test_other_models_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="LlamaForCausalLM; give one of Qwen2ForCausalLM"):
        script("make_drafts").main([str(tiny_model("llama")), str(tmp_path / "d")])
