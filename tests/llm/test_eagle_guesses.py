"""EAGLE-3 heads: they change no bit, and their guesses are as expected."""

from __future__ import annotations

import pytest

from cpuserve import LLM
from cpuserve.base.errors import ConfigError, ModelError, StartupError
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.loader.load import read_config
from cpuserve.loader.speculation.eagle_heads import open_eagle
from cpuserve.models import spec_from_config
from tests.helpers.depth import deep_but
from tests.helpers.eagle_head import VOCAB, eagle_head, known_ids
from tests.helpers.gguf_convert import convert
from tests.helpers.tiny import copy_of, tiny_model
from tests.llm.test_draft_head import TEXTS, plain_params
from tests.llm.test_speculation import (
    PARAMS,
    PROMPTS,
    SIZES,
    answer,
    check_grammars_and_choices,
    check_no_bit_changes,
)

NAMED = {"config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "reads": 2}
ENDS = ("o_proj.weight", "down_proj.weight")
FAMILIES = (
    *("llama", "qwen3-next", "mixtral", "gemma3", "opt", "olmo2"),
    *("gpt-oss", "deepseek-v3", "granite4-hybrid", "lfm2"),
)


@pytest.fixture
def no_ngrams(monkeypatch):
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """heads(model, **options) = a random head with two layers that the model has."""

    def get(path, **options):
        width = spec_from_config(read_config(path)).width
        return eagle_head(tmp_path_factory.mktemp("eagle") / "head", width, **NAMED, **options)

    return get


def make(path, head=None, tokens=4, **options):
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": tokens}
    options = {**SIZES, "speculate": "auto" if head else "off", **options}
    return LLM(str(path), speculative_config=asked if head else None, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model with a next token that depends on the last one only, and a head that knows how.

    No layer of the model adds anything to the embedding. Each row of the head attends to its own
    token, because queries and keys are the same vector, with the same length in each row. So the
    stream of the head is the embedding of the next token, from which the model computes the token
    after it. Tokens that the head cannot guess have small logits.
    """
    import torch
    from safetensors.torch import load_file, save_file

    options = {"dtype": "float32", "rms_norm_eps": 1e-12, "tie_word_embeddings": False}
    path = copy_of(tiny_model("llama", **options), "sure-")
    tensors, numbers = load_file(path / "model.safetensors"), torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if name.endswith(ENDS):
            tensor.zero_()
    width = len(tensors["model.norm.weight"])
    output = torch.zeros(VOCAB, width)
    output[known_ids()] = torch.randn(len(known_ids()), width, generator=numbers)
    tensors["lm_head.weight"] = output.bfloat16().float()
    table = torch.randn(VOCAB, width, generator=numbers)
    tensors["model.embed_tokens.weight"] = table.bfloat16().float()
    tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def know(tensors, first):
        one = torch.eye(width)
        own = torch.cat([one, 0 * one], dim=1)
        for part in "qkv":
            tensors[f"{first}.self_attn.{part}_proj.weight"] = own
        tensors[f"{first}.self_attn.o_proj.weight"] = one
        # With norms of heads, a row agrees most with itself, and the scale decides how much.
        tensors[f"{first}.self_attn.q_norm.weight"] = torch.full((width // 4,), 100.0)
        tensors[f"{first}.self_attn.k_norm.weight"] = torch.ones(width // 4)
        # The stream begins with the norm of the hidden state: with nothing.
        tensors[f"{first}.hidden_norm.weight"].zero_()
        tensors[f"{first}.mlp.down_proj.weight"].zero_()
        for name in (f"{first}.input_layernorm.weight", "norm.weight"):
            tensors[name].fill_(1.0)
        tensors["lm_head.weight"] = output[known_ids()]

    directory = tmp_path_factory.mktemp("eagle") / "sure"
    head = eagle_head(directory, width, form="library", change=know, **NAMED)
    return path, head


@pytest.mark.parametrize("family", deep_but(["llama", "qwen3-next"], FAMILIES))
def test_a_head_changes_no_bit_alone_or_among_31_others(hasty, heads, family):
    """How a request samples and how a family computes meet only in the logits."""
    path = tiny_model(family, dtype="bfloat16")
    check_no_bit_changes(make, path, heads(path), every=1 if family == "llama" else 5)


@pytest.mark.parametrize("temperature", deep_but([0.8], [0.0, 0.8]))
def test_a_head_that_knows_the_model_is_right(hasty, no_ngrams, pair, heads, temperature):
    path, head = pair
    params = [plain_params(temperature, n) for n in range(len(TEXTS))]
    rates = {}
    with make(path) as llm:
        plain = [answer(o) for o in llm.generate(TEXTS, params)]
    for name, each in {"sure": head, "random": heads(path)}.items():
        with make(path, each) as llm:
            assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
            stats = llm._client.stats
            assert stats.draft_tokens > 50
            rates[name] = stats.accepted_tokens / stats.draft_tokens
    assert rates["sure"] > 0.95
    assert rates["random"] < 0.5


SETTINGS = [
    {"kv_cache_space": "0.0001", "swap_space": "0.01"},
    {"max_num_batched_tokens": 36},
    {"enable_prefix_caching": False},
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"omp_threads_bind": "0"},
]


@pytest.mark.parametrize(
    "options", deep_but(SETTINGS[:1], SETTINGS), ids=lambda options: next(iter(options))
)
def test_a_head_changes_no_bit_with_other_settings(hasty, heads, options):
    path = tiny_model("llama", dtype="bfloat16")
    with make(path, **options) as llm:
        plain = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(path, heads(path), **options) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == plain
        assert llm._client.stats.draft_tokens > 50
        if "kv_cache_space" in options:
            assert llm._client.stats.preemptions > 0


@pytest.mark.deep
def test_a_head_guesses_for_a_gguf_file(hasty, tmp_path, heads):
    path = tmp_path / "m.gguf"
    convert("llama", str(path))
    with make(path) as llm:
        want = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(path, heads(path)) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want
        assert llm._client.stats.draft_tokens > 100


def test_grammars_and_several_choices_have_the_same_bits(hasty, heads):
    path = tiny_model("llama", dtype="bfloat16")
    check_grammars_and_choices(make, path, heads(path, form="norms"))


def test_a_start_refuses_a_head_that_does_not_fit(heads, tmp_path):
    path = tiny_model("llama", dtype="bfloat16")
    wide = eagle_head(tmp_path / "wide", 96, **NAMED)
    with pytest.raises(StartupError, match=r"its fc reads 192 columns, and the model has 2 layers"):
        make(path, wide)
    with pytest.raises(StartupError, match=r"it has no tensor fc.weight, so it is no EAGLE-3 head"):
        make(path, path)
    with pytest.raises(StartupError, match="eagle3 needs the native executor, not torch"):
        make(path, heads(path), executor="torch")
    with pytest.raises(StartupError, match="does not generate text here"):
        make(path, heads(path), pooling="last")
    with pytest.raises((ConfigError, ValueError), match='or a head, with the method "eagle3"'):
        LLM(str(path), **SIZES, speculative_config={"method": "eagle3"})


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("fc.weight", lambda t: t.sum(), "its tensor fc.weight is no matrix"),
        ("lm_head.weight", lambda t: t.sum(), "its tensor lm_head.weight is no matrix"),
        ("d2t", lambda t: t - 1000, "its d2t leads to token -1000,"),
    ],
)
def test_a_head_with_damaged_tensors_is_refused(tmp_path, name, change, why):
    def damage(tensors, _first):
        tensors[name] = change(tensors[name])

    path = tiny_model("llama", dtype="bfloat16")
    width = spec_from_config(read_config(path)).width
    with pytest.raises(ModelError, match=why):
        open_eagle(eagle_head(tmp_path / "h", width, change=damage, **NAMED), path)


def test_the_memory_plan_counts_a_head(heads):
    path, sizes = tiny_model("llama", dtype="bfloat16"), {**SIZES, "kv_cache_space": "0.001"}
    with make(path, **sizes) as llm:
        plain = llm.config.kv_blocks
    with make(path, heads(path), **sizes) as llm:
        assert llm.config.draft.kv_blocks == llm.config.kv_blocks < plain
        assert llm.config.draft.layers == [1, 2]
