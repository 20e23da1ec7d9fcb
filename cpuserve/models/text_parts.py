"""Models of images and text: cpuserve serves the part for text, which has a config of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.models.config import read_int, read_object
from cpuserve.models.families import FAMILIES
from cpuserve.models.family import ModelFamily, TextType, Whole

# The config of the text part: the key of transformers, and the key of InternVL's own code.
KEYS = ("text_config", "llm_config")
# The config of the part of Qwen-Omni that reads and writes texts, which has a text config.
THINKER = "thinker_config"


def text_architectures(composite: str) -> list[str]:
    """Return the architectures that the text part of `composite` may have, the usual one first."""
    types = _types(FAMILIES.wholes[composite])
    return list(dict.fromkeys(FAMILIES.text_types[kind][0].name for kind in types))


def text_type(composite: str, architecture: str) -> str:
    """Return the model_type of a text part of `composite` that is of this architecture."""
    types = _types(FAMILIES.wholes[composite])
    return next(kind for kind in types if FAMILIES.text_types[kind][0].name == architecture)


def _types(model: Whole) -> tuple[str, ...]:
    return tuple(dict.fromkeys((model.text, *model.others, *model.called)))


def text_part(composite: str, config: Mapping[str, Any]) -> tuple[ModelFamily, TextType]:
    """Return the family of the text part of a model of images and text, and what its type says.

    Raises:
        ModelError: its text part is of a model type that this model is not known to have.
    """
    model = FAMILIES.wholes[composite]
    kind = str(_own(config).get("model_type") or model.text)
    if kind in _types(model):
        return FAMILIES.text_types[kind]
    if not (model.others or model.called) and kind not in FAMILIES.text_types:
        # The class has this part only, whatever an older file says.
        return FAMILIES.text_types[model.text]
    types = ", ".join(_types(model))
    msg = (
        f"config.json: the text part of {composite} is of type {kind}, but cpuserve runs this "
        f"model with: {types}"
    )
    raise ModelError(msg)


def text_config(composite: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text part, as if it were the config of a text model.

    Ids of special tokens, and the dtype, may be only in the outer config. Its tie_word_embeddings
    has priority, because the head belongs to the whole model. In the configs of the first models
    (Qwen2-VL), the keys of the text part and of other parts are in one object.
    """
    (_, part), text_keys = text_part(composite, config), _own(config)
    config = {**config, **read_object(config, THINKER)}
    tied = config.get("tie_word_embeddings")
    if tied is None and not text_keys.keys() & {"tie_word_embeddings", "tie_embedding"}:
        tied = FAMILIES.wholes[composite].tied
    outer_config = {k: v for k, v in config.items() if v is not None}
    # A null of the text part is a value (no sliding window), unless the outer config has the key.
    text_keys = {k: v for k, v in text_keys.items() if v is not None or k not in outer_config}
    merged_config = {**part.defaults, **outer_config, **text_keys}
    if part.splits_width and merged_config.get("head_dim") is None:
        heads = read_int(merged_config, "num_attention_heads")
        merged_config["head_dim"] = read_int(merged_config, "hidden_size") // heads
    return {**merged_config, **({} if tied is None else {"tie_word_embeddings": tied})}


def _own(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text part; {} if the config has no such object."""
    config = read_object(config, THINKER) or config
    return next((part for key in KEYS if (part := read_object(config, key))), {})
