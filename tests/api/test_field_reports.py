"""Inputs made from public reports of faults in other servers, 2025 and 2026: each shows one of them
is not here. Sources are named where they say more than the case."""

import json
import re
import socket

import httpx
import jsonschema
import pytest

from cpuserve.engine.ipc import Output, TokenLogprob
from tests.api.fakes import Api, error_of, events_of, named_events_of, tokenizer
from tests.api.test_api_tools import calls_of
from tests.api.tools import CALL, TEMPLATE, WEATHER, prompt_of, says, tool_api
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_end_ids, tiny_model

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {
    "/v1/chat/completions": [WEATHER],
    "/api/chat": [WEATHER],
    "/v1/responses": [{"type": "function", **WEATHER["function"]}],
    "/v1/messages": [{"name": "weather", "input_schema": CITY}],
}
# A turn of calls without text is fine; one without either is what Mistral's templates refuse with
# "Invalid assistant message" (vllm-project/vllm#38738).
STRICT = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and not message.content and not message.tool_calls %}"
    "{{ raise_exception('Invalid assistant message') }}{% endif %}{{ message.content }}",
)


USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}


def called(number):
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    return call if number is None else {"id": number, **call}


def chat_history(number):
    result = {"role": "tool", "content": "sunny"}
    return [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [called(number)]},
        result if number is None else {**result, "tool_call_id": number},
    ]


EMPTY = {"type": "text", "text": ""}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
ITEMS = [
    {"role": "user", "content": "hi"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
    {"id": "rs_1", "type": "reasoning", "summary": [], "content": None, "status": None},
    {
        "type": "function_call",
        "name": "weather",
        "call_id": "c1",
        "arguments": {"city": "Rome"},
        "status": None,
    },
    {"type": "function_call_output", "call_id": "c1", "output": "sunny", "id": None},
]
NULLS = dict.fromkeys(
    ["response_format", "tools", "tool_choice", "stop", "logit_bias", "stream_options", "seed"]
)
# What is sent, and what the prompt has to contain.
TAKEN = {
    "fields that are null": ("/v1/chat/completions", {"messages": HI, **NULLS}, "hi"),
    "no tools, but a choice of them": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        "hi",
    ),
    "an empty list of calls": (
        "/v1/chat/completions",
        {"messages": [*HI, {"role": "assistant", "content": "well", "tool_calls": []}, *HI]},
        "well",
    ),
    "calls whose id is empty": (
        "/v1/chat/completions",
        {"messages": chat_history(""), "tools": [WEATHER]},
        "sunny",
    ),
    "calls without ids": (
        "/v1/chat/completions",
        {"messages": chat_history(None), "tools": [WEATHER]},
        "sunny",
    ),
    "a result in parts, one of them a picture": (
        "/v1/chat/completions",
        {
            "messages": [
                *chat_history("c1")[:-1],
                {
                    "role": "tool",
                    "tool_call_id": "c1",
                    "content": [
                        {"type": "text", "text": "sunny"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
                    ],
                },
            ],
            "tools": [WEATHER],
        },
        "sunny",
    ),
    "a function without parameters": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "now"}}]},
        '"now"',
    ),
    "items without id and status, with nulls, and with arguments as an object": (
        "/v1/responses",
        {"input": ITEMS, "tools": TOOLS["/v1/responses"]},
        '"city": "Rome"',
    ),
    "empty texts beside a call and its result": (
        "/v1/messages",
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [EMPTY, USE]},
                {"role": "user", "content": [RESULT, EMPTY, {"type": "text", "text": "go on"}]},
            ],
            "max_tokens": 9,
            "tools": TOOLS["/v1/messages"],
        },
        '"city": "Rome"',
    ),
    "a format that is empty": ("/api/chat", {"messages": HI, "format": ""}, "hi"),
    "a format that is null": ("/api/chat", {"messages": HI, "format": None}, "hi"),
}


@pytest.mark.parametrize(("path", "body", "shown"), TAKEN.values(), ids=TAKEN)
def test_what_clients_send_is_taken(path, body, shown):
    api = tool_api(says("ok"), source=STRICT)
    response = api.post(path, model="tiny", **body)
    assert response.status_code == 200, response.text
    assert shown in prompt_of(api)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", [{"foo": "bar"}, {"type": "banana"}, {"type": "function"}, "AUTO", "any"], ids=str
)
def test_a_choice_of_tools_that_means_nothing_is_refused(choice, stream):
    response = Api().chat(tools=[WEATHER], tool_choice=choice, stream=stream)
    assert (response.status_code, error_of(response)["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_has_its_name_in_the_wrong_place_is_refused(stream):
    tool = {"type": "function", "name": "exec", "function": {"parameters": CITY}}
    response = tool_api(says("Hello!")).chat(tools=[tool], stream=stream)
    assert response.status_code == 400
    assert "tools[0].function.name" in error_of(response)["message"]


ABSENT = {
    "/v1/chat/completions": ("messages", {}),
    "/v1/responses": ("input", {}),
    "/v1/messages": ("messages", {"max_tokens": 9}),
    "/api/chat": ("messages", {"stream": False}),
}


@pytest.mark.parametrize("path", ABSENT)
@pytest.mark.parametrize("content", [None, "", [], [EMPTY]], ids=str)
def test_an_assistants_turn_without_content_is_taken(path, content):
    field, more = ABSENT[path]
    given = (
        [{"type": "output_text", "text": ""}] if content and path == "/v1/responses" else content
    )
    messages = [*HI, {"role": "assistant", "content": given}, *HI]
    api = Api()
    response = api.post(path, model="tiny", **{field: messages}, **more)
    assert response.status_code == 200, response.text
    assert "<|im_start|>assistant\n<|im_end|>" in prompt_of(api)


def test_a_users_turn_without_content_is_refused_in_messages():
    messages = [{"role": "user", "content": None}]
    response = Api().post("/v1/messages", model="tiny", max_tokens=9, messages=messages)
    assert response.status_code == 400
    assert "messages.0.content must be" in response.json()["error"]["message"]


# Ollama itself loads the model for these, and answers with nothing (ollama/ollama#13020).
OWN = {
    "/api/chat": "messages",
    "/api/generate": "prompt",
    "/api/embed": "input",
    "/api/embeddings": "prompt",
}
TEXTS = {"messages": HI, "prompt": "hi", "input": ["hi"]}
MISPLACED = [(path, field) for path, own in OWN.items() for field in TEXTS if field != own]


@pytest.mark.parametrize("more", [{}, {"keep_alive": 0}], ids=["", "unload"])
@pytest.mark.parametrize(("path", "field"), MISPLACED)
def test_text_in_the_field_of_another_endpoint_is_no_request_to_load(path, field, more):
    api = Api()
    response = api.post(path, model="tiny", **{field: TEXTS[field]}, **more)
    assert response.status_code == 400
    assert response.json() == {"error": f"{field} is no field of {path}: use {OWN[path]}"}
    for unset in ("", [], None):
        assert api.post(path, model="tiny", **{field: unset}).status_code == 200


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_text_in_its_own_field_counts_whatever_else_is_sent(path):
    api = Api()
    assert api.post(path, model="tiny", **TEXTS).status_code == 200
    assert len(api.engine.asked) == 1


@pytest.mark.parametrize("form", ['{"type": "object"}', [{"type": "object"}], "xml"], ids=str)
def test_a_format_that_is_no_schema_is_refused(form):
    response = Api().post("/api/chat", model="tiny", messages=HI, format=form)
    assert (response.status_code, "JSON schema" in response.json()["error"]) == (400, True)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/v1/nope", "/api/nope", "/api/v0/models", "/v1", "/v1/chat"])
def test_an_unknown_route_is_404(method, path):
    response = Api().request(method, path)
    assert response.status_code == 404
    assert path in response.text


# Streams


def text_of(response, stream):
    if not stream:
        return response.json()["choices"][0]["message"]["content"]
    choices = [choice for event in events_of(response) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_output", [1, 2, 1000])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["O P Q"], "L M N "),
        (["O P X", "O P Q R"], "L M N "),
        (["O P X", "O P Y"], "L M N O P Q R S"),
        (["OP", "O P", "O"], "L M N "),
        (["R S T"], "L M N O P Q R S"),
        (["N O P Q", "P"], "L M N O "),  # the one that is complete first
    ],
    ids=str,
)
def test_stop_strings_of_several_tokens_and_with_common_beginnings(stop, text, per_output, stream):
    api = tool_api(says("L M N O P Q R S", per_output))
    assert text_of(api.chat(stop=stop, stream=stream), stream) == text


def test_each_choice_of_a_stream_ends_once():
    events = events_of(Api().chat(n=3, stream=True, stream_options={"include_usage": True}))
    *_, last = events
    assert (last["choices"], last["usage"]["completion_tokens"] > 0) == ([], True)
    reasons = [
        (choice["index"], choice["finish_reason"])
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(reasons) == [(i, "stop") for i in range(3)]


def test_chunks_have_no_empty_reasons_or_calls():
    events = events_of(tool_api(says("hello there")).chat(tools=[WEATHER], stream=True))
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all("tool_calls" not in choice["delta"] for choice in choices)


@pytest.mark.parametrize("per_output", [1, 1000])
def test_each_part_of_a_call_has_its_index(per_output):
    api = tool_api(says(f"{CALL}\n{CALL}", per_output))
    events = events_of(api.chat(tools=[WEATHER], stream=True))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    parts = [part["index"] for delta in deltas for part in delta.get("tool_calls", [])]
    assert parts == sorted(parts)
    assert set(parts) == {0, 1}
    assert len({call["id"] for call in calls_of(deltas)} - {""}) == 2


FORCED = {
    "any": ("required", 'weather", "arguments": {"city": "Paris"}}\n</tool_call>'),
    "one": (
        {"type": "function", "function": {"name": "weather"}},
        '{"city": "Paris"}}\n</tool_call>',
    ),
}


@pytest.mark.parametrize(("choice", "rest"), FORCED.values(), ids=FORCED)
def test_a_forced_call_comes_in_a_stream(choice, rest):
    api = tool_api(says(rest, 1))
    events = events_of(api.chat(tools=[WEATHER], tool_choice=choice, stream=True))
    (call,) = calls_of(choice["delta"] for event in events for choice in event["choices"])
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Paris"}')
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", TOOLS)
def test_calls_have_ids_of_their_own_and_whole_arguments(path):
    field = "input" if path == "/v1/responses" else "messages"
    more = {"max_tokens": 300} if path == "/v1/messages" else {}
    api = tool_api(says(f"{CALL}\n{CALL}"))
    body = api.post(path, model="tiny", stream=False, tools=TOOLS[path], **{field: HI}, **more)
    ids = re.findall(r'"(?:call_)?id":"(call_[0-9a-f]+)"', body.text)
    assert len(ids) == len(set(ids)) == 2
    # The arguments are the same in every dialect: text with an object in it, or the object.
    assert len(re.findall(r'[{]\\?"city\\?": ?\\?"Paris\\?"[}]', body.text)) == 2


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_arguments_come_whole_in_a_stream_of_messages(per_output):
    api = tool_api(says(f"Look.\n{CALL}\n{CALL}", per_output))
    tools = TOOLS["/v1/messages"]
    events = named_events_of(
        api.post(
            "/v1/messages", max_tokens=300, messages=HI, tools=tools, stream=True, model="tiny"
        )
    )
    parts = {}
    for event in events:
        if event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
            parts.setdefault(event["index"], []).append(event["delta"]["partial_json"])
    assert {i: "".join(texts) for i, texts in parts.items()} == dict.fromkeys(
        (1, 2), '{"city": "Paris"}'
    )


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_text_and_arguments_do_not_mix_in_a_stream_of_responses(per_output):
    api = tool_api(says(f"Look.\n{CALL}\n{CALL}", per_output))
    tools = TOOLS["/v1/responses"]
    events = named_events_of(
        api.post("/v1/responses", model="tiny", input="hi", tools=tools, stream=True)
    )
    deltas = [event for event in events if event["type"].endswith(".delta")]
    order = [event["output_index"] for event in deltas]
    assert order == sorted(order)
    kinds = ["output_text", "function_call_arguments", "function_call_arguments"]
    assert [(event["type"].split(".")[1], event["output_index"]) for event in deltas] == [
        (kinds[index], index) for index in order
    ]
    told = [event["response"] for event in events if "response" in event]
    assert all(type(response["created_at"]) is int for response in told)
    assert [item["status"] for item in told[-1]["output"]] == ["completed"] * 3


@pytest.mark.parametrize("prompt", ["Warsaw", [87, 97]], ids=str)
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 3}], ids=str)
def test_an_echo_is_streamed_as_it_is_told_whole(prompt, more):
    whole = Api().complete(prompt, echo=True, **more).json()["choices"][0]
    chunks = events_of(Api().complete(prompt, echo=True, stream=True, **more))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    if more:
        tokens = [
            t for choice in choices if choice["logprobs"] for t in choice["logprobs"]["tokens"]
        ]
        assert tokens == whole["logprobs"]["tokens"]


def test_alternatives_with_one_text_are_all_told():
    parts = [i for i in range(256) if tokenizer().token_bytes(i) in (b"\xa1", b"\xa2", b"\xa3")]
    assert len(parts) == 3

    def script(engine, number, prompt, params):
        top = [(token, -0.5 * i - 0.5) for i, token in enumerate(parts)]
        yield Output(number, [parts[1]], None, logprobs=[TokenLogprob(parts[1], -1.0, 2, top)])
        end = min(tiny_end_ids("llama"))
        yield Output(number, [end], "stop", logprobs=[TokenLogprob(end, -0.5, 1, [(end, -0.5)])])

    api = Api(script)
    chat = api.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"][0]
    assert [entry["bytes"] for entry in chat["top_logprobs"]] == [[0xA1], [0xA2], [0xA3]]
    legacy = api.complete(logprobs=3).json()["choices"][0]["logprobs"]
    assert legacy["tokens"][0] == "\ufffd"
    assert legacy["top_logprobs"][0] == {
        f"token_id:{parts[0]}": -0.5,
        "\ufffd": -1.0,
        f"token_id:{parts[2]}": -1.5,
    }


# A real server


@pytest.fixture(scope="module")
def server(shared_server):
    model = tiny_model("llama", max_position_embeddings=4096)
    running = shared_server(model, "--served-model-name", "tiny")
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        http.metric = running.metric
        yield http


def chat(server, **fields):
    body = {"model": "tiny", "messages": HI, "max_tokens": 400, "temperature": 1.0, **fields}
    return server.post("/v1/chat/completions", json=body)


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def one(schema, **more):
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
        **more,
    }


NODE = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = {
    "word characters": one({"type": "string", "pattern": r"^\w+$", "maxLength": 20}),
    "digits, counted twice": one({"type": "string", "pattern": r"^\d{4,4}$"}),
    "an escaped backslash": one({"type": "string", "pattern": r"^hello there indeed\\!$"}),
    "no backslash": one({"type": "string", "pattern": r"^[^\\]$"}),
    "an address": one({"type": "string", "pattern": r"^[\w.-]{1,9}@[\w-]{1,9}\.\w{2,5}$"}),
    "a reference into a list": one(
        NODE,
        properties={"x": NODE, "y": {"$ref": "#/properties/x/properties/a/anyOf/0"}},
        required=["x", "y"],
    ),
    "a reference into a tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"$ref": "#/prefixItems/0"}],
        "minItems": 2,
        "items": False,
    },
    "an enum in a reference": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"$ref": "#/$defs/talk"},
        "$defs": {"talk": one({"$ref": "#/$defs/who"}), "who": {"enum": ["Alice", "Bob"]}},
    },
    "an object without properties": one({"type": "object", "properties": {}, "maxProperties": 0}),
}


@pytest.mark.parametrize("name", deep_but([*SCHEMAS][::3], SCHEMAS))
def test_answers_fit_schemas(server, name):
    schema = SCHEMAS[name]
    for seed in range(3):
        response = chat(server, response_format=form(schema), seed=seed)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        jsonschema.validate(value, schema)
        if isinstance(value, dict) and isinstance(text := value["x"], str):
            # The standard's patterns are ECMA's, in which classes are of ASCII.
            assert re.search(schema["properties"]["x"]["pattern"], text, re.ASCII)


@pytest.mark.parametrize("schema", [{"description": "any"}, {"required": ["a"]}, {}], ids=str)
def test_a_schema_without_type_and_properties_is_kept(server, schema):
    response = chat(server, response_format=form(schema), seed=3)
    assert response.status_code == 200, response.text
    jsonschema.validate(json.loads(response.json()["choices"][0]["message"]["content"]), schema)


@pytest.mark.parametrize("pattern", ["(", "^a{2,1}$", "^(?=a)b$", r"^\q$"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_pattern_that_cannot_be_kept_is_400(server, pattern, stream):
    schema = one({"type": "string", "pattern": pattern})
    response = chat(server, response_format=form(schema), stream=stream)
    assert response.status_code == 400, response.text
    assert re.search("regex|pattern", error_of(response)["message"])


def test_a_rule_of_any_text_ends_no_server(server):
    grammar = 'root ::= "a" any "b"\nany ::= .*'
    response = chat(server, structured_outputs={"grammar": grammar}, max_tokens=30)
    (choice,) = response.json()["choices"]
    text = choice["message"]["content"]
    assert text.startswith("a")
    assert choice["finish_reason"] == "length" or text.endswith("b")
    assert chat(server, max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_generated_for_a_client_that_left(server, stream):
    body = {"model": "tiny", "messages": HI, "max_tokens": 3900, "ignore_eos": True}
    if stream:
        path = "/v1/chat/completions"
        with server.stream("POST", path, json={**body, "stream": True}) as response:
            next(response.iter_lines())
    else:
        url = httpx.URL(server.base_url)
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(head.encode() + content)
            wait_until(lambda: server.metric("num_requests_running") == 1, "it does not start")
    wait_until(lambda: server.metric("num_requests_running") == 0, "the request goes on")
    made = server.metric("generation_tokens_total")
    assert chat(server, max_tokens=1).status_code == 200
    assert server.metric("generation_tokens_total") == made + 1


def test_a_seed_gives_the_same_answer_again_and_its_choices_differ(server):
    fields = {"seed": 123, "temperature": 0.8, "max_tokens": 30, "ignore_eos": True}
    first, second = (chat(server, n=2, **fields).json()["choices"] for _ in range(2))
    assert [c["message"]["content"] for c in first] == [c["message"]["content"] for c in second]
    assert first[0]["message"]["content"] != first[1]["message"]["content"]


def test_the_logprobs_of_a_prompt_are_the_same_again(server):
    """Also if the cache holds the prompt."""
    body = {"prompt": "The quick brown fox " * 20, "max_tokens": 1, "temperature": 0}

    def ask(**more):
        answer = server.post("/v1/completions", json={"model": "tiny", **body, **more})
        return answer.json()["choices"][0]["prompt_logprobs"]

    first = ask(prompt_logprobs=2)
    assert ask() is None
    assert ask(prompt_logprobs=2) == first
