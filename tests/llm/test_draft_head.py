"""Heads for multi-token prediction: they change no bit, and their guesses are as expected."""

from __future__ import annotations

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError, StartupError
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.engine.speculation import draft_head
from cpuserve.engine.speculation.draft_head import EARLY, DraftHead
from cpuserve.engine.speculation.model_proposer import ModelProposer
from cpuserve.engine.speculation.prices import TRIALS, TRY_AFTER, GuessPrices
from cpuserve.engine.speculation.texts import DraftTexts
from tests.helpers.depth import deep_but
from tests.helpers.gguf_convert import convert
from tests.helpers.guess_head import FAMILIES, is_offset, table_of, with_head
from tests.helpers.tiny import tiny_model
from tests.llm.test_speculation import PARAMS, PROMPTS, SIZES, answer, forms

TEXTS = [[3 + (7 * i * i + 31 * n) % 370 for i in range(20 + 17 * n)] for n in range(8)]
ENDS = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")
ENDS += (".wo_b.weight", ".w2.weight")  # DeepSeek V4
ENDS += (".attention.dense.weight",)  # Ling


def copies(family):
    """Tensors with which the next token depends on the last one only, and the head knows how.

    No layer adds anything to the embedding. The head passes on the embedding of the next token,
    so that its guess is what the model will compute from this token.
    """

    def change(tensors, head):
        from torch import eye

        for name, tensor in tensors.items():
            if ("layers." in name or "mtp" in name) and name.endswith(ENDS):
                tensor.zero_()
        table, norm = table_of(head, tensors), "model.norm.weight"
        norm = norm if norm in tensors else "model.norm_f.weight"  # Nemotron H
        width = len(tensors[norm])
        joined = head.stored(f"guess.{'e_proj' if family == 'deepseek-v4' else 'fc'}.weight")
        joined = tensors[joined].zero_()
        if family == "deepseek-v4":
            tensors[head.stored("guess.h_proj.weight")].zero_()
        for own, name in (("model.embed_tokens.weight", table), ("lm_head.weight",) * 2):
            if head.stored(own) in tensors:
                tensors[head.stored(own)].copy_(tensors[name])
        begin = width if family == "qwen2" else 0  # MiMo 7B has the hidden state first
        joined[:, begin : begin + width] = eye(width)
        for name in ("guess.embedding_norm.weight", "guess.hidden_norm.weight"):
            tensors[head.stored(name)].fill_(1.0 - is_offset(family))
        tensors[head.stored(norm)].copy_(tensors[norm])

    return change


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(family, sure) = a model with a random head, or with one that is always right."""
    made = {}

    def get(family, *, sure=False):
        if (family, sure) not in made:
            directory = tmp_path_factory.mktemp("head") / family
            # With a small epsilon, the norm of a norm is the same.
            options = {"dtype": "float32", "rms_norm_eps": 1e-12} if sure else {"dtype": "bfloat16"}
            if family == "longcat" and sure:  # they would add h to the stream
                options["zero_expert_num"] = 0
            change = copies(family) if sure else None
            made[family, sure] = str(with_head(directory, family, change=change, **options))
        return made[family, sure]

    return get


@pytest.fixture
def no_ngrams(monkeypatch):
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))


def make(path, *, head=True, tokens=4, **options):
    asked = {"method": "mtp", "num_speculative_tokens": tokens} if head else None
    options = {**SIZES, "speculate": "auto" if head else "off", **options}
    return LLM(path, speculative_config=asked, **options)


def plain_params(temperature, n, tokens=40):
    return SamplingParams(
        max_tokens=tokens, temperature=temperature, seed=n, ignore_eos=True, logprobs=1
    )


@pytest.mark.parametrize("family", deep_but(["glm4-moe"], FAMILIES))
def test_a_head_changes_no_bit_alone_or_among_31_others(hasty, checkpoint, family):
    """How a request samples and how a family computes meet only in the logits.

    So one family has each request alone, and the others have every fifth.
    """
    some = range(0, len(PROMPTS), 1 if family == "glm4-moe" else 5)
    with make(checkpoint(family), head=False) as llm:
        want = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(checkpoint(family)) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want
        assert llm._client.stats.draft_tokens > 100
        for n in some:
            assert answer(llm.generate([PROMPTS[n]], PARAMS[n])[0]) == want[n]


@pytest.mark.parametrize("family", deep_but(["qwen3-next"], FAMILIES))
def test_a_head_that_knows_the_model_is_right(hasty, no_ngrams, checkpoint, family):
    greedy, warm = ([plain_params(t, n) for n in range(len(TEXTS))] for t in (0.0, 0.8))
    for sure in (True, False):
        path = checkpoint(family, sure=sure)
        with make(path, head=False) as llm:
            plain = [answer(o) for o in llm.generate([*TEXTS, *TEXTS], [*greedy, *warm])]
        with make(path, enable_prefix_caching=False) as llm:
            drafts = accepted = 0
            for params, want in ((greedy, plain[: len(TEXTS)]), (warm, plain[len(TEXTS) :])):
                assert [answer(o) for o in llm.generate(TEXTS, params)] == want
                stats = llm._client.stats
                assert stats.draft_tokens - drafts > 50
                rate = (stats.accepted_tokens - accepted) / (stats.draft_tokens - drafts)
                # Equal random numbers sample equal tokens, except where rounding decides.
                assert rate > 0.95 if sure else rate < 0.5
                drafts, accepted = stats.draft_tokens, stats.accepted_tokens


@pytest.mark.parametrize("arch", deep_but(["qwen35moe"], ["qwen35moe", "deepseek2-glm"]))
def test_a_head_in_a_gguf_file_changes_no_bit(hasty, tmp_path, arch):
    path = str(tmp_path / "m.gguf")
    convert(arch, path)
    with make(path, head=False) as llm:
        want = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(path) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want
        assert llm._client.stats.draft_tokens > 100


SETTINGS = [
    {"kv_cache_space": "0.0002", "swap_space": "0.01"},
    {"max_num_batched_tokens": 36},
    {"enable_prefix_caching": False},
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"omp_threads_bind": "0"},
]


def name_of(options):
    return next(iter(options))


@pytest.mark.parametrize("options", deep_but(SETTINGS[:2], SETTINGS), ids=name_of)
def test_a_head_changes_no_bit_with_other_settings(hasty, checkpoint, options):
    path = checkpoint("glm4-moe")
    with make(path, head=False, **options) as llm:
        plain = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(path, **options) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == plain
        assert llm._client.stats.draft_tokens > 50
        if "kv_cache_space" in options:
            assert llm._client.stats.preemptions > 0


def test_grammars_and_several_choices_have_the_same_bits(hasty, checkpoint):
    path, params = checkpoint("glm4-moe"), [forms(n) for n in range(8)]
    params[3].n = 4
    with make(path, head=False) as llm:
        plain = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS[:8], params)]
    with make(path) as llm:
        outputs = llm.generate(PROMPTS[:8], params)
        assert [[c.token_ids for c in o.outputs] for o in outputs] == plain
        assert llm._client.stats.draft_tokens > 20


@pytest.fixture
def watched(monkeypatch):
    """Per step of a head: for each text its first position, the position and number of tokens."""
    found, step = [], DraftTexts.run

    def watch(self, chunks):
        firsts = {text.slot: text.first_position for text in self.by_request.values()}
        found.append([(firsts[c.slot], c.start + firsts[c.slot], len(c.token_ids)) for c in chunks])
        return step(self, chunks)

    monkeypatch.setattr(DraftTexts, "run", watch)
    return found


def test_a_head_computes_a_long_prompt_in_parts_and_each_row_once(
    hasty, no_ngrams, checkpoint, watched
):
    prompt, tokens = [3 + 7 * i % 370 for i in range(150)], 30
    with make(checkpoint("glm4-moe", sure=True), max_num_seqs=8, max_num_batched_tokens=64) as llm:
        params = plain_params(0.0, 1, tokens)
        first = llm.generate([prompt], params)[0].outputs[0].token_ids
        rows = [row for step in watched for row in step]
        again = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert again == first
    assert {begin for begin, *_ in rows} == {0}
    assert max(count for *_, count in rows) <= 64
    # Positions of the prompt are computed one after another, with the token after each of them.
    at = 0
    for _, start, count in rows:
        if start < len(prompt):
            assert start == at
            at += count
    assert at == len(prompt)


@pytest.fixture
def guessed(monkeypatch):
    """All guesses of heads, in order."""
    found, guess = [], ModelProposer._guess

    def watch(self, turn, row):
        found.append(row.token)
        return guess(self, turn, row)

    monkeypatch.setattr(ModelProposer, "_guess", watch)
    return found


@pytest.mark.parametrize("family", deep_but(["glm4-moe"], FAMILIES))
def test_a_head_guesses_after_a_prefix_from_the_cache_as_without(
    hasty, no_ngrams, checkpoint, watched, guessed, family
):
    """The head attends to the tokens of the prefix; three tokens of the response follow it."""
    prompt, cached = [3 + 7 * i % 370 for i in range(150)], 128
    with make(checkpoint(family)) as llm:
        want = llm.generate([prompt], plain_params(0.8, 1))[0].outputs[0].token_ids
        first = [*guessed]
        for begin in (0, 3):
            watched.clear()
            guessed.clear()
            longer = [*prompt, *want[:begin]]
            (again,) = llm.generate([longer], plain_params(0.8, 1, 40 - begin))
            assert again.num_cached_tokens == cached
            assert again.outputs[0].token_ids == want[begin:]
            rows = [row for step in watched for row in step]
            assert {first for first, *_ in rows} == {0}
            assert min(start for _, start, _ in rows) == cached
            assert len(guessed) > 20
            if begin == 0:
                assert guessed == first


def test_a_head_finds_the_keys_of_a_prefix_that_a_burst_shares(
    hasty, no_ngrams, checkpoint, watched
):
    """One request computes the prefix, and the others read its blocks in the same step."""
    prefix = [3 + 7 * i % 370 for i in range(130)]
    prompts, params = [[*prefix, 5 + n, 7, 9 + n] for n in range(4)], plain_params(0.8, 1, 20)
    with make(checkpoint("glm4-moe"), max_num_batched_tokens=48, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, params)
    assert [output.num_cached_tokens for output in outputs] == [0, 128, 128, 128]
    assert {first for step in watched for first, *_ in step} == {0}
    rows = [start for step in watched for _, start, _ in step]
    assert sum(start < 128 for start in rows) < 2 * 3  # one text, in three steps


def test_a_reset_of_the_prefix_cache_removes_the_keys_of_a_head(hasty, checkpoint, watched):
    prompt, params = [3 + 7 * i % 370 for i in range(150)], plain_params(0.8, 1)
    with make(checkpoint("glm4-moe")) as llm:
        want = llm.generate([prompt], params)[0].outputs[0].token_ids
        llm.reset_prefix_cache()
        watched.clear()
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == want
    assert watched[0][0][1] == 0


def test_a_head_begins_anew_after_a_prefix_that_it_has_not_seen(
    hasty, no_ngrams, checkpoint, watched, monkeypatch
):
    prompt = [3 + 7 * i % 370 for i in range(150)]
    path = checkpoint("glm4-moe", sure=True)
    with make(path) as llm:
        with monkeypatch.context() as without:
            without.setattr(ModelProposer, "_guess_round", lambda *_: None)
            without.setattr(DraftHead, "begin_round", lambda *_: None)
            want = llm.generate([prompt], plain_params(0.8, 1))[0].outputs[0].token_ids
        assert llm.generate([prompt], plain_params(0.8, 1))[0].outputs[0].token_ids == want
        assert llm._client.stats.accepted_tokens > 20
    assert {begin for step in watched for begin, *_ in step} == {128}


def test_a_head_that_does_not_pay_rests_and_tries_a_guess_now_and_then(
    eager, no_ngrams, checkpoint, watched, monkeypatch
):
    monkeypatch.setattr(GuessPrices, "paying", lambda *_: [])
    # A try after TRY_AFTER rounds, and then after twice as many.
    texts, params = TEXTS[:2], [plain_params(0.0, n, 120) for n in range(2)]
    with make(checkpoint("glm4-moe", sure=True)) as llm:
        for text, param in zip(texts, params, strict=True):
            llm.generate([text], param)
        stats = llm._client.stats
        tries = stats.draft_tokens - (TRIALS - 1)  # the first step computes a part of the prompt
        # A try is right although the head has begun the text anew a few tokens before.
        assert stats.accepted_tokens == stats.draft_tokens
    assert tries == 2 < 230 // TRY_AFTER
    assert len(watched) - TRIALS == tries * (EARLY + 1)


def test_a_head_that_rests_looks_up_no_prefixes(eager, no_ngrams, checkpoint, monkeypatch):
    """It begins all texts in each round, and to find the keys of long texts takes milliseconds."""
    prompt, found, match = [3 + 7 * i % 370 for i in range(150)], [], KvManager.match_prefix

    def watch(self, chain, ids):
        found.append(len(ids))
        return match(self, chain, ids)

    monkeypatch.setattr(GuessPrices, "paying", lambda *_: [])
    with make(checkpoint("glm4-moe")) as llm:
        llm.generate([prompt], plain_params(0.8, 1, TRIALS + 10))
        monkeypatch.setattr(KvManager, "match_prefix", watch)
        (again,) = llm.generate([prompt], plain_params(0.8, 1, 20))
        assert again.num_cached_tokens == 128
    assert found == [len(prompt)]  # the model has looked it up


def test_no_request_fails_if_the_head_does(hasty, checkpoint, monkeypatch, caplog):
    path, params = checkpoint("glm4-moe"), [plain_params(0.7, n) for n in range(len(TEXTS))]
    with make(path, head=False) as llm:
        plain = [answer(o) for o in llm.generate(TEXTS, params)]
    step, calls = DraftHead.run, []

    def fail(self, chunks):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no more")
        return step(self, chunks)

    monkeypatch.setattr(DraftHead, "run", fail)
    with make(path) as llm:
        assert [answer(o) for o in llm.generate(TEXTS, params)] == plain
    assert len(calls) == 6
    assert "the draft model failed" in caplog.text


def test_a_head_is_used_by_default_and_its_names_of_vllm_are_known(checkpoint):
    path = checkpoint("glm4-moe")
    with LLM(path, **SIZES, speculate="auto") as llm:
        assert "draft_steps" in llm._client.ask_now("report")
    asked = {"method": "glm4_moe_mtp", "num_speculative_tokens": 2}
    with LLM(path, **SIZES, speculate="auto", speculative_config=asked) as llm:
        assert "draft_steps" in llm._client.ask_now("report")
    ngram = {"speculate": "auto", "speculative_config": {"method": "ngram"}}
    for off in ({"speculate": "off"}, ngram):
        with LLM(path, **SIZES, **off) as llm:
            assert "draft_steps" not in llm._client.ask_now("report")


def test_a_model_without_a_head_is_refused_if_a_head_must_guess():
    with pytest.raises(StartupError, match="has no head that guesses tokens; remove the method"):
        make(tiny_model("glm4-moe", dtype="bfloat16"))
    with pytest.raises(StartupError, match="mtp needs the native executor, not torch"):
        make(tiny_model("glm4-moe", dtype="bfloat16"), executor="torch")


def test_a_file_that_never_has_a_head_is_refused_with_what_does(tmp_path):
    path = str(tmp_path / "m.gguf")
    convert("deepseek4", path)
    with pytest.raises(StartupError, match="remove the method 'mtp', or use its safetensors"):
        make(path)


def test_a_model_that_returns_vectors_has_no_use_for_a_head(checkpoint):
    with LLM(checkpoint("qwen3.5"), **SIZES, speculate="auto", pooling="last") as llm:
        assert llm.config.draft is None
        assert len(llm.embed([PROMPTS[0]])[0].outputs.embedding) > 10


def test_a_head_that_is_not_complete_gets_a_line_and_is_not_used(tmp_path, caplog):
    def cut(tensors, head):
        del tensors[head.stored("model.norm.weight")]

    path = str(with_head(tmp_path / "qwen3.5", "qwen3.5", dtype="bfloat16", change=cut))
    caplog.set_level("INFO", logger="cpuserve")
    with LLM(path, **SIZES, speculate="auto") as llm:
        assert "draft_steps" not in llm._client.ask_now("report")
        assert llm.generate([PROMPTS[0]], plain_params(0.0, 1, 3))[0].outputs[0].token_ids
    lines = [line for line in caplog.messages if "guesses tokens cannot be used" in line]
    assert len(lines) == 1
    assert lines[0].endswith("missing (1): mtp.norm.weight; no tokens are guessed with it")
    with pytest.raises(StartupError, match=r"cannot be used; missing \(1\): mtp.norm.weight$"):
        make(path)


def test_the_memory_plan_counts_the_output_matrix_and_the_keys_of_a_head(checkpoint):
    path = checkpoint("glm4-moe")
    sizes = {**SIZES, "kv_cache_space": "0.001"}
    with make(path, head=False, **sizes) as llm:
        plain = llm.config.kv_blocks
    with make(path, **sizes) as llm:
        assert llm.config.draft.kv_blocks == llm.config.kv_blocks < plain


def test_a_head_that_cannot_be_loaded_stops_only_a_start_that_asks_for_it(
    checkpoint, monkeypatch, caplog
):
    path = checkpoint("glm4-moe")

    def fail(*_):
        raise ModelError("its tensors do not fit together")

    monkeypatch.setattr(draft_head, "_head_executor", fail)
    with LLM(path, **SIZES, speculate="auto") as llm:
        assert llm.generate([PROMPTS[0]], plain_params(0.0, 1, 30))[0].outputs[0].token_ids
        assert "draft_steps" not in llm._client.ask_now("report")
    assert "with the head of the model: its tensors do not fit together" in caplog.text
    with pytest.raises(StartupError, match="its tensors do not fit together"):
        make(path)
