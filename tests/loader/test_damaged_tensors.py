"""Tensors of other shapes and types than a family has are refused in one line, by name."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from tests.helpers import gguf_convert
from tests.helpers.dbrx import flat
from tests.helpers.rwkv6 import as_finch, as_published
from tests.helpers.tiny import copy_of, tiny_model
from tests.models.test_rwkv6 import FINCH

V1 = "transformer.blocks.0.ffn.experts.mlp.v1"
W2 = "transformer.blocks.0.ffn.experts.mlp.w2"
MIXES = "rwkv.blocks.0.attention.time_maa_w1"


def written(kind):
    """A copy of a tiny checkpoint in its published form."""
    if kind == "dbrx":
        return copy_of(flat(tiny_model("dbrx")), "damaged-")
    sizes = {"proj_low_rank_dim": 32, "gate_low_rank_dim": 64, "intermediate_size": 320}
    source = tiny_model("rwkv6", **sizes) if kind == "finch" else tiny_model(kind)
    path = copy_of(source, "damaged-")
    config, file = json.loads((path / "config.json").read_text()), path / "model.safetensors"
    if kind == "finch":
        save_file(as_finch(config, load_file(file)), file)
        (path / "config.json").write_text(json.dumps(FINCH))
    elif kind == "rwkv6":
        save_file(as_published(load_file(file)), file)
    return path


def check(path):
    checkpoint = open_checkpoint(path)
    check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("llama", "lm_head.weight", (0, 64)),
        ("dbrx", V1, (0, 64)),
        ("dbrx", V1, (240, 0)),
        ("dbrx", V1, ()),
        ("dbrx", V1, (241, 64)),
        ("dbrx", W2, (1, 240, 64)),
        ("finch", MIXES, (96 * 160,)),
        ("finch", MIXES, ()),
        ("finch", MIXES, (0, 160)),
        ("finch", "rwkv.blocks.0.attention.time_maa_x", (0, 1, 96)),
        ("rwkv6", "model.layers.0.attn.x_proj.2.weight", (0, 40)),
    ],
)
def test_a_tensor_of_another_shape_is_refused(kind, name, shape):
    path = written(kind)
    check(path)
    file = path / "model.safetensors"
    save_file({**load_file(file), name: np.zeros(shape, np.float32)}, file)
    with pytest.raises(ModelError, match=r"lm_head|experts|x_proj|time_maa") as caught:
        check(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["U8", "I16"])
def test_tables_of_ids_are_refused_in_types_that_are_not_read(dtype):
    path = written("deepseek-v4")
    file = path / "model.safetensors"
    tensors = load_file(file)
    kept = {"U8": np.uint8, "I16": np.int16}[dtype]
    tables = {n: v.astype(kept) for n, v in tensors.items() if n.endswith("tid2eid")}
    save_file({**tensors, **tables}, file)
    with pytest.raises(ModelError, match=rf"unsupported tensor type {dtype} .*tid2eid"):
        check(path)


def test_tables_of_ids_in_gguf_files_are_refused_in_types_that_are_not_read(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_convert.convert("deepseek4", path)
    data = path.read_bytes()
    name = b"blk.0.ffn_gate_tid2eid.weight"
    at = data.index(name) + len(name)
    (dims,) = struct.unpack_from("<I", data, at)
    at += 4 + 8 * dims
    assert struct.unpack_from("<I", data, at) == (26,)  # I32
    path.write_bytes(data[:at] + struct.pack("<I", 24) + data[at + 4 :])  # I8
    with pytest.raises(ModelError, match=r"unsupported tensor type I8 .*tid2eid"):
        check(path)


def test_quantized_stacks_of_vectors_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_convert.convert("rwkv6", path, types=[("lerp_fused", "Q8_0")])
    weights = open_checkpoint(path).weights
    with pytest.raises(ModelError, match=r"x_proj\.2\.bias is quantized, .*dense vectors only"):
        weights.get("model.layers.0.attn.x_proj.2[0][0:96].bias")
