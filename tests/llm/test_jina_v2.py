"""jina-embeddings v2 against plain torch, which transformers lacks, and batch invariance."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, layer_norm, linear

from cpuserve import LLM
from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config
from tests.helpers.encoders import PROMPTS, pooled
from tests.helpers.rounding import sum_bound
from tests.helpers.tiny import copy_of, tiny_config, tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}
# 6 heads: the slopes of 4 heads, and every second one of 8 heads.
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


# As in the config of the published model for code.
CODE = {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}
KINDS = {"text": {}, "code": CODE}


def rows_of(path, prompt, kind="text"):
    """The last hidden state [tokens, width] by the definition, in fp64."""
    t = {k: v.double() for k, v in load_file(path / "model.safetensors").items()}

    def of(name, x):
        return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def norm(name, x):
        return layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], 1e-12)

    x = t["embeddings.word_embeddings.weight"][prompt]
    x = norm("embeddings.LayerNorm", x + t["embeddings.token_type_embeddings.weight"][0])
    places = torch.arange(len(prompt))
    away = (places[:, None] - places).abs()
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        q, k, v = (of(f"{at}.attention.self.{part}", x) for part in ("query", "key", "value"))
        if kind == "code":
            q, k = (norm(f"{at}.attention.self.layer_norm_{n}", y) for n, y in (("q", q), ("k", k)))
        q, k, v = (y.view(len(prompt), 6, 16).transpose(0, 1) for y in (q, k, v))
        scores = q @ k.mT / 4 - torch.tensor(SLOPES).double()[:, None, None] * away
        mixed = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(len(prompt), -1)
        y = norm(f"{at}.attention.output.LayerNorm", x + of(f"{at}.attention.output.dense", mixed))
        if kind == "code":
            x = norm(f"{at}.layer_norm_1", x + y)
            ups, gates = of(f"{at}.mlp.up_gated_layer", x).chunk(2, dim=1)
            x = norm(f"{at}.layer_norm_2", x + of(f"{at}.mlp.down_layer", gelu(gates) * ups))
            continue
        x = y
        gates, ups = of(f"{at}.mlp.gated_layers", x).chunk(2, dim=1)
        x = norm(f"{at}.mlp.layernorm", x + of(f"{at}.mlp.wo", gelu(gates) * ups))
    return x


def vectors(llm, prompts):
    return [np.array(x.outputs.embedding) for x in llm.embed(prompts, use_tqdm=False)]


def make(path=None, **options):
    sizes = {"max_model_len": 320, "max_num_batched_tokens": 400, "executor": "native"}
    return LLM(str(path or tiny_model("jina-v2")), **{**sizes, **FP32, **options})


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_a_plain_torch_model(kind, executor):
    path = tiny_model("jina-v2", **KINDS[kind])
    with make(path, executor=executor) as llm:
        pooling = {"cls": "first"}.get(llm.config.pooling, llm.config.pooling)
        got = vectors(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, got, strict=True):
        assert vector @ pooled(rows_of(path, prompt, kind), pooling) > 1 - sum_bound(len(vector))


@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16", "kv_cache_dtype": "auto"}])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_do_not_depend_on_neighbours_threads_or_ranks(kind, types):
    path = tiny_model("jina-v2", **KINDS[kind])
    with make(path, omp_threads_bind="0", **types) as llm:
        alone = [vectors(llm, [prompt])[0].tolist() for prompt in PROMPTS]
    many = {"max_num_batched_tokens": 1100, "max_num_seqs": 16, "omp_threads_bind": "nobind"}
    for options in ({"omp_num_threads": 3}, {"tensor_parallel_size": 2, "omp_num_threads": 1}):
        with make(path, **many, **options, **types) as llm:
            assert [v.tolist() for v in vectors(llm, PROMPTS)] == alone


def test_a_checkpoint_with_the_head_of_its_training_is_the_same_model():
    path = copy_of(tiny_model("jina-v2"), "jina-v2-head-")
    config = json.loads((path / "config.json").read_text())
    changed = {**config, "architectures": ["JinaBertForMaskedLM"], "feed_forward_type": "geglu"}
    (path / "config.json").write_text(json.dumps(changed))
    with make() as llm, make(path) as other:
        assert np.array_equal(vectors(llm, PROMPTS[:3]), vectors(other, PROMPTS[:3]))


@pytest.mark.parametrize(
    ("key", "value"), [("position_embedding_type", "absolute"), ("feed_forward_type", "reglu")]
)
def test_other_layers_are_refused(key, value):
    with pytest.raises(ModelError, match=f"{key} is '{value}'"):
        spec_from_config(tiny_config("jina-v2", **{key: value}))
