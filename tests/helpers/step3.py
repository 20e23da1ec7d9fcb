"""Step 3.5 as transformers has it: the part for text of Step 3.7, in no class of its own."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors
from tests.helpers.text_class import text_class


@functools.cache
def text_model():
    """A class of transformers with the part for text and the output head."""
    from transformers.models.step3p7 import modeling_step3p7 as theirs

    return text_class(theirs, "Step3p7", "Step3p5ForCausalLM")


@functools.cache
def renamed(path: Path) -> Path:
    """Return a copy of the checkpoint `path` with the tensors of that class."""
    to = copy_without_tensors(path)
    out, gates = {}, {}
    for name, value in load_file(path / "model.safetensors").items():
        at, moe, part = name.partition(".moe.")
        if moe and part.startswith(("gate_proj", "up_proj")):
            gates.setdefault(at, {})[part.split("_")[0]] = value
        elif moe:
            parts = {
                "gate.weight": "mlp.gate.weight",
                "router_bias": "mlp.gate.e_score_correction_bias",
                "down_proj.weight": "mlp.experts.down_proj",
            }
            out[f"{at}.{parts[part]}"] = value
        else:
            out[name.replace(".share_expert.", ".mlp.shared_experts.")] = value
    for at, both in gates.items():
        stacked = np.concatenate([both["gate"], both["up"]], axis=1)
        out[f"{at}.mlp.experts.gate_up_proj"] = stacked
    save_file(out, to / "model.safetensors", {"format": "pt"})
    return to
