"""Presents a GGUF file as a Hugging Face model: a config dict, and tensors with HF names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.archs.table import arch_of
from cpuserve.loader.gguf.file import GgufFile, GgufTensor
from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.rotation import rotation_of
from cpuserve.loader.names import gguf_to_hf
from cpuserve.loader.safetensors import dtype_read, ids_as_floats
from cpuserve.models.rotations import KEY as ROTATION
from cpuserve.program.elementary import logarithm
from cpuserve.quant.stored import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Vectors that the converter of llama.cpp stores as matrices.
# Factors of mixtures of the row of a token with the row before it, as a recurrent model has them.
SHIFTS = (".mu", *(f".attn.x_{part}.bias" for part in ("r", "w", "k", "v", "g")))
VECTORS = tuple(
    f"{module}.{n}" for module in ("mamba", "mixer") for n in ("A_log", "D", "norm.weight")
)
# The weights of norms end like this. Some converters add 1 to them.
NORMS = ("norm.weight", *(f".ple.norm_{part}.weight" for part in ("key", "query", "conv")))
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The default token ids by kind of tokenizer, for files without these ids; as in llama.cpp.
_TOKENS = {"llama": {"bos": 1, "eos": 2}, "t5": {"eos": 1}}
RANK = 4  # LLAMA_POOLING_TYPE_RANK: the file has a reranker's head
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the equivalent of config.json; reads only metadata and the RoPE factors."""
    keys, arch = arch_of(file)
    if keys.raw("expert_count") and "ffn_down_exps" not in arch.blocks:
        wanted = f"absent: mixtures of experts are not supported in files of {keys.arch}"
        keys.fail("expert_count", keys.raw("expert_count"), wanted)
    eps = "attention.layer_norm_epsilon" if arch.layer_norm else "attention.layer_norm_rms_epsilon"
    config: dict[str, Any] = {
        "architectures": [arch.family],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": 0 if arch.states else _intermediate(keys),
        "num_hidden_layers": keys.layers(),
        "max_position_embeddings": keys.count("context_length"),
        arch.eps: keys.real(eps),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": _dtype(file),
    }
    if arch.states:
        config |= {"num_attention_heads": 0, "num_key_value_heads": 0}
    else:
        _add_heads(config, keys, narrow=arch.narrow)
        if not arch.still:
            _add_rope(config, keys, arch.yarn)
        _add_window(config, keys)
    _add_tokens(config, file)
    config["is_ranker"] = keys.raw("pooling_type") == RANK
    if rotation := rotation_of(file, partial(hf_name, arch)):
        config[ROTATION] = rotation
    return {**config, **arch.settings(keys)}


def bytes_in_memory(file: GgufFile, config: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors in memory; a head that is normalized is dense there."""
    from cpuserve.models.decoders import has_normed_head
    from cpuserve.quant.gguf.sizes import packed_bytes

    sizes = {name: packed_bytes(t.dtype, t.size) for name, t in file.tensors.items()}
    head = file.tensors.get("output.weight")
    if head is not None and has_normed_head(config):
        sizes[head.name] = max(sizes[head.name], 2 * math.prod(head.shape))
    return sum(sizes.values())


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        msg = f"GGUF {file.path}: there is no token_embd.weight matrix, so it is not a model"
        raise ModelError(msg)
    return embedding.shape[0]


def _intermediate(keys: Keys) -> int:
    """Return the MLP width; without one in the file, the width of an expert.

    If experts of layers differ in their width (Nemotron 3 Puzzle), return the largest.
    """
    experts = keys.raw("expert_feed_forward_length")
    if isinstance(experts, list) and {type(each) for each in experts} == {int}:
        return int(max(*experts, 1))
    only = keys.raw("feed_forward_length") is None and experts is not None
    key = "expert_feed_forward_length" if only else "feed_forward_length"
    return keys.count(key, some=True)


def _dtype(file: GgufFile) -> str:
    """Return the dtype of most matrix bytes; bfloat16 (the activation dtype) if quantized."""
    weight: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            weight[tensor.dtype] = weight.get(tensor.dtype, 0) + tensor.size
    return _DTYPES.get(max(weight, key=lambda d: weight[d]), "bfloat16")


def _add_heads(config: dict[str, Any], keys: Keys, *, narrow: bool) -> None:
    heads = keys.count("attention.head_count")
    config["num_attention_heads"] = heads
    config["num_key_value_heads"] = keys.count("attention.head_count_kv", heads, some=True)
    if keys.raw("attention.kv_lora_rank") is not None:  # DeepSeek: `settings` has the widths
        config["head_dim"] = keys.whole("rope.dimension_count") or 1
        return
    head_dim = keys.count("attention.key_length", max(1, config["hidden_size"] // heads))
    value_dim = keys.count("attention.value_length", head_dim)
    if value_dim != head_dim and not narrow:
        keys.fail("attention.value_length", value_dim, f"{head_dim}, as the key length")
    config["head_dim"] = head_dim


def _add_rope(config: dict[str, Any], keys: Keys, yarn: Mapping[str, Any]) -> None:
    config["rope_theta"] = keys.real("rope.freq_base", 10000.0)
    rotary = keys.count("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotary / config["head_dim"]
    scaling = _rope_scaling(keys, yarn)
    factors = _rope_factors(keys, rotary)
    if factors is not None:
        if scaling is not None:
            wanted = "absent next to a rope_freqs.weight tensor"
            keys.fail("rope.scaling.type", scaling["rope_type"], wanted)
        scaling = {"rope_type": "freq_factors", "freq_factors": factors}
    config["rope_scaling"] = scaling
    if (sections := keys.raw("rope.dimension_sections")) is not None:
        config["mrope_section"] = sections[:3] if isinstance(sections, list) else sections


def _rope_scaling(keys: Keys, yarn: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = keys.raw("rope.scaling.type")
    legacy = keys.raw("rope.scale_linear")
    if kind is None and legacy is not None:
        kind = "linear"
    if kind in (None, "none"):
        return None
    if kind == "longrope":  # the settings of architectures that have it add its factors
        return {"rope_type": kind}
    key = "rope.scale_linear" if keys.raw("rope.scaling.factor") is None else "rope.scaling.factor"
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.real(key)}
    if kind != "yarn":
        keys.fail("rope.scaling.type", kind, "none, linear, longrope or yarn")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        **yarn,
        "factor": keys.real(key),
        "original_max_position_embeddings": keys.count(
            "rope.scaling.original_context_length", keys.count("context_length")
        ),
    }
    for name, field in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.raw(f"rope.scaling.{name}") is not None:
            scaling[field] = keys.real(f"rope.scaling.{name}")
    if keys.raw("rope.scaling.yarn_log_multiplier") is not None:
        # In DeepSeek, this value is a tenth of mscale_all_dim.
        # llama.cpp assumes that mscale and mscale_all_dim are equal.
        weight = 10 * keys.real("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return scaling


def _rope_factors(keys: Keys, rotary: int) -> list[float] | None:
    """Return the divisors of the rotary / 2 inverse frequencies (Llama 3.1); None if none."""
    values = keys.numbers("rope_freqs.weight")
    if values is None or (len(values) == rotary // 2 and all(0 < v < float("inf") for v in values)):
        return values
    msg = f"GGUF {keys.file.path}: rope_freqs.weight must be {rotary // 2} positive F32 numbers"
    raise ModelError(msg)


def _add_window(config: dict[str, Any], keys: Keys) -> None:
    if keys.raw("attention.sliding_window"):
        config["sliding_window"] = keys.count("attention.sliding_window")
        if config["model_type"] == "llama":
            # GGUF files store Mistral as "llama", but only Mistral's family reads the window.
            config["architectures"] = ["MistralForCausalLM"]
            config["model_type"] = "mistral"


def _add_tokens(config: dict[str, Any], file: GgufFile) -> None:
    defaults = _TOKENS.get(str(file.value("tokenizer.ggml.model")), {})

    def ids(*names: str) -> list[int]:
        keys = {name: f"tokenizer.ggml.{name}_token_id" for name in names}
        values = [file.value(k) if k in file else defaults.get(n) for n, k in keys.items()]
        return [v for v in values if isinstance(v, int) and 0 <= v < config["vocab_size"]]

    if bos := ids("bos"):
        config["bos_token_id"] = bos[0]
    # Tokens for the end of the text, of a turn, and of a message before the reply of a tool.
    if eos := list(dict.fromkeys(ids("eos", "eot", "eom"))):
        config["eos_token_id"] = eos if len(eos) > 1 else eos[0]


# The tensors of a block for multi-token prediction that other blocks do not have.
_GUESSER = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "layer_output_norm": "shared_head.norm",  # MiMo V2
}


def _joined(blocks: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the stack with gates and ups of experts, which files may have as one."""
    stem, _, part = blocks.get("ffn_gate_exps", "").rpartition("experts.")
    both = {"gate_proj": "gate_up_proj", "w1": "w13"}.get(part)
    return {"ffn_gate_up_exps": f"{stem}experts.{both}"} if both else {}


def hf_name(arch: GgufArch, name: str) -> str:
    """Return the Hugging Face name of a tensor in files of an architecture."""
    parts = {**_GUESSER, **_joined(arch.blocks), **arch.blocks}
    return gguf_to_hf(name, parts, arch.top, arch.layers, arch.bare)


class GgufStore:
    """TensorStore of a GGUF file, as a Hugging Face model: rows of q, k and v are in its order.

    heads: whether it has the blocks for multi-token prediction.
    """

    def __init__(self, file: GgufFile, config: dict[str, Any], *, heads: bool = False) -> None:
        self._file = file
        keys, arch = arch_of(file)
        self._arch = arch
        self._q_heads = int(config["num_attention_heads"])
        self._kv_heads = int(config["num_key_value_heads"])
        self._split = int(config.get("split_pairs", 0))
        self._head_dim = int(config.get("head_dim") or 1)
        self._tensors: dict[str, GgufTensor] = {}
        blocks = range(config["num_hidden_layers"], keys.count("block_count"))
        predictors = () if heads else tuple(f"blk.{block}." for block in blocks)
        for name, tensor in file.tensors.items():
            # The RoPE factors are in the config, so they do not count as a weight.
            if name not in ROPE_FACTORS and not name.startswith(predictors):
                self._tensors[hf_name(arch, name)] = tensor

    def names(self) -> set[str]:
        """The Hugging Face names of all tensors."""
        return set(self._tensors)

    def dtype(self, name: str) -> str:
        """The ggml type name, and F32 for tables of ids."""
        return dtype_read(name, self._tensors[name].dtype)

    def get(self, name: str) -> StoredTensor:
        """Return the tensor as a mapped view; row_order undoes the reordering of the converter."""
        tensor = self._tensors[name]
        data, order, shape = self._data(name, tensor), self._row_order(name, tensor), tensor.shape
        if order is not None and len(tensor.shape) == 1:
            # A bias is a single row, so row_order cannot apply. Reorder a copy, which is small.
            if tensor.dtype not in _DTYPES:
                found = f"{tensor.name} has type {tensor.dtype}, but must be F32, F16 or BF16"
                msg = f"GGUF {self._file.path}: {found}"
                raise ModelError(msg)
            data = data.reshape(len(order), -1)[order].reshape(-1)
            order = None

        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)  # a matrix with one row
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            shape = (math.prod(shape[:-1]), 1, shape[-1])
        if name.endswith(("self_attn.A_log", "attention.A_log")):
            count = math.prod(shape)
            shape = (1, 1, count, 1) if self._arch.each_rate else (count,)
        if name.endswith(("k_b_proj.weight", "v_b_proj.weight")) and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])  # a matrix with the rows of all heads
        if name.endswith((".attn.x_x", ".attn.x_proj.2.bias")):
            shape = (shape[0], math.prod(shape[1:]))
        if name.endswith(SHIFTS):
            shape = (math.prod(shape),)
        if name.endswith((".attn.r_k", ".attn.bonus")) and math.prod(shape) % self._head_dim == 0:
            shape = (math.prod(shape) // self._head_dim, self._head_dim)
        # A_log of Mamba 1 is a matrix, and has as many columns as a channel has states.
        if name.endswith(VECTORS) and (not name.endswith("A_log") or shape[-1] == 1):
            shape = (math.prod(shape),)

        def release() -> None:
            tensor.file.release(tensor.offset, tensor.size)

        dtype = self.dtype(name)
        if dtype != tensor.dtype:
            data = ids_as_floats(data, tensor.dtype)
        return StoredTensor(name, shape, dtype, data, order, release, tensor.file.check_content)

    def _data(self, name: str, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor; changes of the converter to some vectors are undone."""
        file = self._file
        if name.endswith("A_log"):
            rates = file.numbers(tensor)  # these are -exp(A_log), or exp(A_log)
            positive = self._arch.positive_rates
            rates = rates if positive else -rates
            if not (rates > 0).all():
                sign = "positive" if positive else "negative"
                msg = f"GGUF {file.path}: {tensor.name} must be {sign} numbers"
                raise ModelError(msg)
            return logarithm(rates).reshape(-1).view("u1")
        norm = name.endswith(NORMS) and not name.endswith("linear_attn.norm.weight")
        plain = self._arch.plain_last and name == "model.norm.weight"
        if norm and self._arch.added_norms and not plain:
            return (file.numbers(tensor) - 1).view("u1")
        return file.data(tensor)

    def _row_order(self, name: str, tensor: GgufTensor) -> npt.NDArray[np.int32] | None:
        heads = self._q_heads, self._kv_heads
        return row_order(self._arch, name, tensor.shape[0], *heads, self._split)


def row_order(
    arch: GgufArch, name: str, rows: int, q_heads: int, kv_heads: int, split: int = 0
) -> npt.NDArray[np.int32] | None:
    """Return for each Hugging Face row the index of the stored row; None if the order is equal.

    split: how many dimensions of a head RoPE turns, if the converter moved their pairs apart.
    """
    heads = {"q_proj": q_heads, "k_proj": kv_heads}
    parts = name.rsplit(".", 2)
    if parts[-1].endswith("_scale"):
        return None
    fused = name.endswith(("query_key_value.weight", "query_key_value.bias"))
    if fused and not name.startswith("model."):  # Ling has the order of the file
        return by_group(rows, q_heads, kv_heads, name)
    if len(parts) < 3 or parts[1] not in heads:
        return None
    if split:
        return pair_row_order(rows, heads[parts[1]], split, name)
    if not arch.interleaved:
        return None
    return rope_row_order(rows, heads[parts[1]], name)


def by_group(rows: int, q_heads: int, kv_heads: int, name: str) -> npt.NDArray[np.int32]:
    """Return for each Hugging Face row of a fused query_key_value the index of the stored row.

    The file has all q, then all k, then all v. Hugging Face has the query heads
    of the first KV head, its k and its v, then the same for the next KV head. Source: the inverse
    of GPTNeoXModel.modify_tensors and FalconModel.modify_tensors in the converter of llama.cpp.
    """
    heads = q_heads + 2 * kv_heads
    if rows % heads or q_heads % kv_heads:
        msg = f"{name} has {rows} rows, which do not fit {q_heads} + 2 x {kv_heads} heads"
        raise ModelError(msg)
    import numpy as np

    stored = np.arange(rows, dtype=np.int32).reshape(heads, -1)
    q, k, v = np.split(stored, [q_heads, q_heads + kv_heads])
    groups = [part.reshape(kv_heads, -1) for part in (q, k, v)]
    return np.ascontiguousarray(np.concatenate(groups, axis=1)).reshape(-1)


def rope_row_order(rows: int, heads: int, name: str) -> npt.NDArray[np.int32]:
    """Return for each Hugging Face row the index of the stored row.

    Rows are [heads, d/2, 2] in the file and [heads, 2, d/2] in Hugging Face.

    Source: the inverse of LlamaModel.permute in convert_hf_to_gguf.py of llama.cpp.
    """
    if rows % (2 * heads):
        msg = f"{name} has {rows} rows, which is not a multiple of 2 x {heads} heads"
        raise ModelError(msg)
    import numpy as np

    stored = np.arange(rows, dtype=np.int32).reshape(heads, -1, 2)
    return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1)


def axial_row_order(rows: int, heads: int, name: str) -> npt.NDArray[np.int32]:
    """Return for each Hugging Face row of queries, keys and values the index of the stored row.

    Rows of queries and keys are [heads, 2, d/4, 2] in the file and [heads, d/4, 2, 2] in Hugging
    Face: a pair of an axis, then one of the other axis.

    Source: the inverse of `permute` of such towers in the converter of llama.cpp.
    """
    if rows % (3 * 4 * heads):
        msg = f"{name} has {rows} rows, which is not a multiple of 3 x 4 x {heads} heads"
        raise ModelError(msg)
    import numpy as np

    stored = np.arange(rows, dtype=np.int32)
    both = stored[: rows // 3 * 2].reshape(2 * heads, 2, -1, 2).swapaxes(1, 2)
    return np.concatenate([both.reshape(-1), stored[rows // 3 * 2 :]])


def pair_row_order(rows: int, heads: int, split: int, name: str) -> npt.NDArray[np.int32]:
    """Return for each Hugging Face row the index of the stored row.

    The first `split` rows of a head are [2, split/2] in the file and [split/2, 2] in Hugging Face.

    Source: the inverse of Glm4Model.normal_to_neox in the converter of llama.cpp.
    """
    if rows % heads or split % 2 or not 0 < split <= rows // heads:
        msg = f"{name} has {rows} rows, which do not fit {heads} heads with {split} rotated ones"
        raise ModelError(msg)
    import numpy as np

    stored = np.arange(rows, dtype=np.int32).reshape(heads, -1)
    turned = stored[:, :split].reshape(heads, 2, -1).swapaxes(1, 2).reshape(heads, -1)
    return np.concatenate([turned, stored[:, split:]], axis=1).reshape(-1)
