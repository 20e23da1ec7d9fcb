"""use_beam_search over HTTP: its fields, what it refuses, and searches that fail or are left."""

import asyncio

import pytest

from cpuserve.engine.ipc import Output, TokenLogprob
from tests.api.fakes import Api, error_of, tokenizer
from tests.api.live import live
from tests.helpers.tiny import tiny_end_ids

END = min(tiny_end_ids("llama"))
A, B = (tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "ab")

BEAMS = {"use_beam_search": True, "max_tokens": 4, "stop_token_ids": [END]}


def likely(engine, number, prompt, params):
    """After "b" the text probably ends; else "a" is twice as likely as "b"."""
    top = [(A, -0.5), (B, -1.0), (END, -9.0)]
    if prompt[-1] == B:
        top = [(END, -0.1), (A, -3.0), (B, -4.0)]
    row = TokenLogprob(top[0][0], top[0][1], 1, top[: params.logprobs])
    yield Output(number, [row.token], "length", logprobs=[row])


def test_the_best_texts_come_first_with_their_logprobs():
    api = Api(likely)
    fields = {"logprobs": 1, "return_token_ids": True, "length_penalty": 0}
    body = api.complete("x", n=2, **BEAMS, **fields).json()
    found = [(c["text"], c["finish_reason"]) for c in body["choices"]]
    assert found == [("b", "stop"), ("ab", "stop")]
    assert [choice["token_ids"] for choice in body["choices"]] == [[B, END], [A, B, END]]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -0.1]
    assert body["choices"][1]["logprobs"]["top_logprobs"][0] == {"a": -0.5}
    assert body["usage"]["completion_tokens"] == 5
    assert api.engine.running == api.context.active_sequences == 0
    # Each step asks for one token of each beam, after the tokens of the beam.
    prompts = [prompt[1:] for prompt, params in api.engine.asked]
    assert prompts[:3] == [[], [A], [B]]
    assert {params.max_tokens for _, params in api.engine.asked} == {1}


def test_a_longer_text_wins_with_a_higher_penalty():
    def texts(**fields):
        body = Api(likely).complete("x", n=2, **BEAMS, **fields).json()
        return [choice["text"] for choice in body["choices"]]

    assert texts(length_penalty=0) == ["b", "ab"]
    assert texts() == ["aaaa", "aaab"]
    assert texts(length_penalty=-4) == ["", "b"]


def test_a_chat_has_the_same_search_and_best_of_is_its_width():
    api = Api(likely)
    body = api.chat(**BEAMS, best_of=2, length_penalty=0).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["b"]
    assert {params.logprobs for _, params in api.engine.asked} == {4}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "stream"),
        ({"echo": True}, "echo"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"dry_multiplier": 0.5}, "dry_multiplier"),
        ({"early_stopping": True}, "early_stopping"),
        ({"n": 11}, "n"),
        ({"best_of": 11}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": "x"}, "best_of"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "best_of": 2, "stream": True}, "best_of"),
    ],
    ids=str,
)
def test_what_a_search_cannot_heed_is_refused_by_name(fields, named):
    api = Api(likely)
    response = api.complete("x", **{"use_beam_search": True, **fields})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == named
    assert api.engine.asked == []


def test_values_that_change_nothing_are_accepted():
    fields = {"min_tokens": 0, "presence_penalty": 0, "repetition_penalty": 1, "stop": []}
    fields |= {"temperature": 0.3, "top_p": 0.5, "seed": 1, "response_format": {"type": "text"}}
    assert Api(likely).complete("x", use_beam_search=True, **fields).status_code == 200


def test_a_step_that_fails_ends_the_request_with_its_error():
    def script(engine, number, prompt, params):
        if len(prompt) > 2:
            yield Output(number, [], "error", error="no room")
        yield from likely(engine, number, prompt, params)

    api = Api(script)
    response = api.complete("x", use_beam_search=True, n=2, max_tokens=9)
    assert response.status_code == 500
    assert "no room" in error_of(response)["message"]
    assert api.engine.running == api.context.active_sequences == 0


def test_a_client_that_leaves_ends_the_search():
    def script(engine, number, prompt, params):
        if len(prompt) > 2:
            yield asyncio.Event()
        yield from likely(engine, number, prompt, params)

    async def main():
        async with live(script) as server:
            body = {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 9}
            _, writer = await server.post("/v1/completions", body)
            await server.until(lambda: server.engine.running == 2)
            writer.close()
            await server.is_sane()

    asyncio.run(main())
