"""Answers end at the end-of-turn token that any file of the model names, by default."""

import json
import shutil

import numpy as np
import pytest

from cpuserve import LLM, SamplingParams
from tests.helpers import gguf_file
from tests.helpers.depth import deep_but
from tests.helpers.gguf_file import ARRAY, I32, STRING, U32
from tests.helpers.tiny import tiny_model

pytest.importorskip("cpuserve._C")

SIZES = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "seed": 0}
PROMPT = [40, 41, 42]


def model(family, path, *, config=(), end="<|im_end|>", special=True, eos_token="<|endoftext|>"):
    """A tiny model whose turns end with `end` (id 2), while its own files say <|endoftext|> (0).

    config: ids that config.json names. special: of the token `end`.
    """
    shutil.copytree(tiny_model(family), path)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((path / name).read_text())
        ids = {"eos_token_id": list(config)} if name == "config.json" else {}
        found.pop("eos_token_id", None)
        (path / name).write_text(json.dumps({**found, **ids}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (token,) = [t for t in tokenizer["added_tokens"] if t["id"] == 2]
    token.update(content=end, special=special)
    tokenizer["model"]["vocab"][end] = tokenizer["model"]["vocab"].pop("<|im_end|>")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings = json.dumps({**settings, "eos_token": eos_token}).replace("<|im_end|>", end)
    (path / "tokenizer_config.json").write_text(settings)
    return path


def answers(path, end, **options):
    """What a model answers that says token `end` whenever it may.

    (the usual answer, one of at least three tokens, one that ignores ends)
    """
    wishes = ({"max_tokens": 9}, {"max_tokens": 9, "min_tokens": 3})
    wishes += ({"max_tokens": 5, "ignore_eos": True},)
    asked = [SamplingParams(temperature=0.0, logit_bias={end: 100.0}, **more) for more in wishes]
    with LLM(str(path), **{**SIZES, **options}) as llm:
        found = [output.outputs[0] for output in llm.generate([PROMPT] * 3, asked)]
        assert found[1].text == llm.get_tokenizer().decode(
            found[1].token_ids[:3], skip_special_tokens=True
        )
        return found


def assert_ends(path, end, **options):
    usual, later, never = answers(path, end, **options)
    assert (usual.token_ids, usual.text, usual.finish_reason) == ([end], "", "stop")
    assert usual.stop_reason is None
    assert len(later.token_ids) == 4, "three other tokens, then the end"
    assert later.token_ids[3] == end
    assert end not in later.token_ids[:3]
    assert later.finish_reason == "stop"
    assert (never.token_ids, never.finish_reason) == ([end] * 5, "length")


# Each family with the end of a turn that its chat models, or fine-tunes of it, have.
FAMILIES = {
    "llama": "<|end|>",
    "llama3": "<|eot_id|>",
    "mistral": "<|im_end|>",
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "opt": "<|end_of_text|>",
    "opt-350m": "<end_of_turn>",
}


@pytest.mark.parametrize("special", deep_but([True], [True, False]))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_model_with_the_ends_of_its_base_stops_at_its_turns_end(family, special, tmp_path):
    path = model(family, tmp_path / "m", config=[0], end=FAMILIES[family], special=special)
    assert_ends(path, 2)


def test_through_the_torch_executor_too(tmp_path):
    path = model("llama", tmp_path / "m", config=[0])
    assert_ends(path, 2, executor="torch", omp_threads_bind="0")


def test_through_transformers_too(tmp_path):
    pytest.importorskip("transformers")
    path = model("llama", tmp_path / "m", config=[0])
    assert_ends(path, 2, model_impl="transformers", omp_threads_bind="0")


def test_the_tokenizers_eos_token_ends_an_answer(tmp_path):
    path = model("llama", tmp_path / "m", end="<my end>", eos_token="<my end>")
    assert_ends(path, 2)


def test_ids_of_config_json_and_generation_config_json_end_an_answer(tmp_path):
    path = model("llama", tmp_path / "m", config=[7])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8]}))
    for end in (7, 8):
        assert_ends(path, end)


def test_another_tokenizer_than_the_models_knows_the_end(tmp_path):
    path = model("llama", tmp_path / "m", config=[0], end="<not an end>")
    other = model("llama", tmp_path / "other", config=[0], end="<|im_end|>")
    assert_ends(path, 2, tokenizer=str(other))


def gguf_model(path, kinds=(), **keys):
    """A tiny Llama with 300 byte-level tokens; the last are "<a>", "<b>" and those of `kinds`."""
    from tokenizers.pre_tokenizers import ByteLevel

    texts = ["<a>", "<b>", *(text for text, _ in kinds)]
    tokens = [*sorted(ByteLevel.alphabet()), "hi", *texts]
    types = [1] * 257 + [3, 3] + [kind for _, kind in kinds]
    tokenizer = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["h i"])),
        **{f"tokenizer.ggml.{name}_token_id": (U32, i) for name, i in keys.items()},
    }
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((len(tokens), 64)).astype("<f4").tobytes()
    others = [t for t in gguf_file.tiny_tensors(rng) if t[0] != "token_embd.weight"]
    tensors = [("token_embd.weight", (64, len(tokens)), 0, embedding), *others]
    path.write_bytes(gguf_file.gguf(gguf_file.tiny_values(**tokenizer), tensors))
    return path


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_each_key_of_a_gguf_file_ends_an_answer(tmp_path, key):
    """None of the texts says what the token is for; as llama.cpp, all three keys count."""
    keys = {"eos": 257, key: 258}
    assert_ends(gguf_model(tmp_path / "m.gguf", **keys), 258)


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["ordinary", "control", "user-defined"])
def test_a_chatml_gguf_file_whose_eos_is_its_bases_stops_at_its_turns_end(tmp_path, kind):
    path = gguf_model(tmp_path / "m.gguf", [("<|im_end|>", kind)], eos=257)
    assert_ends(path, 259)
