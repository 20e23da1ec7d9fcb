"""Find the family of a checkpoint, with the numbers of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.media.families.canvas import (
    CanvasTiles,
    aya_vision,
    granite_docling,
    internvl,
    internvl_chat,
)
from cpuserve.media.families.deepseek_vl import DeepseekVLPictures, deepseek_vl, janus
from cpuserve.media.families.gemma3 import Gemma3Pictures, gemma3
from cpuserve.media.families.gemma4 import Gemma4Pictures, gemma4, gemma4_unified
from cpuserve.media.families.idefics3 import Idefics3, idefics3
from cpuserve.media.families.kimi_vl import KimiPictures, kimi_k25, kimi_vl
from cpuserve.media.families.lfm2_vl import Lfm2Pictures, lfm2_vl
from cpuserve.media.families.llava import LlavaPictures, llava
from cpuserve.media.families.llava_next import LlavaNextPictures, llava_next
from cpuserve.media.families.llava_onevision import OnevisionPictures, llava_onevision
from cpuserve.media.families.pixtral import PixtralPictures, mistral3
from cpuserve.media.families.qwen_vl import QwenVL, glm_ocr, paddleocr_vl, qwen3_omni, qwen_vl

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


def _marked(reader: FamilyReader, marker: str) -> FamilyReader:
    """Return the same reader with `marker` for models that do not set their image token."""

    def read(
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        whole: Mapping[str, Any],
        tokens: Mapping[str, str],
    ) -> AnyFamily:
        return reader(config, processor, whole, {"image_token": marker, **tokens})

    return read


FAMILIES: dict[str, FamilyReader] = {
    "aya_vision": aya_vision,
    "deepseek_vl": deepseek_vl,
    "dots_ocr": _marked(qwen_vl, "<|imgpad|>"),
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "glm46v": glm_ocr,
    "glm4v": glm_ocr,
    "glm4v_moe": glm_ocr,
    "glm_ocr": glm_ocr,
    "granite_docling": granite_docling,
    "idefics3": idefics3,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    "janus": janus,
    "kimi_k25": kimi_k25,
    "kimi_vl": kimi_vl,
    "lfm2_vl": lfm2_vl,
    "lfm3_vl": qwen_vl,
    "lighton_ocr": mistral3,
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "mistral3": mistral3,
    "paddleocr_vl": paddleocr_vl,
    "qianfan_ocr": internvl,
    "qwen2_5_omni": _marked(qwen3_omni, "<|IMAGE|>"),
    "qwen2_5_omni_thinker": _marked(qwen3_omni, "<|IMAGE|>"),
    "qwen2_5_vl": qwen_vl,
    "qwen2_vl": qwen_vl,
    "qwen3_5": qwen_vl,
    "qwen3_5_moe": qwen_vl,
    "qwen3_omni_moe": qwen3_omni,
    "qwen3_omni_moe_thinker": qwen3_omni,
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
    "smolvlm": idefics3,
}

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
    reader = FAMILIES.get(str(config.get("model_type")))
    return None if reader is None else reader(config, config["image_processor"], {}, {})


def family_of(folder: Path) -> AnyFamily | None:
    """Return the family of a checkpoint in a folder; None if pictures are nothing to its model.

    Raises ModelError if files or numbers are missing.
    """
    config = _read(folder / "config.json")
    reader = FAMILIES.get(str(config.get("model_type")))
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
