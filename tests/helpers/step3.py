"""Step 3.5 as transformers has it: the part for text of Step 3.7, in no class of its own."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


@functools.cache
def text_model():
    """A class of transformers with the part for text and the output head."""
    from torch import nn
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.step3p7 import modeling_step3p7 as theirs

    class Step3p5ForCausalLM(theirs.Step3p7PreTrainedModel):
        config_class = theirs.Step3p7TextConfig

        def __init__(self, config):
            super().__init__(config)
            self.model = theirs.Step3p7TextModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids=None, **inputs):
            hidden = self.model(input_ids, use_cache=False, **inputs).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    return Step3p5ForCausalLM


@functools.cache
def renamed(path: Path) -> Path:
    """Return a copy of the checkpoint `path` with the tensors of that class."""
    to = Path(tempfile.mkdtemp(dir=path.parent, prefix="renamed-"))
    for file in path.iterdir():
        if file.suffix == ".json":
            (to / file.name).write_bytes(file.read_bytes())
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
