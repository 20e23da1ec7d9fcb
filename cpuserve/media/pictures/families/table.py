"""Find the family of a checkpoint, with the numbers of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.media.pictures.families.canvas import CanvasTiles
from cpuserve.media.pictures.families.deepseek_vl import DeepseekVLPictures
from cpuserve.media.pictures.families.gemma3 import Gemma3Pictures
from cpuserve.media.pictures.families.gemma4 import Gemma4Pictures
from cpuserve.media.pictures.families.idefics3 import Idefics3
from cpuserve.media.pictures.families.kimi_vl import KimiPictures
from cpuserve.media.pictures.families.lfm2_vl import Lfm2Pictures
from cpuserve.media.pictures.families.llava import LlavaPictures
from cpuserve.media.pictures.families.llava_next import LlavaNextPictures
from cpuserve.media.pictures.families.llava_onevision import OnevisionPictures
from cpuserve.media.pictures.families.pixtral import PixtralPictures
from cpuserve.media.pictures.families.qwen_vl import QwenVL
from cpuserve.models.families import FAMILIES

AnyFamily: TypeAlias = (
    Idefics3
    | QwenVL
    | Gemma3Pictures
    | Gemma4Pictures
    | Lfm2Pictures
    | CanvasTiles
    | LlavaPictures
    | LlavaNextPictures
    | OnevisionPictures
    | DeepseekVLPictures
    | KimiPictures
    | PixtralPictures
)
# Makes a family from config.json, the settings of the image processor and of the whole
# processor, and the texts of special tokens.
FamilyReader: TypeAlias = Callable[
    [Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Mapping[str, str]], AnyFamily
]


def reader_of(model_type: str) -> FamilyReader | None:
    """Return the function that reads the family of a `model_type`; None if it has no pictures."""
    place = FAMILIES.media.get(model_type)
    if place is None:
        return None
    module, _, name = place.partition(":")
    reader: FamilyReader = getattr(import_module(module), name)
    return reader


# By the marker of a picture: the texts that chat templates write before and after it.
FRAMES = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|IMAGE_PLACEHOLDER|>": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "<|IMAGE|>": ("<|vision_bos|>", "<|vision_eos|>"),
    "<|imgpad|>": ("<|img|>", "<|endofimg|>"),
}
# By the same: the text, which may be no token, that chat templates write instead of the marker
# (Aya Vision, Qianfan-OCR).
MAX_SETTINGS_BYTES = 10_000_000  # of a file with the settings of pictures
WRITTEN = {"<|IMG_PATCH|>": "<image>", "<IMG_CONTEXT>": "<image>"}


def frame_of(family: AnyFamily) -> tuple[str, str]:
    """Return the texts that chat templates write before and after the marker of a picture."""
    if isinstance(family, KimiPictures):
        return family.frame
    return FRAMES.get(family.marker, ("", ""))


def for_pictures(family: AnyFamily, count: int) -> AnyFamily:
    """Return the family for a request with so many pictures, pages of documents included."""
    if count > 1 and isinstance(family, OnevisionPictures):
        return family.among_others()
    return family


def family_with(config: Mapping[str, Any]) -> AnyFamily | None:
    """Return the family of a model in GGUF files; None if pictures are nothing to it.

    config: the config of its mmproj file (`mmproj_config`).

    Raises ModelError if numbers are missing.
    """
    reader = reader_of(str(config.get("model_type")))
    return None if reader is None else reader(config, config["image_processor"], {}, {})


def family_of(folder: Path) -> AnyFamily | None:
    """Return the family of a checkpoint in a folder; None if pictures are nothing to its model.

    Raises ModelError if files or numbers are missing.
    """
    config = _read(folder / "config.json")
    reader = reader_of(str(config.get("model_type")))
    if reader is None:
        return None
    whole = _read(folder / "processor_config.json")
    processor = whole.get("image_processor")  # before the other file, as in transformers
    if not isinstance(processor, Mapping) or not processor:
        processor = _read(folder / "preprocessor_config.json")
    if not processor:
        msg = f"{folder} has no preprocessor_config.json"
        raise ModelError(msg)
    return reader(config, processor, whole, _tokens(_read(folder / "tokenizer_config.json")))


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens, by their names in tokenizer_config.json."""
    found: dict[str, str] = {}
    for given in (config.get("extra_special_tokens"), config):
        for name, token in given.items() if isinstance(given, Mapping) else ():
            text = token.get("content") if isinstance(token, Mapping) else token
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _read(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; {} if there is no such file. Raises ModelError."""
    from cpuserve.loader.mapped import read_small

    if not path.exists():
        return {}
    try:
        fault("processor_file.read")
        found = msgspec.json.decode(read_small(path, "settings of pictures", MAX_SETTINGS_BYTES))
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from None
    return found if isinstance(found, dict) else {}
