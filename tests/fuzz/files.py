"""Targets: the files of tiny models and adapters, and how they are loaded and used."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from cpuserve.base.errors import RequestError, StartupError
from cpuserve.llm import LLM
from cpuserve.sampling.params import SamplingParams
from tests.fuzz.edits import Edit, apply, draw
from tests.helpers import gguf_convert
from tests.helpers.tiny import tiny_model

MODEL, GGUF, ADAPTER = "model", "model.gguf", "adapter"
MOST_CHARS = 2000  # of an error's line


@dataclass(frozen=True)
class Target:
    """make(directory) writes the files; edited: those that cases change, below the directory."""

    make: Callable[[Path], None]
    edited: tuple[str, ...]
    model: str = MODEL
    adapter: str = ""

    def options(self, directory: Path) -> dict[str, object]:
        """The arguments of LLM."""
        options = {"model": str(directory / self.model), "max_model_len": 64, "max_num_seqs": 2}
        if self.adapter:
            options["lora_modules"] = [f"a={directory / self.adapter}"]
        return options


def _safetensors(directory: Path) -> None:
    shutil.copytree(tiny_model("llama", num_hidden_layers=1), directory / MODEL)


def _gguf(directory: Path) -> None:
    types = [("ffn_down", "Q5_1"), ("attn_q", "Q8_0"), ("ffn_gate", "Q4_0")]
    gguf_convert.convert("llama", directory / GGUF, types)


def _hybrid(directory: Path) -> None:
    shutil.copytree(tiny_model("granite4-hybrid"), directory / MODEL)


def _adapter(directory: Path) -> None:
    _safetensors(directory)
    rng, tensors = np.random.default_rng(0), {}
    for name, weight in load_file(directory / MODEL / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            module = "base_model.model." + name.removesuffix(".weight")
            outputs, inputs = weight.shape
            for side, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
                values = rng.normal(size=shape).astype(np.float32)
                tensors[f"{module}.lora_{side}.weight"] = values
    (directory / ADAPTER).mkdir()
    save_file(tensors, directory / ADAPTER / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "fan_in_fan_out": False}
    (directory / ADAPTER / "adapter_config.json").write_text(json.dumps(config))


FILES = {
    "gguf": Target(_gguf, (GGUF,), model=GGUF),
    "safetensors": Target(_safetensors, (f"{MODEL}/model.safetensors",)),
    "config": Target(_hybrid, (f"{MODEL}/config.json",)),
    "adapter": Target(
        _adapter,
        (f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors"),
        adapter=ADAPTER,
    ),
}


class FileBench:
    """The files of a target in a directory, whose copies cases change. A case is a list of edits.

    most_bytes: of memory, for models of some 100 KB.
    """

    most_bytes, most_cpu_s = 3 << 30, 120.0  # an unknown architecture starts torch

    def __init__(self, target: Target, directory: Path) -> None:
        """Write the files, unless the directory has them."""
        self.target, self.directory, self.work = target, directory, directory.with_suffix(".work")
        if not directory.exists():
            directory.mkdir()
            target.make(directory)
        self.files = {name: (directory / name).read_bytes() for name in target.edited}

    def draw(self, rng: random.Random) -> list[Edit]:
        """Return a random case."""
        return draw(rng, self.files)

    def outcome(self, edits: list[Edit]) -> str:
        """What loading the changed files and generating two tokens comes to.

        Raises:
            Exception: something else than one line that says why the files are refused.
        """
        work = self.work
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.directory, work)
        for name in {edit[0] for edit in edits}:
            (work / name).write_bytes(apply(edits, name, self.files[name]))
        try:
            self._use(self.target.options(work))
        except (StartupError, RequestError) as error:  # weights may make a request's logits NaN
            line = str(error)
            assert line, "an error without a text"
            assert "\n" not in line, f"an error of several lines: {line!r}"
            assert len(line) <= MOST_CHARS, f"an error of {len(line)} characters: {line[:200]!r}"
            return f"{type(error).__name__}: {line.replace(str(work), '')}"
        return "loaded"

    def close(self) -> None:
        """Remove the copies."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _use(self, options: dict[str, object]) -> None:
        """Load a model and generate two tokens."""
        llm = LLM(**options)
        try:
            adapter = "a" if self.target.adapter else None
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            llm.generate([[3, 4, 5]], params, use_tqdm=False, lora_request=adapter)
        finally:
            llm.close()
