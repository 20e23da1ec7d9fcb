"""DeepSeek V4: its published names and settings, and those that transformers writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint
from cpuserve.loader.names import checkpoint_to_hf, program_name
from cpuserve.loader.speculation.guess_heads import open_head
from cpuserve.models import build_program, spec_from_config
from cpuserve.models.deepseek_v4 import DeepseekV4
from cpuserve.program.operations.entries import PoolEntries
from cpuserve.program.operations.mixture import Route
from cpuserve.program.parts import stored_needs
from cpuserve.quant import dequantize
from tests.helpers.guess_head import with_head
from tests.helpers.oracle import program_of, tensors_of, transformers_of
from tests.helpers.tiny import copy_of, tiny_config, tiny_model

FP4 = np.array([*(mags := (0, 0.5, 1, 1.5, 2, 3, 4, 6)), *(-v for v in mags)])
PUBLISHED = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def published(name):
    """The published name of a tensor of a Program."""
    theirs = {ours: theirs for theirs, ours in PUBLISHED.items()}
    return theirs.get(name, name.removeprefix("model."))


def test_published_files_have_the_tensors_of_the_program():
    path = copy_of(tiny_model("deepseek-v4"), "published")
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({published(name): tensor for name, tensor in tensors.items()}, file)
    assert {"hc_head_fn", "layers.1.attn.indexer.compressor.wgate.weight"} <= load_file(file).keys()
    read = open_checkpoint(path).weights
    for name, tensor in tensors_of(tiny_model("deepseek-v4")).items():
        assert np.array_equal(dequantize(read.get(name)), tensor.float().numpy()), name


def compress(path):
    """Store some matrices of a checkpoint as published files do; return their values by name."""
    file, config = path / "model.safetensors", path / "config.json"
    tensors = {published(name): tensor for name, tensor in load_file(file).items()}
    rng, wanted = np.random.default_rng(0), {}
    for name in [*tensors]:
        n, k = (*tensors[name].shape, 0)[:2]
        if name.endswith(("attn.wq_a.weight", "attn.wo_a.weight", ".e_proj.weight")):
            codes = torch.randn(n, k).to(torch.float8_e4m3fn)
            exponents = torch.full((1, 1), 120, dtype=torch.uint8)
            values = codes.float().numpy() * 2.0**-7
        elif ".experts." in name and k % 32 == 0:
            pairs = rng.integers(0, 256, (n, k // 2), np.uint8)
            exponents = torch.from_numpy(rng.integers(118, 124, (n, k // 32), np.uint8))
            scale = np.repeat(2.0 ** (exponents.numpy().astype(float) - 127), 32, axis=1)
            values = FP4[np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n, k)] * scale
            codes = torch.from_numpy(pairs.view(np.int8))
        else:
            continue
        tensors[name] = codes
        tensors[f"{name.removesuffix('weight')}scale"] = exponents.view(torch.float8_e8m0fnu)
        wanted[program_name(name, DeepseekV4.stored)] = values
    save_file(tensors, file)
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    settings = {**json.loads(config.read_text()), "expert_dtype": "fp4"}
    settings["quantization_config"] = {**quantized, "weight_block_size": [128, 128]}
    config.write_text(json.dumps(settings))
    return wanted


def test_published_matrices_are_fp8_with_powers_of_two_and_experts_mxfp4():
    path = copy_of(tiny_model("deepseek-v4"), "published-fp8")
    wanted = compress(path)
    weights = open_checkpoint(path).weights
    # The groups of outputs are multiplied one by one, which FP8 has no kernels for.
    kinds = {name.split(".")[-2]: weights.kind(name, "bfloat16") for name in wanted}
    assert kinds == {"wq_a": "e4m3_g128", "wo_a": "dense_bf16", "w1": "mxfp4", "w3": "mxfp4"}
    for name, values in wanted.items():
        assert np.array_equal(dequantize(weights.get(name)), values.astype(np.float32)), name
    with LLM(str(path)) as llm:
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 4


def test_the_head_of_published_files_has_their_formats(tmp_path):
    path = with_head(tmp_path / "m", "deepseek-v4")
    wanted = {name: values for name, values in compress(path).items() if name.startswith("mtp.")}
    head, weights = open_head(path)
    ours = {head.stored(need.name): need.name for need in head.program.weights}
    kinds = {name.split(".")[-2]: weights.kind(ours[name], "bfloat16") for name in wanted}
    matrices = {"wq_a": "e4m3_g128", "e_proj": "e4m3_g128", "wo_a": "dense_bf16"}
    assert kinds == {**matrices, "w1": "mxfp4", "w3": "mxfp4"}
    for name, values in wanted.items():
        found = dequantize(weights.get(ours[name]))
        assert np.array_equal(found, values.astype(np.float32)), name


def test_what_transformers_saves_is_the_same_model(tmp_path):
    path = tiny_model("deepseek-v4")
    transformers_of(path).save_pretrained(tmp_path)
    mine, theirs = tensors_of(path), tensors_of(tmp_path)
    assert (
        mine.keys()
        == theirs.keys()
        == {need.name for need in stored_needs(program_of(path).weights)}
    )
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert set(saved["rope_parameters"]) == {"main", "compress"}
    assert spec_from_config(saved) == spec_from_config(
        json.loads((path / "config.json").read_text())
    )


def test_published_settings_say_the_kinds_of_layers():
    changes = {"layer_types": None, "compress_ratios": [0, 128, 4, 128, 4], "compress_rates": None}
    spec = spec_from_config(tiny_config("deepseek-v4", **changes))
    short = [kind.partition("_")[0] for kind in spec.parts["kinds"]]
    assert short == ["sliding", "heavily", "compressed", "heavily"]
    assert spec.parts["hashed"] == (True, True, False, False)
    pools = [op.pool for op in build_program(spec).ops if isinstance(op, PoolEntries)]
    assert pools == [128, 4, 4, 128]  # the layer with pools of 4 has an indexer
    assert spec.parts["kept"] == 128  # the window has only 24 tokens


def test_entries_that_are_all_read_need_no_indexer():
    path = tiny_model("deepseek-v4")
    config = tiny_config("deepseek-v4", index_topk=128)
    program = build_program(spec_from_config(config))
    left = tensors_of(path).keys() - {need.name for need in stored_needs(program.weights)}
    assert left
    assert all(".attn.indexer." in name for name in left)
    assert left <= program.unread


@pytest.mark.parametrize("wrong", [8, -1])
def test_a_table_with_experts_that_are_none_is_refused(wrong):
    program = program_of(tiny_model("deepseek-v4"))
    route = next(op for op in program.ops if isinstance(op, Route) and op.table)
    ids = np.zeros((4, 3), np.float32)
    assert route.experts_of_ids(ids) is ids
    ids[2, 1] = wrong
    with pytest.raises(ModelError, match="tid2eid has experts that are not from 0 to 7"):
        route.experts_of_ids(ids)


def test_names_of_other_families_stay():
    for name in ("model.layers.0.self_attn.norm.weight", "head.dense.weight", "model.embed.weight"):
        assert checkpoint_to_hf(name) == name
