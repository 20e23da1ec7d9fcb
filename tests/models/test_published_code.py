"""Families that transformers does not have: their checkpoints as another family's there."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.model import bytes_in_memory
from cpuserve.loader.gguf.parts import open_gguf
from cpuserve.loader.load import open_checkpoint, read_config
from cpuserve.models import decoders, spec_from_config
from cpuserve.quant import dequantize
from tests.helpers import gguf_convert
from tests.helpers.answers import exact_answers
from tests.helpers.gguf_archs import DEEPSEEK_MOE, ORION, PANGU, PUZZLE
from tests.helpers.oracle import (
    interpreter_of,
    program_of,
    transformers_logits,
    transformers_of,
)
from tests.helpers.tiny import tiny_config, tiny_model
from tests.models.test_families import TOKENS, logits_of

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


def granite_of(path, to):
    """MiniCPM's checkpoint as Granite's: the constants have other keys."""
    shutil.copytree(path, to)
    config = json.loads((path / "config.json").read_text())
    depth = config["scale_depth"] / config["num_hidden_layers"] ** 0.5
    constants = {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "tie_word_embeddings": True,
        "embedding_multiplier": config["scale_emb"],
        "residual_multiplier": depth,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
        "attention_multiplier": (config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
    }
    (to / "config.json").write_text(json.dumps({**config, **constants}))
    return to


NAMES = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "model.tok_embeddings": "model.embed_tokens",
}


def llama_of(path, to):
    """InternLM 2's checkpoint as Llama's: the groups of heads are taken apart."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    kv, heads = config["num_key_value_heads"], config["num_attention_heads"]
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        if "attention.wqkv" in name:
            groups = value.reshape(kv, heads // kv + 2, -1, *value.shape[1:])
            at = name.replace("attention.wqkv", "self_attn.{}_proj")
            parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
            for part, found in parts.items():
                tensors[at.format(part)] = np.ascontiguousarray(found.reshape(-1, *value.shape[1:]))
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(f"{ours}.", f"{theirs}.")
        tensors["lm_head.weight" if name == "output.weight" else name] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    biases = {"attention_bias": config["bias"]}
    (to / "config.json").write_text(json.dumps({**config, **kind, **biases}))
    return to


def sarvam_of(path, to):
    """Ling 2's checkpoint as Sarvam's, which transformers reads as GLM-4.5."""
    shutil.copytree(path, to)
    config = json.loads((path / "config.json").read_text())
    rotary = config.get("rotary_dim", config["partial_rotary_factor"] * config["head_dim"])
    changes = {
        "architectures": ["SarvamMoEForCausalLM"],  # not a class: transformers makes GLM-4.5
        "model_type": "sarvam_moe",
        "rope_theta": 6e5,
        "partial_rotary_factor": rotary / config["head_dim"],
    }
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


def qwen2_moe_of(path, to):
    """Ling 1's checkpoint as Qwen2's: the gate of its shared expert is always one half."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    heads, kv, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    names = {
        "model.word_embeddings": "model.embed_tokens",
        "attention.dense": "self_attn.o_proj",
        "shared_experts": "shared_expert",
    }
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        if "query_key_value" in name:
            for part, found in zip(
                "qkv", np.split(value, [width, width + width * kv // heads]), strict=True
            ):
                at = name.replace("attention.query_key_value.weight", f"self_attn.{part}_proj")
                tensors[f"{at}.weight"] = np.ascontiguousarray(found)
                tensors[f"{at}.bias"] = np.zeros(len(found), value.dtype)
            continue
        if name.endswith("shared_experts.down_proj.weight"):
            at = name.replace("shared_experts.down_proj", "shared_expert_gate")
            tensors[at] = np.zeros((1, width), value.dtype)
            value = value * 2
        for ours, theirs in names.items():
            name = name.replace(f"{ours}.", f"{theirs}.")
        tensors[name] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    shared = config["num_shared_experts"] * config["moe_intermediate_size"]
    changes = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "rope_theta": 6e5,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": shared,
        "mlp_only_layers": list(range(config["first_k_dense_replace"])),
    }
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


def llama_of_baichuan(path, to):
    """Baichuan's checkpoint as Llama's, with the head that the published code makes."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        if "W_pack" in name:
            for part, rows in zip("qkv", np.split(value, 3), strict=True):
                tensors[name.replace("W_pack", f"{part}_proj")] = np.ascontiguousarray(rows)
        elif name == "lm_head.weight" and "z_loss_weight" in config:
            tensors[name] = torch.nn.functional.normalize(torch.from_numpy(value)).numpy()
        else:
            tensors[name] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (to / "config.json").write_text(json.dumps({**config, **kind}))
    return to


def renamed(architecture, model_type, **more):
    """A function that copies a checkpoint for another class; its tensors stay as they are."""

    def relative(path, to):
        shutil.copytree(path, to)
        config = json.loads((path / "config.json").read_text())
        kind = {"architectures": [architecture], "model_type": model_type}
        (to / "config.json").write_text(json.dumps({**config, **kind, **more}))
        return to

    return relative


def telechat3_of(path, to):
    """TeleChat3's checkpoint as Llama's with a YaRN, with the factor of cos and sin."""
    rope = json.loads((path / "config.json").read_text())["rope_scaling"]
    rope |= {"rope_type": "yarn", "attention_factor": 0.07 * math.log(rope["factor"]) + 1}
    return renamed("LlamaForCausalLM", "llama", rope_scaling=rope)(path, to)


TELECHAT3 = {
    "architectures": ["TeleChat3ForCausalLM"],
    "model_type": "telechat3",
    "rope_scaling": {
        "rope_type": "telechat3-yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def mimo_v2_flash_of(path, to):
    """MiMo V2.5's checkpoint as MiMo-V2-Flash's: queries, keys and values are taken apart."""
    renamed("MiMoV2FlashForCausalLM", "mimo_v2_flash")(path, to)
    tensors = load_file(to / "model.safetensors")
    spec = spec_from_config(json.loads((path / "config.json").read_text()))
    for name in [name for name in tensors if "qkv_proj" in name]:
        value, queries = tensors.pop(name), spec.q_heads * spec.head_dim
        kv = (len(value) - queries) // (spec.head_dim + spec.parts["values"])
        parts = np.split(value, [queries, queries + kv * spec.head_dim])
        for part, rows in zip("qkv", parts, strict=True):
            tensors[name.replace("qkv_proj", f"{part}_proj")] = np.ascontiguousarray(rows)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


WIDTHS = {1: 48, 3: 32}
NEMOTRON_PUZZLE = {
    **PUZZLE,
    "block_configs": [
        {**each, **({"num_experts_per_tok": 3} if i in WIDTHS else {})}
        for i, each in enumerate(PUZZLE["block_configs"])
    ],
}


def nemotron_h_of(path, to):
    """Nemotron 3 Puzzle's checkpoint as Nemotron H's: narrow experts get rows of zeros."""
    renamed("NemotronHForCausalLM", "nemotron_h", block_configs=None)(path, to)
    tensors = load_file(to / "model.safetensors")
    for name, value in tensors.items():
        if ".experts." in name and (more := 48 - WIDTHS[int(name.split(".")[2])]):
            rows = "up_proj" in name
            tensors[name] = np.pad(value, [(0, more * rows), (0, more * (not rows))])
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


DECI = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "num_hidden_layers": 5,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": heads, "no_op": heads is None}, "ffn": ffn}
        for heads, ffn in (
            (2, {"ffn_mult": 5.0}),
            (None, {"ffn_mult": 11.0, "no_op": False}),
            (4, {"ffn_mult": None, "no_op": True}),
            (1, {"intermediate_size": 96, "hidden_act": "silu"}),
            (None, {"no_op": True}),
        )
    ],
}
DECI_7B = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "deci",
    "num_key_value_heads_per_layer": [1, 4],
}


def llama_of_deci(path, to):
    """DeciLM's checkpoint as Llama's: heads of keys are repeated, and what is missing is zeros."""
    spec = spec_from_config(json.loads((path / "config.json").read_text()))
    kv, heads, width = spec.parts["kv"], spec.kv_heads, spec.width
    more = {"num_key_value_heads": heads, "intermediate_size": spec.intermediate}
    renamed("LlamaForCausalLM", "llama", **more)(path, to)
    tensors = load_file(to / "model.safetensors")
    shapes = {
        "self_attn.q_proj": (spec.q_heads * spec.head_dim, width),
        "self_attn.k_proj": (heads * spec.head_dim, width),
        "self_attn.v_proj": (heads * spec.head_dim, width),
        "self_attn.o_proj": (width, spec.q_heads * spec.head_dim),
        "mlp.gate_proj": (spec.intermediate, width),
        "mlp.up_proj": (spec.intermediate, width),
        "mlp.down_proj": (width, spec.intermediate),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    for layer in range(spec.layers):
        for part, shape in shapes.items():
            name = f"model.layers.{layer}.{part}.weight"
            value = tensors.get(name, np.zeros(shape, np.float32))
            if name in tensors and part in ("self_attn.k_proj", "self_attn.v_proj"):
                each = value.reshape(kv[layer], spec.head_dim, -1)
                value = np.repeat(each, heads // kv[layer], axis=0).reshape(shape)
            pads = [(0, most - size) for most, size in zip(shape, value.shape, strict=True)]
            tensors[name] = np.ascontiguousarray(np.pad(value, pads))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def qwen2_moe_of_deepseek(path, to):
    """DeepSeek MoE's checkpoint as Qwen2's: the gate of its shared expert is always one half."""
    config = json.loads((path / "config.json").read_text())
    more = {
        "num_experts": config["n_routed_experts"],
        "shared_expert_intermediate_size": 2 * config["moe_intermediate_size"],
        "mlp_only_layers": list(range(config["first_k_dense_replace"])),
        "n_routed_experts": None,
    }
    renamed("Qwen2MoeForCausalLM", "qwen2_moe", **more)(path, to)
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        if name.endswith("shared_experts.down_proj.weight"):
            at = name.replace("shared_experts.down_proj", "shared_expert_gate")
            tensors[at] = np.zeros((1, config["hidden_size"]), value.dtype)
            value = value * 2
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace(".weight", ".bias")] = np.zeros(len(value), value.dtype)
        tensors[name.replace("shared_experts", "shared_expert")] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


CASES = {
    "deepseek-moe": ("llama", DEEPSEEK_MOE, qwen2_moe_of_deepseek),
    "deepseek-moe-norm": (
        "llama",
        {**DEEPSEEK_MOE, "norm_topk_prob": True, "first_k_dense_replace": 0},
        qwen2_moe_of_deepseek,
    ),
    "deci": ("llama", DECI, llama_of_deci),
    "deci-7b": ("llama", DECI_7B, llama_of_deci),
    "nemotron-puzzle": ("nemotron-h-moe", NEMOTRON_PUZZLE, nemotron_h_of),
    "mimo-v2.5": ("mimo-v2", {"architectures": ["MiMoV2ForCausalLM"]}, mimo_v2_flash_of),
    "telechat3": ("llama", TELECHAT3, telechat3_of),
    "xverse": (
        "llama",
        {"architectures": ["XverseForCausalLM"], "model_type": "xverse"},
        renamed("LlamaForCausalLM", "llama"),
    ),
    "pangu-embedded": (
        "llama",
        {**PANGU, "model_type": "PanguEmbedded"},
        renamed("LlamaForCausalLM", "llama", attention_bias=True),
    ),
    "orion": (
        "stablelm",
        {**ORION, "model_type": "orion", "rms_norm_eps": 1e-3},
        renamed("StableLmForCausalLM", "stablelm", layer_norm_eps=1e-3, partial_rotary_factor=1.0),
    ),
    "minicpm": ("minicpm", {}, granite_of),
    "minicpm-more-layers": ("minicpm", {"num_hidden_layers": 5, "scale_emb": 3}, granite_of),
    "internlm2": ("internlm2", {}, llama_of),
    "ling": ("ling", {}, qwen2_moe_of),
    "ling2": ("ling2", {}, sarvam_of),
    "ling2-rotary-dim": ("ling2", {"rotary_dim": 8, "n_group": 1, "topk_group": 1}, sarvam_of),
    "internlm2-biases": ("internlm2", {"bias": True, "num_key_value_heads": 1}, llama_of),
    "baichuan": ("baichuan", {}, llama_of_baichuan),
    "baichuan2": ("baichuan2", {"rms_norm_eps": 1e-3}, llama_of_baichuan),
}


def loaded(path):
    """The interpreter of a directory, with the weights that an engine loads."""
    weights = open_checkpoint(path).weights
    names = {need.name for need in program_of(path).weights}
    made = interpreter_of(path)
    for name in names:
        made.set_weight(name, torch.from_numpy(dequantize(weights.get(name)).copy()))
    return made


@pytest.mark.parametrize("case", CASES)
def test_a_family_has_the_logits_of_its_relative_in_transformers(tmp_path, case):
    family, changes, relative = CASES[case]
    path = tiny_model(family, **changes)
    expected = transformers_logits(relative(path, tmp_path / "relative"), TOKENS)
    got = logits_of(loaded(path), TOKENS, (1, 21, 1))
    assert (got - expected).abs().max() < 1e-3 * (expected.max() - expected.min())


@pytest.mark.parametrize(
    "case",
    [
        "minicpm",
        "internlm2-biases",
        "ling",
        "ling2",
        "baichuan2",
        "deci",
        "deepseek-moe",
        "orion",
        "telechat3",
        "mimo-v2.5",
        "nemotron-puzzle",
    ],
)
def test_a_family_writes_the_text_of_its_relative(tmp_path, case):
    family, changes, relative = CASES[case]
    path = tiny_model(family, **changes)
    prompts = [TOKENS[:40], TOKENS[7:20], TOKENS[:33]]
    written = []
    for each in (path, relative(path, tmp_path / "relative")):
        with LLM(str(each), max_model_len=256, dtype="float32") as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            written.append([output.outputs[0].token_ids for output in outputs])
    assert written[0] == written[1]


def logits_with_alibi(path, tokens):
    """Logits of a Llama at position 0 only, whose RoPE turns nothing, with a bias for distances."""
    model = transformers_of(path)
    slopes = alibi_slopes(model.config.num_attention_heads)
    places = torch.arange(len(tokens))
    distances = places[None, :] - places[:, None]
    biases = slopes[:, None, None] * distances
    mask = biases.masked_fill(distances > 0, -torch.inf)[None]
    zeros = torch.zeros(1, len(tokens), dtype=torch.int64)
    with torch.inference_mode():
        return model(torch.tensor([tokens]), attention_mask=mask, position_ids=zeros).logits[0]


def alibi_slopes(heads):
    """The slope of each head, by the formula in BLOOM of transformers."""
    ones = torch.ones(1, 2, dtype=torch.int64)
    return build_alibi_tensor(ones, heads, torch.float32)[:, 0, 1]


def test_baichuan_13b_has_the_logits_and_tokens_of_a_llama_with_alibi(tmp_path):
    path = tiny_model("baichuan2-13b")
    relative = llama_of_baichuan(path, tmp_path / "relative")
    expected = logits_with_alibi(relative, TOKENS)
    got = logits_of(loaded(path), TOKENS, (1, 21, 1))
    assert (got - expected).abs().max() < 1e-3 * (expected.max() - expected.min())
    prompts = [TOKENS[:40], TOKENS[7:20], TOKENS[:33]]
    types = {"dtype": "float32", "kv_cache_dtype": "float32"}
    with LLM(str(path), max_model_len=256, **types) as llm:
        written = [tokens for tokens, _ in exact_answers(llm, prompts, GREEDY)]
    for prompt, tokens in zip(prompts, written, strict=True):
        logits = logits_with_alibi(relative, prompt + tokens)
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == tokens


@pytest.mark.parametrize(
    ("sizes", "alibi"),
    [
        ({"hidden_size": 4096}, False),
        ({"hidden_size": 5120}, True),
        ({"hidden_size": 5120, "max_position_embeddings": 4096}, True),
        ({"hidden_size": 2048}, True),
        ({"hidden_size": 2048, "max_position_embeddings": 4096}, False),
    ],
)
def test_the_positions_of_baichuan_follow_from_published_sizes(sizes, alibi):
    """With the keys of published configs: only those of 7B have max_position_embeddings."""
    config = tiny_config("baichuan2-13b", num_attention_heads=32, num_key_value_heads=None)
    spec = spec_from_config({**config, **sizes})
    assert (spec.rope is None) == alibi
    assert spec.max_position == sizes.get("max_position_embeddings", 512)


def test_only_baichuan_2_has_a_normalized_head():
    assert not decoders.has_normed_head(tiny_config("baichuan"))
    assert not decoders.has_normed_head(tiny_config("baichuan", vocab_size=64000))
    assert decoders.has_normed_head(tiny_config("baichuan", vocab_size=125696))
    assert not decoders.has_normed_head(tiny_config("llama", vocab_size=125696))


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
def test_the_head_of_a_gguf_file_of_baichuan_2_is_normalized(tmp_path, monkeypatch, dtype):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("baichuan", path, types=[("output.weight", dtype)])
    stored = dequantize(open_checkpoint(path).weights.get("lm_head.weight"))
    monkeypatch.setattr(decoders, "BAICHUAN_2_IDS", 512)
    head = open_checkpoint(path).weights.get("lm_head.weight")
    wanted = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    np.testing.assert_allclose(dequantize(head), wanted, rtol=1e-5, atol=1e-7)
    assert head.cut(slice(3, 40, 5), 0).view(np.float32) == pytest.approx(wanted[3:40:5], rel=1e-5)


def test_memory_is_planned_for_a_head_that_becomes_dense(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("baichuan", path, types=[("output.weight", "Q8_0")])
    before = bytes_in_memory(open_gguf(path), read_config(path))
    monkeypatch.setattr(decoders, "BAICHUAN_2_IDS", 512)
    grown = bytes_in_memory(open_gguf(path), read_config(path)) - before
    assert grown == 512 * 64 * 2 - 512 * 64 // 32 * 34


@pytest.mark.parametrize("layers", [31, 41])
def test_a_gguf_file_of_baichuan_with_other_layers_is_refused(tmp_path, layers):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("baichuan", path, block_count=layers)
    with pytest.raises(ModelError, match=r"block_count is .* it must be 32 .* or 40"):
        open_checkpoint(path)


def test_sparse_attention_of_minicpm_is_refused_with_the_way_out():
    config = tiny_config("minicpm", sparse_config={"kernel_size": 32})
    with pytest.raises(ModelError, match=r"sparse_config .* remove the key from config.json"):
        spec_from_config(config)
