"""From a path to a config dict and named tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.loader.mapped import read_small, regular_file
from cpuserve.loader.names import is_computed

if TYPE_CHECKING:
    from cpuserve.program.program import Program
    from cpuserve.quant.base import Weights

MAX_CONFIG_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: config (HF style), its tensors (mapped, not read) and where it lies."""

    config: dict[str, Any]
    weights: Weights
    path: Path


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory or a .gguf file; ModelError (one line) if it is broken."""
    path = find_model(path)
    # The format modules import numpy; config.json alone does not need it.
    from cpuserve.quant import open_weights

    if path.is_dir():
        from cpuserve.loader.safetensors import SafetensorsStore

        config = read_config(path)
        method = quant_method(config)
        return Checkpoint(config, open_weights(method, SafetensorsStore(path), config), path)
    from cpuserve.loader.gguf import GgufFile
    from cpuserve.loader.gguf_model import GgufStore, gguf_config

    file = GgufFile(path)
    config = gguf_config(file)
    return Checkpoint(config, open_weights("gguf", GgufStore(file, config), config), path)


def read_config(path: Path) -> dict[str, Any]:
    """The model's config.json as a dict (made from the metadata for GGUF); reads no tensor data.

    eos_token_id is merged with that of generation_config.json. Nothing in it is ever executed:
    auto_map and custom code are plain data here.
    """
    path = find_model(path)
    if path.is_dir():
        return _directory_config(path)
    from cpuserve.loader.gguf import GgufFile
    from cpuserve.loader.gguf_model import gguf_config

    return gguf_config(GgufFile(path))


def find_model(path: Path) -> Path:
    """The directory with a config.json, or the .gguf file, that `path` stands for."""
    path = path.expanduser()
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not ggufs:
            return path
        if len(ggufs) > 1:
            msg = f"{path} holds {len(ggufs)} GGUF files; name one of them, e.g. {ggufs[0]}"
            raise ModelError(msg)
        return ggufs[0]
    regular_file(path, "model")
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        msg = (
            f"{path} is a pickle, which can run any code when loaded, and is never read; "
            "give a directory with safetensors, or a .gguf file"
        )
        raise ModelError(msg)
    if path.suffix == ".safetensors":
        msg = f"{path} is one weight file; give the directory that holds it and its config.json"
        raise ModelError(msg)
    return path


def check_weights(program: Program, weights: Weights) -> None:
    """ModelError listing every missing, misshapen and unused tensor at once."""
    needs = {need.name: need.shape for need in program.weights}
    names = weights.names()
    missing = sorted(needs.keys() - names)
    misshapen = [
        f"{name} {list(weights.get(name).shape)} instead of {list(shape)}"
        for name, shape in sorted(needs.items())
        if name in names and weights.get(name).shape != shape
    ]
    # A tied checkpoint may carry its output matrix a second time.
    unused = sorted(n for n in names - needs.keys() if not is_computed(n) and n != "lm_head.weight")
    groups = (("missing", missing), ("wrong shape", misshapen), ("unused", unused))
    found = [f"{what} ({len(items)}): {', '.join(items)}" for what, items in groups if items]
    if found:
        msg = f"the checkpoint's tensors do not fit the model; {'; '.join(found)}"
        raise ModelError(msg)


def read_json(path: Path, what: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a regular file; ModelError if it is anything else."""
    try:
        value = json.loads(read_small(path, what, max_bytes))
    except (ValueError, RecursionError) as error:
        msg = f"{what} {path} is not valid JSON: {error}"
        raise ModelError(msg) from error
    if not isinstance(value, dict):
        msg = f"{what} {path} is not a JSON object"
        raise ModelError(msg)
    return value


def token_ids(value: Any) -> list[int]:
    """A token id field (an id, a list of ids or nothing) as a list."""
    listed = value if isinstance(value, list) else [value]
    return [v for v in listed if type(v) is int and v >= 0]


def _directory_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        msg = f"{path} holds no config.json and no .gguf file, so it is not a model"
        raise ModelError(msg)
    config = read_json(path / "config.json", "config")
    generation = path / "generation_config.json"
    if generation.exists():
        more = token_ids(read_json(generation, "generation config").get("eos_token_id"))
        eos = list(dict.fromkeys(token_ids(config.get("eos_token_id")) + more))
        if eos:
            config["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    return config


def quant_method(config: dict[str, Any]) -> str:
    """The weight format a config names; "dense" without one."""
    quant = config.get("quantization_config")
    if not quant:
        return "dense"
    method = quant.get("quant_method") if isinstance(quant, dict) else quant
    return str(method)[:40]
