"""Batch invariance with speculation: drafts change no token and no bit of a logprob."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.sampling.structured import StructuredOutputs
from tests.helpers.answers import exact
from tests.helpers.depth import deep_but
from tests.helpers.drafters import NGRAM
from tests.helpers.oracle import precise_torch
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

SIZES = {"max_model_len": 192, "max_num_seqs": 32, "max_num_batched_tokens": 128}
# Texts that repeat themselves, of different lengths and periods.
PROMPTS = [[(7 * i) % (3 + n % 7) + 5 + n for i in range(5 + 11 * n % 90)] for n in range(32)]


def params_of(n):
    """Sampling of prompt `n`: greedy or at temperature 0.8, with every kind of state."""
    return SamplingParams(
        max_tokens=40 + n,
        temperature=0.8 if n % 2 else 0.0,
        seed=n,
        top_k=(0, 5)[n % 3 == 0],
        presence_penalty=(0.0, 0.7)[n % 4 == 1],
        frequency_penalty=(0.0, 0.2)[n % 4 == 2],
        repetition_penalty=(1.0, 1.1)[n % 5 == 3],
        logit_bias={7: 1.5, 11: -2.0} if n % 6 == 5 else None,
        allowed_token_ids=list(range(0, 300, 3)) if n % 8 == 7 else None,
        stop_token_ids=list(range(0, 500, 9)) if n % 3 == 1 else [],
        min_tokens=(0, 25)[n % 6 == 4],
        repeat_last_n=(None, 20)[n % 4 == 2],
        mirostat=(None, 2)[n % 9 == 4],
        dry_multiplier=(None, 0.8)[n % 7 == 2],
        typical_p=(None, 0.8)[n % 10 == 6],
        xtc_probability=(None, 0.5)[n % 11 == 8],
        logprobs=(None, 2)[n % 4 < 3],
        ignore_eos=n % 3 != 1,
    )


PARAMS = [params_of(n) for n in range(32)]


def make(executor="native", speculative_config=NGRAM, family="llama", **options):
    threads = {"omp_threads_bind": "0"} if executor == "torch" else {}
    threads["speculate"] = "auto" if speculative_config else "off"
    return LLM(
        str(tiny_model(family, dtype="bfloat16")), executor=executor,
        speculative_config=speculative_config, **{**SIZES, **threads, **options},
    )  # fmt: skip


def answer(output):
    """Tokens, how they end, and the exact logprobs of all reported alternatives."""
    (c,) = output.outputs
    return exact(output), c.finish_reason, c.stop_reason, c.cumulative_logprob


def check_no_bit_changes(make, path, guesses, every=1):
    """Compare the answers without and with `guesses`, of 32 requests together and alone.

    make(path[, guesses]) = an LLM. every: 1 if each request runs alone, 5 if every fifth does.
    """
    with make(path) as llm:
        want = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(path, guesses) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want
        assert llm._client.stats.draft_tokens > 100
        for n in range(0, len(PROMPTS), every):
            assert answer(llm.generate([PROMPTS[n]], PARAMS[n])[0]) == want[n]


def check_grammars_and_choices(make, path, guesses):
    """Compare the answers without and with `guesses` for grammars and several choices."""
    params = [forms(n) for n in range(8)]
    params[3].n = 4
    with make(path) as llm:
        plain = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS[:8], params)]
    with make(path, guesses) as llm:
        outputs = llm.generate(PROMPTS[:8], params)
        assert [[c.token_ids for c in o.outputs] for o in outputs] == plain
        assert llm._client.stats.draft_tokens > 20


def accepted(llm):
    return llm._client.stats.accepted_tokens


@pytest.fixture(scope="module")
def want():
    with make(speculative_config=None) as llm:
        found = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
        assert llm._client.stats.draft_tokens == 0
    assert {reason for _, reason, *_ in found} == {"stop", "length"}
    return found


@pytest.mark.parametrize("caching", deep_but([True], [True, False]), ids=["cached", "uncached"])
def test_drafts_change_no_bit_alone_or_among_31_others(eager, want, caching):
    with make(enable_prefix_caching=caching) as llm:
        together = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
        assert accepted(llm) > 100
        alone = [answer(llm.generate([p], q)[0]) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        assert accepted(llm) > 200
        assert llm._client.stats.draft_tokens > accepted(llm)
    assert together == want
    assert alone == want


def test_drafts_that_pay_change_no_bit(want):
    with make() as llm:
        assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want


HYBRIDS = ["qwen3-next", "lfm2"]
SETTINGS = [
    {"kv_cache_space": "0.00006", "swap_space": "0.01"},
    {"max_num_batched_tokens": 36},
    {"itl_target_ms": 1},
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"family": "mistral"},
    *({"family": family} for family in HYBRIDS),
    {"family": "mixtral"},
]


@pytest.mark.parametrize(
    "options", deep_but(SETTINGS[1:2], SETTINGS), ids=lambda o: o.get("family", next(iter(o)))
)
def test_drafts_change_no_bit_with_other_settings(eager, options):
    with make(**options, speculative_config=None) as llm:
        want = [answer(o) for o in llm.generate(PROMPTS, PARAMS)]
    with make(**options) as llm:
        # A busy machine fits few drafts into a step of 1 ms, so it gets more rounds to use them.
        # Random weights of hybrids hardly repeat a text.
        least = 5 if options.get("family") in HYBRIDS else 50
        for _ in range(10):
            assert [answer(o) for o in llm.generate(PROMPTS, PARAMS)] == want
            if accepted(llm) > least:
                break
        assert accepted(llm) > least
        if "kv_cache_space" in options:
            assert llm._client.stats.preemptions > 0


@pytest.mark.deep
def test_drafts_change_no_token_in_the_torch_executor(eager):
    answers = []
    for asked in (None, NGRAM):
        with precise_torch(), make("torch", asked) as llm:
            outputs = llm.generate(PROMPTS[:6], PARAMS[:6])
            answers.append([o.outputs[0].token_ids for o in outputs])
            assert (accepted(llm) > 20) == (asked is not None)
    assert answers[0] == answers[1]


def test_a_later_request_of_a_salt_is_guessed_from_an_earlier_response(eager):
    def responses(llm, salt):
        before = accepted(llm)
        params = SamplingParams(max_tokens=80, seed=5, ignore_eos=True, cache_salt=salt)
        (output,) = llm.generate([[5, 6, 7]], params)
        return answer(output), accepted(llm) - before

    with make(speculative_config=None) as llm:
        want, _ = responses(llm, "a")
    with make() as llm:
        for salt, guessed in (("a", False), ("a", True), ("b", False), ("b", True)):
            got, right = responses(llm, salt)
            assert got == want
            assert right > 50 if guessed else right < 10


def test_stop_strings_end_an_answer_within_the_accepted_tokens(eager):
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    found = []
    with make(speculative_config=None) as plain, make() as drafting:
        for prompt in PROMPTS[:12]:
            (whole,) = plain.generate([prompt], params)
            text = whole.outputs[0].text
            stops = [text[i : i + 2] or "is" for i in (len(text) // 2, len(text) * 2 // 3)]
            stopped = SamplingParams(
                max_tokens=40, temperature=0.0, ignore_eos=True, stop=stops, logprobs=1
            )
            pair = [llm.generate([prompt], stopped)[0].outputs[0] for llm in (plain, drafting)]
            assert pair[0].text == pair[1].text
            assert pair[0].token_ids == pair[1].token_ids
            assert pair[0].stop_reason == pair[1].stop_reason
            assert len(pair[1].logprobs) == len(pair[1].token_ids)
            found.append(pair[1].finish_reason)
        assert accepted(drafting) > 20
    assert "stop" in found


def test_logprobs_of_a_prompt_in_chunks_beside_drafts_change_no_bit(eager):
    """vllm-project/vllm#53488: they were those of other rows, for some requests."""
    params = [params_of(n).clone() for n in range(8)]
    for own in params:
        own.prompt_logprobs = 1
    found = []
    for asked in (None, NGRAM):
        with make(speculative_config=asked, max_num_batched_tokens=36) as llm:
            for _ in range(2):  # the second time, prefixes are cached
                outputs = llm.generate(PROMPTS[16:24], params)
                found.append([(answer(o), o.prompt_logprobs) for o in outputs])
            assert (llm._client.stats.draft_tokens > 20) == (asked is not None)
    assert found == found[:1] * 4


WORD = {"const": "the same word again and again"}
FORMS = [
    {"json": {"type": "array", "items": WORD, "minItems": 3, "maxItems": 5}},
    {"json": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"},
                       "work": {"enum": ["engineer", "teacher"]}},
        "required": ["name", "age", "work"],
    }},
    {"regex": "(abracadabra |simsalabim ){5,9}"},
]  # fmt: skip


def forms(n):
    """The sampling of prompt `n`, with a grammar."""
    own = {"logprobs": None} if n % 2 else {}
    if n % 4 == 1:  # nothing but the grammar decides, so forced tokens are not sampled
        own |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        own |= {"mirostat": None, "dry_multiplier": None, "typical_p": None, "min_tokens": 0}
        own |= {"xtc_probability": None, "logit_bias": None, "stop_token_ids": []}
    found = params_of(n).clone()
    for name, value in {**own, "allowed_token_ids": None, "max_tokens": 90}.items():
        setattr(found, name, value)
    found.structured_outputs = StructuredOutputs(**FORMS[n % 3])
    return found


GRAMMAR_FAMILIES = ["llama", "qwen3-next", "lfm2", "mixtral", "mistral"]


@pytest.mark.parametrize("family", deep_but(["llama"], GRAMMAR_FAMILIES))
def test_drafts_and_forced_tokens_change_no_bit_with_grammars(eager, family):
    params = [forms(n) for n in range(16)]
    with make(speculative_config=None, family=family) as llm:
        want = [answer(o) for o in llm.generate(PROMPTS[:16], params)]
    with make(family=family) as llm:
        assert [answer(o) for o in llm.generate(PROMPTS[:16], params)] == want
        # A request passes steps over until its bitmask comes, so their number depends on time.
        assert accepted(llm) > 0.4 * llm._client.stats.generation_tokens
        alone = [answer(llm.generate([p], q)[0]) for p, q in zip(PROMPTS, params, strict=False)]
        assert alone == want


def bodies():
    return [
        {
            "prompt": prompt,
            "max_tokens": 30 + n,
            "temperature": 0.8 if n % 2 else 0.0,
            "seed": n,
            "frequency_penalty": 0.3 if n % 4 == 1 else 0.0,
            "logprobs": 2,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for n, prompt in enumerate(PROMPTS)
    ]


def completions(server):
    def complete(body):
        choice = server.post("/v1/completions", **body)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"]

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(complete, bodies()))


@pytest.mark.deep
def test_a_server_answers_alike_with_drafts_and_counts_them():
    model, sizes = tiny_model("llama", dtype="bfloat16"), ["--max-num-seqs", "32"]
    with running_server(model, *sizes) as server:
        want = completions(server)
        assert b"spec_decode" not in server.get("/metrics")
    with running_server(
        model, *sizes, "--speculate", "auto", "--speculative-config", json.dumps(NGRAM)
    ) as server:
        assert completions(server) == want
        # Its answer repeats one token, which drafts soon learn.
        body = {**bodies()[4], "logit_bias": {"7": 100.0}, "max_tokens": 90, "logprobs": None}
        # A busy machine may make drafts look expensive, so it gets more rounds to use them.
        for _ in range(20):
            raw = server.raw("/v1/completions", **body, stream=True).decode()
            events = [json.loads(e[6:]) for e in raw.split("\n\n") if e.startswith("data: {")]
            assert [t for e in events for t in e["choices"][0]["token_ids"]] == [7] * 90
            if len(events) < 90:
                break
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        drafts, tokens, right = (server.metric(f"spec_decode_{name}_total") for name in names)
    assert len(events) < 90
    assert 0 < drafts <= tokens
    assert 0 < right <= tokens
