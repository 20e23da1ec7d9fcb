"""The towers of models of images in GGUF files: llama.cpp's mmproj files, next to the text part.

Such a file has the architecture "clip", its keys begin with "clip.", and its tensors with "v." (the
tower) or "mm." (the projector, which makes rows of its results). Its config and tensors are
presented as the whole model in transformers. Source: convert_hf_to_gguf.py and tools/mtmd
of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.base.registry import imported
from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.model import axial_row_order, rope_row_order
from cpuserve.loader.gguf.parts import find_mmproj, open_gguf
from cpuserve.loader.gguf.projectors import grids, tiles
from cpuserve.loader.gguf.projectors.record import SECOND_FRAME, Projector, shape_of
from cpuserve.models import FAMILIES, projector_of
from cpuserve.models.text_parts import text_type
from cpuserve.models.towers import tower_spec
from cpuserve.quant.stored import StoredTensor, TensorStore

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.loader.gguf.file import GgufFile, GgufTensor

# The type of a picture in the chat template of a model that reads pictures.
_SHOWS_PICTURES = re.compile("""['"]image(?:_url)?['"]""")
_BLOCK = re.compile(r"v\.blk\.(\d+)\.((\w+)\.(weight|bias|(?:in|out)put_(?:min|max)))")
_LEVEL = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
# Tensors for sound, and the row of a token that the text part has too (Pixtral).
_UNREAD = ("a.", "mm.a.", "v.token_embd.")
_UNQUANTIZED, _CHANNELS = ("F32", "F16", "BF16"), 3
_PROJECTORS: dict[str, Projector] = {**tiles.PROJECTORS, **grids.PROJECTORS}


def choose_mmproj(option: str | None, model: Path) -> Path | None:
    """Return the file with the tower of a model; None if there is none.

    option: --mmproj.

    Raises ConfigError if the user gave a file that does not exist, or for another kind of model.
    """
    if option is None:
        return None if model.is_dir() else find_mmproj(model)
    if option == "none":
        return None
    if model.is_dir():
        msg = f"--mmproj {option}: {model} has no GGUF file, and its own files have its tower"
        raise ConfigError(msg)
    found = Path(option).expanduser()
    if not found.is_file():
        msg = f"--mmproj {option}: there is no such file"
        raise ConfigError(msg)
    return found


def add_mmproj(
    config: dict[str, Any], option: str | None, model: Path, text: GgufFile
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return the config with the parts of an mmproj file, its bytes, and ModelFacts of pictures.

    option: --mmproj. text: the GGUF file of the model.
    If a file that was found is of another model, this model reads no pictures; the facts say why.

    Raises ConfigError if the user gave this file.
    """
    from cpuserve.quant.gguf.sizes import packed_bytes

    mmproj = choose_mmproj(option, model)
    if mmproj is None:
        return config, 0, _without_tower(option, text)
    try:
        file = open_gguf(mmproj)
        made = with_mmproj(config, file)
        tower_spec(made, config["hidden_size"])
    except ModelError as error:
        if option is not None:
            msg = f"--mmproj {option}: {error}"
            raise ConfigError(msg) from None
        return config, 0, {"unserved": "vision", "unread_why": str(error)}
    size = sum(packed_bytes(tensor.dtype, tensor.size) for tensor in file.tensors.values())
    return made, size, {"mmproj": str(mmproj)}


def _without_tower(option: str | None, text: GgufFile) -> dict[str, Any]:
    """Return ModelFacts of a model without an mmproj file: whether its template has pictures."""
    template = text.value("tokenizer.chat_template")
    if not isinstance(template, str) or not _SHOWS_PICTURES.search(template):
        return {}
    why = "--mmproj is none" if option else "there is no mmproj file next to it"
    return {"unserved": "vision", "unread_why": why}


def mmproj_config(file: GgufFile) -> dict[str, Any]:
    """Return the parts of the equivalent of config.json that an mmproj file has.

    Raises ModelError if it is another file, or of a kind that cpuserve has no tower for.
    """
    projector = _projector(file)
    return projector.settings(Keys(file, "clip.vision"))


def projector_kinds() -> list[str]:
    """Return the kinds of mmproj files (clip.projector_type) that are read."""
    return [*_PROJECTORS, *FAMILIES.projectors]


def find_projector(kind: str) -> Projector | None:
    """Return how mmproj files of a kind are read, for all families; None if the kind is unknown.

    Raises ModelError if plug-ins claim the kind but none of them can serve it.
    """
    projector = _PROJECTORS.get(kind)
    if projector is None and (place := projector_of(kind)) is not None:
        projector = imported(place)
    wholes = FAMILIES.mmproj.get(kind)
    if projector is None or wholes is None:
        return projector
    return replace(projector, wholes={**projector.wholes, **wholes})


def _projector(file: GgufFile) -> Projector:
    if file.value("general.architecture") != "clip":
        msg = f"GGUF {file.path} is no mmproj file: general.architecture is not clip"
        raise ModelError(msg)
    kind = file.value("clip.projector_type") or file.value("clip.vision.projector_type")
    projector = find_projector(str(kind))
    if projector is None:
        msg = (
            f"GGUF {file.path}: cpuserve has no tower for clip.projector_type {kind!r:.40}; "
            f"it has {', '.join(projector_kinds())}"
        )
        raise ModelError(msg)
    return projector


def with_mmproj(text: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    """Return the config of the whole model; text: the config of its text part (`gguf_config`).

    Raises ModelError if the mmproj file is of another model.
    """
    projector, keys = _projector(file), Keys(file, "clip.vision")
    own, width, rows = projector.settings(keys), text["hidden_size"], projector.width
    wholes: Mapping[str, str] = own.pop("architectures", projector.wholes)
    takes = shape_of(keys, rows, 2)[0] if rows else keys.count("projection_dim")
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
    # A null has a meaning only in the config of the text part (`text_config`).
    inner: dict[str, Any] = {key: None for key, value in text.items() if value is None}
    inner |= {**own.pop("text_config", {}), "model_type": text_type(wholes[part], part)}
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
        names = [name for name in file.tensors if not name.startswith(_UNREAD)]
        for name in sorted(names, key=lambda name: (_place(name, places), name)):
            self._tensors.setdefault(self._renamed(name), []).append(file.tensors[name])
        for parts in self._tensors.values():
            _check_parts(parts)

    def _renamed(self, name: str) -> str:
        """Return the Hugging Face name of a tensor; an unknown name is returned unchanged."""
        projector = self._projector
        if name in projector.top:
            return projector.top[name]
        if (match := _BLOCK.fullmatch(name)) is not None:
            at, kind = f"{projector.layers}.{int(match[1])}", match[4]
            if match[2] in self._blocks:
                return f"{at}.{self._blocks[match[2]]}"
            if match[3] in self._blocks:
                part = self._blocks[match[3]]
                part = part if kind in ("weight", "bias") else part.removesuffix(".linear")
                return f"{at}.{part}.{kind}"
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
        elif first.name in self._projector.channels_last:
            shape, data = _channels_last(first, self._file.data(first))
        elif first.name in self._projector.turned:
            shape, data = _turned(first, self._file.data(first))
        elif name.endswith(("put_min", "put_max")):
            shape, data = (), self._file.data(first)  # the file has vectors of one number
        else:
            shape, data = first.shape, self._file.data(first)
        return StoredTensor(name, shape, first.dtype, data, self._row_order(first), release)

    def _row_order(self, tensor: GgufTensor) -> npt.NDArray[np.int32] | None:
        match = _BLOCK.fullmatch(tensor.name)
        part, projector = "" if match is None else match[3], self._projector
        if part not in (*projector.interleaved, *projector.axial):
            return None
        heads = Keys(self._file, "clip.vision").count("attention.head_count")
        order = axial_row_order if part in projector.axial else rope_row_order
        return order(tensor.shape[0], heads, tensor.name)


def _place(name: str, parts: list[str]) -> int:
    """Return the place of a tensor of a block among the parts of a block; others are first."""
    match = _BLOCK.fullmatch(name)
    return parts.index(match[3]) if match is not None and match[3] in parts else -1


def _check_parts(parts: list[GgufTensor]) -> None:
    """Raise ModelError if tensors cannot be joined: frames, or matrices one below the other."""
    first, frames = parts[0], parts[-1].name == SECOND_FRAME
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
    if parts[-1].name != SECOND_FRAME:
        return (sum(part.shape[0] for part in parts), *first[1:]), np.concatenate(data)
    places = [each.reshape(first[0] * first[1], -1) for each in data]
    shape = (*first[:2], len(parts), *first[2:])
    return shape, np.concatenate(places, axis=1).reshape(-1)


def _channels_last(
    tensor: GgufTensor, data: npt.NDArray[np.uint8]
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """Return the shape and the bytes of numbers for a patch; the channels of a pixel become last.

    A convolution [n, channels, y, x] becomes a matrix; a matrix and a vector stay what they are.

    Raises ModelError if the tensor is quantized, or has no three channels.
    """
    count = 1 if len(tensor.shape) == 1 else tensor.shape[0]
    numbers = prod(tensor.shape) // count
    if tensor.dtype not in _UNQUANTIZED or numbers % _CHANNELS:
        msg = (
            f"GGUF {tensor.file.path}: {tensor.name} has type {tensor.dtype} and shape "
            f"{list(tensor.shape)}; it must be {', '.join(_UNQUANTIZED)}, with {_CHANNELS} channels"
        )
        raise ModelError(msg)
    places = data.reshape(count, _CHANNELS, numbers // _CHANNELS, -1).swapaxes(1, 2)
    shape = tensor.shape if len(tensor.shape) == 1 else (count, numbers)
    return shape, places.reshape(-1)


def _turned(
    tensor: GgufTensor, data: npt.NDArray[np.uint8]
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """Return the shape and the bytes of rows [a, b, width] as [b, a, width]."""
    first, second, *rest = tensor.shape
    return (second, first, *rest), data.reshape(first, second, -1).swapaxes(0, 1).reshape(-1)


def _is_swapped(file: GgufFile) -> bool:
    """Whether the first matrix of an MLP is called ffn_down, as in older files of llama.cpp."""
    down, width = file.tensors.get("v.blk.0.ffn_down.weight"), "clip.vision.embedding_length"
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    if down is None or up is None or down.shape == up.shape:
        return False
    return bool(down.shape[-1] == file.value(width))
