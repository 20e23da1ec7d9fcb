"""A draft model: it changes no token and no bit of a logprob, and its guesses are as expected."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import StartupError
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.engine.speculation.texts import DraftTexts
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_model
from tests.llm.test_speculation import PARAMS, PROMPTS, SIZES, answer, forms

CHOICE = random.Random(7)
# Texts that do not repeat themselves, so n-grams guess nothing.
TEXTS = [[CHOICE.randrange(3, 380) for _ in range(10 + 13 * n % 70)] for n in range(12)]


def model(family="llama"):
    return tiny_model(family, dtype="bfloat16")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Draft models by their agreement with tiny llama: the same one, with noise, and another."""
    from safetensors.torch import load_file, save_file
    from torch import Generator, randn

    near = tmp_path_factory.mktemp("draft") / "near"
    shutil.copytree(model(), near)
    tensors, numbers = load_file(near / "model.safetensors"), Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if "layers" in name and tensor.ndim == 2:
            noise = randn(tensor.shape, generator=numbers) * tensor.float().std() * 0.03
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, near / "model.safetensors")
    return {"same": model(), "near": near, "other": tiny_model("llama", dtype="bfloat16", seed=5)}


@pytest.fixture
def no_ngrams(monkeypatch):
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))


def make(draft=None, family="llama", tokens=4, **options):
    asked = draft and {"model": str(draft), "num_speculative_tokens": tokens}
    options = {**SIZES, "speculate": "auto" if draft else "off", **options}
    return LLM(str(model(family)), speculative_config=asked, **options)


def plain_params(temperature, n):
    return SamplingParams(
        max_tokens=40, temperature=temperature, seed=n, ignore_eos=True, logprobs=1
    )


@pytest.fixture(scope="module")
def want():
    with make() as llm:
        return [answer(o) for o in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("kind", deep_but(["near"], ["same", "near", "other"]))
def test_drafts_of_a_model_change_no_bit_alone_or_among_31_others(hasty, want, drafts, kind):
    with make(drafts[kind]) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want
        assert llm._client.stats.draft_tokens > 100
        alone = [answer(llm.generate([p], q)[0]) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        assert alone == want


@pytest.mark.parametrize("temperature", deep_but([0.7], [0.0, 0.7, 1.2]))
def test_acceptance_is_the_agreement_of_the_models(hasty, no_ngrams, drafts, temperature):
    params = [plain_params(temperature, n) for n in range(len(TEXTS))]
    with make() as llm:
        plain = [answer(o) for o in llm.generate(TEXTS, params)]
    rates = {}
    for kind, draft in drafts.items():
        with make(draft) as llm:
            assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
            stats = llm._client.stats
            rates[kind] = stats.accepted_tokens / stats.draft_tokens
    assert rates["same"] > 0.97
    assert rates["other"] + 0.05 < rates["near"] < rates["same"]


# Families with windows, latent keys, selected keys, experts, shared layers, learned positions.
FAMILIES = ("mistral", "gemma3", "gemma3n", "gpt-oss", "deepseek-v3", "deepseek-v3.2", "opt")


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_all_kinds_can_draft(hasty, no_ngrams, family):
    texts = [[3 + (7 * i * i + 31 * n) % 370 for i in range(90)] for n in range(4)]
    params = [plain_params(0.7, n) for n in range(4)]
    with make(family=family) as llm:
        plain = [answer(o) for o in llm.generate(texts, params)]
    with make(model(family), family=family) as llm:
        assert [answer(o) for o in llm.generate(texts, params)] == plain
        stats = llm._client.stats
        assert stats.accepted_tokens > 0.97 * stats.draft_tokens > 50


SETTINGS = [
    {"kv_cache_space": "0.00012", "swap_space": "0.01"},
    {"max_num_batched_tokens": 36},
    {"enable_prefix_caching": False},
    {"kv_cache_dtype": "int8_v4"},
    {"quantization": "int8"},
    {"family": "mistral"},
    {"family": "qwen3-next"},
    {"family": "mixtral"},
    {"family": "lfm2"},
]


def name_of(options):
    return "-".join(map(str, next(iter(options.items()))))


@pytest.mark.parametrize("options", deep_but([SETTINGS[0], SETTINGS[6]], SETTINGS), ids=name_of)
def test_drafts_of_a_model_change_no_bit_with_other_settings(hasty, drafts, options):
    with make(**options) as llm:
        plain = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(drafts["near"], **options) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == plain
        assert llm._client.stats.draft_tokens > 50
        if "kv_cache_space" in options:
            assert llm._client.stats.preemptions > 0


def test_grammars_and_several_choices_have_the_same_bits(hasty, drafts):
    params = [forms(n) for n in range(12)]
    params[3].n = 4
    with make() as llm:
        plain = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS[:12], params)]
    with make(drafts["same"]) as llm:
        outputs = llm.generate(PROMPTS[:12], params)
        assert [[c.token_ids for c in o.outputs] for o in outputs] == plain
        assert llm._client.stats.accepted_tokens > 50


@pytest.fixture
def watched(monkeypatch):
    """The draft models of all engines that are made, and the numbers of tokens of their steps."""
    found, step = {"tokens": [], "models": []}, DraftTexts.run

    def watch(self, chunks):
        found["tokens"].append(sum(len(chunk.token_ids) for chunk in chunks))
        found["models"].append(self)
        return step(self, chunks)

    monkeypatch.setattr(DraftTexts, "run", watch)
    return found


def test_a_long_prompt_is_computed_in_chunks_and_once_until_a_reset(
    hasty, no_ngrams, drafts, watched
):
    prompt = [3 + 7 * i % 370 for i in range(150)]
    with make(drafts["same"], max_num_seqs=8, max_num_batched_tokens=64) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        first = llm.generate([prompt], params)[0].outputs[0].token_ids
        steps = [*watched["tokens"]]
        assert max(steps) <= 64
        assert 150 < sum(steps) < 150 + 2 * 40
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == first
        again = sum(watched["tokens"]) - sum(steps)
        assert again < sum(steps) - 96  # the blocks of the prompt were found in the prefix cache
        llm.reset_prefix_cache()
        watched["tokens"].clear()
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == first
        assert sum(watched["tokens"]) > 150


def test_no_request_fails_if_the_draft_model_does(hasty, drafts, monkeypatch, caplog):
    params = [plain_params(0.7, n) for n in range(len(TEXTS))]
    with make() as llm:
        plain = [answer(o) for o in llm.generate(TEXTS, params)]
    step, calls = DraftTexts.run, []

    def fail(self, chunks):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no more")
        return step(self, chunks)

    monkeypatch.setattr(DraftTexts, "run", fail)
    with make(drafts["near"]) as llm:
        assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
    assert len(calls) == 6
    assert "the draft model failed" in caplog.text


def test_a_draft_with_another_vocabulary_is_refused(tmp_path, drafts):
    other = tmp_path / "other"
    shutil.copytree(drafts["same"], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [token for token, number in vocab.items() if number in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError, match=r"has another vocabulary than .*: token 300 is"):
        make(other)


@pytest.mark.parametrize(
    ("family", "why"), [("lfm2", "recurrent layers"), ("bert", "generates no text")]
)
def test_models_that_cannot_draft_are_refused(family, why):
    with pytest.raises(StartupError, match=f"cannot be used: .*{why}.*; name another one$"):
        make(model(family))
