"""llama-server's own tests of its server, as behaviour, with a real engine and a tiny model."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

PROMPT = "I believe the meaning of life is"
FIELDS = {"prompt": PROMPT, "n_predict": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with running_server(tiny_model("llama"), "--served-model-name", "tiny") as client:
        yield client


def complete(server, **fields):
    return server.post("/completion", **{**FIELDS, **fields})


def events_of(server, **fields):
    raw = server.raw("/completion", **{**FIELDS, "stream": True, **fields}).decode()
    return [json.loads(block.removeprefix("data: ")) for block in raw.split("\n\n") if block]


def test_a_stream_has_the_text_and_tokens_of_the_whole_response(server):
    whole = complete(server, seed=7, return_tokens=True)
    *parts, last = events_of(server, seed=7)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert last["stop_type"] == whole["stop_type"] == "limit"
    assert last["generation_settings"]["seed"] == 7
    for timings in (last["timings"], whole["timings"]):
        assert timings["predicted_n"] == FIELDS["n_predict"]
        assert timings["cache_n"] + timings["prompt_n"] == whole["tokens_evaluated"]


def test_the_same_seed_has_the_same_text_and_others_differ(server):
    texts = [complete(server, seed=seed, temperature=1.0)["content"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("cached", [True, False])
def test_the_cache_changes_no_text(server, cached):
    once = complete(server, seed=42, temperature=1.0, cache_prompt=cached)
    assert once["content"] == complete(server, seed=42, temperature=1.0)["content"]


def test_token_ids_and_texts_are_the_same_prompt_also_in_one_list(server):
    ids = server.post("/tokenize", content=PROMPT, add_special=True)["tokens"]
    greedy = {"temperature": 0.0}
    text = complete(server, **greedy)["content"]
    assert complete(server, prompt=ids, **greedy)["content"] == text
    for prompts in ([ids, ids], [ids, PROMPT], [PROMPT, PROMPT]):
        both = complete(server, prompt=prompts, **greedy)
        assert [each["content"] for each in both] == [text, text]
    mixed = complete(server, prompt=[1, 2, 3, PROMPT, 7, 8, PROMPT], **greedy)
    plain = server.post("/tokenize", content=PROMPT)["tokens"]
    assert mixed["tokens_evaluated"] == 5 + 2 * len(plain)


def test_requests_at_the_same_time_have_their_own_texts(server):
    prompts = [f"{PROMPT} {number}" for number in range(6)]
    alone = [complete(server, prompt=prompt, seed=42)["content"] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        texts = list(
            pool.map(lambda prompt: complete(server, prompt=prompt, seed=42)["content"], prompts)
        )
    assert texts == alone


def test_probabilities_are_those_of_the_model_before_sampling(server):
    body = complete(server, n_probs=10, temperature=0.0, n_predict=5, return_tokens=True)
    entries = body["completion_probabilities"]
    assert [entry["id"] for entry in entries] == body["tokens"]
    for entry in entries:
        tops = entry["top_logprobs"]
        assert len(tops) == 10
        assert tops[0]["id"] == entry["id"]  # greedy
        assert tops[0]["logprob"] == entry["logprob"]
        assert [t["logprob"] for t in tops] == sorted((t["logprob"] for t in tops), reverse=True)
    same = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=10, ignore_eos=True
    )
    logprobs = [entry["logprob"] for entry in entries]
    assert same["choices"][0]["logprobs"]["token_logprobs"] == logprobs


@pytest.mark.parametrize("as_object", [False, True])
def test_a_banned_token_is_never_written(server, as_object):
    banned = complete(server, temperature=0.0, return_tokens=True)["tokens"]
    pairs = [[token, False] for token in set(banned)]
    bias = {str(token): -100 for token in set(banned)} if as_object else pairs
    tokens = complete(server, temperature=0.0, return_tokens=True, logit_bias=bias)["tokens"]
    assert not set(tokens) & set(banned)


def test_a_prompt_without_response_fills_the_cache(server):
    prompt = "a prompt that is longer than a block of the cache, " * 3
    none = complete(server, prompt=prompt, n_predict=0)
    assert (none["content"], none["tokens_predicted"], none["stop_type"]) == ("", 0, "limit")
    again = complete(server, prompt=prompt)
    assert again["tokens_cached"] > 0
    assert again["timings"]["cache_n"] == again["tokens_cached"]


def test_a_grammar_and_a_schema_shape_the_text(server):
    text = complete(server, grammar='root ::= "yes" | "no"', ignore_eos=False)["content"]
    assert text in ("yes", "no")
    schema = {"enum": ["red", "blue"]}
    text = complete(server, json_schema=schema, ignore_eos=False)["content"]
    assert text in ('"red"', '"blue"')


def test_several_completions_of_a_prompt_have_numbers(server):
    results = complete(server, n_cmpl=3, seed=1, temperature=1.0)
    assert [result["index"] for result in results] == [0, 1, 2]
    assert len({result["content"] for result in results}) > 1


def test_pieces_of_tokens_are_texts_or_bytes(server):
    given = "Wö \N{WAVING HAND SIGN}"
    found = server.post("/tokenize", content=given, with_pieces=True)["tokens"]
    assert [t["id"] for t in found] == server.post("/tokenize", content=given)["tokens"]
    raw = [
        piece.encode() if isinstance(piece, str) else bytes(piece)
        for piece in (t["piece"] for t in found)
    ]
    assert b"".join(raw).decode() == given
    assert any(isinstance(t["piece"], list) for t in found)
    back = server.post("/detokenize", tokens=[t["id"] for t in found])
    assert back["content"] == back["prompt"] == given
