#!/usr/bin/env python3
"""Writes models of pictures and text with random weights in bfloat16, for benchmarks.

    python benchmarks/make_picture_model.py smolvlm-500m DIR [--gguf]

DIR gets a checkpoint as transformers writes it, with a small tokenizer that has the tokens of the
family. `--gguf` adds the same weights as files for llama.cpp: model-BF16.gguf and mmproj-BF16.gguf.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from make_model import write_tokenizer, write_weights

from cpuserve.loader.names import checkpoint_to_hf
from cpuserve.models import build_program, build_tower, spec_from_config, stored_names

ROOT = Path(__file__).resolve().parent.parent

_TURN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}MARKER{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GRID_TOKENS = [f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)]
_SMOLVLM = {
    "architecture": "SmolVLM",
    "model_type": "smolvlm",
    "prefix": "model.text_model.",
    "ids": {"image_token_id": "<image>"},
    "tokens": ["<image>", "<fake_token_around_image>", "<global-img>", *_GRID_TOKENS],
    "marker": "<image>",
}
_QWEN3_VL = {
    "architecture": "Qwen3VL",
    "model_type": "qwen3_vl",
    "prefix": "model.language_model.",
    "ids": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "marker": "<|vision_start|><|image_pad|><|vision_end|>",
}
# By name: the family, the side of a tile if pictures are cut into tiles, and the configs.
SHAPES: dict[str, dict[str, Any]] = {
    "smolvlm-500m": {
        **_SMOLVLM,
        "config": {"scale_factor": 4},
        "image": 512,
        "text": {
            "model_type": "llama",
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "vocab_size": 49280,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
        },
        "vision": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "patch_size": 16,
        },
    },
    "smolvlm-2b": {
        **_SMOLVLM,
        "config": {"scale_factor": 3},
        "image": 378,
        "text": {
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 64,
            "vocab_size": 49280,
            "rms_norm_eps": 1e-5,
            "rope_theta": 130000.0,
            "max_position_embeddings": 8192,
        },
        "vision": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
        },
    },
    "qwen3-vl-2b": {
        **_QWEN3_VL,
        "config": {"tie_word_embeddings": True},
        "text": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 5e6,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "spatial_merge_size": 2,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}
_LEVELS = "deepstack_visual_indexes"
# Sizes of a text part that only has to have the width of the tower.
_SMALL_TEXT = {"intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 16384}


def small_text(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the config of a small text part; it has at least `layers` layers."""
    text, levels = shape["text"], len(shape["vision"].get(_LEVELS, ()))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    kept = {key: text[key] for key in ("model_type", "hidden_size")}
    found = {**kept, **heads, **_SMALL_TEXT, "num_hidden_layers": max(layers, levels)}
    return {**found, "head_dim": text["hidden_size"] // 16} if levels else found


def write_model(shape: dict[str, Any], to: Path, layers: int | None = None) -> None:
    """Write a checkpoint of this shape with random weights into `to`.

    layers: the least number of layers of a small text part; None = the text part of the model.
    """
    to.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(shape, to)
    vision, pictures = dict(shape["vision"]), _processor(shape)
    if "image" in shape:
        vision["image_size"] = shape["image"]
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    config = {
        "architectures": [f"{shape['architecture']}ForConditionalGeneration"],
        "model_type": shape["model_type"],
        "torch_dtype": "bfloat16",
        **ids,
        **ends,
        "text_config": {**(shape["text"] if layers is None else small_text(shape, layers)), **ends},
        "vision_config": vision,
        **shape["config"],
    }
    (to / "config.json").write_text(json.dumps(config, indent=2))
    (to / "preprocessor_config.json").write_text(json.dumps(pictures, indent=2))
    (to / "generation_config.json").write_text(json.dumps(ends))
    _write_weights(shape, config, pictures, to)


def _write_tokenizer(shape: dict[str, Any], to: Path) -> dict[str, int]:
    """Write a tokenizer and template that know pictures; return the ids for config.json."""
    from tokenizers import AddedToken, Tokenizer

    write_tokenizer(to)
    path = to / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["model"]["vocab"]["ĊĊ"] = len(whole["model"]["vocab"])  # llama.cpp needs it for SmolVLM
    whole["model"]["merges"].append(["Ċ", "Ċ"])
    core = Tokenizer.from_str(json.dumps(whole))
    core.add_special_tokens([AddedToken(name, normalized=False) for name in shape["tokens"]])
    core.save(str(path))
    settings = json.loads((to / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TURN.replace("MARKER", shape["marker"])
    (to / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return {key: core.token_to_id(token) for key, token in shape["ids"].items()}


def _processor(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the image processor."""
    found = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
    if "image" in shape:
        return {
            **found,
            "image_processor_type": f"{shape['architecture']}ImageProcessor",
            "max_image_size": {"longest_edge": shape["image"]},
            "size": {"longest_edge": 4 * shape["image"]},
        }
    return {
        **found,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": shape["vision"]["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    }


def _write_weights(
    shape: dict[str, Any], config: dict[str, Any], pictures: dict[str, Any], to: Path
) -> None:
    spec = spec_from_config({**config, "image_processor": pictures})
    patch = shape["vision"]["patch_size"]
    axes = {  # of the pixels of a patch
        "model.vision_model.embeddings.patch_embedding.weight": (3, patch, patch),
        "model.visual.patch_embed.proj.weight": (3, 2, patch, patch),
    }
    tower = [
        replace(need, shape=(need.shape[0], *axes.get(need.name, need.shape[1:])))
        for need in build_tower(spec.tower).weights
    ]
    write_weights(build_program(spec), to, "bfloat16", 0, shape["prefix"], tower)


def write_ggufs(folder: Path) -> tuple[Path, Path]:
    """Write the checkpoint in `folder` as files for llama.cpp; return (text part, mmproj)."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers import mmproj

    config = json.loads((folder / "config.json").read_text())
    tower, text, names = {}, {}, stored_names(config)
    for name, halves in _stored(folder):
        found = checkpoint_to_hf(names.normalize(name))
        if mmproj.is_of_tower(found):
            tower[found] = _as_fp32(halves)
        else:
            text[found] = halves
    files = folder / "model-BF16.gguf", folder / "mmproj-BF16.gguf"
    mmproj.write_mmproj(files[1], config, folder, mmproj.tower_of(config, tower), "BF16")
    del tower
    _write_text(files[0], folder, config, text)
    return files


def _stored(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, bits) of all bfloat16 tensors."""
    for path in sorted(folder.glob("*.safetensors")):
        whole = np.memmap(path, np.uint8, "r")
        begin = 8 + int(whole[:8].view(np.uint64)[0])
        header = json.loads(whole[8:begin].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                halves = whole[begin + first : begin + end].view(np.uint16)
                yield name, halves.reshape(entry["shape"])


def _as_fp32(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _write_text(
    path: Path, folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    import gguf

    from tests.helpers.gguf_convert import renamed

    text = config["text_config"]
    arch = {"llama": "llama", "qwen3_vl_text": "qwen3vl"}[text["model_type"]]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(text["vocab_size"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(text["rope_theta"])
    writer.add_rope_dimension_count(text["head_dim"])
    if levels := config["vision_config"].get(_LEVELS):
        writer.add_rope_dimension_sections([*text["rope_scaling"]["mrope_section"], 0])
        writer.add_uint32(f"{arch}.n_deepstack_layers", len(levels))
    _add_tokenizer(writer, folder, text["vocab_size"])
    for name, halves in renamed(arch, tensors, heads, kv_heads).items():
        if halves.ndim == 1:
            writer.add_tensor(name, _as_fp32(halves))
        else:
            data = np.ascontiguousarray(halves).view(np.uint8)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, folder: Path, vocab: int) -> None:
    """Write the tokenizer of `folder`, and unused tokens up to the size of the vocabulary."""
    core = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in core["added_tokens"]}
    ids = {**core["model"]["vocab"], **special}
    tokens = [f"<unused{i}>" for i in range(vocab)]
    types = [5] * vocab  # unused
    for token, number in ids.items():
        tokens[number], types[number] = token, 3 if token in special else 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    pairs = core["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in pairs])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--gguf", action="store_true")
    args = parser.parse_args(argv)
    write_model(SHAPES[args.shape], args.folder)
    if args.gguf:
        write_ggufs(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
