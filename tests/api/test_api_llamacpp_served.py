"""llama-server's own tests of its server, as behaviour, with a real engine and a tiny model."""

import http.client
import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.helpers.patience import wait_until
from tests.helpers.tiny import tiny_model

PROMPT = "I believe the meaning of life is"
FIELDS = {"prompt": PROMPT, "n_predict": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server(tiny_model("llama"), "--served-model-name", "tiny")


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


SAMPLERS = {
    "typical": {"typical_p": 0.7, "min_keep": 2},
    "sigma": {"top_n_sigma": 1.0},
    "dynatemp": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "dry": {"dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_sequence_breakers": [" z"]},
    "mirostat": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat-2": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.4},
    "penalties": {"repeat_penalty": 1.5, "repeat_last_n": 4, "frequency_penalty": 1.0},
    "order": {"samplers": ["temperature", "top_p", "unknown"], "top_p": 0.5},
    "letters": {"samplers": "kt", "top_k": 3},
}


def test_samplers_have_the_same_tokens_alone_in_company_and_in_a_stream(server):
    asked = [{**fields, "seed": 3, "temperature": 1.5} for fields in SAMPLERS.values()]

    def tokens(fields):
        return complete(server, return_tokens=True, **fields)["tokens"]

    alone = [tokens(fields) for fields in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(tokens, asked)) == alone
    plain = tokens({"seed": 3, "temperature": 1.5})
    assert all(each != plain for each in alone)
    for fields, want in zip(asked[-3:], alone[-3:], strict=True):
        parts = events_of(server, **fields)
        assert [token for part in parts for token in part["tokens"]] == want


def test_settings_of_samplers_are_shown(server):
    shown = complete(server, samplers="kyt", typical_p=0.5, repeat_last_n=7)["generation_settings"]
    assert shown["samplers"] == ["top_k", "typ_p", "temperature"]
    assert (shown["typical_p"], shown["repeat_last_n"], shown["mirostat"]) == (0.5, 7, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probabilities_after_sampling_are_those_of_the_tokens_that_are_left(server, temperature):
    fields = {"n_probs": 10, "n_predict": 5, "post_sampling_probs": True, "return_tokens": True}
    body = complete(server, temperature=temperature, min_p=0, top_k=7, top_p=1.0, **fields)
    entries = body["completion_probabilities"]
    assert [entry["id"] for entry in entries] == body["tokens"]
    for entry in entries:
        tops = [top["prob"] for top in entry["top_probs"]]
        assert len(tops) == 7  # top_k has dropped the others
        assert sum(tops) == pytest.approx(1.0, abs=1e-5)
        assert entry["prob"] in tops
        assert {"logprob", "top_logprobs"}.isdisjoint(entry)
        assert (tops == [1.0] + 6 * [0.0]) == (temperature == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_samplers_work_in_the_dialect_of_openai(server, path):
    given = {"prompt": PROMPT} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": PROMPT}]
    }  # fmt: skip
    common = {"max_tokens": 8, "seed": 3, "temperature": 1.5, "ignore_eos": True, **given}

    def text(**fields):
        choice = server.post(path, **{**common, **fields})["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    # mirostat with the least surprise keeps the most likely token, as top_k of 1 does.
    greedy = text(temperature=0)
    assert text(mirostat=2, mirostat_tau=0) == text(samplers=["top_k"], top_k=1) == greedy
    assert text(typical_p=0.5) != text()


def test_a_context_is_never_shifted(server):
    short = complete(server, n_predict=-1)
    assert short["truncated"]
    assert short["stop_type"] == "limit"
    size = short["generation_settings"]["n_ctx"]
    assert short["tokens_evaluated"] + short["tokens_predicted"] >= size
    assert not complete(server)["truncated"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(server, prompt=PROMPT * size)
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["type"]) == (400, "exceed_context_size_error")


def test_the_client_of_openai_reads_completions_whole_and_in_a_stream(server):
    with openai.OpenAI(api_key="dummy", base_url=f"{server.url}/v1") as client:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert whole.choices[0].finish_reason == "length"
        stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text


def test_a_client_that_leaves_frees_its_slot(server):
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)
    body = json.dumps({**FIELDS, "n_predict": -1, "stream": True})
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    connection.getresponse().read(1)
    connection.close()
    wait_until(lambda: not any(s["is_processing"] for s in json.loads(server.get("/slots"))))
