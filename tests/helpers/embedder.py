"""A tiny embedding model, in the files of sentence-transformers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.helpers.tiny import tiny_model

MODES = {"last": "lasttoken", "mean": "mean_tokens", "first": "cls_token"}


@functools.cache
def embedding_model(pooling: str) -> Path:
    """A directory with a tiny decoder without output head, and its modules.json."""
    source = tiny_model("qwen3")
    directory = source.with_name(f"{source.name}-embeds-{pooling}")
    shutil.copytree(source, directory)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        file.unlink()
        bare = {name.removeprefix("model."): t for name, t in tensors.items()}
        bare.pop("lm_head.weight", None)
        save_file(bare, file, metadata={"format": "pt"})
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{part}"}
        for i, (part, path) in enumerate(parts.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": key == pooling for key, name in MODES.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return directory
