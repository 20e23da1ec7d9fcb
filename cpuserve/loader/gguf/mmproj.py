"""The towers of models of images in GGUF files: llama.cpp's mmproj files, next to the text part.

Such a file has the architecture "clip", its keys begin with "clip.", and its tensors with "v." (the
tower) or "mm." (the projector, which makes rows of its results). Its config and tensors are
presented as the whole model in transformers. Source: convert_hf_to_gguf.py and tools/mtmd
of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ConfigError, ModelError
from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.parts import find_mmproj, open_gguf
from cpuserve.models.text_parts import TEXT_PARTS
from cpuserve.models.towers import PICTURES, tower_spec
from cpuserve.quant.stored import StoredTensor, TensorStore

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.loader.gguf.file import GgufFile, GgufTensor

# The type of a picture in the chat template of a model that reads pictures.
_SHOWS_PICTURES = re.compile("""['"]image(?:_url)?['"]""")
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_LEVEL = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
# The second frame of a convolution over two frames of a video.
_SECOND_FRAME = "v.patch_embd.weight.1"


@dataclass(frozen=True, slots=True)
class Projector:
    """The form that a kind of mmproj file (clip.projector_type) has in transformers.

    wholes: the class of the whole model for each class of text part; the usual one first.
    settings: returns the parts of config.json that the file determines, with PICTURES.
    top, blocks: the new name of each tensor outside and inside of a block. Tensors of a block with
      one new name are joined, in this order.
    layers: the beginning of the new name of a block, before its number.
    levels, level: the same for DeepStack, and the new names of its parts.
    added: the tensors of the file that have 1 added to them.
    """

    wholes: Mapping[str, str]
    settings: Callable[[Keys], dict[str, Any]]
    top: Mapping[str, str]
    layers: str
    blocks: Mapping[str, str]
    levels: str = ""
    level: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()


def _idefics3(keys: Keys) -> dict[str, Any]:
    image = keys.count("image_size")
    return {
        "model_type": "idefics3",
        "scale_factor": keys.count("projector.scale_factor"),
        "vision_config": _vision(keys),
        # A file without the longest side is of a time when llama.cpp made one tile of a picture.
        PICTURES: {
            **_pixels(keys),
            "size": {"longest_edge": keys.count("preproc_image_size", image)},
            "max_image_size": {"longest_edge": image},
            "resample": 1,
        },
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    vision = _vision(keys)
    image, merge = vision["image_size"], keys.count("projector.scale_factor", 4)
    side = image // vision["patch_size"] // merge
    return {
        "model_type": "gemma3",
        "mm_tokens_per_image": side**2,
        "vision_config": vision,
        PICTURES: {**_pixels(keys), "size": {"height": image, "width": image}, "resample": 2},
    }


def _qwen2_vl(keys: Keys) -> dict[str, Any]:
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    # The converter writes the width of the text part as feed_forward_length.
    width, up = vision.pop("hidden_size"), keys.file.tensors.get("v.blk.0.ffn_up.weight")
    vision |= {"embed_dim": width, "mlp_ratio": max(up.shape) // width if up else 4}
    return {
        "model_type": "qwen2_vl",
        "vision_config": {**vision, "spatial_merge_size": merge},
        PICTURES: _any_size(keys, vision["patch_size"], merge, (4, 16384)),
    }


def _qwen25_vl(keys: Keys) -> dict[str, Any]:
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    every = keys.count("n_wa_pattern")
    vision |= {
        "spatial_merge_size": merge,
        "window_size": 112,  # of all published models; files do not have it
        "fullatt_block_indexes": list(range(every - 1, vision["depth"], every)),
    }
    return {
        "model_type": "qwen2_5_vl",
        "vision_config": vision,
        PICTURES: _any_size(keys, vision["patch_size"], merge, (4, 16384)),
    }


def _grid_vision(keys: Keys) -> dict[str, Any]:
    """Return `_vision` with the names of Qwen for two numbers."""
    vision = _vision(keys)
    more = {"depth": vision["num_hidden_layers"], "num_heads": vision["num_attention_heads"]}
    return {**vision, **more}


def _qwen3_vl(keys: Keys) -> dict[str, Any]:
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    levels = keys.raw("is_deepstack_layers") or []
    if not isinstance(levels, list) or not all(isinstance(level, bool) for level in levels):
        keys.fail("is_deepstack_layers", levels, "a list of booleans")
    vision |= {
        "num_position_embeddings": (vision["image_size"] // vision["patch_size"]) ** 2,
        "spatial_merge_size": merge,
        "deepstack_visual_indexes": [i for i, level in enumerate(levels) if level],
    }
    return {
        "model_type": "qwen3_vl",
        "vision_config": vision,
        PICTURES: _any_size(keys, vision["patch_size"], merge, (64, 16384)),
    }


def _any_size(keys: Keys, patch: int, merge: int, tokens: tuple[int, int]) -> dict[str, Any]:
    """Return the settings of pictures of any size.

    tokens: the least and the most of a picture in the published models, as files do not have them.
    """
    least, most = (count * (patch * merge) ** 2 for count in tokens)
    return {
        **_pixels(keys),
        "patch_size": patch,
        "merge_size": merge,
        "size": {"shortest_edge": least, "longest_edge": most},
        "resample": 3,
    }


def _vision(keys: Keys) -> dict[str, Any]:
    tanh, silu = (keys.file.value(f"clip.use_{name}") is True for name in ("gelu", "silu"))
    return {
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": keys.count("attention.head_count"),
        "image_size": keys.count("image_size"),
        "patch_size": keys.count("patch_size"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh" if tanh else "silu" if silu else "quick_gelu",
    }


def _pixels(keys: Keys) -> dict[str, Any]:
    return {key: keys.raw(key) for key in ("image_mean", "image_std")}


_SIGLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN2_VL = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN25_VL = {
    **_QWEN2_VL,
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN2_TOP = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.post_ln": "model.visual.merger.ln_q",
    "mm.0": "model.visual.merger.mlp.0",
    "mm.2": "model.visual.merger.mlp.2",
}
_QWEN3_VL = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}


def _embeddings(at: str) -> dict[str, str]:
    """Return the new names of the tensors of SigLIP outside of its blocks."""
    return {
        "v.patch_embd": f"{at}.embeddings.patch_embedding",
        "v.position_embd": f"{at}.embeddings.position_embedding",
        "v.post_ln": f"{at}.post_layernorm",
    }


PROJECTORS = {
    "idefics3": Projector(
        {"LlamaForCausalLM": "Idefics3ForConditionalGeneration"},
        _idefics3,
        {
            **_embeddings("model.vision_model"),
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        "model.vision_model.encoder.layers",
        _SIGLIP,
    ),
    "gemma3": Projector(
        {"Gemma3ForCausalLM": "Gemma3ForConditionalGeneration"},
        _gemma3,
        {
            **_embeddings("vision_tower"),
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection": "multi_modal_projector.mm_input_projection",
        },
        "vision_tower.encoder.layers",
        _SIGLIP,
        added=("mm.soft_emb_norm.weight",),
    ),
    "qwen2vl_merger": Projector(
        {"Qwen2ForCausalLM": "Qwen2VLForConditionalGeneration"},
        _qwen2_vl,
        _QWEN2_TOP,
        "model.visual.blocks",
        _QWEN2_VL,
    ),
    "qwen2.5vl_merger": Projector(
        {"Qwen2ForCausalLM": "Qwen2_5_VLForConditionalGeneration"},
        _qwen25_vl,
        _QWEN2_TOP,
        "model.visual.blocks",
        _QWEN25_VL,
    ),
    "qwen3vl_merger": Projector(
        {
            "Qwen3ForCausalLM": "Qwen3VLForConditionalGeneration",
            "Qwen3MoeForCausalLM": "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
        },
        _qwen3_vl,
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        "model.visual.blocks",
        _QWEN3_VL,
        levels="model.visual.deepstack_merger_list",
        level={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    ),
}


def choose_mmproj(given: str | None, model: Path) -> Path | None:
    """Return the file with the tower of a model; None if there is none.

    given: --mmproj.

    Raises ConfigError if the user gave a file that does not exist, or for another kind of model.
    """
    if given is None:
        return None if model.is_dir() else find_mmproj(model)
    if given == "none":
        return None
    if model.is_dir():
        msg = f"--mmproj {given}: {model} has no GGUF file, and its own files have its tower"
        raise ConfigError(msg)
    found = Path(given).expanduser()
    if not found.is_file():
        msg = f"--mmproj {given}: there is no such file"
        raise ConfigError(msg)
    return found


def add_mmproj(
    config: dict[str, Any], given: str | None, model: Path, text: GgufFile
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return the config with the parts of an mmproj file, its bytes, and ModelFacts of pictures.

    given: --mmproj. text: the GGUF file of the model.
    If a file that was found is of another model, this model reads no pictures; the facts say why.

    Raises ConfigError if the user gave this file.
    """
    from cpuserve.quant.gguf.sizes import packed_bytes

    mmproj = choose_mmproj(given, model)
    if mmproj is None:
        return config, 0, _without_tower(given, text)
    try:
        file = open_gguf(mmproj)
        made = with_mmproj(config, file)
        tower_spec(made, config["hidden_size"])
    except ModelError as error:
        if given is not None:
            msg = f"--mmproj {given}: {error}"
            raise ConfigError(msg) from None
        return config, 0, {"unserved": "vision", "unread_why": str(error)}
    size = sum(packed_bytes(tensor.dtype, tensor.size) for tensor in file.tensors.values())
    return made, size, {"mmproj": str(mmproj)}


def _without_tower(given: str | None, text: GgufFile) -> dict[str, Any]:
    """Return ModelFacts of a model without an mmproj file: whether its template has pictures."""
    template = text.value("tokenizer.chat_template")
    if not isinstance(template, str) or not _SHOWS_PICTURES.search(template):
        return {}
    why = "--mmproj is none" if given else "there is no mmproj file next to it"
    return {"unserved": "vision", "unread_why": why}


def mmproj_config(file: GgufFile) -> dict[str, Any]:
    """Return the parts of the equivalent of config.json that an mmproj file has.

    Raises ModelError if it is another file, or of a kind that cpuserve has no tower for.
    """
    projector = _projector(file)
    return projector.settings(Keys(file, "clip.vision"))


def _projector(file: GgufFile) -> Projector:
    if file.value("general.architecture") != "clip":
        msg = f"GGUF {file.path} is no mmproj file: general.architecture is not clip"
        raise ModelError(msg)
    kind = file.value("clip.projector_type") or file.value("clip.vision.projector_type")
    found = PROJECTORS.get(str(kind))
    if found is None:
        known = ", ".join(PROJECTORS)
        msg = (
            f"GGUF {file.path}: cpuserve has no tower for clip.projector_type {kind!r:.40}; "
            f"it has {known}"
        )
        raise ModelError(msg)
    return found


def with_mmproj(text: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    """Return the config of the whole model; text: the config of its text part (`gguf_config`).

    Raises ModelError if the mmproj file is of another model.
    """
    own, wholes = mmproj_config(file), _projector(file).wholes
    width, takes = text["hidden_size"], Keys(file, "clip.vision").count("projection_dim")
    if width != takes:
        msg = (
            f"GGUF {file.path} is of another model: its rows have {takes} numbers, and the "
            f"embeddings of this model have {width}"
        )
        raise ModelError(msg)
    part = text["architectures"][0]
    if part not in wholes:
        msg = (
            f"GGUF {file.path} is of another model: its text part is {next(iter(wholes))}, and "
            f"this model is {part}"
        )
        raise ModelError(msg)
    inner: dict[str, Any] = {"model_type": TEXT_PARTS[wholes[part]].text}
    if sections := text.get("mrope_section"):
        inner["rope_scaling"] = {**(text["rope_scaling"] or {}), "mrope_section": sections}
    return {**text, **own, "architectures": [wholes[part]], "text_config": inner}


class WholeStore:
    """The tensors of a text part and of an mmproj file, as the tensors of the whole model."""

    def __init__(self, text: TensorStore, file: GgufFile) -> None:
        """Raise ModelError if tensors of the mmproj file cannot be joined."""
        self._text, self._file = text, file
        self._projector = projector = _projector(file)
        self._blocks = dict(projector.blocks)
        if _is_swapped(file):
            up, down = self._blocks["ffn_up"], self._blocks["ffn_down"]
            self._blocks |= {"ffn_up": down, "ffn_down": up}
        matches = [match for name in file.tensors if (match := _LEVEL.fullmatch(name))]
        self._levels = sorted({int(match[1]) for match in matches})
        self._tensors: dict[str, list[GgufTensor]] = {}
        places = list(self._blocks)
        for name in sorted(file.tensors, key=lambda name: (_place(name, places), name)):
            self._tensors.setdefault(self._renamed(name), []).append(file.tensors[name])
        for parts in self._tensors.values():
            _check_parts(parts)

    def _renamed(self, name: str) -> str:
        """Return the Hugging Face name of a tensor; an unknown name is returned unchanged."""
        projector = self._projector
        if (match := _BLOCK.fullmatch(name)) is not None and match[2] in self._blocks:
            return f"{projector.layers}.{int(match[1])}.{self._blocks[match[2]]}.{match[3]}"
        if (match := _LEVEL.fullmatch(name)) is not None and match[2] in projector.level:
            level = self._levels.index(int(match[1]))
            return f"{projector.levels}.{level}.{projector.level[match[2]]}.{match[3]}"
        stem, _, kind = name.removesuffix(".1").rpartition(".")
        return f"{projector.top[stem]}.{kind}" if stem in projector.top else name

    def names(self) -> set[str]:
        """The Hugging Face name of each tensor."""
        return self._text.names() | set(self._tensors)

    def dtype(self, name: str) -> str:
        """The ggml type name."""
        own = self._tensors.get(name)
        return self._text.dtype(name) if own is None else own[0].dtype

    def get(self, name: str) -> StoredTensor:
        """Return the tensor as a mapped view, or a copy of its parts.

        Raises ModelError if its file has changed.
        """
        parts = self._tensors.get(name)
        if parts is None:
            return self._text.get(name)

        def release() -> None:
            for part in parts:
                part.file.release(part.offset, part.size)

        first = parts[0]
        if len(parts) > 1:
            shape, data = _joined(parts, [self._file.data(part) for part in parts])
        elif first.name in self._projector.added:
            shape, data = first.shape, (self._file.numbers(first) - 1).view("u1")
        else:
            shape, data = first.shape, self._file.data(first)
        return StoredTensor(name, shape, first.dtype, data, None, release)


def _place(name: str, parts: list[str]) -> int:
    """Return the place of a tensor of a block among the parts of a block; others are first."""
    match = _BLOCK.fullmatch(name)
    return parts.index(match[2]) if match is not None and match[2] in parts else -1


def _check_parts(parts: list[GgufTensor]) -> None:
    """Raise ModelError if tensors cannot be joined: frames, or matrices one below the other."""
    first, frames = parts[0], parts[-1].name == _SECOND_FRAME
    skip = 0 if frames else 1
    for part in parts[1:]:
        if part.dtype != first.dtype or part.shape[skip:] != first.shape[skip:]:
            msg = (
                f"GGUF {first.file.path}: {part.name} has type {part.dtype} and shape "
                f"{list(part.shape)}, which does not fit {first.name} with {first.dtype} and "
                f"{list(first.shape)}"
            )
            raise ModelError(msg)


def _joined(
    parts: list[GgufTensor], data: list[npt.NDArray[np.uint8]]
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """Return the shape and the bytes of tensors as one: frames of a convolution, or rows."""
    import numpy as np

    first = parts[0].shape
    if parts[-1].name != _SECOND_FRAME:
        return (sum(part.shape[0] for part in parts), *first[1:]), np.concatenate(data)
    places = [each.reshape(first[0] * first[1], -1) for each in data]
    shape = (*first[:2], len(parts), *first[2:])
    return shape, np.concatenate(places, axis=1).reshape(-1)


def _is_swapped(file: GgufFile) -> bool:
    """Whether the first matrix of an MLP is called ffn_down, as in older files of llama.cpp."""
    down, width = file.tensors.get("v.blk.0.ffn_down.weight"), "clip.vision.embedding_length"
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    if down is None or up is None or down.shape == up.shape:
        return False
    return bool(down.shape[-1] == file.value(width))
