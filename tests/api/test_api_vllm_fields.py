"""Further fields of vLLM, with a tiny random model: alone, among others, and streamed."""

from __future__ import annotations

import json
import shutil
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

PROMPT = [(7 * i) % 250 for i in range(30)]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
LOOP = {"max_pattern_size": 3, "min_count": 2}


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server(tiny_model("llama", dtype="bfloat16"), "--served-model-name", "tiny")


def complete(server, **fields):
    return server.post("/v1/completions", **{"prompt": PROMPT, **GREEDY, **fields})["choices"][0]


def chat(server, **fields):
    return server.post("/v1/chat/completions", **{"messages": HI, **GREEDY, **fields})


def events(server, path, **fields):
    lines = server.raw(path, stream=True, **GREEDY, **fields).decode().split("\n\n")[:-1]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def refusal(server, path="/v1/completions", **fields):
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, **fields)
    assert caught.value.code == 400
    return json.loads(caught.value.read())["error"]


def test_bad_words_are_not_written(server):
    free = complete(server, min_tokens=4)
    word = next(iter(free["text"].split()), free["text"])[:3]
    assert word in free["text"]
    found = complete(server, bad_words=[word, "other"])
    assert found["token_ids"] != free["token_ids"]


def test_named_tokens_have_logprobs_at_each_token(server):
    named = [300, 7, 41]
    free = complete(server, logprobs=20)
    ids = {"logprob_token_ids": named, "return_tokens_as_token_ids": True}
    found = complete(server, logprobs=1, **ids)
    assert found["token_ids"] == free["token_ids"]
    logprobs = found["logprobs"]
    assert logprobs["token_logprobs"] == free["logprobs"]["token_logprobs"]
    for token, top in zip(found["token_ids"], logprobs["top_logprobs"], strict=True):
        assert set(top) == {f"token_id:{i}" for i in (*named, token)}
    asked = chat(server, logprobs=True, **ids)["choices"][0]["logprobs"]["content"][0]
    assert [t["token"] for t in asked["top_logprobs"]] == [f"token_id:{i}" for i in named]
    top = chat(server, logprobs=True, top_logprobs=20, return_tokens_as_token_ids=True)
    usual = top["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    wanted = {t["token"]: t["logprob"] for t in usual}
    again = chat(
        server,
        logprobs=True,
        return_tokens_as_token_ids=True,
        logprob_token_ids=[int(name.removeprefix("token_id:")) for name in wanted],
    )["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {t["token"]: t["logprob"] for t in again} == pytest.approx(wanted, abs=2e-6)


def test_a_response_that_repeats_itself_ends(server):
    pair = complete(server, logit_bias={"5": 100}, repetition_detection=LOOP)
    assert pair["token_ids"] == [5, 5]
    assert (pair["finish_reason"], pair["stop_reason"]) == ("repetition", "repetition_detected")
    longer = complete(server, logit_bias={"5": 100}, repetition_detection=LOOP, min_tokens=4)
    assert longer["token_ids"] == [5] * 5


def test_new_sampling_fields_give_the_same_bits_alone_and_among_others(server):
    free = complete(server)["token_ids"]
    word = server.post("/detokenize", tokens=free[:3])["prompt"]
    bodies = [
        {"prompt": PROMPT, "bad_words": [word, "a", "the"], "logprobs": 2},
        {"prompt": PROMPT, "temperature": 1.0, "seed": 3, "bad_words": ["e"], "logprobs": 2},
        {"prompt": PROMPT, "logprobs": 0, "logprob_token_ids": [9, 300]},
        {"prompt": PROMPT, "temperature": 1.0, "seed": 4, "repetition_detection": LOOP},
        {"prompt": PROMPT * 9, "truncate_prompt_tokens": 30, "logprobs": 1},
    ]
    alone = [complete(server, **body) for body in bodies]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda body: complete(server, **body), bodies * 4))
    assert together == alone * 4
    assert alone[4]["token_ids"] == free


def test_a_prompt_is_cut_at_its_start_or_at_its_end(server):
    def read(**fields):
        return complete(server, max_tokens=1, **fields)["prompt_token_ids"]

    assert read(truncate_prompt_tokens=4) == PROMPT[-4:]
    assert read(truncate_prompt_tokens=4, truncation_side="right") == PROMPT[:4]
    text = "one two three four five six seven"
    whole = read(prompt=text)
    assert read(prompt=text, truncate_prompt_tokens=3) == whole[-3:]
    assert read(prompt=text, truncate_prompt_tokens=3, truncation_side="right") == whole[:3]
    most = server.post("/tokenize", prompt="a")["max_model_len"]
    long = complete(server, prompt=[5] * (most + 9), truncate_prompt_tokens=-1, max_tokens=3)
    assert len(long["prompt_token_ids"]) == most - 3
    assert len(long["token_ids"]) == 3
    chatted = chat(server)["prompt_token_ids"]
    assert chat(server, truncate_prompt_tokens=5)["prompt_token_ids"] == chatted[-5:]


def test_chat_echoes_the_last_message_of_its_role(server):
    more = {"continue_final_message": True, "add_generation_prompt": False}
    plain = chat(server, **more)["choices"][0]["message"]["content"]
    echoed = chat(server, echo=True, **more)["choices"][0]["message"]
    assert echoed["content"] == "Well, " + plain
    user = chat(server, messages=HI[:1], echo=True)["choices"][0]["message"]
    assert user["content"] == chat(server, messages=HI[:1])["choices"][0]["message"]["content"]
    deltas = [
        e["choices"][0]["delta"].get("content", "")
        for e in events(server, "/v1/chat/completions", messages=HI, echo=True, **more)
    ]
    assert "".join(deltas) == echoed["content"]


def test_streams_have_prompt_logprobs_in_their_first_chunk(server):
    whole = complete(server, prompt_logprobs=1)["prompt_logprobs"]
    first, *rest = events(server, "/v1/completions", prompt=PROMPT, prompt_logprobs=1)
    assert first["choices"][0]["prompt_logprobs"] == whole
    assert not any("prompt_logprobs" in e["choices"][0] for e in rest)
    told = chat(server, prompt_logprobs=1)["prompt_logprobs"]
    first, *rest = events(server, "/v1/chat/completions", messages=HI, prompt_logprobs=1)
    assert first["prompt_logprobs"] == told
    assert not any("prompt_logprobs" in e for e in rest)


def test_chunks_have_the_tokens_that_stream_interval_asks_for(server):
    whole = complete(server, logprobs=1)
    found = events(server, "/v1/completions", prompt=PROMPT, stream_interval=10, logprobs=1)
    choices = [e["choices"][0] for e in found]
    assert [len(c["token_ids"]) for c in choices] == [1, 10, 10, 3]
    assert [i for c in choices for i in c["token_ids"]] == whole["token_ids"]
    assert "".join(c["text"] for c in choices) == whole["text"]
    logprobs = [p for c in choices for p in c["logprobs"]["token_logprobs"]]
    assert logprobs == whole["logprobs"]["token_logprobs"]
    deltas = events(server, "/v1/chat/completions", messages=HI, stream_interval=10)
    counts = [len(e["choices"][0].get("token_ids", ())) for e in deltas]
    assert [n for n in counts if n] == [1, 10, 10, 3]


def test_the_request_names_its_id_and_sees_its_prompt(server):
    told = chat(server, request_id="job-7", return_prompt_text=True)
    assert told["id"] == "chatcmpl-job-7"
    assert (
        told["prompt_text"] == server.post("/detokenize", tokens=told["prompt_token_ids"])["prompt"]
    )
    first, *rest = events(server, "/v1/chat/completions", messages=HI, return_prompt_text=True)
    assert first["prompt_text"] == told["prompt_text"]
    assert not any("prompt_text" in e for e in rest)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("bad_words", {"bad_words": [""]}),
        ("bad_words", {"bad_words": [" "]}),
        ("bad_words", {"bad_words": ["a"] * 1025}),
        ("bad_words", {"bad_words": ["a" * 257]}),
        ("logprob_token_ids", {"logprob_token_ids": [5]}),
        ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": []}),
        ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [5, 5]}),
        ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [1 << 20]}),
        ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": list(range(21))}),
        ("repetition_detection", {"repetition_detection": {"max_pattern_size": 2}}),
        ("repetition_detection", {"repetition_detection": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncation_side", {"truncation_side": "top"}),
        ("stream_interval", {"stream_interval": 0}),
        ("request_id", {"request_id": "a b"}),
        ("suffix", {"suffix": "b"}),
        ("watermarking", {"watermarking": True}),
    ],
)
def test_bad_values_are_refused_by_name(server, field, fields):
    error = refusal(server, prompt="hi", **fields)
    assert error["param"] == field, error


@pytest.mark.deep
def test_a_suffix_becomes_a_prompt_to_fill_in(tmp_path):
    model = tmp_path / "fills"
    shutil.copytree(tiny_model("llama", dtype="bfloat16"), model)
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    made = json.loads((model / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = [1 + max(made["model"]["vocab"].values()) + i for i in range(3)]
    for i, name in zip(ids, names, strict=True):
        made["added_tokens"].append({"id": i, "content": name, "special": True, **flags})
    (model / "tokenizer.json").write_text(json.dumps(made))
    with running_server(model) as filling:
        before = filling.post("/tokenize", prompt="a = ", add_special_tokens=False)["tokens"]
        after = filling.post("/tokenize", prompt="+ 1", add_special_tokens=False)["tokens"]
        found = complete(filling, prompt="a = ", suffix="+ 1", max_tokens=2, echo=True)
        both = complete(filling, prompt=before, suffix="+ 1", max_tokens=2)
    assert found["prompt_token_ids"] == [ids[0], *before, ids[1], *after, ids[2]]
    assert found["text"].startswith("a = ")
    assert both["prompt_token_ids"] == found["prompt_token_ids"]


def test_bad_words_that_leave_no_token_are_named(server):
    text = server.post("/detokenize", tokens=[70])["prompt"]
    (token,) = server.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    error = refusal(server, prompt="hi", bad_words=[text], allowed_token_ids=[token])
    assert "bad_words" in error["message"]
