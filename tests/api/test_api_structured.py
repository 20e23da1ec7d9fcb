"""Answers with a form over HTTP: a server with random weights, and what clients see of failures."""

import asyncio
import json
import re
import shutil
import string

import httpx
import jsonschema
import pytest

from cpuserve.engine.grammars.grammar_queue import MAX_OF_CALLER
from cpuserve.engine.ipc import Output
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import Api
from tests.api.tools import TEMPLATE
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_end_ids, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["ok", "name", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
END = sorted(tiny_end_ids("llama"))
LETTERS = string.ascii_letters
QUESTION = [{"role": "user", "content": "hi"}]


def bomb(letters):
    """A schema whose compilation takes twice as long with each more letter."""
    all_of = [{"pattern": f".*{letter}.*"} for letter in letters]
    return {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(400)},
            "d400": {"type": "string", "allOf": all_of},
        },
    }


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A server whose chat template has tools."""
    template = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TEMPLATE)
    model = tiny_model("llama", max_position_embeddings=4096)
    options = ("--served-model-name", "tiny", "--chat-template", str(template))
    with (
        running_server(model, *options) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def server(shared_server):
    model = tiny_model("llama", max_position_embeddings=4096)
    running = shared_server(model, "--served-model-name", "tiny")
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        yield http


def chat(server, **fields):
    body = {"model": "tiny", "messages": QUESTION, "temperature": 1.0, "max_tokens": 600}
    return server.post("/v1/chat/completions", json={**body, **fields})


def streamed(server, **fields):
    """The text and the finish reason of a streamed answer."""
    response = chat(server, stream=True, **fields)
    assert response.status_code == 200, response.text
    frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    choices = [choice for frame in frames for choice in json.loads(frame)["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices), choices[-1]["finish_reason"]


def test_streamed_and_whole_answers_are_valid_and_equal(server):
    for seed in range(8):
        fields = {"response_format": FORMAT, "seed": seed}
        (choice,) = chat(server, **fields).json()["choices"]
        text = choice["message"]["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert streamed(server, **fields) == (text, choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_keep_the_schema_of_their_format(server, stream):
    wanted = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 600, "stream": stream, **wanted}
    answer = server.post("/v1/messages", json=body)
    if stream:
        frames = [json.loads(s[6:]) for s in answer.text.splitlines() if s.startswith("data: ")]
        text = "".join(frame.get("delta", {}).get("text", "") for frame in frames)
    else:
        (block,) = answer.json()["content"]
        text = block["text"]
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_of_messages_that_cannot_be_kept_is_400_with_the_reason(server, stream):
    form = {"type": "json_schema", "schema": {"type": "sound"}}
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 9, "stream": stream}
    response = server.post("/v1/messages", json={**body, "output_config": {"format": form}})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("output_config.format cannot be compiled")
    assert "sound" in message


@pytest.mark.deep
def test_a_client_with_too_many_new_forms_gets_429_and_others_none():
    """The forms take seconds each; the clients leave, and the next form does not wait for them."""
    model = tiny_model("llama", max_position_embeddings=2048)
    keys = ("--served-model-name", "tiny", "--api-key", "first", "--api-key", "second")
    asked = MAX_OF_CALLER + 8

    async def chats(url):
        options = {"base_url": url, "timeout": PATIENCE_S, "limits": httpx.Limits()}
        async with httpx.AsyncClient(**options, headers={"x-api-key": "first"}) as many:
            body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1}
            posts = [
                asyncio.ensure_future(
                    many.post("/v1/chat/completions", json=body | schema(bomb(LETTERS[i:])))
                )
                for i in range(asked)
            ]
            await until(lambda: sum(post.done() for post in posts) >= asked - MAX_OF_CALLER - 1)
            refused = [post.result() for post in posts if post.done()]
            other = {"x-api-key": "second"}
            waits = asyncio.ensure_future(
                many.post(
                    "/v1/chat/completions", json=body | {"response_format": FORMAT}, headers=other
                )
            )
            await asyncio.sleep(0.1)
            for post in posts:
                post.cancel()
            return refused, await waits

    with running_server(model, *keys) as running:
        refused, other = asyncio.run(chats(running.url))
    assert other.status_code == 200, other.text
    for answer in refused:
        assert answer.status_code == 429, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert f"limit is {MAX_OF_CALLER}" in answer.json()["error"]["message"]


def test_any_json_object(server):
    # Random text hardly ever ends by itself: a bias makes quotation marks and braces likely.
    likely = {str(i): 9 for i in tokens_of('"', "}", ":", ",", '":"', '"}')}
    for seed in range(4):
        form = {"response_format": {"type": "json_object"}, "logit_bias": likely}
        (choice,) = chat(server, seed=seed, max_tokens=1500, **form).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    "form", [schema(True), {"structured_outputs": {"json": True}}], ids=["format", "vllm"]
)
def test_any_json_value(server, form):
    fields = {**form, "logit_bias": {str(i): 100 for i in tokens_of('"')}}
    (choice,) = chat(server, **fields).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", '""')


def tokens_of(*texts):
    """The ids of tokens that are these texts, of those that the tokenizer has."""
    tokenizer = Tokenizer.load(tiny_model("llama"))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [found[0] for found in ids if len(found) == 1]


def test_completions_have_a_form_for_every_prompt_and_choice(server):
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 50, "temperature": 1.0}
    form = {"structured_outputs": {"choice": ["left", "right"]}}
    answer = server.post("/v1/completions", json={**body, **form}).json()
    assert len(answer["choices"]) == 4
    assert {c["text"] for c in answer["choices"]} <= {"left", "right"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "GBNF"),
        ({"structured_outputs": {"json": {"type": "sound"}}}, "structured_outputs", "sound"),
        ({"structured_outputs": {"json": False}}, "structured_outputs", "no finite text matches"),
        (schema(False), "response_format", "no finite text matches"),
        (schema({"$ref": "#"}), "response_format", "no finite text matches"),
        # The library's own limit ends the first within 10 ms; the limit of 3 s ends the second,
        # which takes more than a minute.
        (schema(bomb("abcdefghij")), "response_format", "it is too complex"),
        pytest.param(
            schema(bomb("abcdefghijklmnopqrstuvw")),
            "response_format",
            "it is too complex",
            marks=pytest.mark.deep,
        ),
    ],
    ids=["regex", "grammar", "schema", "false", "format-false", "endless", "library", "time"],
)
def test_what_cannot_be_compiled_is_400_with_the_reason(server, stream, fields, param, reason):
    response = chat(server, stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert reason in error["message"]
    assert chat(server, structured_outputs={"choice": ["fine"]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": END, "min_tokens": 3}, ["allowed_token_ids", "min_tokens"]),
        ({"structured_outputs": {"choice": ["Paris"]}, "allowed_token_ids": END, "min_tokens": 1},
         ["structured_outputs", "allowed_token_ids", "min_tokens"]),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [5]},
         ["response_format", "allowed_token_ids"]),
    ],
    ids=["end", "choice", "object"],
)  # fmt: skip
def test_fields_that_exclude_every_token_are_400_and_named(server, stream, fields, names):
    response = chat(server, stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == names[0]
    assert " and ".join(names) in error["message"]
    assert "NaN" not in error["message"]
    assert chat(server, max_tokens=2).status_code == 200


def tool(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TOOLS = [
    tool("thing", SCHEMA, strict=True),
    tool("count", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                   "additionalProperties": False}, strict=True),
]  # fmt: skip


CHOICES = ["required", {"type": "function", "function": {"name": "thing"}}]


@pytest.mark.parametrize("choice", deep_but(CHOICES[:1], CHOICES))
def test_arguments_of_strict_functions_fit_their_schemas(caller, choice):
    names = set()
    for seed in range(12):
        fields = {"tools": TOOLS, "tool_choice": choice, "seed": seed}
        (answer,) = chat(caller, **fields).json()["choices"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        (call,) = (c["function"] for c in answer["message"]["tool_calls"])
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
        names.add(call["name"])
        assert streamed(caller, **fields) == ("", "tool_calls")
    assert names == ({"thing", "count"} if choice == "required" else {"thing"})


def test_a_required_call_names_an_offered_function_also_if_none_is_strict(caller):
    tools = [tool("thing", SCHEMA), tool("count", {})]
    for seed in range(6):
        fields = {"tools": tools, "tool_choice": "required", "seed": seed, "max_tokens": 60}
        (answer,) = chat(caller, **fields).json()["choices"]
        names = {call["function"]["name"] for call in answer["message"]["tool_calls"]}
        assert names <= {"thing", "count"}, names


def never(first):
    """A logit_bias against the tokens that begin with a character, unless no other may follow."""
    tokenizer = Tokenizer.load(tiny_model("llama"))
    ids = range(300)
    return {str(i): -100 for i in ids if tokenizer.token_bytes(i).startswith(first.encode())}


@pytest.mark.parametrize("calls", [False, True], ids=["form", "calls"])
def test_an_answer_with_tools_has_its_form_or_is_calls(caller, calls):
    fields = {
        "tools": [tool("thing", SCHEMA), tool("count", {})],
        "response_format": FORMAT,
        "max_tokens": 1500,
        "parallel_tool_calls": False,
        # Strings and objects that random weights write would be long.
        "logit_bias": {**never("{" if calls else "<"), **{str(i): 4 for i in tokens_of('"', "}")}},
    }
    for seed in range(4):
        (answer,) = chat(caller, seed=seed, **fields).json()["choices"]
        text, reason = answer["message"]["content"], answer["finish_reason"]
        assert streamed(caller, seed=seed, **fields) == (text or "", reason)
        assert reason == ("tool_calls" if calls else "stop")
        if calls:
            (call,) = (c["function"] for c in answer["message"]["tool_calls"])
            assert call["name"] in ("thing", "count")
            assert isinstance(json.loads(call["arguments"]), dict)
        else:
            jsonschema.validate(json.loads(text), SCHEMA)


def test_a_strict_schema_that_cannot_be_kept_is_400_with_the_reason(caller):
    tools = [tool("f", {"type": "object", "not": {"minProperties": 1}}, strict=True)]
    for fields in ({"tool_choice": "required"}, {}, {"response_format": FORMAT}):
        response = chat(caller, tools=tools, **fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert error["message"].startswith("tools cannot be compiled to a grammar: the parameters")
        assert "the parameters of f: not at #" in error["message"]
        assert "%json" not in error["message"]
    assert chat(caller, tools=tools, tool_choice="none", max_tokens=2).status_code == 200


def chosen(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"]


@pytest.mark.deep  # 16 s
def test_the_arguments_of_a_call_that_the_model_chooses_fit_a_strict_schema(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama", max_position_embeddings=4096), model)
    content = json.loads((model / "tokenizer.json").read_text())
    marker = 1 + max(content["model"]["vocab"].values())
    added = {**content["added_tokens"][0], "id": marker, "content": "<tool_call>", "special": False}
    content["added_tokens"].append(added)
    (model / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    options = ("--served-model-name", "tiny", "--chat-template", str(tmp_path / "template.jinja"))
    with (
        running_server(model, *options) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        schemas, names = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}, set()
        for seed in range(6):
            fields = {"tools": TOOLS, "seed": seed, "parallel_tool_calls": False}
            biased = {**fields, "logit_bias": {str(marker): 100}}  # then a call comes first
            (answer,) = chosen(chat(http, **biased))
            assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
            (call,) = (c["function"] for c in answer["message"]["tool_calls"])
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
            names.add(call["name"])
            assert streamed(http, **biased) == ("", "tool_calls")
            free = {**fields, "max_tokens": 40, "logit_bias": {str(marker): -100}}
            (answer,) = chosen(chat(http, **free))
            assert "tool_calls" not in answer["message"]
            told = (answer["message"]["content"], answer["finish_reason"])
            assert streamed(http, **free) == told
        assert names == {"thing", "count"}


LINES = r"""start: line~1..2 "end"
line: "+" /[^\n]{0,3}/ NL
NL: /\n/
"""


def custom(syntax, definition):
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "edit", "format": form}}


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "edit"}}])
@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [("regex", '^"[ab]{3}\\\\c$', r'"[ab]{3}\\c'), ("lark", LINES, r"(\+[^\n]{0,3}\n){1,2}end")],
    ids=["regex", "lark"],
)
def test_the_input_of_a_custom_tool_matches_its_grammar(
    caller, choice, syntax, definition, pattern
):
    fields = {"tools": [custom(syntax, definition)], "tool_choice": choice}
    for seed in range(3):
        (choice_,) = chat(caller, seed=seed, **fields).json()["choices"]
        found = [call["custom"]["input"] for call in choice_["message"]["tool_calls"]]
        assert found
        assert all(re.fullmatch(pattern, text) for text in found), found
        assert choice_["finish_reason"] == "tool_calls"


def test_a_faulty_grammar_of_a_tool_beside_a_form_is_an_error_of_the_tools(caller):
    fields = {"tools": [custom("lark", 'start: "a" foo')], "response_format": FORMAT}
    error = chat(caller, **fields).json()["error"]
    assert error["param"] == "tools"
    wanted = "tools cannot be compiled to a grammar: the grammar of edit: line 1, column 12"
    assert error["message"].startswith(wanted)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("syntax", "definition", "place"),
    [("lark", 'start: "a"\n  | b', "line 2, column 5: there is no rule or terminal b"),
     ("lark", "start: " + "(" * 900, "nests too deeply"),
     ("regex", "(?=a)", "line 1, column 1: the regular expression")],
    ids=["rule", "deep", "regex"],
)  # fmt: skip
def test_a_grammar_that_is_not_valid_is_400_with_the_place(
    caller, syntax, definition, place, choice, stream
):
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool = {"type": "custom", "name": "edit", "format": form}
    body = {
        "model": "tiny",
        "input": "hi",
        "tools": [tool],
        "stream": stream,
        "tool_choice": choice,
    }
    response = caller.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert place in error["message"]
    assert ("the grammar of edit" in error["message"]) == ("nests" not in place)


COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
_A_COLOR = r'\{\s*"color"\s*:\s*"(red|blue)"\s*\}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": COLOR}, _A_COLOR),
        ({"guided_json": json.dumps(COLOR)}, _A_COLOR),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"response_format": {"type": "json_object", "value": COLOR}}, _A_COLOR),
        ({"response_format": {"type": "json", "value": COLOR}}, _A_COLOR),
        ({"response_format": {"type": "json", "value": json.dumps(COLOR)}}, _A_COLOR),
        ({"response_format": {"type": "json_schema", "value": {"schema": COLOR}}}, _A_COLOR),
        ({"response_format": {"type": "regex", "value": "[0-9]{3}"}}, "[0-9]{3}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_structures_of_other_servers_bind_every_endpoint(server, fields, expected):
    asked = {"model": "tiny", "temperature": 1.0, "max_tokens": 64, **fields}
    said = server.post("/v1/chat/completions", json={**asked, "messages": QUESTION}).json()
    assert re.fullmatch(expected, said["choices"][0]["message"]["content"])
    text = server.post("/v1/completions", json={**asked, "prompt": "a"}).json()
    assert re.fullmatch(expected, text["choices"][0]["text"])
    asked["max_output_tokens"] = asked.pop("max_tokens")
    if (form := asked.pop("response_format", None)) is not None:
        if form["type"] == "json_schema":  # whose schema has another place in this API
            return
        asked["text"] = {"format": form}
    found = server.post("/v1/responses", json={**asked, "input": "a"})
    assert found.status_code == 200, found.text
    (item,) = found.json()["output"]
    assert re.fullmatch(expected, item["content"][0]["text"])


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "json_schema": {"schema": COLOR}},
        {"type": "json_object", "schema": COLOR, "value": COLOR},
        {"type": "json_object", "regex": "a"},
        {"type": "json", "value": 5},
        {"type": "json_schema", "schema": COLOR},
        {"type": "regex"},
        {"type": "regex", "value": "a", "schema": COLOR},
    ],
    ids=str,
)
def test_a_structure_is_never_ignored(server, form):
    error = chat(server, response_format=form).json()["error"]
    assert (error["param"], error["type"]) == ("response_format", "BadRequestError")


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True, "n": 2}], ids=["text", "beams"])
def test_a_form_that_the_server_cannot_keep_now_is_503_and_no_fault_of_the_client(fields):
    def lost(engine, number, prompt, params):
        yield Output(number, [], "error", error="the process has ended", unavailable=True)

    answer = Api(lost).complete(max_tokens=2, **fields)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "the process has ended" in answer.json()["error"]["message"]
