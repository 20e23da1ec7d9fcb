"""gpt-oss through the whole engine, from each of the files in which its weights are published."""

import pytest
import torch

from cpuserve import LLM, SamplingParams
from tests.helpers import gguf_convert
from tests.helpers.answers import exact_answers
from tests.helpers.gpt_oss import published
from tests.helpers.oracle import transformers_logits
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(20 + 37 * n)] for n in range(3)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


def opened(path, **options):
    sizes = {"max_model_len": 160, "max_num_batched_tokens": 48}
    types = {"dtype": "float32", "kv_cache_dtype": "float32"}
    return LLM(str(path), **{**sizes, **types, **options})


def answers(path):
    with opened(path) as llm:
        return exact_answers(llm, PROMPTS, PARAMS)


def test_the_published_layout_gives_the_same_bits():
    assert answers(published(tiny_model("gpt-oss"))) == answers(tiny_model("gpt-oss"))


def test_mxfp4_gives_the_same_bits_from_safetensors_and_gguf(tmp_path):
    gguf_convert.convert("gpt-oss", tmp_path / "m.gguf", types=[("_exps.weight", "MXFP4")])
    packed = published(tiny_model("gpt-oss"), packed=True)
    assert answers(packed) == answers(tmp_path / "m.gguf")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "mxfp4"])
def test_logprobs_beyond_the_clamp_are_those_of_transformers(packed):
    path = published(tiny_model("gpt-oss"), packed=packed, bias=60.0)
    with opened(path, executor="native") as llm:
        (output,) = llm.generate([PROMPTS[2]], SCORED)
    rows = zip(PROMPTS[2][1:], output.prompt_logprobs[1:], strict=True)
    got = torch.tensor([row[token].logprob for token, row in rows])
    every = transformers_logits(path, PROMPTS[2])[:-1].log_softmax(dim=1)
    want = every.gather(1, torch.tensor(PROMPTS[2][1:])[:, None])[:, 0]
    # The rows that MXFP4 multiplies are rounded to int8.
    assert (got - want).abs().max() < (3e-2 if packed else 1e-4) * (want.max() - want.min())
