"""The render routes: the prompts of requests, as the engine would get them."""

import pytest

from tests.api.fakes import Api, error_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
FIELDS = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "seed": 3, "cache_salt": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": HI, "n": 2}), (TEXT, {"prompt": ["hi", "a fox", [5, 6]], "n": 2})],
)
def test_a_rendered_prompt_is_the_one_that_runs(path, body):
    api = Api()
    answer = api.post(f"{path}/render", **body, **FIELDS)
    assert answer.status_code == 200, answer.text
    assert api.engine.asked == []
    found = answer.json()
    prompts = [found] if path == CHAT else found
    assert api.post(path, **body, **FIELDS).status_code == 200
    asked = [prompt for prompt, _ in api.engine.asked]
    assert sorted(asked) == sorted(2 * [prompt["token_ids"] for prompt in prompts])
    for prompt in prompts:
        assert prompt["model"] == "tiny"
        assert prompt["sampling_params"].items() >= FIELDS.items()
        assert "caller" not in prompt["sampling_params"]
        assert (prompt["features"], prompt["token_offsets"]) == (None, None)
    assert api.context.active_sequences == 0


def test_the_text_of_a_conversation_is_shown_if_asked():
    body = Api().post(f"{CHAT}/render", messages=HI, return_prompt_text=True).json()
    assert "Be kind." in body["prompt_text"]
    assert "prompt_text" not in Api().post(f"{CHAT}/render", messages=HI).json()


def test_the_id_of_the_request_is_kept():
    body = Api().post(f"{CHAT}/render", messages=HI, request_id="mine").json()
    assert body["request_id"] == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"messages": HI, "return_token_offsets": True}, "return_token_offsets"),
        (TEXT, {"prompt": "x", "return_token_offsets": True}, "return_token_offsets"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": HI, "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "x", "documents": [1]}, "documents"),
        (TEXT, {"prompt": "x " * 900}, "prompt"),
    ],
)
def test_a_bad_request_is_refused_as_it_would_be_to_run(path, fields, named):
    response = Api().post(f"{path}/render", **fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == named
