"""RWKV 6 in plain torch, one token after another, from the formulas of the paper.

transformers has no RWKV after 4. Source: Peng et al. 2024, "Eagle and Finch: RWKV with
Matrix-Valued States and Dynamic Recurrence", with the tensor names of flash-linear-attention.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F


class PlainRwkv6(torch.nn.Module):
    """The model of a config and its tensors; model(ids [1, T]).logits is [1, T, vocab].

    With the tensors of QRWKV 6, norms and MLPs are those of Qwen2.
    """

    def __init__(self, config, tensors):
        super().__init__()
        self.config = config
        self.hybrid = config["architectures"] == ["RWKV6Qwen2ForCausalLM"]
        self.order = config.get("mixture_order", "rwkvg")
        self.names = list(tensors)
        self.tensors = torch.nn.ParameterList(t.float() for t in tensors.values())

    def at(self, name):
        return self.tensors[self.names.index(name)]

    def has(self, name):
        return name in self.names

    def norm(self, name, x):
        if self.hybrid:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
            return x * scale * self.at(f"{name}.weight")
        bias = self.at(f"{name}.bias") if self.has(f"{name}.bias") else None
        weight = self.at(f"{name}.weight")
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config["norm_eps"])

    def linear(self, name, x):
        y = self.at(f"{name}.weight") @ x
        return y + self.at(f"{name}.bias") if self.has(f"{name}.bias") else y

    def mixtures(self, at, h, before):
        """The inputs by the letter of their projection (the paper's ddlerp)."""
        delta = before - h
        ranks = self.config["proj_low_rank_dim"]
        first = h + delta * self.at(f"{at}.x_proj.0.mu")
        y = torch.tanh(self.at(f"{at}.x_proj.0.linear.weight") @ first)
        found = {}
        for i, part in enumerate(self.order):
            factors = self.at(f"{at}.x_proj.2.weight")[i] @ y[i * ranks : (i + 1) * ranks]
            found[part] = h + delta * (factors + self.at(f"{at}.x_proj.2.bias")[i])
        return found

    def time_mix(self, at, h, before, state):
        heads, keys, values = state.shape
        kv_heads = self.config.get("num_kv_heads", heads)
        xs = self.mixtures(at, h, before)
        r, k, v = (self.linear(f"{at}.{p}_proj.linear", xs[p]) for p in "rkv")
        low = torch.tanh(self.at(f"{at}.w_proj.linear.lora.0.weight") @ xs["w"])
        w = torch.exp(-torch.exp(self.linear(f"{at}.w_proj.linear.lora.2", low)))
        gates = self.at(f"{at}.g_proj.linear.weight") @ xs["g"]
        r, w = r.reshape(heads, keys), w.reshape(heads, keys)
        k, v = k.reshape(kv_heads, keys), v.reshape(kv_heads, values)
        out = torch.zeros(heads, values)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            key, value = k[kv_head], v[kv_head]
            if self.hybrid:
                key = key * (1 - w[head])
            added = torch.outer(key, value)
            if self.hybrid:
                state[head] = w[head][:, None] * state[head] + added
                out[head] = keys**-0.5 * r[head] @ state[head]
            else:
                u = self.at(f"{at}.bonus")[head]
                out[head] = r[head] @ (state[head] + u[:, None] * added)
                state[head] = w[head][:, None] * state[head] + added
        if self.hybrid:
            y = out.reshape(-1) * torch.sigmoid(gates)
        else:
            eps = self.config.get("head_norm_eps", self.config["norm_eps"])
            weights = self.at(f"{at}.g_norm.weight"), self.at(f"{at}.g_norm.bias")
            y = F.group_norm(out.reshape(1, -1), heads, *weights, eps)[0] * F.silu(gates)
        return self.at(f"{at}.o_proj.weight") @ y

    def channel_mix(self, at, h, before):
        xk, xr = (h + (before - h) * self.at(f"{at}.{p}.mu") for p in ("key", "receptance"))
        y = F.relu(self.at(f"{at}.key.linear.weight") @ xk).square()
        gate = torch.sigmoid(self.at(f"{at}.receptance.linear.weight") @ xr)
        return gate * (self.at(f"{at}.value.weight") @ y)

    def mlp(self, at, h):
        gate, up = (self.at(f"{at}.{part}_proj.weight") @ h for part in ("gate", "up"))
        return self.at(f"{at}.down_proj.weight") @ (F.silu(gate) * up)

    def layer(self, i, x, before, state):
        at = f"model.layers.{i}"
        h = self.norm(f"{at}.{'input_layernorm' if self.hybrid else 'attn_norm'}", x)
        x = x + self.time_mix(f"{at}.attn", h, before[0], state)
        before[0] = h
        if self.hybrid:
            return x + self.mlp(f"{at}.mlp", self.norm(f"{at}.post_attention_layernorm", x))
        h = self.norm(f"{at}.ffn_norm", x)
        x = x + self.channel_mix(f"{at}.ffn", h, before[1])
        before[1] = h
        every = self.config.get("rescale_every", 0)
        return x / 2 if every and (i + 1) % every == 0 else x

    def forward(self, ids):
        layers, width = self.config["num_hidden_layers"], self.config["hidden_size"]
        table = self.at(f"model.{'embed_tokens' if self.hybrid else 'embeddings'}.weight")
        heads = self.config["num_heads"]
        expand = self.config.get("expand_k", 0.5), self.config.get("expand_v", 1.0)
        sizes = [int(width * e) // heads for e in expand]
        states = [torch.zeros(heads, *sizes) for _ in range(layers)]
        before = [[torch.zeros(width), torch.zeros(width)] for _ in range(layers)]
        rows = []
        for token in ids[0]:
            x = table[token]
            if self.config.get("norm_first", True) and not self.hybrid:
                x = self.norm("model.layers.0.pre_norm", x)
            for i in range(layers):
                x = self.layer(i, x, before[i], states[i])
            rows.append(self.norm("model.norm", x))
        head = self.at("lm_head.weight") if self.has("lm_head.weight") else table
        return SimpleNamespace(logits=(torch.stack(rows) @ head.T)[None])


_LAYER = {
    "attn.x_proj.0.mu": "time_mix_lerp_x.weight",
    "attn.x_proj.0.linear.weight": "time_mix_w1.weight",
    "attn.x_proj.2.weight": "time_mix_w2.weight",
    "attn.x_proj.2.bias": "time_mix_lerp_fused.weight",
    "attn.bonus": "time_mix_first.weight",
    "attn.w_proj.linear.lora.2.bias": "time_mix_decay.weight",
    "attn.w_proj.linear.lora.0.weight": "time_mix_decay_w1.weight",
    "attn.w_proj.linear.lora.2.weight": "time_mix_decay_w2.weight",
    "ffn.key.mu": "channel_mix_lerp_k.weight",
    "ffn.receptance.mu": "channel_mix_lerp_r.weight",
}
_STEMS = {
    "attn.r_proj.linear": "time_mix_receptance",
    "attn.k_proj.linear": "time_mix_key",
    "attn.v_proj.linear": "time_mix_value",
    "attn.g_proj.linear": "time_mix_gate",
    "attn.g_norm": "time_mix_ln",
    "attn.o_proj": "time_mix_output",
    "attn_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "ffn.key.linear": "channel_mix_key",
    "ffn.value": "channel_mix_value",
    "ffn.receptance.linear": "channel_mix_receptance",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_TOP = {
    "model.embeddings": "token_embd",
    "model.embed_tokens": "token_embd",
    "model.layers.0.pre_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _reordered(config, value, part):
    """The rows of all mixtures in the order of GGUF files."""
    order = [config.get("mixture_order", "rwkvg").index(p) for p in "wkvrg"]
    if part == "attn.x_proj.0.linear.weight":
        return value.reshape(5, -1, value.shape[-1])[order].reshape(value.shape)
    return value[order]


def as_gguf(config, tensors, *, early=False):
    """Return the tensors as the converter of llama.cpp writes them (Rwkv6Model.modify_tensors).

    early: as it wrote them in 2024, with a tensor for the factors of each mixture.
    """
    out = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            out[f"{_TOP[stem]}.{kind}"] = value
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        if part.startswith("attn.x_proj.") and not part.endswith(".mu"):
            value = _reordered(config, value, part)
        if part.endswith(".x_proj.2.bias") and early:
            for row, letter in zip(value, "wkvrg", strict=True):
                out[f"blk.{layer}.time_mix_lerp_{letter}.weight"] = row[None, None]
            continue
        if part.endswith(".x_proj.2.bias"):
            value = value[:, None, None]
        found = _LAYER.get(part) or f"{_STEMS[part.rpartition('.')[0]]}.{kind}"
        out[f"blk.{layer}.{found}"] = value
    return out


def as_published(tensors):
    """Return the tensors as flash-linear-attention stores them."""
    out = {}
    for name, value in tensors.items():
        if name.endswith(".x_proj.2.weight"):
            value = np.ascontiguousarray(np.concatenate(list(value), axis=1))
        out[name.replace(".x_proj.2.bias", ".x_bias")] = value
    return out


_FINCH = {
    "attn.x_proj.0.mu": "attention.time_maa_x",
    "attn.x_proj.0.linear.weight": "attention.time_maa_w1",
    "attn.x_proj.2.weight": "attention.time_maa_w2",
    "attn.w_proj.linear.lora.2.bias": "attention.time_decay",
    "attn.w_proj.linear.lora.0.weight": "attention.time_decay_w1",
    "attn.w_proj.linear.lora.2.weight": "attention.time_decay_w2",
    "attn.bonus": "attention.time_faaaa",
    "attn.o_proj.weight": "attention.output.weight",
    "ffn.key.mu": "feed_forward.time_maa_k",
    "ffn.receptance.mu": "feed_forward.time_maa_r",
    "ffn.value.weight": "feed_forward.value.weight",
}
_FINCH_STEMS = {
    "pre_norm": "pre_ln",
    "attn_norm": "ln1",
    "ffn_norm": "ln2",
    "attn.g_norm": "attention.ln_x",
    "attn.r_proj.linear": "attention.receptance",
    "attn.k_proj.linear": "attention.key",
    "attn.v_proj.linear": "attention.value",
    "attn.g_proj.linear": "attention.gate",
    "ffn.key.linear": "feed_forward.key",
    "ffn.receptance.linear": "feed_forward.receptance",
}
_FINCH_TOP = {"model.embeddings": "rwkv.embeddings", "model.norm": "rwkv.ln_out", "lm_head": "head"}


def as_finch(config, tensors):
    """Return the tensors as the directories of RWKV have them (modeling_rwkv6.py there)."""
    out = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in _FINCH_TOP:
            out[f"{_FINCH_TOP[stem]}.{kind}"] = value
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        at = f"rwkv.blocks.{layer}"
        if part.startswith("attn.x_proj.") and not part.endswith(".mu"):
            value = _reordered(config, value, part)
        if part == "attn.x_proj.2.bias":
            for row, letter in zip(value, "wkvrg", strict=True):
                out[f"{at}.attention.time_maa_{letter}"] = row[None, None]
            continue
        if part.startswith(("attn.x_proj.", "attn.w_proj.")) and value.ndim > 1:
            value = np.ascontiguousarray(np.swapaxes(value, -1, -2))
        if part.endswith((".mu", ".lora.2.bias")):
            value = value[None, None]
        ending = f".{kind}"
        out[f"{at}.{_FINCH.get(part) or _FINCH_STEMS[part.removesuffix(ending)] + ending}"] = value
    return out
