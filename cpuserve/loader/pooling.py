"""Reads how a checkpoint makes embeddings: sentence-transformers files, or GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpuserve.errors import ModelError
from cpuserve.loader.load import read_any_json, read_json

MAX_BYTES = 1_000_000
# Keys of a Pooling module's config.json; newer files have "pooling_mode": "lasttoken" instead.
MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
NAMES = {"lasttoken": "last", "mean": "mean", "cls": "first"}
GGUF_TYPES = {1: "mean", 2: "first", 3: "last"}  # LLAMA_POOLING_TYPE_*


def checkpoint_pooling(path: Path) -> tuple[str, str]:
    """(pooling of the checkpoint, why); "none" for one that generates text.

    Raises:
        ModelError: the checkpoint is an embedding model with a pooling that is not supported.
    """
    if not path.is_dir():
        return _gguf(path)
    modules = path / "modules.json"
    if modules.exists():
        for module in _modules(modules):
            if str(module.get("type", "")).endswith(".Pooling"):
                file = path / Path(str(module.get("path", ""))).name / "config.json"
                return _mode(read_json(file, "pooling config"), file), f"{file.parent.name} says so"
    return "none", "the model generates text"


def _modules(path: Path) -> list[dict[str, Any]]:
    listed = read_any_json(path, "module list", MAX_BYTES)
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        msg = f"module list {path} is not a list of JSON objects"
        raise ModelError(msg)
    return listed


def _mode(config: dict[str, Any], file: Path) -> str:
    named = config.get("pooling_mode")
    modes = [mode for key, mode in MODES.items() if config.get(key) is True]
    modes += [NAMES[named]] if isinstance(named, str) and named in NAMES else []
    if len(modes) != 1:
        msg = (
            f"{file}: this way of pooling is not supported; cpuserve knows the last token, the "
            "first one (cls) and the mean. Choose one of them with --pooling"
        )
        raise ModelError(msg)
    return modes[0]


def _gguf(path: Path) -> tuple[str, str]:
    from cpuserve.loader.gguf import GgufFile

    file = GgufFile(path)
    key = f"{file.value('general.architecture')}.pooling_type"
    kind = file.value(key)
    if kind in (None, 0):
        return "none", "the model generates text"
    if not isinstance(kind, int) or kind not in GGUF_TYPES:
        msg = f"GGUF {path}: {key} is {kind!r:.40}, which is not supported; choose with --pooling"
        raise ModelError(msg)
    return GGUF_TYPES[kind], f"{key} says so"
