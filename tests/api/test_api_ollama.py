"""Ollama's API: lines of JSON, whole answers, options, forms, tools and what is refused."""

import json
from dataclasses import replace
from datetime import datetime

import pytest

from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import ANSWER, Api, logprob_of, speak, tokenizer
from tests.api.recorded import fails
from tests.api.tools import CALL, TEMPLATE, WEATHER, prompt_of, says, tool_api
from tests.helpers.tiny import tiny_end_ids
from tests.tokenizer.test_infill import tokenizer_with

HI = [{"role": "user", "content": "hi"}]
NUM_TOKENS = len(tokenizer().encode(ANSWER, add_special_tokens=False)) + 1
COUNTED = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration",
           "eval_count", "eval_duration"}  # fmt: skip


def chat(api, **fields):
    return api.post("/api/chat", **{"model": "tiny", "messages": HI, **fields})


def generate(api, **fields):
    return api.post("/api/generate", **{"model": "tiny", "prompt": "hi", **fields})


def lines_of(response):
    """Return the parts of a stream, of which the last one alone is done."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    parts = [json.loads(line) for line in response.text.splitlines()]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    return parts


def told(part):
    """Return a part without its clocks."""
    return {k: v for k, v in part.items() if k != "created_at" and not k.endswith("_duration")}


def test_a_chat_streams_lines_unless_asked_not_to():
    api = Api()
    *parts, last = lines_of(chat(api, options={"seed": 3}))
    assert {tuple(part) for part in parts} == {("model", "created_at", "message", "done")}
    assert len(parts) > 5
    assert "".join(part["message"]["content"] for part in parts) == ANSWER
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done_reason"], last["eval_count"]) == ("stop", NUM_TOKENS)
    assert last["prompt_eval_count"] == len(api.engine.asked[0][0])

    whole = chat(api, options={"seed": 3}, stream=False).json()
    assert told(whole) == {**told(last), "message": {"role": "assistant", "content": ANSWER}}
    assert api.engine.asked[0] == api.engine.asked[1]
    for part in (last, whole):
        assert set(part) >= COUNTED
        took = part["prompt_eval_duration"] + part["eval_duration"]
        assert 0 < took == pytest.approx(part["total_duration"], abs=2)


@pytest.mark.parametrize("stream", [True, False])
def test_generate_answers_with_a_response(stream):
    answer = generate(Api(), stream=stream)
    parts = lines_of(answer) if stream else [answer.json()]
    assert "".join(part["response"] for part in parts) == ANSWER
    assert not any("message" in part for part in parts)
    assert parts[-1]["done_reason"] == "stop"


def test_generate_uses_the_chat_template_unless_raw():
    api = Api()
    generate(api, system="Be kind.")
    chat(api, messages=[{"role": "system", "content": "Be kind."}, *HI])
    generate(api, raw=True)
    api.complete("hi")
    prompts = [ids for ids, _ in api.engine.asked]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3] != prompts[0]


def test_a_model_without_a_template_continues_the_prompt():
    api = Api()
    api.context.chat_template.source = None
    generate(api)
    assert api.engine.asked[0][0] == tokenizer().encode("hi", add_special_tokens=True)


FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def test_a_suffix_follows_the_response(tmp_path):
    api = Api(says("x"))
    api.context.tokenizer = tokenizer_with(tmp_path, *FIM)
    assert generate(api, prompt="a = ", suffix="+ 1", stream=False).json()["response"] == "x"
    text = api.context.tokenizer.decode(api.engine.asked[0][0], skip_special_tokens=False)
    assert text == "<fim_prefix>a = <fim_suffix>+ 1<fim_middle>"


@pytest.mark.parametrize("stream", [True, False])
def test_a_context_continues_the_conversation(stream):
    """The prompt is that of a chat with the same turns, and each response has it and its tokens."""
    api, end = Api(), min(tiny_end_ids("llama"))
    api.context.bounds = replace(api.context.bounds, eos_ids=frozenset({end}))
    first = generate(api, stream=stream)
    last = lines_of(first)[-1] if stream else first.json()
    reply = tokenizer().encode(ANSWER, add_special_tokens=False)
    assert last["context"] == [*api.engine.asked[0][0], *reply, end]
    generate(api, prompt="more", context=last["context"])
    turns = [*HI, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "more"}]
    chat(api, messages=turns)
    assert api.engine.asked[1][0] == api.engine.asked[2][0]
    assert "context" not in generate(api, raw=True, stream=False).json()
    assert "context" not in chat(api, stream=False).json()


def test_a_context_with_a_system_message_or_without_a_template_goes_before_the_prompt():
    api = Api()
    generate(api, system="Be kind.", context=[70, 71])
    generate(api, system="Be kind.")
    assert api.engine.asked[0][0] == [70, 71, *api.engine.asked[1][0]]
    api.context.chat_template.source = None
    generate(api, context=[70, 71])
    assert api.engine.asked[2][0] == [70, 71, *tokenizer().encode("hi", add_special_tokens=False)]


def test_a_context_needs_a_template_that_writes_responses():
    api = Api()
    api.context.chat_template.source = "{{ messages[-1].content }}"
    refused = generate(api, context=[70])
    assert refused.status_code == 400
    assert "leaves out earlier responses" in refused.json()["error"]


def test_options_are_sampling_parameters():
    api = Api()
    options = {"num_predict": 5, "temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1,
               "seed": 7, "stop": "zz", "repeat_penalty": 1.5, "presence_penalty": 0.5,
               "frequency_penalty": 0.25, "num_ctx": 2048, "num_thread": 64}  # fmt: skip
    *_, last = lines_of(chat(api, options=options))
    params = api.engine.asked[0][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 1.0, 0.5, 4)
    assert (params.min_p, params.seed, params.stop) == (0.1, 7, ["zz"])
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.5)
    assert params.frequency_penalty == 0.25
    assert (last["done_reason"], last["eval_count"]) == ("length", 5)


@pytest.mark.parametrize("ask", [chat, generate], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("top", [None, 0, 2])
def test_logprobs_are_those_of_chat_completions(ask, top):
    api = Api(speak)
    *parts, last = lines_of(ask(api, logprobs=True, top_logprobs=top, options={"seed": 3}))
    streamed = [entry for part in parts for entry in part["logprobs"]]
    assert "logprobs" not in last
    whole = ask(api, logprobs=True, top_logprobs=top, stream=False, options={"seed": 3}).json()
    assert whole["logprobs"] == streamed
    same = api.chat(logprobs=True, top_logprobs=top, seed=3).json()["choices"][0]["logprobs"]
    assert streamed == same["content"]
    assert len(streamed) == whole["eval_count"]
    assert {len(entry["top_logprobs"]) for entry in streamed} == {top or 0}


def test_logprobs_of_tokens_without_text_come_too():
    """The tokens of a call have no text in a line, and a part of a character has none yet."""
    api = tool_api(says(CALL))
    api.engine.script = with_logprobs(api.engine.script)
    *parts, _ = lines_of(chat(api, tools=[WEATHER], logprobs=True))
    tokens = [entry["token"] for part in parts for entry in part.get("logprobs", [])]
    assert "".join(tokens).startswith(CALL)
    assert "".join(part["message"]["content"] for part in parts) == ""


def with_logprobs(script):
    """A script whose tokens have logprobs."""

    def scored(engine, number, prompt, params):
        for output in script(engine, number, prompt, params):
            output.logprobs = [logprob_of(token, params.logprobs) for token in output.tokens]
            yield output

    return scored


def test_top_logprobs_alone_have_no_effect():
    api = Api()
    answer = chat(api, top_logprobs=2, stream=False).json()
    assert "logprobs" not in answer
    assert api.engine.asked[0][1].logprobs is None


def test_samplers_that_are_switched_off_are_accepted():
    off = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "repeat_last_n": 64}
    assert chat(Api(), stream=False, options=off).status_code == 200


def test_samplers_reach_the_engine():
    on = {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "typical_p": 0.5}
    api = Api()
    assert chat(api, stream=False, options={**on, "repeat_last_n": 64}).status_code == 200
    params = api.engine.asked[0][1]
    assert {name: getattr(params, name) for name in on} == on
    assert params.penalty_window == 64


@pytest.mark.parametrize("most", [-2, -1, 0, 100_000])
def test_a_limit_beyond_the_context_is_none(most):
    api = Api()
    assert chat(api, stream=False, options={"num_predict": most, "seed": -1}).status_code == 200
    prompt, params = api.engine.asked[0]
    assert params.max_tokens == api.context.max_model_len - len(prompt)
    assert params.seed is None


def test_defaults_are_those_of_the_server():
    api = Api(default_sampling={"temperature": 0.25, "max_tokens": 2})
    chat(api, stream=False)
    params = api.engine.asked[0][1]
    assert (params.temperature, params.max_tokens) == (0.25, 2)


@pytest.mark.parametrize(
    ("form", "key"),
    [
        ("json", ("json", '{"type":"object"}')),
        ({"type": "integer"}, ("json", '{"type":"integer"}')),
        ("", None),
        (None, None),
    ],
)
def test_a_form_is_kept(form, key):
    api = Api()
    assert chat(api, format=form, stream=False).status_code == 200
    form = api.engine.asked[0][1].structured_outputs
    assert (form and form.key) == key


def test_an_earlier_beginning_of_the_answer_is_continued():
    api = Api()
    chat(api, messages=[*HI, {"role": "assistant", "content": "I am", "thinking": "Hm."}])
    assert prompt_of(api).endswith("I am")


@pytest.mark.parametrize("per_output", [1, 1000])
def test_calls_are_objects_and_come_whole(per_output):
    api = tool_api(says(f"I look.\n{CALL}{CALL}", per_output))
    *parts, last = lines_of(chat(api, tools=[WEATHER]))
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        {"index": index, "name": "weather", "arguments": {"city": "Paris"}} for index in (0, 1)
    ]
    assert last["done_reason"] == "stop"
    message = chat(api, tools=[WEATHER], stream=False).json()["message"]
    assert message["content"] == "I look."
    assert [c["function"] for c in message["tool_calls"]] == [c["function"] for c in calls]


def test_arguments_that_are_cut_short_are_empty():
    api = tool_api(says(CALL.partition("Par")[0], finish="length"))
    answer = chat(api, tools=[WEATHER], stream=False).json()
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == {}
    assert answer["done_reason"] == "length"


def test_results_of_tools_go_back_to_the_model():
    api = tool_api(says("Fine."))
    called = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "content": "sunny", "tool_name": "weather"}]  # fmt: skip
    assert chat(api, messages=messages, tools=[WEATHER]).status_code == 200
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt_of(api)
    assert "sunny" in prompt_of(api)


@pytest.mark.parametrize("ask", [chat, generate], ids=lambda ask: ask.__name__)
def test_the_template_is_told_whether_to_think(ask):
    api = Api()
    api.context.chat_template.source = "{{ enable_thinking | default('unset') }}"
    for think in (None, False, True, "high", ""):
        assert ask(api, think=think).status_code == 200
    assert [prompt_of(api, i) for i in range(5)] == ["unset", "False", "True", "unset", "unset"]


@pytest.mark.parametrize("ask", [chat, generate], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("level", ["low", "medium", "high", "max"])
def test_a_level_of_thinking_is_the_effort_of_the_template(ask, level):
    api = Api()
    api.context.chat_template.source = "{{ reasoning_effort | default('unset') }}"
    for think in (level, None, False):
        assert ask(api, think=think).status_code == 200
    assert [prompt_of(api, i) for i in range(3)] == [level, "unset", "unset"]


def test_a_level_of_thinking_leaves_a_raw_prompt_alone():
    api = Api()
    for think in (None, "high"):
        assert generate(api, raw=True, think=think).status_code == 200
    assert api.engine.asked[0] == api.engine.asked[1]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_for_nothing_loads_the_model(path):
    api = Api()
    answer = api.post(path, model="tiny", keep_alive=-1).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert not api.engine.asked


BAD = {
    "no-model": ("/api/chat", {"model": None}, 400, "model must be a string"),
    "other-model": ("/api/chat", {"model": "other:latest"}, 404, "'other:latest' does not exist"),
    "image": ("/api/chat", {"messages": [{**HI[0], "images": ["x"]}]}, 400, "reads text only"),
    "role": ("/api/chat", {"messages": [{"role": "a b", "content": ""}]}, 400, "messages[0].role"),
    "think-level": ("/api/chat", {"think": "deep"}, 400, "or one of low, medium, high, max"),
    "think-number": ("/api/generate", {"think": 1}, 400, "think must be true, false"),
    "think-zero": ("/api/chat", {"think": 0}, 400, "think must be true, false"),
    "think-list": ("/api/generate", {"think": []}, 400, "think must be true, false"),
    "format": ("/api/chat", {"format": "xml"}, 400, 'format must be "json" or a JSON schema'),
    "mirostat": ("/api/chat", {"options": {"mirostat": 3}}, 400, "options.mirostat must be"),
    "logprobs": ("/api/generate", {"logprobs": 2}, 400, "logprobs must be"),
    "top-logprobs": ("/api/chat", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must"),
    "top-p": ("/api/generate", {"options": {"top_p": 2}}, 400, "top_p must be in [0, 1]"),
    "penalty": (
        "/api/chat",
        {"options": {"repeat_penalty": 0}},
        400,
        "repeat_penalty must be above",
    ),
    "last-n": (
        "/api/chat",
        {"options": {"repeat_last_n": -2, "repeat_penalty": 1.1}},
        400,
        "options.repeat_last_n must be",
    ),
    "suffix": ("/api/generate", {"suffix": "x"}, 400, "suffix is not possible with this model"),
    "suffix-raw": ("/api/generate", {"suffix": "x", "raw": True}, 400, "not possible with raw"),
    "suffix-system": ("/api/generate", {"suffix": "x", "system": "y"}, 400, "system is not"),
    "context-raw": ("/api/generate", {"context": [1], "raw": True}, 400, "context is not possible"),
    "context-ids": ("/api/generate", {"context": [1, 512]}, 400, "context has the token id 512"),
    "context-negative": ("/api/generate", {"context": [-1]}, 400, "context has the token id -1"),
    "context-long": ("/api/generate", {"context": [5] * 500}, 400, "maximum context length"),
    "pull": ("/api/pull", {"model": "other"}, 404, "--models-dir"),
    "embed": ("/api/embed", {"input": "a"}, 400, "serve a model with --pooling"),
    "embeddings": ("/api/embeddings", {}, 400, "serve a model with --pooling"),
    "too-long": ("/api/generate", {"prompt": "x " * 400}, 400, "maximum context length"),
}


@pytest.mark.parametrize(("path", "fields", "status", "message"), BAD.values(), ids=BAD.keys())
def test_errors_are_ollamas(path, fields, status, message):
    api = Api()
    answer = api.post(path, **{"model": "tiny", "messages": HI, "prompt": "hi", **fields})
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]
    assert api.alive()


def test_an_error_after_the_first_line_is_a_line():
    answer = chat(Api(fails))
    assert answer.status_code == 200
    *parts, last = map(json.loads, answer.text.splitlines())
    assert len(parts) == 3
    assert last == {"error": "the engine was killed by SIGKILL"}


def test_silence_is_filled_with_empty_parts():
    def slow(engine, number, prompt, params):
        yield 0.05
        yield from says("Fine.")(engine, number, prompt, params)

    parts = lines_of(chat(Api(slow, http=ClientLimits(silent_s=0.001))))
    assert parts[0]["message"] == {"role": "assistant", "content": ""}
    assert "".join(part["message"]["content"] for part in parts) == "Fine."


def test_models_are_listed_and_shown():
    api = tool_api(says(""))
    listed = api.get("/api/tags").json()["models"]
    assert [model["name"] for model in listed] == ["tiny", "alias"]
    assert [len(model["digest"]) for model in listed] == [64, 64]
    shown = api.post("/api/show", model="alias").json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["model.context_length"] == 4096
    assert shown["parameters"].split() == ["num_ctx", "4096"]
    assert api.post("/api/show", name="alias").json() == shown, "as older clients ask"
    missing = api.post("/api/show", model="", name=None)
    assert (missing.status_code, missing.json()) == (400, {"error": "model is missing"})
    told = api.get("/api/version").json()
    assert told["cpuserve"] == api.get("/version").json()["version"]
    assert [int(part) for part in told["version"].split(".")] >= [0, 6, 4], "as VS Code checks it"


@pytest.mark.parametrize(
    "source",
    [TEMPLATE, "{{ tools }}{{ messages[0].content }}", "{{ messages[0].content }}"],
    ids=["tools", "unknown calls", "no tools"],
)
def test_a_template_is_shown_and_tools_can_be_called_with_each(source):
    """LiteLLM sends tools if the template names them, and else asks for JSON in the prompt."""
    body = tool_api(says(""), source=source).post("/api/show", model="tiny").json()
    assert body["template"] == source
    assert "tools" in body["capabilities"]
    assert body["model_info"]["general.basename"] == "tiny"


def test_loaded_models_are_listed():
    api = tool_api(says(""))
    listed, found = (api.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
    assert [model["context_length"] for model in found] == [4096, 4096]
    for model, shown in zip(found, listed, strict=True):
        assert {**model, **shown} == model
        assert datetime.fromisoformat(model["expires_at"].replace("Z", "+00:00")).year > 2100
