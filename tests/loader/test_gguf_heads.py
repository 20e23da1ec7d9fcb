"""Heads and assistants in GGUF files: the same tensors as in safetensors."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from cpuserve.loader.load import open_checkpoint, read_config
from cpuserve.loader.speculation.assistants import open_assistant
from cpuserve.loader.speculation.guess_heads import open_head
from cpuserve.models import spec_from_config
from cpuserve.program.operations.latent import HeadLinear
from cpuserve.program.parts import stored_needs
from cpuserve.quant import dequantize
from tests.helpers.assistant import assistant
from tests.helpers.gguf_archs import ARCHS
from tests.helpers.gguf_convert import convert, convert_assistant
from tests.helpers.guess_head import own_matrices, with_head
from tests.helpers.tiny import tiny_model

HEADS = ["qwen3next", "qwen35", "qwen35moe", "glm4moe", "deepseek2-glm", "deepseek2", "deepseek32"]
HEADS += ["glm-dsa", "mimo2", "exaone-moe", "bailingmoe2", "step35"]
HEADS += ["nemotron_h_moe", "hy_v3", "bailingmoe3"]
HALVES = re.compile(r"\b(k|v)_b_proj\b")  # of kv_b_proj, by heads; k is transposed in GGUF files


def leaves(program):
    """The numbers and texts of the operations and cache layers, but not of the halves of kv_b."""
    ops = [op for op in program.ops if not isinstance(op, HeadLinear)]
    left, found = [msgspec.to_builtins([ops, program.cache])], []
    while left:
        each = left.pop()
        if isinstance(each, dict | list | tuple):
            left += each.values() if isinstance(each, dict) else each
        else:
            found.append(each)
    return found


def wanted(head, weights, name):
    """The numbers of a tensor in the checkpoint."""
    half = HALVES.search(name)
    if half is None:
        return dequantize(weights.get(name))
    whole = HALVES.sub("kv_b_proj", name)
    k, v = [op for op in head.program.ops if isinstance(op, HeadLinear) and op.weight == whole]
    by_head = dequantize(weights.get(whole)).reshape(k.heads, k.rows, -1)
    return by_head[:, v.first :] if half[1] == "v" else by_head[:, : k.in_features].swapaxes(1, 2)


@pytest.mark.parametrize("arch", HEADS)
def test_a_head_is_that_of_the_safetensors(tmp_path, arch):
    family, changes, _ = ARCHS[arch]
    source, file = with_head(tmp_path / "m", family, **changes), tmp_path / "m.gguf"
    convert(arch, file, source=source, nextn_predict_layers=1)
    check(open_head(source), open_head(file))


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35moe"])
def test_a_head_may_have_an_embedding_and_an_output_matrix_of_its_own(tmp_path, arch):
    family, changes, _ = ARCHS[arch]
    source, file = tmp_path / "m", tmp_path / "m.gguf"
    with_head(source, family, change=own_matrices if arch == "glm4moe" else None, **changes)
    more, tables = {}, ("model.embed_tokens.weight", "lm_head.weight")
    names = "blk.{}.nextn.embed_tokens.weight", "blk.{}.nextn.shared_head_head.weight"
    if arch == "qwen35moe":  # its safetensors have none
        last = spec_from_config(read_config(source)).layers
        shape, numbers = (512, 64), np.random.default_rng(3)
        more = {n.format(last): numbers.standard_normal(shape, np.float32) for n in names}
    convert(arch, file, source=source, nextn_predict_layers=1, more=more)
    head, tensors = open_head(file)
    if arch == "glm4moe":
        check(open_head(source), (head, tensors))
        of_model = open_checkpoint(file).weights
        for name in tables:
            its, model = (dequantize(found.get(name)) for found in (tensors, of_model))
            assert its.shape == model.shape
            assert not np.array_equal(its, model)
    for name, known in zip(tables, more.values(), strict=False):
        assert np.array_equal(dequantize(tensors.get(name)), known)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe"])
def test_an_assistant_is_that_of_the_safetensors(tmp_path, family):
    model, file = tiny_model(family), tmp_path / "a.gguf"
    source = assistant(tmp_path / "a", model, use_ordered_embeddings=True, num_centroids=16)
    convert_assistant(source, file)
    theirs, ours = open_assistant(source, model), open_assistant(file, model)
    check(theirs, ours)
    assert ours[0].caches == theirs[0].caches


def check(theirs, ours):
    """Check that two heads have equal operations and tensors; each is (head, tensors)."""
    (head, tensors), (found, ours) = theirs, ours
    for its, known in zip(leaves(found.program), leaves(head.program), strict=True):
        # A GGUF file has the epsilon of norms and the base of RoPE in fp32.
        assert its == (pytest.approx(known, rel=1e-6) if isinstance(known, float) else known)
    names = {need.name for need in stored_needs(found.program.weights)}
    assert len(names) > 15
    for name in sorted(names):
        its, known = dequantize(ours.get(name)), wanted(head, tensors, name)
        # The converter adds 1 to the norms of Qwen, which rounds.
        np.testing.assert_allclose(its.reshape(known.shape), known, rtol=0, atol=1e-6, err_msg=name)
