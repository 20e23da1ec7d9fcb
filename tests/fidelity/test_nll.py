"""The served model against transformers fp32 on the same dequantized weights."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fidelity.bf16_checkpoint import write_bf16
from tests.fidelity.passages import NUM_GREEDY, PROMPTS, TEXT, fingerprint, passages, reference
from tests.helpers.served import DEFAULT_MODEL, default_model, running_server

pytestmark = pytest.mark.deep  # a minute of the default model

# Nats a token. Over the text rounding averages out; over a passage of 60 tokens it does less.
MEAN_TOLERANCE = 0.005
PASSAGE_TOLERANCE = 0.02
BF16_TOLERANCE = 0.002  # weights, activations and KV cache in bfloat16; weights are the same
GREEDY_TOKENS = 8
GREEDY_PROMPTS = 8


@pytest.fixture(scope="module")
def golden():
    return reference()


@pytest.fixture(scope="module")
def server():
    default_model()
    with running_server(DEFAULT_MODEL) as client:
        yield client


@pytest.fixture(scope="module")
def bf16_server(tmp_path_factory):
    gguf = default_model()
    directory = write_bf16(gguf, tmp_path_factory.mktemp("bf16"))
    with running_server(directory, "--tokenizer", str(gguf), "--dtype", "bfloat16") as client:
        yield client


def test_the_reference_is_of_this_text_and_model(golden):
    assert golden["text_sha256"] == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert len(golden["passages"]) == len(passages())
    assert sum(p["predicted"] for p in golden["passages"]) >= 10_000
    assert all(59 <= p["predicted"] <= 399 for p in golden["passages"])
    assert [len(g["ids"]) for g in golden["greedy"]] == [NUM_GREEDY] * len(PROMPTS)
    assert all(min(g["margins"]) >= 0 for g in golden["greedy"])
    from cpuserve.loader.builtin import BUILTIN

    assert golden["model"]["sha256"] == BUILTIN[DEFAULT_MODEL].sha256


def score(server, text, start):
    """(fingerprint of the ids, predicted tokens, sum of their NLL) as served.

    start: whether the token that begins a text comes first.
    """
    body = server.post(
        "/v1/completions",
        prompt=text,
        max_tokens=0,
        echo=True,
        logprobs=0,
        add_special_tokens=start,
        return_token_ids=True,
    )
    choice = body["choices"][0]
    assert choice["text"].endswith(text)
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    return fingerprint(choice["prompt_token_ids"]), len(rest), -sum(rest)


@pytest.mark.network
def test_the_negative_log_likelihood_is_the_references(server, golden):
    compare(server, golden["passages"], MEAN_TOLERANCE)


@pytest.mark.network
def test_bf16_weights_and_activations_lose_less(bf16_server, golden):
    pairs = zip(golden["passages"], golden["bf16_nll"], strict=True)
    compare(bf16_server, [{**passage, "nll": nll} for passage, nll in pairs], BF16_TOLERANCE)


def compare(server, wanted, mean_tolerance, texts=None, *, start=False):
    """Score the passages `texts` (None: all) as served and hold them to the reference."""
    with ThreadPoolExecutor(4) as pool:
        served = list(pool.map(lambda text: score(server, text, start), texts or passages()))
    assert [(ids, n) for ids, n, _ in served] == [(w["ids"], w["predicted"]) for w in wanted]
    off = {
        i: round((nll - w["nll"]) / n, 4)
        for i, ((_, n, nll), w) in enumerate(zip(served, wanted, strict=True))
    }
    tokens = sum(n for _, n, _ in served)
    mean = (sum(nll for _, _, nll in served) - sum(w["nll"] for w in wanted)) / tokens
    report = f"mean {mean:+.5f} nats a token; worst {max(off.items(), key=lambda x: abs(x[1]))}"
    assert abs(mean) <= mean_tolerance, report
    bad = {i: d for i, d in off.items() if abs(d) > PASSAGE_TOLERANCE}
    assert not bad, f"{report}; passages {json.dumps(bad)}"


def compare_greedy(server, wanted, **settings):
    """Check that most greedy continuations of PROMPTS are those of the reference."""
    agreed = []
    for prompt, expected in zip(PROMPTS, wanted, strict=True):
        choice = server.post(
            "/v1/completions",
            prompt=prompt,
            temperature=0,
            max_tokens=GREEDY_TOKENS,
            ignore_eos=True,
            return_token_ids=True,
            **settings,
        )["choices"][0]
        assert fingerprint(choice["prompt_token_ids"]) == expected["prompt"]
        agreed.append(choice["token_ids"] == expected["ids"][:GREEDY_TOKENS])
    assert sum(agreed) >= GREEDY_PROMPTS, dict(zip(PROMPTS, agreed, strict=True))


@pytest.mark.network
def test_greedy_continuations_agree(server, golden):
    compare_greedy(server, golden["greedy"], add_special_tokens=False)
