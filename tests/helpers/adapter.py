"""Tiny LoRA adapters as files of PEFT and GGUF, and models with these adapters merged."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import gguf_archs, gguf_convert
from tests.helpers.tiny import copy_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
WORDS = "embed_tokens"
MLP = ("gate_proj", "up_proj", "down_proj")


@functools.cache
def adapter_of(
    model: Path, parts: tuple[str, ...] = ATTENTION + MLP, rank: int = 4, seed: int = 1
) -> Path:
    """The directory of a random adapter of these parts of every layer; its scale is 2."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in tensors_of(model).items():
        module = name.removesuffix(".weight")
        if not module.endswith(parts):
            continue
        outputs, inputs = reversed(weight.shape) if _transposed(model) else weight.shape
        stem, end = f"base_model.model.{module}.lora_", ".weight"
        if module.endswith(WORDS):  # PEFT stores table A [vocab, rank] as its transpose
            outputs, inputs, stem, end = inputs, outputs, f"{stem}embedding_", ""
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.15
            tensors[f"{stem}{side}{end}"] = values
    directory = Path(tempfile.mkdtemp(dir=model.parent, prefix="adapter-"))
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config["fan_in_fan_out"] = _transposed(model)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _transposed(model: Path) -> bool:
    """Whether the checkpoint stores linears as their transposes."""
    return json.loads((model / "config.json").read_text())["model_type"] == "gpt2"


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {k: v for f in sorted(model.glob("*.safetensors")) for k, v in load_file(f).items()}


@functools.cache
def merged(model: Path, adapter: Path, scale: float = 1.0) -> Path:
    """A copy of the model with `scale` times the adapter added to its weights."""
    directory = copy_of(model, "merged-")
    changes = load_file(adapter / "adapter_model.safetensors")
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            table = f"{key}embedding_A"
            if table in changes:
                tensors[name] += 2 * scale * (changes[f"{key}embedding_B"] @ changes[table]).T
            if f"{key}A.weight" in changes:
                change = 2 * scale * changes[f"{key}B.weight"] @ changes[f"{key}A.weight"]
                tensors[name] += change.T if _transposed(model) else change
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


def as_gguf(adapter: Path, arch: str, path: Path, types: str = "F32", **changes: object) -> Path:
    """Write an adapter of a tiny model as llama.cpp's convert_lora_to_gguf.py does.

    types: the type of the tensors.
    changes: metadata, with __ in place of a dot in a key; None leaves the key out.
    """
    model = gguf_convert.checkpoint_of(arch)
    config = json.loads((model / "config.json").read_text())
    heads = config["n_head"] if arch == "gpt2" else config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads)
    values = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(
            json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]
        ),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    file_arch = str(values.pop("general.architecture", gguf_archs.FILE_ARCHS.get(arch, arch)))
    writer = gguf.GGUFWriter(path, file_arch)
    for key, value in values.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    kind = gguf.GGMLQuantizationType[types]
    tensors = {k: v.numpy() for k, v in load_file(adapter / "adapter_model.safetensors").items()}
    for name, b in tensors.items():
        if name.endswith(".lora_embedding_B"):
            a = tensors[f"{name[:-1]}A"].T
            for side, matrix in (("a", a), ("b", b)):
                data = np.ascontiguousarray(matrix, np.float32)
                writer.add_tensor(f"token_embd.weight.lora_{side}", data)
        if ".lora_B." not in name:
            continue
        weight = name.removeprefix("base_model.model.").replace(".lora_B", "")
        # Only B has the rows of the weight, which the converter reorders.
        stored = b.T if _transposed(model) else b
        ((at, rows),) = gguf_convert.renamed(arch, {weight: stored}, heads, kv).items()
        a = tensors[name.replace(".lora_B.", ".lora_A.")]
        for side, matrix in (("a", a), ("b", rows)):
            data = gguf.quants.quantize(np.ascontiguousarray(matrix, np.float32), kind)
            writer.add_tensor(f"{at}.lora_{side}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
