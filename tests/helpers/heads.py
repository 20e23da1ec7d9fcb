"""Tiny models with a class of transformers that has a head, and random weights in this head."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

CLASSIFIERS = ("classifier", "head", "score")


def with_random_head(
    source: Path,
    directory: Path,
    config: Mapping[str, object],
    *,
    seed: int,
    heads: tuple[str, ...] = CLASSIFIERS,
    factor: float = 3.0,
    **options: object,
) -> Path:
    """Write the model at `source` to `directory` with a head, and return `directory`.

    config: keys that the config of the source gets; "architectures" names the class.
    heads: the beginnings of the names of the head's tensors; poolers belong to it in any case.
    factor: of the matrices. Weights of transformers' size would give all texts almost the same
      result.
    options: arguments of from_pretrained.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    shutil.copytree(source, directory, dirs_exist_ok=True)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    model = _load(directory, **options)
    generator = torch.Generator().manual_seed(seed)
    for part, tensor in model.named_parameters():
        if part.startswith(heads) or "pooler" in part:
            scale = 0.3 if tensor.dim() < 2 else factor * tensor.shape[1] ** -0.5
            tensor.data = scale * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(directory)
    return directory


def roberta_keys(kind: str) -> dict[str, object]:
    """Return the keys of the config in which a kind of RoBERTa differs from a tiny XLM-RoBERTa."""
    if kind not in ("roberta", "xlm-roberta", "camembert"):
        return {}
    return {"pad_token_id": 1} | ({} if kind == "xlm-roberta" else {"model_type": kind})


@functools.lru_cache(maxsize=4)
def transformers_model(path: Path) -> torch.nn.Module:
    """Return the model at `path` in fp32, with the class of transformers that its config names.

    Tests share the model, and call this for each prompt.
    """
    return _load(path)


def _load(path: Path, **options: object) -> torch.nn.Module:
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32, **options).eval()
