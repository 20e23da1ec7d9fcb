"""LongRoPE has the factors of the longest request that the server takes, as in vLLM.

transformers has those of the sequence at hand. So both agree on short prompts if no request may be
longer than the original context, and on long ones otherwise.
"""

import numpy as np
import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError
from cpuserve.cli import banner
from cpuserve.config.load import from_arguments
from cpuserve.prepare import prepare
from tests.helpers import gguf_convert
from tests.helpers.oracle import transformers_logits
from tests.helpers.tiny import tiny_model

ORIGINAL, LONGEST = 64, 512
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(LONGEST)]


def factors(half):
    return {
        "long_factor": [1.0 + 0.5 * i for i in range(half)],
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
    }


# The forms of configs, small: all dimensions turn in Phi-3.5, three of four in Phi-4-mini.
MODELS = {
    "phi-3.5": (8, {"rope_scaling": {"type": "longrope"}, "original": True}),
    "phi-3": (8, {"rope_scaling": {"type": "su"}, "original": True}),
    "phi-4-mini": (
        6,
        {
            "rope_scaling": {"type": "longrope"},
            "original": True,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "transformers-5": (
        8,
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}, "original": True},
    ),
}


def model(name, *, forced=False):
    """A tiny model of that form; forced: its short factors are the long ones."""
    half, changes = MODELS[name]
    changes = {"sliding_window": None, "max_position_embeddings": LONGEST, **changes}
    key = "rope_parameters" if "rope_parameters" in changes else "rope_scaling"
    scaling = {**changes[key], **factors(half)}
    if forced:
        scaling["short_factor"] = scaling["long_factor"]
    number = {"original_max_position_embeddings": ORIGINAL}
    if changes.pop("original", False):
        changes |= number
    # transformers 5 writes the number in both places, and reads it there with the type "su".
    if key == "rope_parameters" or scaling["type"] == "su":
        scaling |= number
    return tiny_model("phi3", **{**changes, key: scaling})


def prompt_logprobs(path, tokens, **options):
    """Logprobs of all tokens but the first, from the whole engine in fp32."""
    types = {"dtype": "float32", "kv_cache_dtype": "float32"}
    with LLM(str(path), max_num_batched_tokens=24, **types, **options) as llm:
        (output,) = llm.generate([tokens], SCORED)
    found = output.prompt_logprobs
    return torch.tensor([found[i][token].logprob for i, token in enumerate(tokens) if i])


def expected(path, tokens):
    rows = transformers_logits(path, tokens).log_softmax(dim=1)
    return rows[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("length", [None, 40, ORIGINAL])
@pytest.mark.parametrize("name", MODELS)
def test_short_prompts_are_those_of_transformers_within_the_original_context(
    name, length, executor
):
    path, tokens = model(name), TOKENS[:37]
    got = prompt_logprobs(path, tokens, max_model_len=length, executor=executor)
    assert (got - expected(path, tokens)).abs().max() < 1e-3
    assert (got - expected(model(name, forced=True), tokens)).abs().max() > 1e-2


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("length", [ORIGINAL + 1, 200, LONGEST])
@pytest.mark.parametrize("name", MODELS)
def test_longer_requests_have_the_long_factors_from_their_first_token(name, length, executor):
    path, short = model(name), TOKENS[:37]
    options = {"max_model_len": length, "executor": executor}
    got = prompt_logprobs(path, short, **options)
    assert (got - expected(model(name, forced=True), short)).abs().max() < 1e-3
    if length > 150:
        tokens = TOKENS[:150]
        assert (
            prompt_logprobs(path, tokens, **options) - expected(path, tokens)
        ).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("asked", "length", "factors_", "why"),
    [
        ({}, ORIGINAL, "short", "no request is longer than the original 64 tokens"),
        ({"max_model_len": 32}, 32, "short", "no request is longer than the original 64 tokens"),
        ({"max_model_len": -1}, ORIGINAL, "short", "no request is longer"),
        ({"max_model_len": 65}, 65, "long", "longer than the original 64 tokens"),
        ({"max_model_len": LONGEST}, LONGEST, "long", "which --max-model-len 64 avoids"),
        (
            {"max_model_len": 2 * LONGEST, "allow_long_model_len": True},
            2 * LONGEST,
            "long",
            "longer than the original 64 tokens",
        ),
    ],
)
def test_the_banner_and_the_decisions_say_which_factors(asked, length, factors_, why):
    prepared = prepare(from_arguments({"model": str(model("phi-3.5")), **asked}, environ={}))
    config = prepared.resolved.config
    assert (config.max_model_len, config.long_rope) == (length, factors_ == "long")
    shown = " ".join(banner.render(prepared).split())
    assert f"RoPE {factors_} factors (" in shown
    assert why in shown
    assert "long_rope" in {d.field for d in prepared.resolved.decisions}
    if not asked:
        assert f"--max-model-len may be up to {LONGEST}" in shown


def test_a_model_without_longrope_has_no_such_decision():
    prepared = prepare(from_arguments({"model": str(tiny_model("llama3"))}, environ={}))
    assert not prepared.resolved.config.long_rope
    assert "factors (" not in banner.render(prepared)
    assert "long_rope" not in {d.field for d in prepared.resolved.decisions}


def dynamic(factor):
    scaling = {"rope_type": "dynamic", "factor": factor}
    return tiny_model("llama", rope_scaling=scaling, max_position_embeddings=ORIGINAL)


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_dynamic_ntk_has_the_base_of_its_longest_requests(executor):
    """transformers has the base of the length at hand, so both agree on the longest texts."""
    path, tokens = dynamic(3.0), TOKENS[: 3 * ORIGINAL]
    got = prompt_logprobs(path, tokens[:-1], max_model_len=3 * ORIGINAL, executor=executor)
    assert (got - expected(path, tokens)[:-1]).abs().max() < 1e-3
    short = TOKENS[: ORIGINAL - 1]  # after a longer text, transformers keeps its base for 64
    want = expected(path, short)
    got = prompt_logprobs(path, short[:-1], max_model_len=None, executor=executor)
    assert (got - want[:-1]).abs().max() < 1e-3
    got = prompt_logprobs(path, short[:-1], max_model_len=ORIGINAL + 1, executor=executor)
    assert (got - want[:-1]).abs().max() > 1e-2


def test_dynamic_ntk_is_plain_unless_longer_requests_are_asked_for():
    for asked, length, factors_ in (
        ({}, ORIGINAL, "short"),
        ({"max_model_len": 3 * ORIGINAL}, 3 * ORIGINAL, "long"),
    ):
        arguments = {"model": str(dynamic(3.0)), **asked}
        prepared = prepare(from_arguments(arguments, environ={}))
        config = prepared.resolved.config
        assert (config.max_model_len, config.long_rope) == (length, factors_ == "long")
        assert f"RoPE {factors_} factors (" in " ".join(banner.render(prepared).split())
    with pytest.raises(ConfigError, match="give at most 192"):
        prepare(from_arguments({"model": str(dynamic(3.0)), "max_model_len": 193}, environ={}))


@pytest.mark.deep
def test_gguf_files_choose_by_the_same_rule(tmp_path):
    source, path = model("phi-3.5"), tmp_path / "phi3.gguf"
    more = {
        f"rope_factors_{key.removesuffix('_factor')}.weight": np.array(values, np.float32)
        for key, values in factors(8).items()
    }
    original = {"rope.scaling.original_context_length": ORIGINAL}
    gguf_convert.convert("phi3", path, source=source, more=more, **original)
    tokens = TOKENS[:37]
    for length in (None, ORIGINAL, ORIGINAL + 1):
        mine = prompt_logprobs(path, tokens, max_model_len=length)
        theirs = prompt_logprobs(source, tokens, max_model_len=length)
        assert (mine - theirs).abs().max() < 1e-3


# Configs of Qwen have the longest position before scaling, others the one after it.
YARNS = {"before": ("qwen2", ORIGINAL), "after": ("llama", 4 * ORIGINAL)}


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("kind", YARNS)
def test_yarn_has_the_logits_of_transformers_up_to_its_factor_times_the_original(kind, executor):
    family, longest = YARNS[kind]
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    path = tiny_model(family, max_position_embeddings=longest, rope_scaling=scaling)
    tokens = TOKENS[: 4 * ORIGINAL - 1]
    got = prompt_logprobs(path, tokens, executor=executor)
    assert (got - expected(path, tokens)).abs().max() < 1e-3
    plain = tiny_model(family, max_position_embeddings=4 * ORIGINAL)
    assert (got - expected(plain, tokens)).abs().max() > 1e-2
