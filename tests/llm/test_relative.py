"""Encoders whose attention depends on the distance of two tokens: DeBERTa, MPNet and T5."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.t5.modeling_t5 import T5Attention

from cpuserve import LLM
from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config
from cpuserve.program.operations.relative import Distances
from tests.helpers.encoders import PROMPTS, pooled, rows_of
from tests.helpers.levels import each_level
from tests.helpers.rounding import sum_bound
from tests.helpers.tiny import copy_of, tiny_config, tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}
# What published configs have beside those of V3: projections of their own for distances (V2),
# one term, a row for each distance, learned positions, and no distances at all.
DEBERTAS = {
    "projections": {"share_att_key": False, "norm_rel_ebd": "none", "pos_att_type": ["c2p", "p2c"]},
    "queries": {"pos_att_type": "c2p", "max_relative_positions": 200},
    "keys": {"pos_att_type": ["p2c"], "share_att_key": False},
    "every-distance": {"position_buckets": -1, "max_relative_positions": 40},
    "positions": {"position_biased_input": True, "hidden_act": "gelu_new"},
    "plain": {
        "relative_attention": False,
        "pos_att_type": None,
        "norm_rel_ebd": "none",
        "position_biased_input": True,
    },
}
T5S = {
    "relu": {"feed_forward_proj": "relu", "d_kv": 24},
    "narrow": {"d_kv": 16, "num_heads": 3},
    "deep": {"num_layers": 4, "d_kv": 40, "feed_forward_proj": "gated-silu"},
}


def vectors(path, prompts, **options):
    sizes = {"max_model_len": 320, "max_num_batched_tokens": 400, "max_num_seqs": 8}
    settings = {**sizes, "executor": "native", "pooling": "mean", **FP32, **options}
    with LLM(str(path), **settings) as llm:
        return [np.array(x.outputs.embedding) for x in llm.embed(prompts, use_tqdm=False)]


@pytest.mark.parametrize(("buckets", "reach"), [(256, 512), (32, 320), (64, 513), (128, 8192)])
def test_rows_of_deberta_are_those_of_transformers(buckets, reach):
    ahead = torch.arange(1 - reach, reach)
    bucket = make_log_bucket_position(-ahead, buckets, reach).long()
    wanted = (bucket + buckets).clamp(0, 2 * buckets - 1)
    assert np.array_equal(Distances("logarithmic", 2 * buckets, reach).places(reach), wanted)


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (64, 256), (16, 1000), (32, 512)])
def test_rows_of_t5_are_those_of_transformers(buckets, reach):
    ahead = torch.arange(-3000, 3001)
    bucket = T5Attention._relative_position_bucket
    wanted = bucket(ahead, num_buckets=buckets, max_distance=reach)
    assert np.array_equal(Distances("halving", buckets, reach).places(3001), wanted)


def check(path, prompts, **options):
    for prompt, vector in zip(prompts, vectors(path, prompts, **options), strict=True):
        assert vector @ pooled(rows_of(path, prompt), "mean") > 1 - sum_bound(len(vector))


@pytest.mark.parametrize("kind", DEBERTAS)
def test_every_kind_of_deberta_gives_the_vectors_of_transformers(kind):
    check(tiny_model("deberta", **DEBERTAS[kind]), PROMPTS[3:])


@pytest.mark.parametrize("kind", T5S)
def test_every_kind_of_t5_gives_the_vectors_of_transformers(kind):
    check(tiny_model("t5", **T5S[kind]), PROMPTS[3:])


@pytest.mark.parametrize("family", ["deberta", "mpnet", "t5"])
@each_level
def test_every_level_gives_the_vectors_of_transformers(isa, family):
    check(tiny_model(family), PROMPTS, isa=isa)


@pytest.mark.parametrize("family", ["deberta", "t5"])
@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16"}])
def test_vectors_do_not_depend_on_neighbours_threads_or_ranks(family, types):
    path, prompts = tiny_model(family), PROMPTS
    alone = [
        vectors(path, [prompt], omp_threads_bind="0", **types)[0].tolist()
        for prompt in prompts[-3:]
    ]
    many = {"max_num_batched_tokens": 1100, "max_num_seqs": 16, "omp_threads_bind": "nobind"}
    for options in ({"omp_num_threads": 3}, {"tensor_parallel_size": 2, "omp_num_threads": 1}):
        got = vectors(path, prompts, **many, **options, **types)[-3:]
        assert [v.tolist() for v in got] == alone


def test_quantized_projections_make_the_same_vectors_for_distances_in_both_executors():
    path = tiny_model("deberta")
    ours, reference = (
        vectors(path, PROMPTS[4:], executor=executor, quantization="int8", dtype="bfloat16")
        for executor in ("native", "torch")
    )
    for one, other in zip(ours, reference, strict=True):
        assert one @ other > 0.999


def test_the_encoder_of_mt5_is_that_of_t5():
    path = copy_of(tiny_model("t5"), "mt5-")
    config = json.loads((path / "config.json").read_text())
    changed = {**config, "architectures": ["MT5EncoderModel"], "model_type": "mt5"}
    (path / "config.json").write_text(json.dumps(changed))
    assert np.array_equal(vectors(path, PROMPTS[:4]), vectors(tiny_model("t5"), PROMPTS[:4]))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deberta", "conv_kernel_size", 3),
        ("deberta", "type_vocab_size", 2),
        ("deberta", "embedding_size", 32),
        ("deberta", "pos_att_type", "c2p|p2p"),
        ("deberta", "pos_att_type", None),
        ("deberta", "position_buckets", 31),
        ("deberta", "max_relative_positions", 17),
        ("mpnet", "relative_attention_num_buckets", 64),
        ("t5", "relative_attention_num_buckets", 30),
        ("t5", "relative_attention_max_distance", 8),
        ("t5", "feed_forward_proj", "gated-relu"),
    ],
)
def test_other_settings_are_refused(family, key, value):
    name = "position_buckets" if key == "max_relative_positions" else key
    with pytest.raises(ModelError, match=f"{name} is"):
        spec_from_config(tiny_config(family, **{key: value}))
