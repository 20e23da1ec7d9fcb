"""Tasks of jina-embeddings v3 and v5: each has an adapter of the checkpoint, perhaps a prompt."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, InvalidRequest, ModelError
from cpuserve.loader import lora
from cpuserve.loader.load import read_config
from cpuserve.loader.lora import AdapterReader
from cpuserve.loader.tasks import task_adapters
from cpuserve.models import build_program, spec_from_config
from cpuserve.offline.pooling import items_of
from cpuserve.serving.calls.events import floats_of
from tests.helpers import jina_v3 as v3
from tests.helpers.adapter import merged
from tests.helpers.depth import deep_but
from tests.helpers.encoders import PROMPTS, encoder_of, pooled, rows_of
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


@pytest.mark.parametrize("size", deep_but(["nano"], SIZES))
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


def test_the_files_of_tasks_are_read_once_for_all_tasks(monkeypatch):
    read, opened = lora.SafetensorsFile, []
    monkeypatch.setattr(lora, "SafetensorsFile", lambda p: opened.append(p) or read(p))
    path = v3.jina_v3()
    spec = spec_from_config(read_config(path))
    reader = AdapterReader(spec, build_program(spec))
    found = [reader.open(task, path) for task in v3.TASKS]
    assert len({adapter.fingerprint() for adapter in found}) == len(v3.TASKS)
    assert opened == [path / "model.safetensors"]


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


def test_vectors_of_jina_v3_are_those_of_weights_with_the_changes_of_the_task():
    path, prompts = v3.jina_v3(), PROMPTS[:6]
    with make(path) as llm, make(tiny_model("jina-v3")) as plain:
        assert llm.config.pooling == "mean"
        without = vectors(llm, prompts)
        assert np.array_equal(without, vectors(plain, prompts))
        for task in v3.TASKS:
            for prompt, vector in zip(prompts, vectors(llm, prompts, task=task), strict=True):
                want = pooled(rows_of(v3.with_task(task), prompt), "mean")
                assert vector @ want > 1 - sum_bound(len(vector))
                assert vector @ without[prompts.index(prompt)] < 0.99


def mixed(llm, prompts, tasks):
    """The vector of each prompt with a task of its own, all in one batch."""
    requests = [llm._request(prompt) for prompt in prompts]
    params = [SamplingParams(max_tokens=0, adapter=task) for task in tasks]
    items = items_of(requests, params, [0] * len(prompts))
    llm._run(items, False, llm._context)
    return [floats_of(item.choices[0].vector).tolist() for item in items]


@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16", "kv_cache_dtype": "auto"}])
def test_texts_of_several_tasks_in_a_batch_have_the_bits_of_each_alone(types):
    prompts, tasks = PROMPTS[:6], [*v3.TASKS, None]
    with make(v3.jina_v3(), **types, omp_threads_bind="0") as llm:
        alone = [mixed(llm, [p], [t])[0] for p, t in zip(prompts, tasks, strict=True)]
    with make(v3.jina_v3(), **types) as llm:
        assert mixed(llm, prompts, tasks) == alone
        assert llm._client.stats.steps < len(prompts)


def test_the_torch_executor_gives_the_same_vectors_of_a_task():
    with make(v3.jina_v3()) as llm, make(v3.jina_v3(), executor="torch") as slow:
        fast, other = (vectors(x, PROMPTS[:4], task="separation") for x in (llm, slow))
    for one, two in zip(fast, other, strict=True):
        assert one @ two > 1 - sum_bound(len(one))


@pytest.mark.parametrize("key", ["task", "prompt_name"])
def test_a_task_of_jina_v3_has_its_prompt_and_the_name_of_the_prompt_selects_it(key):
    with make(v3.jina_v3()) as llm:
        tokens = llm.get_tokenizer().encode(f"{v3.PROMPTS['retrieval.query']}red foxes")
        (got,) = vectors(llm, ["red foxes"], **{key: "retrieval.query"})
        assert got.tolist() == mixed(llm, [tokens], ["retrieval.query"])[0]
        with pytest.raises(InvalidRequest, match=r"'retrieval': this model has retrieval\.query, "):
            vectors(llm, ["red foxes"], task="retrieval")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("lora_adaptations", ["one"], "is no stack of 1 matrices"),
        ("lora_adaptations", "one", "must be a list of names of tasks"),
        ("lora_rank", 3, r"A of .* is \[1, 4\], and must be \[1, 3\]"),
        ("lora_alpha", "6", "its lora_alpha is '6', but it must be a number"),
        ("task_instructions", ["a"], "must be an object with texts"),
    ],
)
def test_broken_adapters_of_jina_v3_are_refused(tmp_path, key, value, why):
    path = shutil.copytree(v3.jina_v3(), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=why):
        make(path).close()


def test_numbers_of_a_task_that_are_not_finite_are_refused(tmp_path):
    """Its table is part of the rows of all tasks."""
    path = shutil.copytree(v3.jina_v3(), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["roberta.embeddings.word_embeddings.parametrizations.weight.0.lora_A"][2, 7, 0] = np.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"adapter separation: A of .* are not finite"):
        make(path).close()
