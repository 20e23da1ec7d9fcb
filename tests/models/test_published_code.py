"""Families that transformers does not have: their checkpoints as another family's there."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.errors import ModelError
from cpuserve.models import spec_from_config
from tests.helpers.oracle import interpreter_of, transformers_logits
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


CASES = {
    "minicpm": ("minicpm", {}, granite_of),
    "minicpm-more-layers": ("minicpm", {"num_hidden_layers": 5, "scale_emb": 3}, granite_of),
    "internlm2": ("internlm2", {}, llama_of),
    "ling": ("ling", {}, qwen2_moe_of),
    "ling2": ("ling2", {}, sarvam_of),
    "ling2-rotary-dim": ("ling2", {"rotary_dim": 8, "n_group": 1, "topk_group": 1}, sarvam_of),
    "internlm2-biases": ("internlm2", {"bias": True, "num_key_value_heads": 1}, llama_of),
}


@pytest.mark.parametrize("case", CASES)
def test_a_family_has_the_logits_of_its_relative_in_transformers(tmp_path, case):
    family, changes, relative = CASES[case]
    path = tiny_model(family, **changes)
    expected = transformers_logits(relative(path, tmp_path / "relative"), TOKENS)
    got = logits_of(interpreter_of(path), TOKENS, (1, 21, 1))
    assert (got - expected).abs().max() < 1e-3 * (expected.max() - expected.min())


@pytest.mark.parametrize("case", ["minicpm", "internlm2-biases", "ling"])
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


def test_sparse_attention_of_minicpm_is_refused_with_the_way_out():
    config = tiny_config("minicpm", sparse_config={"kernel_size": 32})
    with pytest.raises(ModelError, match=r"sparse_config .* remove the key from config.json"):
        spec_from_config(config)
