"""Every tensor of a file is read, or the start is refused with its name; heads tied and untied."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve.base.errors import ModelError
from cpuserve.loader import load
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from tests.helpers.depth import deep_but
from tests.helpers.saved_forms import (
    output_of,
    output_of_transformers,
    random_model,
    save,
    weights_of,
)
from tests.helpers.tiny import ENCODERS, FAMILIES, RELATIVES, tiny_model

# Whether the head of a family can be tied in transformers, if not both.
ONLY_UNTIED = ("dbrx", "deepseek-v4")
# transformers has no class, or computes another RoPE (tests/models/test_published_names.py).
ELSEWHERE = {"rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2", "molmo2", "hy-v4"}
DECODERS = [family for family in FAMILIES if family not in ELSEWHERE]
TIED = [(f, tied) for f in DECODERS for tied in (True, False) if not tied or f not in ONLY_UNTIED]


def assert_same_output(model, path):
    program, weights = weights_of(path)
    got, want = output_of(program, weights), output_of_transformers(model)
    assert (got[:, : want.shape[1]] - want).abs().max() < 1e-4 * (want.max() - want.min())


@pytest.mark.parametrize("case", deep_but([("zamba", False), ("zamba2", False)], TIED))
def test_tied_and_untied_models_compute_the_logits_of_transformers(case, tmp_path):
    family, tied = case
    model = random_model(family, tie_word_embeddings=tied)
    assert_same_output(model, save(model, "published", tmp_path))


def with_tensors(source, to, more):
    """A copy of a checkpoint with further tensors, or without those that are None."""
    tensors = {**load_file(source / "model.safetensors"), **more}
    save_file({k: v for k, v in tensors.items() if v is not None}, to / "model.safetensors")
    (to / "config.json").write_bytes((source / "config.json").read_bytes())
    return to


def test_a_head_that_the_file_lacks_is_missing_unless_it_is_tied(tmp_path):
    path = with_tensors(tiny_model("llama"), tmp_path, {"lm_head.weight": None})
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelError, match=r"missing \(1\): lm_head.weight"):
        check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights_of(path)


def unknown_tensors(tensors):
    """Tensors that no family has: further modules, and a bias for each matrix without one."""
    layer = next(m[1] for name in tensors if (m := re.match(r"(.*?\.\d+)\.", name)))
    names = [f"{layer}.surprise.weight", f"{layer}.surprise", "surprise.weight", "surprise"]
    sizes = dict.fromkeys(names, 3)
    for name, value in tensors.items():
        bias = f"{name.removesuffix('.weight')}.bias"
        table = "embed" in name or name.startswith(("transformer.wte", "transformer.wpe"))
        if name.endswith(".weight") and value.ndim == 2 and bias not in tensors and not table:
            sizes[bias] = len(value)
    return {name: np.ones(size, np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("family", deep_but(("llama", "zamba"), (*FAMILIES, *RELATIVES, *ENCODERS)))
def test_tensors_that_nothing_reads_are_refused_by_their_names(family, tmp_path, monkeypatch):
    path = tiny_model(family)
    more = unknown_tensors(load_file(path / "model.safetensors"))
    checkpoint = open_checkpoint(with_tensors(path, tmp_path, more))
    unknown = checkpoint.weights.names() - open_checkpoint(path).weights.names()
    assert len(unknown) == len(more)
    monkeypatch.setattr(load, "_some", ", ".join)  # all of them, not five
    with pytest.raises(ModelError) as refused:
        check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)
    assert str(refused.value).endswith(f"; unused ({len(more)}): {', '.join(sorted(unknown))}")
