"""Arguments of vLLM's plugins: n-grams are honoured, others are named in a header."""

import pytest

from tests.api.fakes import Api
from tests.api.tools import says, tool_api

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "model": "tiny"},
}


def asked(api):
    """The sampling parameters of the last request."""
    return api.engine.asked[-1][1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_minerus_arguments_are_honoured_and_others_are_named(path, stream):
    api = tool_api(says("Fine."))
    extras = {"no_repeat_ngram_size": 100, "debug": False, 'a"\nb': 1}
    response = api.post(path, **BODIES[path], vllm_xargs=extras, stream=stream)
    assert response.status_code == 200, response.text
    assert (asked(api).banned_ngram_size, asked(api).banned_ngram_window) == (100, -1)
    named = "vllm_xargs.debug, vllm_xargs.a??b"
    assert response.headers["warning"] == f'299 - "without effect: {named}"'
    assert "warning" not in api.post(path, **BODIES[path]).headers


@pytest.mark.parametrize("place", ["vllm_xargs", "extra_args", ""])
@pytest.mark.parametrize("path", list(BODIES)[:3])
def test_deepseek_ocrs_arguments_are_honoured_in_each_place(path, place):
    api = Api()
    given = {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [1, 2]}
    body = {place: given} if place else given
    response = api.post(path, **BODIES[path], **body)
    assert response.status_code == 200, response.text
    params = asked(api)
    assert (params.banned_ngram_size, params.banned_ngram_window) == (30, 90)
    assert params.exempt_ids == [1, 2]
    assert "warning" not in response.headers


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ngram_size": -1}, "ngram_size"),
        ({"ngram_size": "3"}, "ngram_size"),
        ({"no_repeat_ngram_size": 2**31}, "no_repeat_ngram_size"),
        ({"ngram_size": 3, "window_size": 0}, "window_size"),
        ({"ngram_size": 3, "whitelist_token_ids": [-1]}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": "1"}, "whitelist_token_ids"),
        ({"ngram_size": 3, "no_repeat_ngram_size": 3}, "ngram_size"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(given, named):
    for body in ({"vllm_xargs": given}, given):
        response = Api().complete(**body)
        assert response.status_code == 400, (body, response.text)
        assert named in response.text


def test_many_arguments_make_a_short_header():
    response = Api().complete(vllm_xargs={f"{n}" + "x" * 100: n for n in range(10_000)})
    assert response.status_code == 200
    assert len(response.headers["warning"]) < 2000
    assert "and 9984 more" in response.headers["warning"]
