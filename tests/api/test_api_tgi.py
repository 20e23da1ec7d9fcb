"""The endpoints of TGI: /generate, /generate_stream and `POST /`, over a scripted engine."""

import json

import pytest

from cpuserve.engine.ipc import Output, TokenLogprob
from tests.api.fakes import ANSWER, Api, speak, tokenizer
from tests.api.recorded import bursts, fails

PROMPT = "hi there"
NUM_PROMPT = len(tokenizer().encode(PROMPT))


def generate(api, path="/generate", **parameters):
    return api.post(path, inputs=PROMPT, parameters=parameters)


def events(response):
    """The events of a stream, after checking how they are framed."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data:{") for block in blocks)
    return [json.loads(block.removeprefix("data:")) for block in blocks]


def params(api):
    """The sampling parameters of the newest sequence that the engine got."""
    return api.engine.asked[-1][1]


def test_generate_returns_the_text():
    api = Api()
    assert generate(api).json() == {"generated_text": ANSWER}
    assert api.post("/generate", inputs=PROMPT).json() == {"generated_text": ANSWER}
    assert generate(api, return_full_text=True).json() == {"generated_text": PROMPT + ANSWER}


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_the_path_of_all_tasks_returns_a_list_or_a_stream(path):
    api = Api()
    assert generate(api, path, max_new_tokens=20).json() == [{"generated_text": ANSWER}]
    streamed = api.post(path, inputs=PROMPT, stream=True)
    assert events(streamed)[-1]["generated_text"] == ANSWER


def test_details_have_every_token():
    body = generate(Api(), details=True, seed=3, top_n_tokens=2).json()
    details = body["details"]
    ids = tokenizer().encode(ANSWER, add_special_tokens=False)
    assert [token["id"] for token in details["tokens"][:-1]] == ids
    assert [token["special"] for token in details["tokens"]] == [*[False] * len(ids), True]
    assert details["finish_reason"] == "eos_token"
    assert (details["generated_tokens"], details["seed"]) == (len(ids) + 1, 3)
    assert [len(top) for top in details["top_tokens"]] == [2] * (len(ids) + 1)
    assert details["prefill"] == []


def test_the_logprobs_of_the_prompt_are_prefill():
    prefill = generate(Api(), details=True, decoder_input_details=True).json()["details"]["prefill"]
    assert len(prefill) == NUM_PROMPT
    assert prefill[0]["logprob"] is None
    assert all(isinstance(each["logprob"], float) for each in prefill[1:])


@pytest.mark.parametrize("script", [speak, bursts])
def test_the_events_of_a_stream_make_up_the_text(script):
    found = events(generate(Api(script), "/generate_stream", details=True, top_n_tokens=1))
    assert "".join(event["token"]["text"] for event in found) == ANSWER
    assert [event["index"] for event in found] == list(range(1, len(found) + 1))
    assert all(len(event["top_tokens"]) == 1 for event in found)
    assert [event["generated_text"] for event in found] == [*[None] * (len(found) - 1), ANSWER]
    last = found[-1]["details"]
    assert last["generated_tokens"] == len(found)
    assert last["input_length"] == NUM_PROMPT


def test_a_text_ends_with_its_stop_sequence():
    body = generate(Api(), details=True, stop=["wör"]).json()
    assert body["generated_text"] == ANSWER[: ANSWER.index("wör") + 3]
    assert body["details"]["finish_reason"] == "stop_sequence"
    cut = generate(Api(), details=True, max_new_tokens=2).json()["details"]
    assert (cut["finish_reason"], cut["generated_tokens"]) == ("length", 2)


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 1.0}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"top_p": 0.9}, 1.0),
        ({"top_k": 3}, 1.0),
        ({"typical_p": 0.9}, 1.0),
    ],
    ids=str,
)
def test_tokens_are_sampled_only_if_a_parameter_says_so(given, temperature):
    api = Api()
    assert generate(api, **given).status_code == 200
    assert params(api).temperature == temperature


def test_parameters_reach_the_engine():
    api = Api()
    given = {"top_k": 3, "top_p": 0.5, "typical_p": 0.4, "seed": 7, "max_new_tokens": 5}
    assert generate(api, **given, repetition_penalty=1.5, frequency_penalty=0.5).status_code == 200
    found = params(api)
    assert (found.top_k, found.top_p, found.typical_p) == (3, 0.5, 0.4)
    assert (found.seed, found.max_tokens) == (7, 5)
    assert (found.repetition_penalty, found.frequency_penalty) == (1.5, 0.5)
    assert generate(api, truncate=1).status_code == 200
    assert api.engine.asked[-1][0] == tokenizer().encode(PROMPT)[-1:]
    assert generate(api).status_code == 200
    assert params(api).max_tokens == 100


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "key"),
    [
        ({"type": "json", "value": SCHEMA}, ("json", json.dumps(SCHEMA, separators=(",", ":")))),
        (
            {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}},
            ("json", json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"type": "regex", "value": "[0-9]+"}, ("regex", "[0-9]+")),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_a_grammar_becomes_a_structured_output(grammar, key):
    api = Api()
    assert generate(api, grammar=grammar).status_code == 200
    assert params(api).structured_outputs.key == key


def by_number(engine, number, prompt, params):
    """The text of a sequence is its number; the second sequence is the most likely."""
    which = (params.seed or 0) - 10
    token = tokenizer().encode(str(which), add_special_tokens=False)[0]
    logprob = -0.1 if which == 1 else -2.0 - which
    yield Output(number, [token], "length", logprobs=[TokenLogprob(token, logprob, 1, [])])


def test_best_of_returns_the_text_with_the_highest_mean_logprob():
    body = generate(Api(by_number), best_of=3, seed=10, do_sample=True, details=True).json()
    assert body["generated_text"] == "1"
    others = body["details"]["best_of_sequences"]
    assert [other["generated_text"] for other in others] == ["0", "2"]


def test_best_of_of_completions_returns_the_n_best_of_each_prompt():
    api = Api(by_number)
    asked = {"prompt": ["a", "b c"], "best_of": 3, "n": 2, "seed": 10, "echo": True}
    body = api.post("/v1/completions", **asked).json()
    assert [choice["text"] for choice in body["choices"]] == ["a1", "a0", "b c1", "b c0"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 6
    scored = api.post("/v1/completions", **asked, logprobs=0).json()["choices"]
    assert scored[0]["logprobs"]["token_logprobs"][-1] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": "3"}, "best_of"),
    ],
    ids=str,
)
def test_a_wrong_best_of_is_refused(given, param):
    response = Api().post("/v1/completions", prompt="a", **given)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("/generate", {"max_new_tokens": 0}, "max_new_tokens must be"),
        ("/generate", {"max_new_tokens": "a"}, "max_new_tokens must be an integer"),
        ("/generate", {"watermark": True}, "watermark is not supported"),
        ("/generate", {"num_return_sequences": 2}, "num_return_sequences"),
        ("/generate", {"best_of": 0}, "best_of must be"),
        ("/generate", {"best_of": 1000}, "best_of must be"),
        ("/generate", {"top_n_tokens": 21}, "top_n_tokens must be"),
        ("/generate", {"truncate": -2}, "truncate must be"),
        ("/generate", {"repetition_penalty": 0}, "repetition_penalty must be"),
        ("/generate", {"adapter_id": "x"}, "adapter_id 'x'"),
        ("/generate", {"grammar": {"type": "json_object"}, "stop": "a"}, "stop must be a list"),
        ("/generate", {"grammar": "x"}, "grammar must be"),
        ("/generate", {"grammar": {"type": "regex"}}, "grammar of the type regex needs"),
        ("/generate", {"grammar": {"type": "json", "vlaue": {}}}, "unknown field 'vlaue'"),
        ("/generate", {"grammar": {"type": "json", "value": 1}}, "grammar json must be"),
        ("/generate_stream", {"best_of": 2}, "best_of is not possible in a stream"),
        ("/generate_stream", {"decoder_input_details": True}, "decoder_input_details is not"),
        ("/", {"temperature": -1}, "temperature must be"),
    ],
    ids=str,
)
def test_wrong_parameters_get_422_in_the_format_of_tgi(path, given, words):
    response = generate(Api(), path, **given)
    body = response.json()
    assert (response.status_code, body["error_type"]) == (422, "validation")
    assert list(body) == ["error", "error_type"]
    assert words in body["error"]


def test_other_errors_have_the_format_of_tgi():
    for path in ("/generate", "/generate_stream"):
        long = Api().post(path, inputs="x " * 400)
        assert (long.status_code, long.json()["error_type"]) == (422, "validation")
        unknown = Api().post(path, inputs="x", model="other")
        assert (unknown.status_code, unknown.json()["error_type"]) == (404, "validation")
        wrong = Api().raw(path, b"{")
        assert (wrong.status_code, wrong.json()["error_type"]) == (400, "validation")
        missing = Api().post(path)
        assert (missing.status_code, missing.json()["error"]) == (422, "inputs is missing")


def test_an_error_in_a_stream_is_its_last_event():
    *shown, last = events(generate(Api(fails), "/generate_stream"))
    assert len(shown) == 3
    assert last["error_type"] == "generation"


@pytest.mark.parametrize("name", ["tgi", "dummy", "http://127.0.0.1:1/"])
def test_the_names_that_hugging_face_clients_send_mean_the_only_model(name):
    api = Api()
    assert api.chat(model=name).json()["model"] == "tiny"
    assert api.post("/generate", inputs="a", model=name).status_code == 200


@pytest.mark.parametrize(("media", "what"), [("audio/wav", "audio"), ("image/png", "images")])
def test_audio_posted_to_the_path_of_all_tasks_gets_the_answer_of_its_own_route(media, what):
    response = Api().raw("/", b"RIFF", media)
    other = Api().raw(f"/v1/{what}", b"RIFF", media)
    assert (response.status_code, other.status_code) == (404, 404)
    told, wanted = (each.json()["error"] for each in (response, other))
    assert (told["code"], told["type"]) == (wanted["code"], wanted["type"])
    assert told["message"] in wanted["message"]
