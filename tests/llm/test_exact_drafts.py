"""Requests of all kinds get the same tokens and logprobs from every drafter and from none."""

from __future__ import annotations

import functools
import shutil

import pytest

from cpuserve import LoRARequest, SamplingParams
from cpuserve.serving.calls.call import Prompt
from cpuserve.serving.generation.batch import BatchItem, run_batch
from cpuserve.serving.generation.fan_out import sequences_of
from tests.api.sees import write_served_model
from tests.api.tools import TEMPLATE
from tests.engine.test_pictures_end_to_end import Question
from tests.helpers.adapter import ATTENTION, adapter_of
from tests.helpers.depth import deep_but
from tests.helpers.drafters import DRAFTED, Drafter, drafter_for, drafter_of, with_drafter
from tests.helpers.drawn import picture
from tests.helpers.every_kind import TOOLS, check_situation, wanted
from tests.helpers.guess_head import add_head
from tests.helpers.pictures import write_grid_model
from tests.helpers.tiny import tiny_model
from tests.llm.test_speculation import PARAMS, PROMPTS, SIZES, answer

MIXTURES = ("qwen3-moe", "glm4-moe")
DRAFTERS = ["ngram", "mtp", "eagle3", "draft"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """drafter(name, path) = what guesses for the model at `path`, or for a mixture of experts.

    A head for multi-token prediction belongs to a tiny model of the family `path`.
    """

    @functools.cache
    def get(name, path=None):
        directory = tmp_path_factory.mktemp(name)
        if name == "mtp" or path is None:
            return drafter_for(name, directory, path or MIXTURES[name == "mtp"])
        return drafter_of(name, directory, path, reduced=False)

    return get


def make(drafter, **options):
    return with_drafter(drafter, **{**SIZES, **options})


def equal_with_guesses(drafter, ask, *, least=50, **options):
    """Check that ask(llm) has the same result with guesses and without; return this result."""
    with make(drafter, guesses=False, **options) as llm:
        plain = ask(llm)
        assert llm._client.stats.draft_tokens == 0
    with make(drafter, **options) as llm:
        assert ask(llm) == plain
        assert llm._client.stats.draft_tokens > least
    return plain


def answers(llm, prompts=PROMPTS, params=PARAMS, **more):
    return [answer(o) for o in llm.generate(prompts, params, use_tqdm=False, **more)]


def hot(n):
    params = PARAMS[n].clone()
    params.temperature = 1.2
    return params


@pytest.mark.parametrize("name", deep_but(["mtp"], DRAFTERS))
def test_hot_samples(hasty, drafter, name):
    params = [hot(n) for n in range(32)]
    equal_with_guesses(drafter(name), lambda llm: answers(llm, params=params))


@pytest.mark.parametrize("name", deep_but(["mtp", "eagle3"], DRAFTERS))
def test_requests_with_adapters(hasty, drafter, name):
    family = "qwen3.5" if name == "mtp" else "llama"
    model = tiny_model(family, dtype="bfloat16")
    found = drafter(name, family if name == "mtp" else model)
    paths = [adapter_of(model, ATTENTION, seed=n) for n in (1, 2)]
    adapters = [None, *(LoRARequest(f"a{n}", n + 1, str(path)) for n, path in enumerate(paths))]
    chosen = [adapters[n % 3] for n in range(32)]

    def ask(llm):
        return answers(llm), answers(llm, lora_request=chosen)

    plain, adapted = equal_with_guesses(found, ask, enable_lora=True, max_loras=2)
    same = [n for n in range(32) if plain[n] == adapted[n]]
    assert {0, 3, 6} <= set(same) != set(range(32))


@pytest.mark.parametrize("name", deep_but(["mtp", "eagle3"], DRAFTERS))
def test_requests_whose_blocks_come_from_files(hasty, patient_offload, drafter, name, tmp_path):
    found, place = drafter(name), {"prefix_cache_dir": str(tmp_path)}
    with make(found, guesses=False) as llm:
        plain = answers(llm)
    with make(found, **place) as llm:
        assert answers(llm) == plain
    with make(found, **place) as llm:
        assert answers(llm) == plain
        stats = llm._client.stats
        assert stats.tiers["disk"].hits > 0
        assert stats.draft_tokens > 50


@pytest.mark.parametrize("name", deep_but(["eagle3"], DRAFTERS))
def test_requests_whose_blocks_come_from_the_swap_space(hasty, patient_offload, drafter, name):
    with make(drafter(name), guesses=False) as llm:
        plain = answers(llm)
    with make(drafter(name), kv_cache_space="0.0002", swap_space="0.01") as llm:
        assert answers(llm) == plain
        assert answers(llm) == plain
        stats = llm._client.stats
        assert stats.preemptions > 0
        assert stats.tiers["swap"].hits > 0
        assert stats.draft_tokens > 50


@pytest.mark.parametrize("name", deep_but(["mtp"], ["ngram", "mtp", "eagle3"]))
@pytest.mark.usefixtures("folder")
def test_experts_that_are_read_from_the_disk(hasty, drafter, name):
    with make(drafter(name), guesses=False) as llm:
        plain = answers(llm)
    for memory in ("64MiB", "600KiB"):
        with make(drafter(name), weights_on_disk=memory) as llm:
            assert answers(llm) == plain
            assert llm._client.stats.draft_tokens > 50


@pytest.mark.parametrize("name", deep_but(["mtp", "eagle3"], DRAFTERS))
def test_tool_calls(hasty, drafter, name):
    chats = [[{"role": "user", "content": f"{'again ' * (n % 5)}{n}"}] for n in range(16)]
    params = [plain_params(n) for n in range(16)]

    def ask(llm):
        outputs = llm.chat(
            chats, params, use_tqdm=False, tools=TOOLS, tool_choice="required",
            chat_template=TEMPLATE,
        )  # fmt: skip
        functions = [[call["function"] for call in o.outputs[0].tool_calls] for o in outputs]
        return [answer(o) for o in outputs], functions

    _, called = equal_with_guesses(drafter(name), ask, max_model_len=512)
    assert sum(bool(calls) for calls in called) > 8


def plain_params(n):
    temperature = (0.0, 0.7, 1.2)[n % 3]
    return SamplingParams(max_tokens=90, temperature=temperature, seed=n, logprobs=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A model of pictures, and prompts; every second one has a picture."""
    model = write_served_model(tmp_path_factory.mktemp("sees"))
    text = "<|im_start|>User:{}what is this? " + "this is this " * 3 + "<|im_end|>\nAssistant:"
    shown = {"image": picture(100, 60)}
    prompts = [
        {"prompt": text.format("<image>"), "multi_modal_data": shown} if n % 2 else text.format(n)
        for n in range(8)
    ]
    return model.path, prompts


@pytest.mark.parametrize("name", deep_but(["eagle3"], ["ngram", "eagle3", "draft"]))
def test_pictures_beside_texts(hasty, drafter, seeing, name):
    path, prompts = seeing
    params = [plain_params(n) for n in range(8)]
    sizes = {"max_model_len": 512, "dtype": "float32"}
    equal_with_guesses(
        drafter(name, path), lambda llm: answers(llm, prompts, params), least=10, **sizes
    )


def test_a_head_beside_pictures(hasty, tmp_path):
    theirs = write_grid_model("Qwen3_5ForConditionalGeneration", tmp_path)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    found = Drafter(add_head(tmp_path, offset=True), {"method": "mtp"})

    def ask(llm):
        items = []
        for n in range(16):
            shown = Question(theirs, n % 3)
            prompt = Prompt(shown.ids, media=shown.pictures, payload_of=shown.payload_of)
            params = plain_params(n)
            items.append(BatchItem(sequences_of(prompt if n % 2 else Prompt(PROMPTS[n]), params)))
        run_batch(llm._client, llm._context, items, lambda *_: None)
        choices = [item.choices[0] for item in items]
        return [(c.token_ids, c.logprobs) for c in choices]

    sizes = {"max_model_len": 512, "dtype": "float32"}
    shown = equal_with_guesses(found, ask, **sizes)[1::2]
    assert len({tuple(ids) for ids, _ in shown}) > 1


CASES = [
    ("mtp", "restored"),
    ("mtp", "alone"),
    ("ngram", "among 31"),
    ("eagle3", "alone"),
    ("draft", "restored"),
    ("assistant", "among 31"),
]


@pytest.mark.parametrize("case", deep_but(CASES[:1], CASES), ids="-".join)
def test_requests_of_every_kind(hasty, patient_offload, tmp_path, case):
    """drafts_in_full.py has 200 requests, in all situations."""
    name, situation = case
    found = drafter_for(name, tmp_path, DRAFTED[name][-1])
    check_situation(situation, found, wanted(found, 40), tmp_path / "cache")
