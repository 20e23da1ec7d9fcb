"""POST /v1/chat/completions/batch: a choice for each conversation."""

import pytest

from tests.api.fakes import Api, error_of
from tests.helpers.tiny import tiny_model

PATH = "/v1/chat/completions"
TEXTS = ("hi", "The lazy dog", "a fox jumps over it")
ALL = [[{"role": "user", "content": text}] for text in TEXTS]
FIELDS = {"temperature": 0.8, "seed": 5, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}


def test_each_choice_is_the_response_to_its_conversation_alone(shared_server):
    server = shared_server(tiny_model("llama"), "--served-model-name", "tiny")
    whole = server.post(f"{PATH}/batch", messages=ALL, **FIELDS, return_token_ids=True)
    alone = [server.post(PATH, messages=each, **FIELDS, return_token_ids=True) for each in ALL]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    for choice, one in zip(whole["choices"], alone, strict=True):
        assert {**choice, "index": 0} == one["choices"][0]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) > 1
    for count in ("prompt_tokens", "completion_tokens"):
        assert whole["usage"][count] == sum(one["usage"][count] for one in alone)
    assert "prompt_token_ids" not in whole


def test_the_last_message_of_each_conversation_is_echoed():
    begun = [[*each, {"role": "assistant", "content": f"{i}: "}] for i, each in enumerate(ALL)]
    more = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    body = Api().post(f"{PATH}/batch", messages=begun, **more).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [text[:3] for text in texts] == ["0: ", "1: ", "2: "]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", [[]]),
        ("messages", [ALL[0], []]),
        ("messages", ALL[0]),
        ("messages", [[{"role": "user", "content": 1}]]),
        ("messages", [ALL[0]] * 1025),
        ("n", 2),
        ("stream", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("return_prompt_text", True),
        ("best_of", 2),
        ("top_logprobs", 2),
    ],
)
def test_what_several_conversations_cannot_have_is_refused_by_name(field, value):
    api = Api()
    response = api.post(f"{PATH}/batch", **{"messages": ALL, field: value})
    assert response.status_code == 400
    assert field in error_of(response)["message"]
    assert api.alive()
