"""LoRA adapters that come and go while the engine runs: the same bits, alone and among others."""

import shutil

import msgspec
import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, InvalidRequest, ModelError
from tests.helpers.adapter import ATTENTION, MLP, adapter_of, as_gguf, merged
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.oracle import transformers_of
from tests.helpers.rounding import assert_likeliest, model_bound
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(3 + 13 * n)] for n in range(5)]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)
FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}
NAMES = [None, "start", "late", "gguf", "late"]


def adapters():
    model = tiny_model("llama")
    return {
        "start": adapter_of(model, ATTENTION + MLP, 4, 1),
        "late": adapter_of(model, ("q_proj", "v_proj", "down_proj"), 8, 2),
        "other": adapter_of(model, ATTENTION + MLP, 16, 3),
    }


def make(given=("start",), **options):
    sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    modules = {"lora_modules": [f"{name}={adapters()[name]}" for name in given]} if given else {}
    changing = {"allow_runtime_lora_updating": True, "max_loras": 3}
    return LLM(str(tiny_model("llama")), **{**changing, **modules, **sizes, **options})


def named(params, name):
    return msgspec.structs.replace(params, adapter=name)


@pytest.mark.deep
@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
def test_a_late_adapter_gives_the_tokens_of_merged_weights(executor):
    with make(executor=executor, **FP32) as llm:
        llm.load_lora_adapter("late", str(adapters()["late"]))
        outputs = llm.generate(PROMPTS, GREEDY, lora_request="late", use_tqdm=False)
    model = transformers_of(merged(tiny_model("llama"), adapters()["late"]))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert_likeliest(
            tokens, logits[len(prompt) - 1 : -1], model_bound(tiny_model("llama"), 160)
        )


@pytest.mark.parametrize("quantization", deep_but(["int8"], [None, "int8"]))
def test_answers_are_the_same_alone_and_among_adapters_of_others(tmp_path, quantization):
    late, file = str(adapters()["late"]), tmp_path / "a.gguf"
    as_gguf(adapters()["other"], "llama", file)
    options = {} if quantization is None else {"quantization": quantization}
    with make(enable_prefix_caching=False, omp_threads_bind="0", **options) as llm:
        before = exact_answers(llm, PROMPTS[:2], [named(SAMPLED, n) for n in NAMES[:2]])
        llm.load_lora_adapter("late", late)
        llm.load_lora_adapter("gguf", str(file))
        alone = [
            exact_answers(llm, [prompt], named(SAMPLED, name))[0]
            for prompt, name in zip(PROMPTS, NAMES, strict=True)
        ]
        assert alone[:2] == before
        plain = exact_answers(llm, PROMPTS, SAMPLED)
        assert all(a != b for a, b in zip(alone[1:], plain[1:], strict=True))
    params = [named(SAMPLED, name) for name in NAMES]
    # In other slots, whole prompts, and a thread for each CPU.
    with make(given=(), max_num_batched_tokens=160, **options) as llm:
        llm.load_lora_adapter("gguf", str(file))
        llm.load_lora_adapter("late", late)
        llm.load_lora_adapter("start", str(adapters()["start"]))
        assert exact_answers(llm, PROMPTS, params) == alone
        assert exact_answers(llm, PROMPTS, params) == alone  # now with cached prefixes


def test_a_reused_slot_keeps_nothing_of_the_adapter_before():
    with make(given=(), max_loras=1, enable_prefix_caching=False) as llm:
        llm.load_lora_adapter("late", str(adapters()["late"]))
        wanted = exact_answers(llm, PROMPTS[:2], named(SAMPLED, "late"))
        for _ in range(2):  # both slots get an adapter of more linears and a higher rank
            llm.unload_lora_adapter("late")
            llm.load_lora_adapter("late", str(adapters()["other"]))
            assert exact_answers(llm, PROMPTS[:2], named(SAMPLED, "late")) != wanted
            llm.load_lora_adapter("late", str(adapters()["late"]), load_inplace=True)
            assert exact_answers(llm, PROMPTS[:2], named(SAMPLED, "late")) == wanted


def test_an_adapter_of_the_same_name_finds_no_prefix_of_the_one_before():
    def cached(llm):
        params = named(SAMPLED, "a")
        return llm.generate(PROMPTS[-1:], params, use_tqdm=False)[0].num_cached_tokens

    with make(given=()) as llm:
        llm.load_lora_adapter("a", str(adapters()["late"]))
        assert [cached(llm), cached(llm)] == [0, 32]
        llm.load_lora_adapter("a", str(adapters()["other"]), load_inplace=True)
        assert [cached(llm), cached(llm)] == [0, 32]
        llm.unload_lora_adapter("a")
        llm.load_lora_adapter("a", str(adapters()["late"]))
        assert cached(llm) == 32  # the content counts, whatever its slot


def test_requests_without_adapter_get_what_they_got_before():
    with make(given=()) as llm:
        before = exact_answers(llm, PROMPTS, SAMPLED)
        llm.load_lora_adapter("late", str(adapters()["late"]))
        assert exact_answers(llm, PROMPTS, SAMPLED) == before


def test_a_file_that_changes_afterwards_changes_no_answer(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters()["late"], folder)
    with make(given=(), enable_prefix_caching=False) as llm:
        llm.load_lora_adapter("a", str(folder))
        before = exact_answers(llm, PROMPTS[:1], named(SAMPLED, "a"))
        (folder / "adapter_model.safetensors").write_bytes(b"")
        assert exact_answers(llm, PROMPTS[:1], named(SAMPLED, "a")) == before


def test_what_cannot_be_loaded_changes_nothing(tmp_path):
    late, other = str(adapters()["late"]), str(adapters()["other"])
    big = str(adapter_of(tiny_model("llama"), ("q_proj",), 32, 5))
    wrong = str(adapter_of(tiny_model("opt"), ("fc1",), 4, 1))
    broken = tmp_path / "broken"
    shutil.copytree(late, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    huge = tmp_path / "huge"
    shutil.copytree(late, huge)
    with (huge / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 40)
    with make(max_loras=2) as llm:
        llm.load_lora_adapter("late", late)
        params = [named(SAMPLED, name) for name in (None, "start", "late", "start", "late")]
        before = exact_answers(llm, PROMPTS, params)
        for name, path, in_place, why in (
            ("late", late, False, "an adapter has this name"),
            ("more", other, False, "there is room for 2 adapters, and start, late are loaded"),
            ("late", big, True, "its rank r is 32, but this server has room for ranks up to 16"),
            ("late", wrong, True, "it is for another model"),
            ("late", str(broken), True, "too few for a header"),
            ("late", str(huge), True, "1 to .* are accepted"),
            ("late", str(tmp_path / "no"), True, "config .* not found"),
            ("late", str(tmp_path / "no.gguf"), True, "not found"),
            ("late", str(tmp_path), True, "config .* not found"),
        ):
            with pytest.raises(InvalidRequest, match=why) as raised:
                llm.load_lora_adapter(name, path, load_inplace=in_place)
            assert "\n" not in str(raised.value)
        assert exact_answers(llm, PROMPTS, params) == before
        with pytest.raises(InvalidRequest, match="no adapter 'more' can be unloaded"):
            llm.unload_lora_adapter("more")


def test_without_the_option_nothing_changes():
    given = [f"late={adapters()['late']}"]
    with LLM(str(tiny_model("llama")), lora_modules=given, max_model_len=96) as llm:
        with pytest.raises(InvalidRequest, match="only change with --allow-runtime-lora-updating"):
            llm.load_lora_adapter("other", str(adapters()["other"]))
        with pytest.raises(InvalidRequest, match="those that can be: none"):
            llm.unload_lora_adapter("late")


def test_a_rank_above_the_most_is_refused_at_the_start():
    with pytest.raises(ModelError, match="room for ranks up to 2; start it with --max-lora-rank 4"):
        make(max_lora_rank=2)


def test_fewer_adapters_than_are_given_cannot_be_the_most():
    with pytest.raises(ConfigError, match="--lora-modules names 2 adapters; give at least 2"):
        make(("start", "late"), max_loras=1)
