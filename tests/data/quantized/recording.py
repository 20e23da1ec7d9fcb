"""Recordings of quantized matrices: tensors as a library packs them, and the values it reads."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

N, K = 8, 128


def random_weight(n=N, k=K, dtype=torch.float32):
    """Random weights [n, k] of a size as in models, equal at each call."""
    drawn = torch.Generator().manual_seed(20261129)
    return (torch.randn(n, k, generator=drawn) * 0.02).to(dtype)


class Recording:
    """The cases of one library, for tests/quant/test_library_values.py."""

    def __init__(self, library: str) -> None:
        """library: the name of its distribution, as pip has it."""
        self._library = library
        self._tensors: dict[str, torch.Tensor] = {}
        self._texts = {"library": f"{library} {version(library)}"}

    def add(
        self, case, method, parts, values, settings=None, texts=None, key="quantization_config"
    ):
        """Record a matrix.

        method: the name of the format in cpuserve.
        parts: the tensors of the matrix, each with the end of its name after `q.`
        values: the weights [n, k] as the library dequantizes them, in its dtype.
        settings, key: the settings in config.json, and their key.
        texts: the header of the safetensors file.
        """
        about = {"method": method, "config": {key: settings or {}}, "texts": texts or {}}
        self._texts[case] = json.dumps(about)
        for name, part in {
            **{f"q.{end}": part for end, part in parts.items()},
            "values": values,
        }.items():
            self._tensors[f"{case}/{name}"] = part.detach().contiguous().clone()

    def write(self) -> None:
        """Write LIBRARY.safetensors beside this file."""
        path = Path(__file__).with_name(f"{self._library}.safetensors")
        save_file(self._tensors, path, metadata=self._texts)
        print(f"{path.name}: {len(self._texts) - 1} cases, {path.stat().st_size} bytes")
