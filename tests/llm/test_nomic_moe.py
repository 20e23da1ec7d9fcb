"""nomic-embed-text v2, a mixture: published files against plain torch, and batch invariance."""

import json
import shutil

import numpy as np
import pytest

from cpuserve import LLM
from cpuserve.base.errors import ModelError
from tests.helpers.depth import deep_but
from tests.helpers.encoders import PROMPTS, pooled
from tests.helpers.nomic_moe import published, rows_of
from tests.helpers.rounding import sum_bound

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(path=None, **options):
    sizes = {"max_model_len": 320, "max_num_batched_tokens": 400, "executor": "native"}
    return LLM(str(path or published()), **{**sizes, **FP32, **options})


def vectors(llm, prompts):
    return [np.array(x.outputs.embedding) for x in llm.embed(prompts, use_tqdm=False)]


@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
def test_vectors_are_those_of_a_plain_torch_model(executor):
    with make(executor=executor) as llm:
        assert llm.config.pooling == "mean"
        got = vectors(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, got, strict=True):
        assert vector @ pooled(rows_of(published(), prompt), "mean") > 1 - sum_bound(len(vector))


@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16", "kv_cache_dtype": "auto"}])
def test_vectors_do_not_depend_on_neighbours_or_threads(types):
    with make(omp_threads_bind="0", **types) as llm:
        alone = [vectors(llm, [prompt])[0].tolist() for prompt in PROMPTS]
    with make(max_num_batched_tokens=1100, max_num_seqs=16, **types) as llm:
        assert [v.tolist() for v in vectors(llm, PROMPTS)] == alone
        assert llm._client.stats.steps < len(PROMPTS)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_experts", 5, r"wrong shape"),
        ("moe_top_k", 5, "moe_top_k is 5, but it must be an integer from 1 to 4"),
        ("moe_every_n_layers", 1, "moe_every_n_layers is 1"),
        ("moe_normalize_expert_weights", True, "moe_normalize_expert_weights is True"),
        ("activation_function", "swiglu", "gelu in a mixture"),
    ],
)
def test_mixtures_that_the_published_code_does_not_have_are_refused(tmp_path, key, value, why):
    path = shutil.copytree(published(), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=why):
        make(path).close()
