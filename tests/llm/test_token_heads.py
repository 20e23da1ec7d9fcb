"""BGE-M3 through the whole engine: an embedding, weights and vectors of tokens in one pass."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from cpuserve import LLM
from cpuserve.base.errors import InvalidRequest, ModelError
from tests.helpers.bge_m3 import MULTI, WIDTH, bge_m3, expected, heads
from tests.helpers.depth import deep_but
from tests.helpers.encoders import PROMPTS
from tests.helpers.pooled import listed
from tests.helpers.tiny import tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}
TASKS = ("embed", "token_embed", "token_classify")
ALL = "embed&token_embed&token_classify"
TEXTS = ("The quick brown fox", "jumps over", "the lazy dog")


def make(path, **options):
    return LLM(str(path), **{"executor": "native", "max_model_len": 320, **FP32, **options})


def data(llm, prompts, task, **more):
    done = llm.encode(prompts, pooling_task=task, use_tqdm=False, **more)
    return [listed(each.outputs.data) for each in done]


def results(prompt):
    embedding, weights, vectors = expected(prompt)
    return {"embed": embedding, "token_embed": vectors, "token_classify": weights}


@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
@pytest.mark.parametrize("apart", deep_but([True], [True, False]))
def test_the_three_results_are_those_of_torch(apart, executor):
    with make(bge_m3(apart=apart), executor=executor) as llm:
        assert llm.config.pooling == "first"
        together = data(llm, PROMPTS, ALL)
        one_by_one = {task: data(llm, PROMPTS, task) for task in TASKS}
        flat = data(llm, PROMPTS, "embed&token_classify")
    for i, prompt in enumerate(PROMPTS):
        got = {task: torch.tensor(together[i][task]).double() for task in TASKS}
        for task, wanted in results(prompt).items():
            assert got[task].shape == wanted.shape
            assert got[task] == pytest.approx(wanted, abs=1e-5), task
            assert one_by_one[task][i] == together[i][task]
        assert flat[i] == together[i]["embed"] + together[i]["token_classify"]


def test_special_tokens_around_a_text_have_no_weight_and_the_first_one_no_vector():
    with make(bge_m3()) as llm:
        (done,) = llm.encode(TEXTS[0], pooling_task=ALL, use_tqdm=False)
        ids, first, last = done.prompt_token_ids, *llm._tokenizer.encode("")
        assert (ids[0], ids[-1]) == (first, last)
        _, weights, vectors = expected(ids)
        got = done.outputs.data
        assert got["token_classify"] == pytest.approx(weights[1:-1].tolist(), abs=1e-5)
        assert torch.tensor(got["token_embed"]) == pytest.approx(vectors[1:], abs=1e-5)


def test_without_the_activation_weights_and_vectors_are_those_of_the_linears():
    with make(bge_m3()) as llm:
        raw = data(llm, PROMPTS[6], ALL, use_activation=False)[0]
        got = data(llm, PROMPTS[6], ALL)[0]
    assert min(raw["token_classify"]) < 0 <= min(got["token_classify"])
    assert got["token_classify"] == [max(weight, 0.0) for weight in raw["token_classify"]]
    vectors = torch.nn.functional.normalize(torch.tensor(raw["token_embed"]).double(), dim=1)
    assert torch.tensor(got["token_embed"]).double() == pytest.approx(vectors, abs=1e-6)


@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16"}])
def test_results_do_not_depend_on_neighbours_threads_or_tasks(types):
    with make(bge_m3(), omp_threads_bind="0", max_num_seqs=1, **types) as llm:
        alone = [data(llm, [prompt], ALL)[0] for prompt in PROMPTS]
    with make(bge_m3(), max_num_batched_tokens=1100, max_num_seqs=16, **types) as llm:
        assert data(llm, PROMPTS, ALL) == alone
        assert llm._client.stats.steps < len(PROMPTS)


def test_a_model_without_the_heads_has_no_such_task():
    with make(tiny_model("xlm-roberta")) as llm:
        for task in ("token_classify", "embed&token_classify", ALL):
            with pytest.raises(InvalidRequest, match="for this model it is embed or token_embed"):
                llm.encode("a", pooling_task=task)


def test_a_model_with_one_head_has_its_tasks_only(tmp_path):
    path = tmp_path / "m"
    shutil.copytree(bge_m3(), path)
    (path / "colbert_linear.safetensors").unlink()
    with make(path) as llm:
        assert len(data(llm, [PROMPTS[2]], "embed&token_classify")[0]) == WIDTH + len(PROMPTS[2])
        assert len(data(llm, [PROMPTS[2]], "token_embed")[0][0]) == WIDTH
        with pytest.raises(InvalidRequest, match=r"or embed&token_classify$"):
            llm.encode("a", pooling_task=ALL)


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.zeros(1, WIDTH + 1), "bias": torch.zeros(1)},
        {"weight": torch.zeros(2, WIDTH), "bias": torch.zeros(2)},
        {"weight": torch.zeros(1, WIDTH)},
        {"weight": torch.zeros(1, WIDTH), "bias": torch.zeros(1), "other": torch.zeros(1)},
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, tensors):
    path = tmp_path / "m"
    shutil.copytree(bge_m3(), path)
    save_file(tensors, path / "sparse_linear.safetensors")
    with pytest.raises(ModelError, match="the head sparse_linear has tensors of the shapes"):
        make(path)


def test_pickled_heads_are_not_read(tmp_path):
    path = tmp_path / "m"
    shutil.copytree(tiny_model("xlm-roberta"), path)
    for name, tensors in heads().items():
        torch.save(tensors, path / f"{name}.pt")
    with make(path) as llm:
        assert llm._client.info["token_widths"] == {}
    assert MULTI != WIDTH
