"""Tiny random models of transformers, saved as published and as the modules of transformers."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.operations.dense import Logits
from cpuserve.quant import dequantize
from tests.helpers import glm5_next, molmo2, muse_glimmer, step3
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_config

# Parts for text that have no class of their own in transformers.
_TEXT_CLASSES = {
    "Glm5NextForCausalLM": glm5_next.text_model,
    "Molmo2ForCausalLM": molmo2.text_model,
    "MuseGlimmerForCausalLM": muse_glimmer.text_model,
    "Step3p5ForCausalLM": step3.text_model,
}
TOKENS = [(i * 37 + i * i * 5) % 500 + 5 for i in range(70)]
FORMS = ("published", "modules")


@functools.cache
def random_model(family: str, **changes) -> torch.nn.Module:
    """The model of transformers for tiny_config(family), in fp32; no parameter keeps its value."""
    settings = tiny_config(family, torch_dtype="float32", **changes)
    name = settings["architectures"][0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(settings))
        if name in _TEXT_CLASSES:
            kind = _TEXT_CLASSES[name]()
            config = kind.config_class.from_pretrained(folder)
        else:
            config = transformers.AutoConfig.from_pretrained(folder)
            kind = getattr(transformers, name, None)
            if kind is None or not isinstance(config, kind.config_class):
                kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if (getattr(config, "pad_token_id", 0) or 0) >= config.vocab_size:  # of the real model
        config.pad_token_id = 0
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).float().eval()
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=numbers) * 0.05)
        for buffer, value in model.named_buffers():
            if buffer.endswith(("correction_bias", "expert_bias")):
                value.add_(torch.randn(value.shape, generator=numbers) * 0.05)
    model.tie_weights()
    return model


def save(model: torch.nn.Module, form: str, to: Path) -> Path:
    """Save a model as published (as transformers does by default) or as its modules are called."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(to, save_original_format=form == "published")
    return to


def weights_of(path):
    """(the Program of a saved model, its weights by their names), in fp32; no tensor is unknown."""
    checkpoint = open_checkpoint(path)
    program = build_program(spec_from_config(checkpoint.config))
    check_weights(program, checkpoint.weights)
    return program, {
        need.name: dequantize(checkpoint.weights.get(need.name)).reshape(need.shape)
        for need in program.weights
    }


def output_of(program, weights):
    """The logits of all tokens, or the hidden states if the model is an encoder."""
    tensors = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
    states = {"num_states": 64} if program.states else {}
    interpreter = Interpreter(program, tensors, **states)
    first = interpreter.num_blocks if program.states else 0
    words = step(Sequence(0, TOKENS, [5, 2, 9], first).chunk(None, all_rows(len(TOKENS))))
    with torch.inference_mode():
        hidden = interpreter.hidden(words)
        last = program.ops[-1]
        return interpreter.logits(hidden) if isinstance(last, Logits) else hidden


def output_of_transformers(model):
    """Return the same of a model of transformers."""
    with torch.inference_mode():
        out = model(torch.tensor([TOKENS]))
    return out.logits[0] if "logits" in out else out.last_hidden_state[0]
