"""Qwen2.5-VL and Qwen3-VL compute texts as Qwen2 and Qwen3: their GGUF files are read as these."""

import json

import pytest
import torch
import transformers

from tests.helpers.oracle import tensors_of, transformers_of
from tests.helpers.rounding import model_bound
from tests.helpers.tiny import tiny_model

KINDS = {"qwen2": "Qwen2_5_VLTextModel", "qwen3": "Qwen3VLTextModel"}
TOKENS = torch.tensor([[(7 * i) % 300 + 5 for i in range(50)]])


@pytest.mark.parametrize("family", KINDS)
def test_positions_on_three_axes_change_no_text(family):
    path = tiny_model(family)
    plain, text = transformers_of(path), getattr(transformers, KINDS[family])
    config = json.loads((path / "config.json").read_text())
    half = plain.model.rotary_emb.inv_freq.numel()
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    ropes = {**plain.config.rope_parameters, "mrope_section": sections}
    sizes = {key: config[key] for key in config if key not in ("model_type", "architectures")}
    sizes |= {"rms_norm_eps": plain.config.rms_norm_eps, "rope_parameters": ropes}
    model = text(text.config_class(**sizes)).float().eval()
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors_of(path).items()}, False)
    with torch.inference_mode():
        got = model(input_ids=TOKENS).last_hidden_state
        want = plain.model(TOKENS).last_hidden_state
    assert (got - want).abs().max() < model_bound(path, 50)
    assert (got - want.roll(1, dims=1)).abs().max() > model_bound(path, 50)
