"""Tiny models with something that guesses their tokens: every drafter, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from cpuserve import LLM
from cpuserve.loader.load import read_config
from cpuserve.models import spec_from_config
from tests.helpers.assistant import assistant
from tests.helpers.eagle_head import eagle_head
from tests.helpers.guess_head import with_head
from tests.helpers.tiny import tiny_model

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
NAMED: dict[str, Any] = {"config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "reads": 2}
# For each drafter families of models: dense ones, hybrids with recurrent layers, and mixtures.
DRAFTED = {
    "none": ("llama", "qwen3-next", "qwen3-moe"),
    "ngram": ("llama", "qwen3-next", "qwen3-moe"),
    "mtp": ("mimo-v2", "qwen3.5", "qwen3-next", "glm4-moe"),
    "eagle3": ("llama", "qwen3-next", "qwen3-moe"),
    "draft": ("llama", "qwen3-next", "qwen3-moe"),
    "assistant": ("gemma4", "gemma4-moe"),
}


class Drafter(NamedTuple):
    """A model, and the settings of what guesses for it."""

    model: Path
    asked: dict[str, Any]


def drafter_of(name: str, directory: Path, path: Path, *, reduced: bool = True) -> Drafter:
    """Return what guesses for the model at `path`; `directory` gets a head or an assistant.

    name: "none", "ngram", "draft" (the model itself, or tiny llama if it has recurrent layers),
      "assistant", or "eagle3".
    reduced: whether an EAGLE-3 head guesses some of the 512 tokens of tiny models only.
    """
    if name in ("none", "ngram"):
        return Drafter(path, NGRAM)
    if name == "assistant":
        guesses = assistant(directory / "a", path)
        return Drafter(path, {"method": "mtp", "model": str(guesses)})
    if name == "draft":
        recurrent = "qwen3_next" in read_config(path).get("model_type", "")
        return Drafter(path, {"model": str(tiny_model("llama") if recurrent else path)})
    width = spec_from_config(read_config(path)).width
    head = eagle_head(directory / "h", width, reduced=reduced, **NAMED)
    return Drafter(path, {"method": "eagle3", "model": str(head)})


def drafter_for(name: str, directory: Path, family: str) -> Drafter:
    """Return a tiny model of a family with what guesses for it; "mtp" is a head of its own."""
    if name == "mtp":
        path = with_head(directory / "m", family, dtype="bfloat16")
        return Drafter(path, {"method": "mtp"})
    return drafter_of(name, directory, tiny_model(family, dtype="bfloat16"))


def with_drafter(drafter: Drafter, *, guesses: bool = True, **options: Any) -> LLM:
    """Return an engine of the model, with guesses or without."""
    asked = {"num_speculative_tokens": 4, **drafter.asked} if guesses else None
    speculate = "auto" if guesses else "off"
    return LLM(str(drafter.model), speculative_config=asked, speculate=speculate, **options)
