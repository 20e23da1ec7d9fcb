"""Limits on the lists of all sequences of a request, and prompt logprobs that they share."""

import pytest

from cpuserve.core import admission
from cpuserve.engine.ipc import Output
from cpuserve.serving.generation.fan_out import MAX_REQUEST_ITEMS
from tests.api.fakes import MAX_LEN, Api, error_of, events_of, logprob_of, speak


def wide_api(vocab):
    """Return an Api whose model has a vocabulary of `vocab` ids."""
    api = Api()
    api.engine.info["vocab_size"] = vocab
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    return api


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [[5]] * 1024, "allowed_token_ids": list(range(8000))},
        {"prompt": [5], "n": 128, "stop": ["x" * 4096] * 64},
    ],
    ids=["allowed", "stop"],
)
def test_a_small_body_that_would_fill_the_memory_is_400(fields):
    api = wide_api(8192)
    error = error_of(api.complete(max_tokens=1, **fields))
    assert error["code"] == "invalid_value"
    assert error["param"] == "n"
    assert str(MAX_REQUEST_ITEMS) in error["message"]
    assert api.engine.asked == []
    assert api.alive()


def test_prompt_tokens_count_again_for_every_prompt_logprob(monkeypatch):
    monkeypatch.setattr("cpuserve.serving.generation.fan_out.MAX_REQUEST_ITEMS", 2_000_000)
    api = Api()
    assert api.complete([[5] * (MAX_LEN - 1)] * 8, n=128).status_code == 200
    api.engine.asked.clear()
    scored = {"n": 128, "prompt_logprobs": 20, "echo": True}
    error = error_of(api.complete([[5] * (MAX_LEN - 1)] * 8, **scored))
    assert error["code"] == "invalid_value"
    assert error["param"] == "n"
    assert api.engine.asked == []


def test_one_sequence_is_never_too_much(monkeypatch):
    monkeypatch.setattr("cpuserve.serving.generation.fan_out.MAX_REQUEST_ITEMS", 1)
    api = Api()
    assert api.complete([5, 6, 7]).status_code == 200
    assert api.complete([5, 6, 7], n=2).status_code == 400


def test_lists_that_the_prompts_share_are_checked_once(monkeypatch):
    checked, real = [], admission._check_ids
    monkeypatch.setattr(
        admission, "_check_ids", lambda name, *rest: (checked.append(name), real(name, *rest))
    )
    assert Api().complete([[5], [6], [7]], allowed_token_ids=[8, 9]).status_code == 200
    assert checked.count("allowed_token_ids") == 1
    assert checked.count("prompt") == 3


def test_each_prompt_has_its_own_room():
    api = Api()
    assert api.complete([[5], [6] * 120], max_tokens=None).status_code == 200
    assert [params.max_tokens for _, params in api.engine.asked] == [16, 8]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_only_the_first_choice_scores_the_prompt(endpoint):
    api = Api()
    response = getattr(api, endpoint)(n=3, prompt_logprobs=1, max_tokens=2)
    assert response.status_code == 200, response.text
    assert [params.prompt_logprobs for _, params in api.engine.asked] == [1, None, None]
    shown = response.json()
    if endpoint == "chat":
        assert shown["prompt_logprobs"][0] is None
        assert len(shown["prompt_logprobs"]) == len(api.engine.asked[0][0])
    else:
        first, *others = (choice["prompt_logprobs"] for choice in shown["choices"])
        assert first[1]
        assert others == [first, first]


def test_every_prompt_has_a_choice_that_scores_it():
    api = Api()
    response = api.complete([[5, 6], [7, 8]], n=2, prompt_logprobs=0, max_tokens=1)
    assert [params.prompt_logprobs for _, params in api.engine.asked] == [0, None, 0, None]
    shown = [list(choice["prompt_logprobs"][1]) for choice in response.json()["choices"]]
    assert shown == [["6"], ["6"], ["8"], ["8"]]


@pytest.mark.parametrize("late", [0, 1])
def test_a_streamed_echo_has_the_prompts_logprobs_in_every_choice(late):
    def speak_late(engine, number, prompt, params):
        if number == late:
            yield 0.05
        yield from speak(engine, number, prompt, params)

    api = Api(speak_late)
    events = events_of(
        api.complete([5, 6, 7], n=2, echo=True, logprobs=0, max_tokens=3, stream=True)
    )
    for index in range(2):
        first = next(e["choices"][0] for e in events if e["choices"][0]["index"] == index)
        want = [logprob_of(token, 0).logprob for token in (6, 7)]
        assert first["logprobs"]["token_logprobs"][:3] == [None, *want]
    assert api.alive()


def test_a_sequence_ends_at_its_stop_string_while_the_prompt_is_still_scored():
    ran = []

    def speak_on(engine, number, prompt, params):
        if params.prompt_logprobs is not None:
            yield 0.3
            yield from speak(engine, number, prompt, params)
            return
        for output in speak(engine, number, prompt, params):
            ran.append(output)
            yield output
            yield 0.01

    api = Api(speak_on)
    answer = api.complete([5, 6, 7], n=2, prompt_logprobs=0, max_tokens=20, stop=["e"]).json()
    assert [choice["text"] for choice in answer["choices"]] == ["H", "H"]
    assert all(choice["prompt_logprobs"] for choice in answer["choices"])
    assert len(ran) < 6, "the stop string must end it before its text is sent"


def test_prompt_logprobs_that_are_held_once_count_once(monkeypatch):
    monkeypatch.setattr("cpuserve.serving.generation.fan_out.MAX_REQUEST_ITEMS", 10_000)
    api = Api()
    many = {"n": 16, "prompt_logprobs": 20, "max_tokens": 1}
    assert api.complete([5] * 100, **many).status_code == 200
    assert api.complete([5] * 100, echo=True, **many).status_code == 400, (
        "every choice shows the logprobs"
    )


def test_a_failure_of_the_choice_that_scores_ends_all():
    def fail(engine, number, prompt, params):
        if number == 0:
            yield 0.05
            yield ValueError("no scores")
        yield from speak(engine, number, prompt, params)

    api = Api(fail)
    assert api.complete([5, 6, 7], n=3, prompt_logprobs=0).status_code == 500
    assert api.engine.running == 0
    assert api.context.active_sequences == 0


def scored(fields, tokens, context=1 << 18):
    """The response to prompts of `tokens` tokens, from a script that scores nothing."""
    api = Api(lambda engine, number, prompt, params: [Output(number, [40], "length")])
    api.context.max_model_len = context
    api.engine.info["kv_tokens"] = context
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    response = api.complete([[5] * n for n in tokens], max_tokens=1, **fields)
    assert response.status_code == 200 or api.engine.asked == []
    return response


@pytest.mark.parametrize(
    ("fields", "tokens", "most"),
    [
        ({"prompt_logprobs": 20}, [32_000], 14),
        ({"prompt_logprobs": 20}, [8_000] * 4, 14),
        ({"prompt_logprobs": 3}, [131_072], 2),
        ({"prompt_logprobs": 0, "n": 2}, [200_000, 200_000], None),
    ],
    ids=str,
)
def test_prompt_logprobs_have_a_budget_also_of_one_sequence(fields, tokens, most):
    """One request with 32,000 tokens and 20 alternatives took 219 MB."""
    refused = scored(fields, tokens)
    assert refused.status_code == 400
    error = error_of(refused)
    assert error["param"] == "prompt_logprobs"
    assert str(sum(tokens) * (fields["prompt_logprobs"] + 2)) in error["message"]
    if most is None:
        assert "alternatives, or" not in error["message"]
        return
    assert f"at most {most} alternatives" in error["message"]
    assert scored({**fields, "prompt_logprobs": most}, tokens).status_code == 200
    assert scored({**fields, "prompt_logprobs": most + 1}, tokens).status_code == 400


def test_prompt_logprobs_count_for_each_choice_that_echoes_them():
    fields = {"prompt_logprobs": 0, "n": 20}
    assert scored(fields, [14_000]).status_code == 200
    refused = scored({**fields, "echo": True}, [14_000])
    assert error_of(refused)["param"] == "prompt_logprobs"
