"""Server-default sampling: a request's value, else the server's, else OpenAI's."""

import pytest

from cpuserve.loader.builtin import BUILTIN
from tests.api.fakes import MAX_LEN, Api

SERVER = {"temperature": 0.25, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
OTHERS = {"temperature": 0.5, "top_p": 0.8, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def asked(endpoint, defaults, **fields):
    """The SamplingParams the engine gets for the first sequence."""
    api = Api(default_sampling=defaults)
    response = api.chat(**fields) if endpoint == "chat" else api.complete(**fields)
    assert response.status_code == 200, response.text
    return api.engine.asked[0][1]


def named(params):
    return {name: getattr(params, name) for name in OPENAI}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
class TestBothEndpoints:
    def test_without_server_defaults_openais_hold(self, endpoint):
        assert named(asked(endpoint, {})) == OPENAI

    def test_the_server_fills_what_a_request_leaves_open(self, endpoint):
        assert named(asked(endpoint, SERVER)) == SERVER
        assert named(asked(endpoint, SERVER, temperature=None)) == SERVER
        assert named(asked(endpoint, SERVER, top_p=0.3)) == {**SERVER, "top_p": 0.3}

    def test_a_request_wins_with_every_value(self, endpoint):
        assert named(asked(endpoint, SERVER, **OTHERS)) == {**OTHERS, "top_k": 0}

    def test_a_request_for_temperature_0_wins_over_a_sampling_server(self, endpoint):
        assert asked(endpoint, SERVER, temperature=0).temperature == 0

    def test_several_answers_are_not_greedy_by_default(self, endpoint):
        greedy = {"temperature": 0.0, "top_k": 7}
        assert asked(endpoint, greedy, n=1).temperature == 0
        several = asked(endpoint, greedy, n=3)
        assert (several.temperature, several.top_k) == (1.0, 7)
        assert asked(endpoint, greedy, n=3, temperature=0).temperature == 0
        assert asked(endpoint, {"temperature": 0.25}, n=3).temperature == 0.25

    def test_the_default_length_holds_until_a_request_names_one(self, endpoint):
        assert asked(endpoint, {"max_tokens": 5}).max_tokens == 5
        assert asked(endpoint, {"max_tokens": 5}, max_tokens=9).max_tokens == 9
        assert asked(endpoint, {"max_tokens": 5}, min_tokens=8).max_tokens == 8

    def test_a_default_length_beyond_the_context_is_cut_and_not_refused(self, endpoint):
        prompt = [5] * (MAX_LEN - 4)
        api = Api(default_sampling={"max_tokens": 10 * MAX_LEN})
        response = api.chat("x" * 60) if endpoint == "chat" else api.complete(prompt)
        assert response.status_code == 200
        prompt, params = api.engine.asked[0]
        assert params.max_tokens == MAX_LEN - len(prompt)


def test_a_long_default_length_is_not_for_completions_whose_default_is_openais_16():
    assert asked("completions", {"max_tokens": 100}).max_tokens == 16
    assert asked("completions", {"max_tokens": 100}, max_tokens=50).max_tokens == 50
    assert asked("chat", {"max_tokens": 50}).max_tokens == 50


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_built_in_model_answers_with_1024_tokens_at_most_unless_asked_for_more(name):
    defaults = BUILTIN[name].generation
    api = Api(default_sampling=defaults)
    api.context.max_model_len = 8192
    api.engine.info.update(max_model_len=8192, kv_tokens=8192)
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    assert api.chat(stream=True).status_code == 200
    assert api.chat(max_tokens=2000).status_code == 200
    assert api.chat(max_completion_tokens=7000).status_code == 200
    lengths = [params.max_tokens for _, params in api.engine.asked]
    assert lengths == [1024, 2000, 7000]
    assert api.get("/v1/models").json()["data"][0]["default_sampling_params"] == defaults


def test_max_completion_tokens_wins_over_the_default_length():
    assert asked("chat", {"max_tokens": 5}, max_completion_tokens=9).max_tokens == 9


def test_the_fingerprint_changes_with_the_defaults():
    from cpuserve.api.lifecycle.model_context import _build
    from tests.helpers.fake_executor import fake_config

    builds = [
        _build(fake_config(**changes))
        for changes in ({}, {"default_sampling": {"temperature": 0.0}}, {"activation_bits": 16})
    ]
    assert len(set(builds)) == 3
    assert builds[0] == _build(fake_config(default_sampling={}))
