"""A real engine process with a tiny random model, for tests that need real logits."""

import json
import math
import threading

import pytest

from tests.helpers.tiny import tiny_model

PROMPT = "The quick brown fox"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server(tiny_model("llama"), "--served-model-name", "tiny")


def streamed(raw):
    lines = raw.decode().split("\n\n")[:-1]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def complete(server, **fields):
    return server.post("/v1/completions", **{"prompt": PROMPT, **GREEDY, **fields})


def test_streamed_and_whole_text_are_equal(server):
    whole = complete(server)["choices"][0]["text"]
    events = streamed(server.raw("/v1/completions", prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(e["choices"][0]["text"] for e in events) == whole


def test_the_text_is_the_same_alone_and_among_others(server):
    alone = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
    results = []

    def ask():
        results.append(complete(server, return_token_ids=True)["choices"][0]["token_ids"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 8


def test_a_seed_gives_the_same_choices_again_and_other_seeds_others(server):
    def ids(seed):
        body = complete(server, temperature=1.5, seed=seed, n=3, return_token_ids=True)
        return [choice["token_ids"] for choice in body["choices"]]

    assert ids(5) == ids(5)
    assert ids(5) != ids(6)
    assert len({tuple(i) for i in ids(5)}) == 3


def test_logprobs_of_an_answer_equal_those_of_scoring_it(server):
    body = complete(server, logprobs=3, return_token_ids=True)["choices"][0]
    ids = body["prompt_token_ids"] + body["token_ids"]
    scored = complete(server, prompt=ids, echo=True, logprobs=3, max_tokens=0)["choices"][0]
    count = len(body["token_ids"])
    again = scored["logprobs"]["token_logprobs"][-count:]
    for given, wanted in zip(body["logprobs"]["token_logprobs"], again, strict=True):
        assert math.isclose(given, wanted, abs_tol=1e-4)
    for value, alternatives in zip(again, scored["logprobs"]["top_logprobs"][-count:], strict=True):
        assert math.isclose(value, max(alternatives.values()), abs_tol=1e-5)


def test_logit_bias_and_allowed_ids_rule_the_choice(server):
    body = complete(server, logit_bias={"77": 100}, return_token_ids=True)
    assert set(body["choices"][0]["token_ids"]) == {77}
    body = complete(server, allowed_token_ids=[78, 79], temperature=1, return_token_ids=True)
    assert set(body["choices"][0]["token_ids"]) <= {78, 79}


def test_a_stop_token_ends_the_answer_and_is_named(server):
    ids = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
    choice = complete(server, stop_token_ids=[ids[2]], return_token_ids=True)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[2]
    assert choice["token_ids"] == ids[: ids.index(ids[2]) + 1]


def test_min_tokens_hold_off_the_stop_token(server):
    ids = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
    fields = {"stop_token_ids": [ids[0]], "min_tokens": 6}
    choice = complete(server, **fields, return_token_ids=True)["choices"][0]
    assert len(choice["token_ids"]) >= 6
    assert ids[0] not in choice["token_ids"][:5]


def test_a_prompt_can_fill_the_context_to_the_last_token(server):
    limit = json.loads(server.get("/v1/models"))["data"][0]["max_model_len"]
    usage = complete(server, prompt=[70] * (limit - 1), max_tokens=1)["usage"]
    assert usage["total_tokens"] == limit
    body = complete(server, prompt=[70] * limit, max_tokens=0, echo=True, logprobs=0)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == limit


def test_a_chat_counts_its_template(server):
    messages = [{"role": "user", "content": "hi"}]
    body = server.post("/v1/chat/completions", messages=messages, **GREEDY)
    counted = server.post("/tokenize", messages=messages)["count"]
    assert body["usage"]["prompt_tokens"] == counted
    assert body["usage"]["completion_tokens"] == 12


def test_ids_beyond_the_tokenizer_are_served_as_no_text(server):
    # The model's vocabulary has 512 ids, the tokenizer's 384.
    choice = complete(server, prompt=[500, 511], echo=True, logit_bias={"510": 100})["choices"][0]
    assert choice["text"] == ""


def test_metrics_count_the_steps(server):
    before = server.get("/metrics").decode()
    complete(server)
    after = server.get("/metrics").decode()

    def value(text, name):
        line = next(line for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    def grown(name):
        return value(after, name) - value(before, name)

    assert grown("generation_tokens_total") == 12
    assert grown("inter_token_latency_seconds_count") == 11
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("iteration_tokens_total_count") == 12
    assert value(after, "num_requests_running") == 0
    assert value(after, "kv_cache_usage_perc") == 0
