"""Hyperparameters of models without a family in cpuserve, for the fallback to transformers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpuserve.errors import ModelError
from cpuserve.models import architecture_of, find_model, spec_from_config
from cpuserve.models.base import REFUSED
from cpuserve.models.config import read_bool, read_dtype, read_heads, read_ids, read_int
from cpuserve.models.spec import ModelSpec

# Current config.json keys, each with the names that older model types have for the same value.
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len"),
}


def read_spec(config: Mapping[str, Any]) -> tuple[ModelSpec, bool]:
    """Return (hyperparameters of the model, whether cpuserve has a Program for it).

    Raises ModelError, which lists the supported architectures, if neither cpuserve
    nor an installed transformers implements the model. Also raises it for architectures in REFUSED.
    """
    architecture = architecture_of(config)
    if architecture in REFUSED:
        msg = f"architecture {architecture} is not supported: {REFUSED[architecture]}"
        raise ModelError(msg)
    if find_model(architecture) is None and transformers_knows(config):
        return generic_spec(config), False
    return spec_from_config(config), True


def transformers_knows(config: Mapping[str, Any]) -> bool:
    """Return whether an installed transformers has the model type of `config`.

    The function looks for the directory of the model type, because importing transformers is slow.
    """
    kind = str(config.get("model_type") or "").replace("-", "_")
    found = find_spec("transformers")
    places = found.submodule_search_locations if found else None
    if not places or not kind.isidentifier():
        return False
    return (Path(places[0]) / "models" / kind).is_dir()


def generic_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return hyperparameters for the KV cache and for checks; they cannot build a Program.

    Raises ModelError for a value that is missing or out of range.
    """
    text = config.get("text_config")
    numbers = dict(text if isinstance(text, Mapping) else config)
    for key, others in ALIASES.items():
        found = [numbers[k] for k in (key, *others) if numbers.get(k) is not None]
        numbers[key] = found[0] if found else None
    vocab = read_int(numbers, "vocab_size")
    width = read_int(numbers, "hidden_size", high=1 << 20)
    q_heads, kv_heads, head_dim = read_heads(numbers, width)
    return ModelSpec(
        architecture=architecture_of(config),
        vocab=vocab,
        width=width,
        layers=read_int(numbers, "num_hidden_layers", high=4096),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read_int(numbers, "intermediate_size", 4 * width, high=1 << 24),
        max_position=read_int(numbers, "max_position_embeddings", 2048),
        norm_eps=1e-6,
        tied=read_bool(numbers, "tie_word_embeddings", False),
        dtype=read_dtype({**numbers, **config}),
        bos_ids=read_ids({**numbers, **config}, "bos_token_id", vocab),
        eos_ids=read_ids({**numbers, **config}, "eos_token_id", vocab),
    )
