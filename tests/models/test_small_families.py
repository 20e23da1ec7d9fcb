"""Published files that call tensors as transformers 5.24 does when it has read them."""

from __future__ import annotations

import pytest
import transformers
from safetensors.numpy import load_file, save_file

from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.parts import stored_needs
from cpuserve.quant import dequantize
from tests.helpers.gemma4 import stacked
from tests.helpers.tiny import tiny_model

EXPERTS = {
    ".experts.gate_up_proj": ".experts.fc1.weight",
    ".experts.down_proj": ".experts.fc2.weight",
}
# By family: the layout of experts, and what a tensor's name has, here and in published files.
PUBLISHED = {
    "aria": ({"by_inputs": True}, EXPERTS),
    "lara-mini": ({}, {"linear_attn.norm.": "linear_attn.out_norm."}),
    "openai-gpt": (None, {"transformer.": ""}),
    "zamba": (None, {".x_proj.weight": ".x_proj_weight", ".dt_proj.": ".dt_proj_"}),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_names_are_read_as_transformers_does(tmp_path, family):
    layout, names = PUBLISHED[family]
    path = tiny_model(family)
    source = path if layout is None else stacked(path, **layout)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = value
    assert not tensors.keys() >= load_file(source / "model.safetensors").keys()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    mine, published = open_checkpoint(path), open_checkpoint(tmp_path)
    program = build_program(spec_from_config(published.config))
    check_weights(program, published.weights)
    for need in stored_needs(program.weights):
        want, got = (dequantize(of.weights.get(need.name)) for of in (mine, published))
        assert (got == want).all(), need.name
    kind = getattr(transformers, mine.config["architectures"][0])
    _, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
