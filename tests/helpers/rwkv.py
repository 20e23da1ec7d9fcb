"""RWKV 7 in plain torch, one token after another, from the formulas of the paper.

transformers has no RWKV after 4. Source: Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic
State Evolution", with the tensor names of flash-linear-attention.
"""

import json
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F


def config_of(path):
    return json.loads((path / "config.json").read_text())


class PlainRwkv7(torch.nn.Module):
    """The model of a config and its tensors; model(ids [1, T]).logits is [1, T, vocab].

    With the tensors of ARWKV 7, norms and MLPs are those of Qwen2.
    """

    def __init__(self, config, tensors):
        super().__init__()
        self.config = config
        self.hybrid = config["architectures"] == ["RwkvHybridForCausalLM"]
        self.names = list(tensors)
        self.tensors = torch.nn.ParameterList(t.float() for t in tensors.values())

    def at(self, name):
        return self.tensors[self.names.index(name)]

    def norm(self, name, x):
        if self.hybrid:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
            return x * scale * self.at(f"{name}.weight")
        bias = f"{name}.bias"
        bias = self.at(bias) if bias in self.names else None
        return F.layer_norm(
            x, x.shape[-1:], self.at(f"{name}.weight"), bias, self.config["norm_eps"]
        )

    def small(self, name, x, act):
        """act(x A^T) B^T + b of two small matrices."""
        y = act(x @ self.at(f"{name}.lora.0.weight").T) @ self.at(f"{name}.lora.2.weight").T
        bias = f"{name}.lora.2.bias"
        return y + self.at(bias) if bias in self.names else y

    def factor(self, at, part):
        if f"{at}.x_x" in self.names:
            return self.at(f"{at}.x_x")["rwkvag".index(part)]
        return self.at(f"{at}.x_{part}").reshape(-1)

    def time_mix(self, at, h, before, state, first):
        """The layer `at` of one token: (its output, its first values)."""
        heads, width = state.shape[0], state.shape[2]
        gated = f"{at}.g_lora.lora.0.weight" in self.names
        parts = "rwkvag" if gated else "rwkva"
        xs = {p: h + (before - h) * self.factor(at, p) for p in parts}
        r, k, v = (xs[p] @ self.at(f"{at}.{p}_proj.weight").T for p in "rkv")
        if first is None:
            first = v
        else:
            v = v + (first - v) * torch.sigmoid(self.small(f"{at}.v_lora", xs["v"], lambda y: y))
        raw = self.small(f"{at}.w_lora", xs["w"], torch.tanh)
        w = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=raw.dtype)) * torch.sigmoid(raw))
        a = torch.sigmoid(self.small(f"{at}.a_lora", xs["a"], lambda y: y))
        g = self.small(f"{at}.g_lora", xs["g"], torch.sigmoid) if gated else 1.0
        kappa = (k * self.at(f"{at}.k_k")).reshape(heads, width)
        kappa = kappa / kappa.norm(dim=-1, keepdim=True)
        k = k * (1 + (a - 1) * self.at(f"{at}.k_a"))
        r, w, k, a = (y.reshape(heads, width) for y in (r, w, k, a))
        v_heads = v.reshape(heads, -1)
        for head in range(heads):
            kept = torch.diag(w[head]) - torch.outer(kappa[head], a[head] * kappa[head])
            # The paper has S [values, keys]: S <- S (diag(w) - kappa^T (a kappa)) + v^T k.
            state[head] = state[head] @ kept + torch.outer(v_heads[head], k[head])
        out = torch.einsum("hvk,hk->hv", state, r)
        if (norm := f"{at}.g_norm") + ".weight" in self.names:
            weights = self.at(f"{norm}.weight"), self.at(f"{norm}.bias")
            out = F.group_norm(out.reshape(1, -1), heads, *weights, self.head_eps())
            out = out.reshape(heads, -1)
        out = out + (r * self.at(f"{at}.r_k") * k).sum(-1, keepdim=True) * v_heads
        return (out.reshape(-1) * g) @ self.at(f"{at}.o_proj.weight").T, first

    def head_eps(self):
        given = self.config.get("head_norm_eps")
        return given or self.config["head_dim"] * self.config["norm_eps"]

    def qwen_layer(self, i, x, before, state, first):
        """ARWKV: (x after layer i, its normed input, the first values)."""
        at = f"model.layers.{i}"
        h = self.norm(f"{at}.input_layernorm", x)
        mixed, first = self.time_mix(f"{at}.attn", h, before, state, first)
        x = x + mixed
        y = self.norm(f"{at}.post_attention_layernorm", x)
        gate, up = (self.at(f"{at}.mlp.{part}_proj.weight") @ y for part in ("gate", "up"))
        return x + self.at(f"{at}.mlp.down_proj.weight") @ (F.silu(gate) * up), h, first

    def channel_mix(self, at, h, before):
        mixed = h + (before - h) * self.at(f"{at}.x_k")
        return (
            F.relu(mixed @ self.at(f"{at}.key.weight").T).square() @ self.at(f"{at}.value.weight").T
        )

    def forward(self, ids):
        layers, width = self.config["num_hidden_layers"], self.config["hidden_size"]
        table = self.at(f"model.{'embed_tokens' if self.hybrid else 'embeddings'}.weight")
        size = self.config["head_dim"]
        heads = width // size
        values = (self.config.get("value_dim") or width) // heads
        zero = table.new_zeros
        states = [zero(heads, values, size) for _ in range(layers)]
        before = [[zero(width), zero(width)] for _ in range(layers)]
        rows = []
        for token in ids[0]:
            x, first = table[token], None
            if self.config.get("norm_first", True) and not self.hybrid:
                x = self.norm("model.layers.0.pre_norm", x)
            for i in range(layers):
                at = f"model.layers.{i}"
                if self.hybrid:
                    x, before[i][0], first = self.qwen_layer(i, x, before[i][0], states[i], first)
                    continue
                h = self.norm(f"{at}.attn_norm", x)
                mixed, first = self.time_mix(f"{at}.attn", h, before[i][0], states[i], first)
                before[i][0], x = h, x + mixed
                h = self.norm(f"{at}.ffn_norm", x)
                x = x + self.channel_mix(f"{at}.ffn", h, before[i][1])
                before[i][1] = h
            rows.append(self.norm("model.norm", x))
        # A stored head counts even if the config calls it tied.
        head = self.at("lm_head.weight") if "lm_head.weight" in self.names else table
        return SimpleNamespace(logits=(torch.stack(rows) @ head.T)[None])


_TIME = {
    **{f"{part}_lora.lora.0.weight": f"time_mix_{part}1.weight" for part in "wavg"},
    **{f"{part}_lora.lora.2.weight": f"time_mix_{part}2.weight" for part in "wavg"},
    **{f"{part}_lora.lora.2.bias": f"time_mix_{part}0.weight" for part in "wav"},
    **{part: f"time_mix_{part}.weight" for part in ("k_k", "k_a", "r_k")},
    "r_proj.weight": "time_mix_receptance.weight",
    "k_proj.weight": "time_mix_key.weight",
    "v_proj.weight": "time_mix_value.weight",
    "o_proj.weight": "time_mix_output.weight",
    "g_norm.weight": "time_mix_ln.weight",
    "g_norm.bias": "time_mix_ln.bias",
}
_OTHER = {
    "attn_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_TOP = {
    "model.embeddings": "token_embd",
    "model.embed_tokens": "token_embd",
    "model.layers.0.pre_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def as_gguf(tensors):
    """Return the tensors as the converter of llama.cpp writes them (Rwkv7Model.modify_tensors)."""
    out, factors = {}, {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            out[f"{_TOP[stem]}.{kind}"] = value
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        own = part.removeprefix("attn.")
        if own.startswith("x_") and part != own:
            factors.setdefault(layer, {})[own[-1]] = value
        elif part == "ffn.x_k":
            out[f"blk.{layer}.channel_mix_lerp_k.weight"] = value
        elif own in _TIME and part != own:
            out[f"blk.{layer}.{_TIME[own]}"] = value.reshape(-1) if own == "r_k" else value
        else:
            out[f"blk.{layer}.{_OTHER[part.removesuffix(f'.{kind}')]}.{kind}"] = value
    for layer, found in factors.items():
        rows = found["x"] if "x" in found else np.stack([found[p].reshape(-1) for p in "rwkvag"])
        out[f"blk.{layer}.time_mix_lerp_fused.weight"] = rows[:, None, None]
    # The first layer has matrices for first values that nothing reads.
    unused = {f"blk.0.time_mix_v{i}.weight": out[f"blk.0.time_mix_a{i}.weight"] for i in "012"}
    return out | unused
