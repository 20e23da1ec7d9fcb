"""The towers of models of images in GGUF files: llama.cpp's mmproj files, next to the text part.

Such a file has the architecture "clip", its keys begin with "clip.", and its tensors with "v." (the
tower) or "mm." (the projector, which makes rows of its results). Its config and tensors are
presented as those of the whole model in transformers. Source: convert_hf_to_gguf.py and tools/mtmd
of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ConfigError, ModelError
from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.parts import find_mmproj, open_gguf
from cpuserve.models.text_parts import text_architectures
from cpuserve.models.towers import PICTURES, tower_spec
from cpuserve.quant.stored import StoredTensor, TensorStore

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile, GgufTensor

# The type of a picture in the chat template of a model that reads pictures.
_SHOWS_PICTURES = re.compile("""['"]image(?:_url)?['"]""")
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Projector:
    """The form that a kind of mmproj file (clip.projector_type) has in transformers.

    architecture: the class of the whole model.
    settings: returns the parts of config.json that the file determines, with PICTURES.
    top, blocks: the new name of each tensor outside and inside of a block.
    layers: the beginning of the new name of a block, before its number.
    """

    architecture: str
    settings: Callable[[Keys], dict[str, Any]]
    top: Mapping[str, str]
    layers: str
    blocks: Mapping[str, str]


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
PROJECTORS = {
    "idefics3": Projector(
        "Idefics3ForConditionalGeneration",
        _idefics3,
        {
            "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
            "v.position_embd": "model.vision_model.embeddings.position_embedding",
            "v.post_ln": "model.vision_model.post_layernorm",
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        "model.vision_model.encoder.layers",
        _SIGLIP,
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
    config = projector.settings(Keys(file, "clip.vision"))
    return {"architectures": [projector.architecture], **config}


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
    own = mmproj_config(file)
    width, takes = text["hidden_size"], Keys(file, "clip.vision").count("projection_dim")
    if width != takes:
        msg = (
            f"GGUF {file.path} is of another model: its rows have {takes} numbers, and the "
            f"embeddings of this model have {width}"
        )
        raise ModelError(msg)
    known = text_architectures(own["architectures"][0])
    if text["architectures"][0] not in known:
        msg = (
            f"GGUF {file.path} is of another model: its text part is {known[0]}, and this model is "
            f"{text['architectures'][0]}"
        )
        raise ModelError(msg)
    return {**text, **own, "text_config": {"model_type": text["model_type"]}}


class WholeStore:
    """The tensors of a text part and of an mmproj file, as the tensors of the whole model."""

    def __init__(self, text: TensorStore, file: GgufFile) -> None:
        self._text, self._file = text, file
        projector = _projector(file)
        blocks = dict(projector.blocks)
        if _is_swapped(file):
            blocks |= {"ffn_up": blocks["ffn_down"], "ffn_down": blocks["ffn_up"]}
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in file.tensors.items():
            if (match := _BLOCK.fullmatch(name)) is not None and match[2] in blocks:
                found = f"{projector.layers}.{int(match[1])}.{blocks[match[2]]}.{match[3]}"
            else:
                stem, _, kind = name.rpartition(".")
                found = f"{projector.top[stem]}.{kind}" if stem in projector.top else name
            self._tensors[found] = tensor

    def names(self) -> set[str]:
        """The Hugging Face name of each tensor."""
        return self._text.names() | set(self._tensors)

    def dtype(self, name: str) -> str:
        """The ggml type name."""
        own = self._tensors.get(name)
        return self._text.dtype(name) if own is None else own.dtype

    def get(self, name: str) -> StoredTensor:
        """Return the tensor as a mapped view; ModelError if its file has changed."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return self._text.get(name)
        own = tensor

        def release() -> None:
            own.file.release(own.offset, own.size)

        return StoredTensor(name, own.shape, own.dtype, self._file.data(own), None, release)


def _is_swapped(file: GgufFile) -> bool:
    """Whether the first matrix of an MLP is called ffn_down, as in older files of llama.cpp."""
    down, width = file.tensors.get("v.blk.0.ffn_down.weight"), "clip.vision.embedding_length"
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    if down is None or up is None or down.shape == up.shape:
        return False
    return bool(down.shape[-1] == file.value(width))
