"""Writes tiny checkpoints as GGUF files, with the tensor names and the row order of llama.cpp.

The files follow the converters of llama.cpp. Its logits (llama-cpp-python 0.3.36) agree with the
logits of the interpreter for all files except encoders, which were not compared.
The difference is at most 6e-6 of the range of the logits, or 7e-4 where llama.cpp takes gelu from
an fp16 table (Gemma, GPT-2, Falcon, StarCoder2, GPT-NeoX). It is larger for a token with two nearly
equal scores in a router.

For this agreement, some models need special settings. "deepseek2-joined" needs 26 layers.
"deepseek2-glm" needs expert_gating_func and an epsilon of 1e-6. "gpt-oss" needs a YaRN with
"truncate", which llama.cpp has for all models. "mellum" needs one RoPE base for all layers, since
llama.cpp does not read the base of layers with a window. "qwen4exp" needs indexers with blocks of
one token, since llama.cpp selects parts of larger blocks, too. "gemma3n" needs 25 layers (5 share
caches and 10 are sparse), keys of the layers that share caches, inputs of 256, a rank of 64, a cap
of 30, and the variance of gates divided by their number minus 1. That many random layers amplify
the errors of the gelu table: the tokens of "gemma3n" differ by 0.7 % of the range in the median.
"""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
from safetensors.numpy import load_file

from cpuserve.models import spec_from_config
from tests.helpers import qwen4_gguf, rwkv, rwkv6
from tests.helpers.gemma4 import stack_experts
from tests.helpers.gguf_archs import (
    ADDED_NORMS,
    ARCHS,
    CHOSEN_KEYS,
    DEEPSEEK4_BARE,
    DELTA_KEYS,
    EXPERT_KEYS,
    FILE_ARCHS,
    GEMMA4_BARE,
    GUESSER,
    INTERLEAVED,
    LAYER_NORM,
    LLAMA,
    MIXTRAL_PARTS,
    MTP,
    NAMES,
    OTHER_KEYS,
    STATES,
    TOP,
)
from tests.helpers.tiny import tiny_model

PROJECTIONS = ("pre_projection", "post_projection")  # of assistants
JOINED = ("deepseek2-joined", "minicpm3")  # keys and values have one matrix
_EXPERT = re.compile(
    r"(?:(?:model|encoder)\.layers|transformer\.blocks)\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)"
)


def checkpoint_of(arch):
    """The tiny checkpoint that `convert` writes for this architecture."""
    family, changes, _ = ARCHS[arch]
    return tiny_model(family, **changes)


def convert(arch, path, types=(), last=None, more=None, source=None, **changes):
    """Write the tiny checkpoint of an architecture as a GGUF file of fp32 weights.

    types: pairs of a text and the type of the tensors with this text in their name.
    last: metadata keys that are written after all others, such as lists with a value per layer.
    more: further tensors.
    source: another checkpoint of the same architecture.
    changes: values of metadata keys, which may be wrong.
    """
    source = source or checkpoint_of(arch)
    config = json.loads((source / "config.json").read_text())
    if arch in OTHER_KEYS:
        config |= _sizes(spec_from_config(config))
    file_arch = FILE_ARCHS.get(arch, arch)
    writer = gguf.GGUFWriter(path, file_arch)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("d_kv") or config.get("head_dim", config["hidden_size"] // max(heads, 1))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size") and arch not in (*STATES, "minimax-m3"):
        writer.add_feed_forward_length(config["intermediate_size"])
    if "model_max_length" in config:  # Kimi Linear
        config |= {"max_position_embeddings": config["model_max_length"], "q_lora_rank": None}
    layers = config["num_hidden_layers"]
    keys = {**ARCHS[arch][2], **changes}
    delta = "full_attention_interval" in keys
    guessers = keys.get("nextn_predict_layers") == 1
    writer.add_block_count(layers + guessers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(heads)
    if arch in STATES and "feed_forward_length" not in keys:
        writer.add_feed_forward_length(0)
    attends = [kind in ("attention", "full_attention") for kind in config.get("layer_types", ())]
    if arch.startswith("jamba"):
        attends = [i % config["attn_layer_period"] == config["attn_layer_offset"] for i in range(4)]
    hybrid = arch.startswith(("granitehybrid", "lfm2", "jamba"))
    if "kv_lora_rank" in config:
        head_dim = _add_latent(writer, config, attends, joined=arch in JOINED)
    elif arch != "gpt2" and arch not in STATES:
        writer.add_head_count_kv([kv * has for has in attends] if hybrid else kv)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    eps = spec_from_config(config).norm_eps * config.get("residual_multiplier", 1.0) ** 2
    eps = config.get("rms_norm_eps", 1e-5) if arch == "minicpm3" else eps
    (writer.add_layer_norm_eps if arch in LAYER_NORM else writer.add_layer_norm_rms_eps)(eps)
    bases = {
        "mixtral": 1e6,
        "nomic-bert": 1e3,
        "modern-bert": 160000.0,
        "modern-bert-silu": 160000.0,
        "jina-bert-v3": 2e4,
        "gemma-embedding": 1e6,
        "smollm3": 2e6,
        **dict.fromkeys(("command-r", "command-r-heads"), 5e5),
        "mellum": 5e5,
        "gemma3": 1e6,
        "gemma3n": 1e6,
        "gemma4": 1e6,
        "gemma4-moe": 1e6,
        "lfm2": 1e6,
        "lfm2moe": 1e6,
        "laguna": 5e5,
        "ernie4_5": 5e5,
        "ernie4_5-moe": 5e5,
        "minimax-m2": 5e6,
        "minimax-01": 1e6,
        "bitnet": 5e5,
        "llama4": 5e5,
        "bailingmoe": 6e5,
        "bailingmoe2": 6e5,
        "phimoe": 1e6,
        "mimo2": 5e6,
        "hy_v3": 11158840.0,
        "minimax-m3": 5e6,
        **dict.fromkeys(("bailingmoe3", "bailingmoe3-limits"), 6e6),
    }
    base = config.get("rope_parameters", {}).get("rope_theta") or config.get("rope_theta")
    base = None if isinstance(base, list) else base  # a base of each layer, as in Step 3.5
    writer.add_rope_freq_base(base or bases.get(arch, 1e4))
    halves = dict.fromkeys(("chatglm", "glm4", "glm4moe", "nemotron", "phi2", "bailingmoe2"), 0.5)
    shares = {
        **halves,
        **dict.fromkeys(("stablelm", "stablelm-heads"), 0.25),
        "gptneox": 0.25,
        "deepseek4": 0.25,
        "qwen4exp": 0.5,
    }
    share = shares.get(arch, 0.25 if delta else 1.0)
    if arch.startswith(("qwen35", "qwen4exp")):
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_rope_dimension_count(config.get("rotary_dim", int(head_dim * share)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if count := next(filter(None, map(config.get, EXPERT_KEYS)), 0):
        writer.add_expert_count(count)
        chosen = next(filter(None, map(config.get, CHOSEN_KEYS)))
        writer.add_expert_used_count(chosen)
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if arch == "qwen4exp":
        qwen4_gguf.add_hashes(writer)
    for key, value in keys.items():
        add[type(value)](f"{file_arch}.{key}", value)
    add_tokenizer(writer, config["vocab_size"])
    tensors = _with_last_block(load_file(source / "model.safetensors"), layers)
    if file_arch == "falcon-h1":
        tensors = {name: value * _factor(config, name) for name, value in tensors.items()}
    if arch == "apertus":
        _add_xielu(writer, tensors, layers)
    if file_arch.startswith("rwkv6"):
        tensors = rwkv6.as_gguf(config, tensors, early=arch == "rwkv6-early")
    elif arch in STATES and "wkv.head_size" in keys:
        tensors = rwkv.as_gguf(tensors)
    else:
        tensors = renamed(arch, tensors, heads, kv)
    if file_arch == "gemma4":
        tensors |= _add_gemma4(writer, config)
    if arch == "minimax-m3":
        tensors |= _indexers(config)
    if arch == "muse-glimmer":
        for part, scale in (("q", config["qk_scale_factor"]), ("k", 1.0)):
            norms = {f"blk.{i}.attn_{part}_norm.weight": np.full(32, scale) for i in range(layers)}
            tensors |= norms
    tensors |= more or {}
    for key, value in (last or {}).items():
        add[type(value)](f"{file_arch}.{key}", value)
    if guessers and not any(name.startswith(f"blk.{layers}.") for name in tensors):
        tensors |= _guesser(tensors, layers)
    for name, value in tensors.items():
        if name.endswith("tid2eid.weight"):
            writer.add_tensor(name, value.astype(np.int32))
            continue
        kind = gguf.GGMLQuantizationType[next((t for at, t in types if at in name), "F32")]
        data = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert_assistant(source, path):
    """Write an assistant of Gemma 4 as a GGUF file of fp32 weights."""
    whole = json.loads((source / "config.json").read_text())
    config, arch = whole["text_config"], "gemma4-assistant"
    writer, layers = gguf.GGUFWriter(path, arch), config["num_hidden_layers"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_uint32(f"{arch}.embedding_length_out", whole["backbone_hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_uint32(f"{arch}.nextn_predict_layers", layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_float32(f"{arch}.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    add_tokenizer(writer, config["vocab_size"])
    found = load_file(source / "model.safetensors")
    own = {f"nextn.{n}.weight": found.pop(f"{n}.weight") for n in PROJECTIONS}
    known = {n: value for n, value in found.items() if not n.startswith("masked_embedding")}
    tensors = renamed("gemma4", known, 1, 1) | _add_gemma4(writer, config) | own
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _factor(config, name):
    """Return the factor of a tensor of Falcon-H1, which the converter multiplies into it."""
    into = config["attention_in_multiplier"]
    if ".mamba.in_proj" in name:
        groups = config["mamba_n_groups"] * config["mamba_d_state"]
        rows = [*[config["mamba_d_ssm"]] * 2, groups, groups, config["mamba_n_heads"]]
        return np.repeat(config["ssm_multipliers"], rows)[:, None] * config["ssm_in_multiplier"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": into,
        "k_proj": into * config["key_multiplier"],
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "out_proj": config["ssm_out_multiplier"],
    }
    return factors.get(name.split(".")[-2], 1.0)


def _add_gemma4(writer, config):
    """Write the keys that differ between layers of Gemma 4; return the RoPE factors as a tensor."""
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    if (by_layer := config.get("per_layer_config")) and "global_head_dim" not in config:
        one = by_layer[str(local.index(False))]  # so transformers saves the sizes
        config["global_head_dim"] = one["head_dim"]
        config["num_global_key_value_heads"] = one.get("num_key_value_heads")
    shared, wide = config.get("num_kv_shared_layers", 0), config["global_head_dim"]
    first, width = len(local) - shared, config["intermediate_size"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    writer.add_sliding_window_pattern(local)
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([width * (1 + (i >= first)) for i in range(len(local))])
    if few := config.get("num_global_key_value_heads"):
        many = config["num_key_value_heads"]
        writer.add_head_count_kv([many if own else few for own in local])
    turned = wide // 8  # pairs: a quarter of the head
    return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (wide // 2 - turned))}


def _add_xielu(writer, tensors, layers):
    """Write the parameters of xIELU as metadata, and take them out of the tensors."""
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        names = [f"model.layers.{i}.mlp.act_fn.{part}" for i in range(layers)]
        writer.add_array(f"xielu.{part}", [tensors.pop(name).item() for name in names])


def _sizes(spec):
    """Return the sizes of a model under the keys of Llama's config.json."""
    return {
        "hidden_size": spec.width,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.q_heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": spec.max_position,
    }


def renamed(arch, tensors, heads, kv):
    """Return the tensors with llama.cpp's names and row order, and stacks of experts' matrices."""
    out, stacks = {}, {}
    if arch == "qwen4exp":
        out, tensors = qwen4_gguf.split(tensors)
    if arch.startswith("gemma4"):
        tensors = stack_experts(tensors)
    for name, value in tensors.items():
        name = name.replace("backbone.", "model.")
        stem, kind = name.rpartition(".")[::2]
        if stem in TOP:
            out[f"{TOP[stem]}.{kind}"] = value
        elif match := _EXPERT.fullmatch(stem):
            layer, expert, part = match.groups()
            part = MIXTRAL_PARTS.get(part, part.removesuffix("_proj"))
            stacks.setdefault(f"blk.{layer}.ffn_{part}_exps.{kind}", {})[int(expert)] = value
        elif match := re.fullmatch(r"model\.altup_(un)?(?:embed_)?projections\.(\d+)", stem):
            both = f"altup_{'unembd_' if match[1] else ''}proj.{kind}"
            stacks.setdefault(both, {})[int(match[2])] = value
        elif match := re.fullmatch(
            r"model\.layers\.(\d+)\.self_attn\.(.)_layernorm\..+\.(\d+)", stem
        ):
            layer, part, head = match.groups()
            stacks.setdefault(f"blk.{layer}.attn_{part}_norm.weight", {})[int(head)] = value
        elif kind.startswith("index_kpool_compress_"):  # GLM-5.3-Flash
            part = kind.rpartition("_")[2]
            out[f"blk.{name.split('.')[2]}.indexer_compressor_{part}.weight"] = value
        elif kind in GEMMA4_BARE:
            out[f"blk.{name.split('.')[2]}.{GEMMA4_BARE[kind]}"] = value
        elif (part := name.split(".", 3)[-1]) in DEEPSEEK4_BARE:
            out[f"blk.{name.split('.')[2]}.{DEEPSEEK4_BARE[part]}"] = value
        elif ".hc_" in name:  # the residual streams of Hunyuan 4 and of DeepSeek V4
            top = "model.hc_head." in name
            at = "output_hc_" if top else f"blk.{name.split('.')[2]}.hc_"
            at += "" if top else "attn_" if "hc_attn" in name else "ffn_"
            out[f"{at}{name.rpartition('_')[2]}.weight"] = value
        elif name.endswith((".sinks", ".learnable_sink_param")):
            out[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = value
        elif name.endswith("e_score_correction_bias"):
            out[f"blk.{stem.split('.')[2]}.exp_probs_b.bias"] = value.reshape(-1)
        elif name.endswith(".input_linear.weight") and "swa" not in arch:  # gate and up
            kind = "_shexp" if ".shared_mlp." in name else "_exps"
            kind = "" if arch == "granitehybrid-dense" else kind
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=-2), strict=True):
                out[f"blk.{stem.split('.')[2]}.ffn_{part}{kind}.weight"] = half
        elif name.endswith(("expert_bias", "router_bias")):
            bare = arch == "hy_v3"
            out[f"blk.{stem.split('.')[2]}.exp_probs_b{'' if bare else '.bias'}"] = value
        elif name.endswith((".mamba.D", ".mixer.D")):
            out[f"blk.{stem.split('.')[2]}.ssm_d"] = value
        elif name.endswith(("A_log", "dt_bias")):
            _, _, layer, _ = stem.split(".", 3)
            rates = kind == "A_log"
            sign = 1 if arch.startswith("bailingmoe3") else -1
            out[f"blk.{layer}.ssm_{'a' if rates else 'dt.bias'}"] = (
                sign * np.exp(value) if rates else value
            )
        else:
            _, _, layer, part = stem.split(".", 3)
            part = {**GUESSER, **NAMES.get(arch, LLAMA)}[part]
            if part == "ssm_g_a" and len(value) == heads:  # the attention of Ling 3 has a gate, too
                part = "attn_gate"
            out[f"blk.{layer}.{part}.{kind}"] = value
    out |= {name: np.stack([s[e] for e in range(len(s))]) for name, s in stacks.items()}
    if arch == "internlm2":
        out = {n: part for name, value in out.items() for n, part in _split_qkv(name, value, kv)}
    if arch == "granite_swa-moe":
        out = joined(out)
    if arch.startswith("baichuan"):
        for name in [name for name in out if "attn_qkv" in name]:
            for part, rows in zip("qkv", np.split(out.pop(name), 3), strict=True):
                out[name.replace("attn_qkv", f"attn_{part}")] = rows
    if arch == "bailingmoe":
        for name in [name for name in out if "attn_qkv" in name]:
            parts = np.split(out.pop(name), [heads * 16, (heads + kv) * 16])  # 16 a head
            for part, rows in zip("qkv", parts, strict=True):
                out[name.replace("attn_qkv", f"attn_{part}")] = rows
    for name, value in out.items():
        interleaved = arch.startswith(("granite", *INTERLEAVED)) or arch in ("olmo", "deepseek")
        interleaved = interleaved and not arch.startswith(("llama4", "bailingmoe3"))
        if interleaved and re.search(r"attn_[qk]\.", name):
            count = heads if "attn_q" in name else kv
            halves = value.reshape(count, 2, -1, *value.shape[1:])
            out[name] = halves.swapaxes(1, 2).reshape(value.shape)
        plain = "ssm_norm" in name or (arch == "muse-glimmer" and name == "output_norm.weight")
        if arch in ADDED_NORMS and name.endswith("norm.weight") and not plain:
            out[name] = value + 1
        if name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
            out[name] = value.squeeze(1)
        if "ssm_conv1d_" in name:
            out[name] = value[None]  # [1, channels, 1, taps]
        mamba = arch.startswith(("granitehybrid", "nemotron_h", "falcon-h1", "mamba2"))
        if (mamba or arch.startswith("bailingmoe3")) and name.endswith((".ssm_a", ".ssm_d")):
            out[name] = value[:, None]
        if mamba and name.endswith("ssm_norm.weight"):
            out[name] = value.reshape(ARCHS[arch][2]["ssm.group_count"], -1)
        if arch.startswith(("qwen35", "qwen4exp")) and name.startswith("blk"):
            out[name] = _tiled(name.split(".")[2], out[name])
        if arch.startswith(("gptneox", "falcon", "bloom")) and "attn_qkv" in name:
            q, k, v = np.split(value.reshape(kv, heads // kv + 2, -1), [-2, -1], axis=1)
            out[name] = np.concatenate([x.reshape(-1, *value.shape[1:]) for x in (q, k, v)])
        if arch == "bert-roberta" and name == "position_embd.weight":
            out[name] = value[1:]  # pad_token_id 0
        if arch == "gpt2" and name.startswith("blk") and value.ndim > 1:
            out[name] = value.T
        if name.endswith("ffn_gate_inp_shexp.weight"):
            out[name] = value.reshape(-1)
    if (
        arch.startswith(
            (
                *("deepseek2", "deepseek32", "glm-dsa", "glm5-next"),
                *("hy_v4", "mistral4", "kimi", "bailingmoe3"),
            )
        )
        and arch != "deepseek2-joined"
    ):
        out = _split_kv_b(out, heads, len(out["blk.1.attn_output.weight"][0]) // heads)
    if arch.startswith("t5encoder"):
        own = ("blk.", "output_norm.")
        out = {f"enc.{name}" if name.startswith(own) else name: x for name, x in out.items()}
    return _split_qkvz(out) if arch == "qwen3next" else out


def _split_qkv(name, value, kv):
    """Return (name, rows) of q, k and v of InternLM 2's wqkv, which has them by heads of keys."""
    if "attn_qkv" not in name:
        return [(name, value)]
    groups = value.reshape(kv, -1, 16, *value.shape[1:])  # heads have 16 dimensions
    parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
    return [
        (name.replace("attn_qkv", f"attn_{part}"), rows.reshape(-1, *value.shape[1:]))
        for part, rows in parts.items()
    ]


def _add_latent(writer, config, attends, joined):
    """Write the widths of DeepSeek's attention, and return how many dimensions are rotated."""
    rank, rotary = config["kv_lora_rank"], config.get("qk_rope_head_dim", 0)
    key, value = config["qk_nope_head_dim"] + rotary, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    count = config["num_attention_heads"] if joined else 1
    hybrid = "linear_head_dim" in config or config["model_type"] == "bailing_hybrid"
    writer.add_head_count_kv(list(map(int, attends)) if hybrid else count)
    writer.add_key_length(key if joined else rank + rotary)
    writer.add_value_length(value if joined else rank)
    return rotary


def _split_kv_b(tensors, heads, values):
    """Return the tensors with kv_b split into k_b, which is transposed, and v_b."""
    out = {}
    for name, tensor in tensors.items():
        if "attn_kv_b" not in name:
            out[name] = tensor
            continue
        by_head = tensor.reshape(heads, -1, tensor.shape[-1])
        out[name.replace("kv_b", "k_b")] = by_head[:, :-values].swapaxes(1, 2)
        out[name.replace("kv_b", "v_b")] = by_head[:, -values:]
    return out


def _with_last_block(tensors, layers):
    """Return the tensors, with those of a head for further tokens called as of one more layer."""
    out = {}
    for name, tensor in tensors.items():
        part = re.sub(r"^(model\.)?mtp\.", "", name)
        if ".layers.1." in f".{part}" and part != name:  # the experts of Nemotron 3
            stem, _, kind = part.removeprefix("layers.1.").rpartition(".")
            stem = {"norm": "post_norm", "final_layernorm": "shared_head.norm"}.get(stem, stem)
            out[f"model.layers.{layers}.{stem}.{kind}"] = tensor
            continue
        stem, _, kind = part.rpartition(".")
        if part != name:
            stem = MTP.get(stem, stem.removeprefix("layers.0."))
            name = f"model.layers.{layers}.{stem}.{kind}"
        out[name] = tensor
    return out


def _guesser(tensors, layers):
    """Return the tensors of a block that predicts a further token, after all other blocks.

    It has copies of the tensors of the last block, and the tensors that only such a block has.
    """
    last, width = f"blk.{layers - 1}.", len(tensors["output_norm.weight"])
    block = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    block["nextn.eh_proj.weight"] = np.ones((width, 2 * width), np.float32)
    block |= {f"nextn.{n}.weight": np.ones(width) for n in ("enorm", "hnorm", "shared_head_norm")}
    return {f"blk.{layers}.{name}": tensor for name, tensor in block.items()}


def joined(tensors):
    """Return the tensors with one stack of gates and ups, as `--fuse-gate-up-exps` writes them."""
    out = dict(tensors)
    for at in [name.partition("ffn_gate_exps")[0] for name in tensors if "gate_exps" in name]:
        both = [out.pop(f"{at}ffn_{part}_exps.weight") for part in ("gate", "up")]
        out[f"{at}ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    return out


def _indexers(config):
    """Return tensors of MiniMax M3's indexers: two heads of 32 in the layers with experts."""
    random, width, found = np.random.default_rng(5), config["hidden_size"], {}
    for layer, kind in enumerate(config["layer_types"]):
        for part, heads in (("q", 2), ("k", 1)) if kind == "minimax_m3_sparse" else ():
            at = f"blk.{layer}.indexer.{part}"
            found[f"{at}_proj.weight"] = random.standard_normal((32 * heads, width))
            found[f"{at}_norm.weight"] = np.ones(32)
    return found


def _split_qkvz(tensors):
    """Return the tensors with Qwen3-Next's ssm_in split into two, as newer converters write it."""
    keys, heads = DELTA_KEYS["ssm.group_count"], DELTA_KEYS["ssm.time_step_rank"]
    key = value = DELTA_KEYS["ssm.state_size"]
    ends = np.cumsum([key, key, heads // keys * value])
    out = {}
    for name, tensor in tensors.items():
        if not name.endswith("ssm_in.weight"):
            out[name] = tensor
            continue
        at = name.removesuffix("ssm_in.weight")
        by_head = np.split(tensor.reshape(keys, -1, tensor.shape[-1]), ends, axis=1)
        q, k, v, z = (part.reshape(-1, tensor.shape[-1]) for part in by_head)
        out |= {f"{at}attn_qkv.weight": np.concatenate([q, k, v]), f"{at}attn_gate.weight": z}
    return out


def _tiled(part, value):
    """Return a tensor with its value heads in llama.cpp's order.

    The first value head of each key head comes first, then the second value head of each.

    part: the name of the tensor in its block, such as "attn_qkv".
    """
    keys, heads = DELTA_KEYS["ssm.group_count"], DELTA_KEYS["ssm.time_step_rank"]
    width = DELTA_KEYS["ssm.state_size"]
    if part == "ssm_out":
        return _tiled("attn_gate", value.T).T
    # The first row of values, and the rows of each value head.
    rows = {
        "attn_qkv": (2 * keys * width, width),
        "ssm_conv1d": (2 * keys * width, width),
        "attn_gate": (0, width),
        **dict.fromkeys(("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"), (0, 1)),
    }
    if part not in rows:
        return value
    first, each = rows[part]
    last = value[first:].reshape(keys, heads // keys, each, *value.shape[1:])
    return np.concatenate([value[:first], last.swapaxes(0, 1).reshape(value[first:].shape)])


def add_tokenizer(writer, vocab):
    """A byte-level BPE of the 256 bytes and unused tokens; llama.cpp refuses a file without one."""
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"<unused{i}>" for i in range(vocab - 257)]
    writer.add_token_list([*letters, "ab", *unused])
    writer.add_token_types([1] * 257 + [5] * len(unused))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_bos_token_id(vocab - 2)
