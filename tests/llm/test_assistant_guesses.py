"""Assistants of Gemma 4: they change no bit, and their guesses are as expected."""

from __future__ import annotations

import gc
import weakref

import pytest

from cpuserve import LLM
from cpuserve.base.errors import StartupError
from cpuserve.cli.main import main
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.runtime.native import NativeExecutor
from tests.helpers.assistant import assistant
from tests.helpers.depth import deep_but
from tests.helpers.gguf_convert import convert_assistant
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

FAMILIES = ("gemma4", "gemma4-moe")


@pytest.fixture
def no_ngrams(monkeypatch):
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))


@pytest.fixture(scope="module")
def helper(tmp_path_factory):
    """helper(model) = a random assistant of this model."""
    return lambda path: assistant(tmp_path_factory.mktemp("assistant") / "a", path)


def make(path, guesses=None, tokens=4, **options):
    asked = {"method": "mtp", "model": str(guesses), "num_speculative_tokens": tokens}
    options = {**SIZES, "speculate": "auto" if guesses else "off", **options}
    return LLM(str(path), speculative_config=asked if guesses else None, **options)


def quiet(tensors, ends):
    """Let no layer add anything to the stream: the norms of its results are 0."""
    for name, tensor in tensors.items():
        if name.endswith(ends):
            tensor.zero_()
        elif name.endswith("layer_scalar"):
            tensor.fill_(1.0)


ENDS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
MORE = ("post_per_layer_input_norm.weight",)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model whose next token depends on the last one only, and an assistant that knows how.

    The stream of both is the embedding of the last token. The assistant is as wide as the model and
    has the same last norm and the same output matrix.
    """
    import torch
    from safetensors.torch import load_file, save_file

    options = {"rms_norm_eps": 1e-12, "final_logit_softcapping": None}
    path = copy_of(tiny_model("gemma4", **options), "sure-")
    tensors = load_file(path / "model.safetensors")
    quiet(tensors, (*ENDS, *MORE))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    width = len(tensors["model.norm.weight"])

    def know(own):
        quiet(own, ENDS)
        one = torch.eye(width)
        own["pre_projection.weight"] = torch.cat([one, 0 * one], dim=1)
        own["model.norm.weight"] = tensors["model.norm.weight"].float()
        own["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()

    wide = {"text": {"hidden_size": width, "rms_norm_eps": 1e-12}}
    return path, assistant(tmp_path_factory.mktemp("sure") / "a", path, change=know, **wide)


@pytest.mark.parametrize("family", deep_but(["gemma4"], FAMILIES))
def test_an_assistant_changes_no_bit_alone_or_among_31_others(hasty, helper, family):
    path = tiny_model(family, dtype="bfloat16")
    check_no_bit_changes(make, path, helper(path))


@pytest.mark.parametrize("temperature", deep_but([0.8], [0.0, 0.8, 1.2]))
def test_an_assistant_that_knows_the_model_is_right(hasty, no_ngrams, pair, helper, temperature):
    path, sure = pair
    params = [plain_params(temperature, n) for n in range(len(TEXTS))]
    rates = {}
    with make(path) as llm:
        plain = [answer(o) for o in llm.generate(TEXTS, params)]
    for name, each in {"sure": sure, "random": helper(path)}.items():
        with make(path, each) as llm:
            assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
            stats = llm._client.stats
            assert stats.draft_tokens > 50
            rates[name] = stats.accepted_tokens / stats.draft_tokens
            before = stats.draft_tokens, stats.accepted_tokens
            # Prompts that the prefix cache has, and all their keys.
            assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
            stats = llm._client.stats
            drafts, right = stats.draft_tokens - before[0], stats.accepted_tokens - before[1]
            assert stats.prefix_hits > 0
            assert abs(right / drafts - rates[name]) < 0.05
    assert rates["sure"] > 0.95
    assert rates["random"] < 0.5


def test_an_assistant_in_a_gguf_file_changes_no_bit(hasty, no_ngrams, pair, tmp_path):
    path, sure = pair
    file, params = tmp_path / "a.gguf", [plain_params(0.8, n) for n in range(len(TEXTS))]
    convert_assistant(sure, file)
    with make(path) as llm:
        plain = [answer(o) for o in llm.generate(TEXTS, params)]
    with make(path, file) as llm:
        assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
        stats = llm._client.stats
    assert stats.accepted_tokens > 0.95 * stats.draft_tokens > 50


SETTINGS = [
    {"kv_cache_space": "0.0002", "swap_space": "0.01"},
    {"max_num_batched_tokens": 36},
    {"enable_prefix_caching": False},
    {"kv_cache_dtype": "int8_v4"},
    {"quantization": "int8"},
    {"omp_threads_bind": "0"},
    {"tensor_parallel_size": 2, "omp_threads_bind": "nobind", "omp_num_threads": 2},
]


@pytest.mark.parametrize(
    "options", deep_but(SETTINGS[:1], SETTINGS), ids=lambda options: next(iter(options))
)
def test_an_assistant_changes_no_bit_with_other_settings(hasty, helper, options):
    path = tiny_model("gemma4", dtype="bfloat16")
    # Texts that grow, so that not all of them fit into a small cache to their ends.
    prompts = [*(text[:40] for text in TEXTS), *PROMPTS[:16]]
    params = [*(plain_params(0.7, n, 120) for n in range(len(TEXTS))), *PARAMS[:16]]
    with make(path, **options) as llm:
        plain = [answer(o) for o in llm.generate(prompts, params)]
    with make(path, helper(path), **options) as llm:
        assert [answer(o) for o in llm.generate(prompts, params)] == plain
        assert llm._client.stats.draft_tokens > 50
        if "kv_cache_space" in options:
            assert llm._client.stats.preemptions > 0


def test_grammars_and_several_choices_have_the_same_bits(hasty, helper):
    path = tiny_model("gemma4", dtype="bfloat16")
    check_grammars_and_choices(make, path, helper(path))


def test_a_start_refuses_an_assistant_that_does_not_fit(helper):
    path = tiny_model("gemma4", dtype="bfloat16")
    with pytest.raises(StartupError, match="it is no assistant of Gemma 4"):
        make(path, path)
    with pytest.raises(StartupError, match="the model is LlamaForCausalLM, not Gemma 4"):
        make(tiny_model("llama", dtype="bfloat16"), helper(path))
    with pytest.raises(StartupError, match="mtp needs the native executor, not torch"):
        make(path, helper(path), executor="torch")
    with pytest.raises(StartupError, match="does not generate text here"):
        make(path, helper(path), pooling="last")
    named = {"model": str(helper(path))}
    with pytest.raises(StartupError, match=r'is an assistant, which .*"method": "mtp"'):
        LLM(str(path), **SIZES, speculate="auto", speculative_config=named)


@pytest.mark.parametrize("file", ["a.gguf", "a"])
def test_a_start_with_an_assistant_as_the_model_names_the_option(tmp_path, capsys, file):
    source = assistant(tmp_path / "a", tiny_model("gemma4"))
    convert_assistant(source, tmp_path / "a.gguf")
    path = tmp_path / file
    assert main(["serve", str(path)]) == 2
    err = capsys.readouterr().err
    assert " is an assistant, which guesses tokens for another model: give that model, and " in err
    assert err.endswith("""--speculative-config '{"method": "mtp", "model": ASSISTANT}'\n""")
    assert err.count("\n") == 1


def test_an_assistant_has_no_keys_in_the_memory_plan(helper):
    path, sizes = tiny_model("gemma4", dtype="bfloat16"), {**SIZES, "kv_cache_space": "0.002"}
    with make(path, **sizes) as llm:
        plain = llm.config.kv_blocks
    with make(path, helper(path), **sizes) as llm:
        assert llm.config.kv_blocks == plain
        assert llm.config.draft.caches == [2, 1]
        assert llm._client.ask_now("report")["draft_steps"] == 0


def test_a_model_with_an_assistant_frees_its_memory_when_it_sleeps(helper, monkeypatch):
    """The memory of weights and keys waits for no garbage collection."""
    path, found, begin = tiny_model("gemma4", dtype="bfloat16"), [], NativeExecutor.__init__

    def watch(self, *args, **options):
        begin(self, *args, **options)
        found.append(weakref.ref(self.native))

    monkeypatch.setattr(NativeExecutor, "__init__", watch)
    with make(path, helper(path)) as llm:
        llm.generate([PROMPTS[0]], PARAMS[0])
        assert None not in [native() for native in found]
        gc.disable()
        try:
            llm.sleep()
            assert [native() for native in found] == [None, None]
        finally:
            gc.enable()
