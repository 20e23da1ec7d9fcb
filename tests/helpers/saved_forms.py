"""Tiny random models of transformers, saved as published and as the modules of transformers."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.helpers import glm5_next, molmo2, muse_glimmer, step3
from tests.helpers.tiny import tiny_config

# Parts for text that have no class of their own in transformers.
_TEXT_CLASSES = {
    "Glm5NextForCausalLM": glm5_next.text_model,
    "Molmo2ForCausalLM": molmo2.text_model,
    "MuseGlimmerForCausalLM": muse_glimmer.text_model,
    "Step3p5ForCausalLM": step3.text_model,
}
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
