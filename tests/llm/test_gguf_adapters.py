"""GGUF adapters: what PEFT's give, bit for bit, over safetensors and over GGUF models."""

import functools
import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from tests.helpers import gguf_convert
from tests.helpers.adapter import ATTENTION, MLP, WORDS, adapter_of, as_gguf
from tests.helpers.answers import exact
from tests.helpers.depth import deep_but
from tests.helpers.mmproj import split_pairs, write_ggufs
from tests.helpers.pictures import write_grid_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(3 + 13 * n)] for n in range(3)]
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)
# The linears of each architecture. In llama and granite q and k have another order of rows in GGUF
# files, in gptneox q, k and v; phi3 and gptneox store several matrices as one.
PARTS = {
    "llama": ATTENTION + MLP,
    "qwen2": ATTENTION + MLP,
    "granite": ("q_proj", "k_proj"),
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "gptneox": ("query_key_value", "dense_4h_to_h"),
    "gpt2": ("c_attn", "c_fc", "mlp.c_proj"),
    "qwen35": ("in_proj_qkv", "in_proj_z", "q_proj"),
}


def answers(model, adapter):
    """What the model answers without the adapter and with it, to the bit."""
    with LLM(str(model), lora_modules=[f"a={adapter}"], max_model_len=96) as llm:

        def ask(name):
            outputs = llm.generate(PROMPTS, SAMPLED, lora_request=name, use_tqdm=False)
            return [completion for output in outputs for completion in exact(output)]

        return ask(None), ask("a")


@functools.cache
def peft_of(arch):
    return adapter_of(gguf_convert.checkpoint_of(arch), PARTS[arch], 4, 1)


OF_LINEARS = ["llama", "qwen2", "granite", "phi3", "gptneox", "gpt2"]


@pytest.mark.parametrize("arch", deep_but(["llama"], OF_LINEARS))
def test_it_answers_as_pefts_over_safetensors_and_over_a_gguf_model(tmp_path, arch):
    model, adapter = gguf_convert.checkpoint_of(arch), peft_of(arch)
    converted, base = as_gguf(adapter, arch, tmp_path / "a.gguf"), tmp_path / "m.gguf"
    gguf_convert.convert(arch, base)
    plain, changed = answers(model, adapter)
    assert changed != plain
    assert answers(model, converted) == (plain, changed)
    with_gguf = answers(base, adapter)
    assert with_gguf[0] != with_gguf[1]
    assert answers(base, converted) == with_gguf


def test_it_answers_as_pefts_where_both_change_the_table_of_words(tmp_path):
    model = gguf_convert.checkpoint_of("llama")
    adapter = adapter_of(model, (WORDS, "q_proj"), 4, 1)
    plain, changed = answers(model, adapter)
    assert changed != plain
    assert answers(model, as_gguf(adapter, "llama", tmp_path / "a.gguf")) == (plain, changed)


def write_split(adapter, settings, file):
    """Write the attention of an adapter of GLM with M-RoPE as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(file, "glm4")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    for name, value in load_file(adapter / "adapter_model.safetensors").items():
        *_, layer, _, part, side, _ = name.split(".")
        rows = value.numpy()
        if side == "lora_B":
            rows = split_pairs(settings, f"{part}.weight", rows)
        stored = np.ascontiguousarray(rows, np.float32)
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight.{side.lower()}", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.deep
def test_it_answers_as_pefts_over_glm_with_m_rope(tmp_path):
    model = tmp_path / "model"
    write_grid_model("Glm4vForConditionalGeneration", model)
    for file in gguf_convert.checkpoint_of("llama").glob("tokenizer*"):
        shutil.copy(file, model)
    base, _ = write_ggufs(model, tmp_path / "files")
    adapter = adapter_of(model, ATTENTION, 4, 1)
    settings = json.loads((tmp_path / "files" / "text" / "config.json").read_text())
    write_split(adapter, settings, tmp_path / "a.gguf")
    for each in (model, base):
        plain, changed = answers(each, adapter)
        assert changed != plain
        assert answers(each, tmp_path / "a.gguf") == (plain, changed)


def test_it_answers_as_pefts_over_a_quantized_model(tmp_path):
    base = tmp_path / "m.gguf"
    gguf_convert.convert("llama", base, types=[("attn_", "Q8_0"), ("ffn_", "Q4_0")])
    plain, changed = answers(base, peft_of("llama"))
    assert changed != plain
    assert answers(base, as_gguf(peft_of("llama"), "llama", tmp_path / "a.gguf")) == (
        plain,
        changed,
    )


@pytest.mark.parametrize("types", deep_but(["F16"], ["F16", "BF16", "Q8_0"]))
def test_types_of_the_converter_are_read(tmp_path, types):
    model = gguf_convert.checkpoint_of("llama")
    adapter = adapter_of(model, ("q_proj", "o_proj"), 32, 3)
    converted = as_gguf(adapter, "llama", tmp_path / "a.gguf", types)
    # The same adapter with the values that gguf's own reader finds.
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    kind = gguf.GGMLQuantizationType[types]
    for name, value in tensors.items():
        stored = gguf.quants.quantize(value.numpy(), kind)
        tensors[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind)).contiguous()
    save_file(tensors, rounded / "adapter_model.safetensors")
    assert answers(model, converted) == answers(model, rounded)


def test_value_heads_in_the_order_of_another_format_are_refused(tmp_path):
    base = tmp_path / "m.gguf"
    gguf_convert.convert("qwen35", base)
    with pytest.raises(ModelError, match="in another order than those of the model"):
        answers(base, peft_of("qwen35"))
    converted = as_gguf(peft_of("qwen35"), "qwen35", tmp_path / "a.gguf")
    with pytest.raises(ModelError, match="in another order than those of the model"):
        answers(gguf_convert.checkpoint_of("qwen35"), converted)
    # The same sums in another order.
    model = gguf_convert.checkpoint_of("qwen35")
    wanted = [[tokens for tokens, _ in got] for got in answers(model, peft_of("qwen35"))]
    found = [[tokens for tokens, _ in got] for got in answers(base, converted)]
    assert found == wanted
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("llama", {"general__type": "model"}, "its general.type is 'model', but it must be"),
        ("llama", {"adapter__type": None}, "its adapter.type is None, but it must be 'lora'"),
        ("llama", {"adapter__lora__alpha": None}, "its adapter.lora.alpha is None, but it must"),
        ("llama", {"adapter__lora__alpha": float("nan")}, "adapter.lora.alpha is nan, but it must"),
        ("llama", {"general__architecture": "plamo2"}, "architecture 'plamo2' is not supported"),
        ("qwen2", {}, "for another model: its architecture is qwen2, that of the model llama"),
    ],
    ids=["a model", "no type", "no alpha", "alpha is nan", "unknown", "another architecture"],
)
def test_a_file_that_cannot_be_served_is_refused_at_the_start(tmp_path, arch, changes, message):
    file = as_gguf(peft_of(arch), arch, tmp_path / "a.gguf", **changes)
    with pytest.raises(ModelError, match=message) as raised:
        answers(gguf_convert.checkpoint_of("llama"), file)
    assert str(raised.value).startswith("adapter a: ")
    assert "\n" not in str(raised.value)


def write(path, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, shape in tensors.items():
        writer.add_tensor(name, torch.zeros(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q = "blk.0.attn_q.weight.lora_"
K = "blk.0.attn_k.weight.lora_"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}a": (4, 64)}, "q_proj has only one of its matrices A and B"),
        ({"blk.0.attn_norm.weight": (64,)}, "attn_norm.weight is not a matrix lora_a or lora_b"),
        ({f"{Q}a": (4, 64), f"{Q}b": (64, 8)}, r"the ranks \[4, 8\], but all must have one"),
        ({f"{Q}a": (4, 48), f"{Q}b": (48, 4)}, "it is for another model"),
        ({"blk.9.attn_v.weight.lora_a": (4, 64), "blk.9.attn_v.weight.lora_b": (32, 4)}, "no line"),
        (
            {"output.weight.lora_a": (4, 64), "output.weight.lora_b": (9, 4)},
            "output head cannot be",
        ),
        ({f"{K}a": (4, 64), f"{K}b": (31, 4)}, "31 rows, which is not a multiple of"),
        ({f"{Q}a": (600, 64), f"{Q}b": (64, 600)}, "its rank r is 600, but it must be between"),
    ],
    ids=["no B", "norm", "ranks", "shape", "layer", "head", "rows", "rank"],
)
def test_wrong_tensors_are_refused_at_the_start(tmp_path, tensors, message):
    with pytest.raises(ModelError, match=message) as raised:
        answers(gguf_convert.checkpoint_of("llama"), write(tmp_path / "a.gguf", tensors))
    assert "\n" not in str(raised.value)
