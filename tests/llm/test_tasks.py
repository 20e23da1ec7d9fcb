"""Tasks of jina-embeddings v5: each has an adapter of the checkpoint, and perhaps a prompt."""

import numpy as np
import pytest
import torch

from cpuserve import LLM
from cpuserve.errors import ConfigError, InvalidRequest, ModelError
from cpuserve.loader.tasks import task_adapters
from tests.helpers.adapter import merged
from tests.helpers.encoders import PROMPTS, encoder_of, pooled
from tests.helpers.jina_v5 import SIZES, TASKS, base_of, jina_v5, task_adapter
from tests.helpers.oracle import transformers_of
from tests.helpers.rounding import sum_bound
from tests.helpers.tiny import tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(path, **options):
    sizes = {"max_model_len": 320, "max_num_batched_tokens": 400, "executor": "native"}
    return LLM(str(path), **{**sizes, **FP32, **options})


def vectors(llm, prompts, **task):
    return [np.array(x.outputs.embedding) for x in llm.embed(prompts, use_tqdm=False, **task)]


def expected(size, task, prompt):
    """The vector of transformers with the task's adapter merged into its weights."""
    path = merged(base_of(size), task_adapter(size, task))
    model = encoder_of(path) if size == "nano" else transformers_of(path).model
    with torch.inference_mode():
        return pooled(model(torch.tensor([prompt])).last_hidden_state[0], "last")


@pytest.mark.parametrize("size", SIZES)
def test_vectors_of_a_task_are_those_of_its_merged_adapter_in_any_batch(size):
    prompts = PROMPTS[:6]
    with make(jina_v5(size)) as llm:
        assert llm.config.pooling == "last"
        by_task = {task: vectors(llm, prompts, task=task) for task in TASKS}
        for task, got in by_task.items():
            for prompt, vector in zip(prompts, got, strict=True):
                assert vector @ expected(size, task, prompt) > 1 - sum_bound(len(vector))
                (alone,) = vectors(llm, [prompt], task=task)
                assert (alone == vector).all()
        assert np.array_equal(vectors(llm, prompts), by_task["retrieval"])  # the default


@pytest.mark.parametrize(
    ("task", "prompt_name", "before", "adapter"),
    [
        ("retrieval.query", None, "Query: ", "retrieval"),
        ("retrieval.passage", None, "Document: ", "retrieval"),
        ("text-matching", None, "Document: ", "text-matching"),
        ("text-matching", "query", "Query: ", "text-matching"),
        (None, "query", "Query: ", "retrieval"),
    ],
)
def test_the_prompt_of_a_task_goes_before_texts(task, prompt_name, before, adapter):
    with make(jina_v5("nano")) as llm:
        tokens = llm.get_tokenizer().encode(f"{before}red foxes")
        (got,) = vectors(llm, ["red foxes"], task=task, prompt_name=prompt_name)
        (want,) = vectors(llm, [tokens], task=adapter)
    assert (got == want).all()


def test_unknown_tasks_and_other_prompts_are_refused():
    path = jina_v5("nano")
    with make(path) as llm:
        with pytest.raises(InvalidRequest, match=r"'x': this model has retrieval, "):
            vectors(llm, [[1, 2]], task="x")
        with pytest.raises(InvalidRequest, match="has the prompt 'query', but prompt_name is 'doc"):
            vectors(llm, [[1, 2]], task="retrieval.query", prompt_name="document")
    with pytest.raises(ConfigError, match="retrieval: this is the name of a task"):
        make(path, lora_modules=f"retrieval={path}/adapters/retrieval")
    with make(tiny_model("eurobert")) as llm, pytest.raises(InvalidRequest, match="has no tasks"):
        vectors(llm, [[1, 2]], task="retrieval.query")


@pytest.mark.parametrize("names", ["retrieval", [1], ["../other"], [".."], [""]])
def test_names_of_tasks_that_are_no_folders_are_refused(names):
    config = {"architectures": ["JinaEmbeddingsV5Model"], "task_names": names}
    with pytest.raises(ModelError, match=r"task_names is .*; it must be a list of names"):
        task_adapters(jina_v5("nano"), config)
