"""LoRA adapters through the whole engine: merged weights in transformers, and batch invariance."""

import json

import msgspec
import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, InvalidRequest, ModelError
from tests.helpers.adapter import ATTENTION, MLP, WORDS, adapter_of, merged
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.oracle import transformers_of
from tests.helpers.quantized import quantized_copy
from tests.helpers.rounding import assert_likeliest, assert_same_choices, model_bound
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(3 + 13 * n)] for n in range(5)]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)
FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def adapters(family="llama"):
    model, gpt2 = tiny_model(family), family == "gpt2"
    return {
        "all": adapter_of(model, GPT2 if gpt2 else ATTENTION + MLP, 4, 1),
        "q": adapter_of(model, ("c_attn",) if gpt2 else ("q_proj", "v_proj"), 8, 2),
    }


GPT2 = ("c_attn", "c_fc", "c_proj")


def make(family="llama", **options):
    sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    given = [f"{name}={path}" for name, path in adapters(family).items()]
    path = str(tiny_model(family))
    return LLM(path, lora_modules=given, **{"executor": "native", **sizes, **options})


def named(params, name):
    return msgspec.structs.replace(params, adapter=name)


# Of phi3 and glm4 some matrices are parts of stored ones, in glm4 every other row of them; gpt2
# stores their transposes.
@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", deep_but(["llama", "gpt2"], ["llama", "qwen2", "qwen3", "phi3", "glm4", "gpt2"])
)
@pytest.mark.parametrize("name", ["all", "q"])
def test_greedy_tokens_are_those_of_transformers_with_merged_weights(family, name):
    with make(family, **FP32) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, lora_request=name, use_tqdm=False)
    model = transformers_of(merged(tiny_model(family), adapters(family)[name]))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert_likeliest(tokens, logits[len(prompt) - 1 : -1], model_bound(tiny_model(family), 160))


@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
def test_adapters_of_the_table_of_words_give_the_tokens_of_merged_weights(executor):
    model = tiny_model("llama", tie_word_embeddings=False)
    given = {
        "words": adapter_of(model, (WORDS, "q_proj"), 4, 1),
        "more": adapter_of(model, (WORDS,), 8, 2),
        "none": adapter_of(model, ("v_proj",), 4, 3),
    }
    modules = [f"{name}={path}" for name, path in given.items()]
    params = [named(GREEDY, name) for name in given]
    with LLM(str(model), max_model_len=160, lora_modules=modules, executor=executor, **FP32) as llm:
        alone = [exact_answers(llm, [PROMPTS[2]], own)[0] for own in params]
        assert exact_answers(llm, [PROMPTS[2]] * 3, params) == alone
    for (tokens, _), path in zip(alone, given.values(), strict=True):
        with torch.inference_mode():
            logits = transformers_of(merged(model, path))(torch.tensor([PROMPTS[2] + tokens]))
        rows = logits.logits[0, len(PROMPTS[2]) - 1 : -1]
        assert_likeliest(tokens, rows, model_bound(model, 160))


@pytest.mark.deep
def test_the_torch_executor_gives_the_same_tokens():
    params, found = named(msgspec.structs.replace(GREEDY, logprobs=2), "all"), []
    for executor in ("native", "torch"):
        with make(executor=executor, **FP32) as llm:
            found.append(exact_answers(llm, PROMPTS[:2], params))
    assert_same_choices(*found, model_bound(tiny_model("llama"), 160))


def test_adapters_of_matrices_in_activation_order_read_rows_as_they_were(tmp_path):
    model = tiny_model("llama", intermediate_size=192)
    path = str(quantized_copy(model, "gptq", tmp_path / "m"))
    given = [f"all={adapter_of(model, ATTENTION + MLP, 4, 1)}"]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=8, adapter="all")
    found = []
    for executor in ("torch", "native"):
        with LLM(path, lora_modules=given, executor=executor, max_model_len=160, **FP32) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found.append([output.outputs[0].logprobs[0] for output in outputs])
    for slow, fast in zip(*found, strict=True):
        both = slow.keys() & fast.keys()
        assert len(both) >= 6
        # Rows have 8 bits here, which costs 0.02; without the adapter other tokens come first.
        assert max(abs(slow[token].logprob - fast[token].logprob) for token in both) < 0.1


def test_answers_do_not_depend_on_neighbours_adapters_of_others_threads_or_chunks():
    names = [None, "all", "q", "all", None]
    with make(enable_prefix_caching=False, omp_threads_bind="0") as llm:
        alone = [
            exact_answers(llm, [prompt], named(SAMPLED, name))[0]
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        assert alone[1] != exact_answers(llm, [PROMPTS[1]], SAMPLED)[0]
    params = [named(SAMPLED, name) for name in names]
    with make(max_num_batched_tokens=160) as llm:  # whole prompts, a thread for each CPU
        assert exact_answers(llm, PROMPTS, params) == alone
        assert exact_answers(llm, PROMPTS, params) == alone  # now with cached prefixes


def test_guessed_tokens_change_no_answer_of_an_adapter():
    repeats = [[5, 6, 7, 8] * 8, [9, 10, 11] * 9]
    params = [named(SAMPLED, "all"), named(SAMPLED, None)]
    with make() as llm:
        plain = exact_answers(llm, repeats, params)
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with make(speculative_config=guess, speculate="auto") as llm:
        assert exact_answers(llm, repeats, params) == plain


def test_requests_without_adapter_get_what_the_model_alone_gives():
    with make(**FP32) as llm:
        got = [tokens for tokens, _ in exact_answers(llm, PROMPTS, GREEDY)]
    with LLM(str(tiny_model("llama")), max_model_len=160, **FP32) as llm:
        assert [tokens for tokens, _ in exact_answers(llm, PROMPTS, GREEDY)] == got


def test_adapters_share_no_cached_prefixes():
    with make() as llm:

        def cached(name):
            params = named(SAMPLED, name)
            return llm.generate(PROMPTS[-1:], params, use_tqdm=False)[0].num_cached_tokens

        assert [cached(name) for name in (None, "all", "q", None, "all", "q")] == [0] * 3 + [32] * 3


def test_an_unknown_adapter_is_refused():
    with make() as llm, pytest.raises(InvalidRequest, match="no adapter 'other'"):
        llm.generate("hello", lora_request="other")


def changed(tmp_path, source, **config):
    target = tmp_path / "adapter"
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    stored = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**stored, **config}))
    return target


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "adapter a: its peft_type is IA3, but it must be LORA"),
        ({"use_dora": True}, "adapter a: use_dora is True, which is not supported"),
        ({"r": 0}, "adapter a: its rank r is 0, but it must be between 1 and 512"),
        ({"r": 5}, r"is \[4, 160\], but the rank r is 5"),
        ({"lora_alpha": "high"}, "its lora_alpha is 'high', but it must be a number"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_at_the_start(tmp_path, config, message):
    adapter = changed(tmp_path, adapters()["all"], **config)
    with pytest.raises(ModelError, match=message) as raised:
        LLM(str(tiny_model("llama")), lora_modules=[f"a={adapter}"])
    assert "\n" not in str(raised.value)


def test_an_adapter_of_another_model_is_refused():
    with pytest.raises(ModelError, match=r"adapter a: it is for another model: .* is \[.*\]"):
        LLM(str(tiny_model("llama", hidden_size=128)), lora_modules=[f"a={adapters()['all']}"])
    opt = adapter_of(tiny_model("opt"), ("fc1",), 4, 1)
    with pytest.raises(ModelError, match="this one has no linear"):
        LLM(str(tiny_model("llama")), lora_modules=[f"a={opt}"])


def test_an_adapter_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"adapter a: config .* not found"):
        LLM(str(tiny_model("llama")), lora_modules=[f"a={tmp_path / 'no'}"])


def test_an_adapter_cannot_have_the_name_of_the_model():
    given = [f"tiny={adapters()['all']}"]
    with pytest.raises(ConfigError, match="tiny is the name of the model itself"):
        LLM(str(tiny_model("llama")), lora_modules=given, served_model_name=["tiny"])


def test_adapters_of_mixtures_and_of_other_implementations_are_refused():
    given = [f"a={adapter_of(tiny_model('qwen3-moe'), ('q_proj',), 4, 1)}"]
    with pytest.raises(ModelError, match="adapters of a mixture of experts are not supported"):
        LLM(str(tiny_model("qwen3-moe")), lora_modules=given)
    given = [f"a={adapters()['all']}"]
    with pytest.raises(ConfigError, match="runs on the transformers library"):
        LLM(str(tiny_model("llama")), lora_modules=given, model_impl="transformers")
