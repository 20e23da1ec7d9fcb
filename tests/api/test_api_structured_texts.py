"""Structured outputs that have texts of tokens or tags, and schemas that outgrow the limits.

A server with random weights: each text below is the only one that its grammar allows.
"""

import json
import shutil

import httpx
import pytest
from tokenizers import Tokenizer

from tests.api.test_api_thoughts import OPENS
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

TEXTS = ["<|im_end|>", "a<|im_start|>b", "<|endoftext|>", "<think>x", "</think>", "<tool_call>{}"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with thoughts, tools, and tokens that are spaces and a quotation mark."""
    place = tmp_path_factory.mktemp("texts")
    template = place / "template.jinja"
    template.write_text(OPENS)
    source = tiny_model("llama", max_position_embeddings=4096)
    model = shutil.copytree(source, place / "model")
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    runs = [" " * i + "\t" * j for i in range(1, 17) for j in range(4)]
    core.add_tokens([begin + run + '"' for begin in ("\n", "\n\n") for run in runs][:120])
    core.save(str(model / "tokenizer.json"))
    options = ("--served-model-name", "tiny", "--chat-template", str(template))
    with (
        running_server(model, *options) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        yield http


def gbnf(text):
    return f"root ::= {json.dumps(text)}"


def literal(text):
    return "".join(f"\\{c}" if c in "<>|{}/" and c not in "<>" else c for c in text)


def const(text):
    return {"type": "object", "properties": {"x": {"const": text}}, "required": ["x"],
            "additionalProperties": False}  # fmt: skip


FORMS = {
    "choice": lambda text: ({"choice": [text]}, text),
    "regex": lambda text: ({"regex": literal(text)}, text),
    "lark": lambda text: ({"grammar": f"start: {json.dumps(text)}"}, text),
    "gbnf": lambda text: ({"grammar": gbnf(text)}, text),
    "const": lambda text: ({"json": {"const": text}}, json.dumps(text)),
    "pattern": lambda text: (
        {"json": {"type": "string", "pattern": f"^{literal(text)}$"}}, json.dumps(text)),
}  # fmt: skip


def chat(server, **fields):
    body = {"model": "tiny", "messages": HI, "max_tokens": 600, "reasoning_effort": "none"}
    return server.post("/v1/chat/completions", json={**body, **fields})


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_text_of_a_token_is_written_and_stays_text(server, form, text):
    fields, wanted = FORMS[form](text)
    answer = chat(server, structured_outputs=fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (wanted, "stop")
    assert not choice["message"].get("tool_calls")
    assert not choice["message"].get("reasoning")


@pytest.mark.parametrize("text", TEXTS)
def test_it_stays_text_after_a_thought_and_beside_tools(server, text):
    fields, wanted = FORMS["const"](text)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for more in ({"reasoning_effort": "low"}, {"tools": [tool]}):
        for seed in range(3):
            answer = chat(server, structured_outputs=fields, seed=seed, **more)
            message = answer.json()["choices"][0]["message"]
            if "tools" not in more or not message.get("tool_calls"):
                assert message["content"] == wanted


def structured(answer):
    body = answer.json()
    if "choices" in body:
        return body["choices"][0].get("text") or body["choices"][0]["message"]["content"]
    if "output" in body:
        return body["output"][-1]["content"][0]["text"]
    if isinstance(body.get("content"), list):
        return body["content"][-1]["text"]
    return body["message"]["content"] if "message" in body else body["content"]


@pytest.mark.parametrize("text", TEXTS)
def test_every_dialect_writes_it(server, text):
    schema, wanted = const(text), {"x": text}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    typed = {"type": "json_schema", "name": "a", "schema": schema}
    off = {"thinking": {"type": "disabled"}}
    bodies = {
        "/v1/chat/completions": {"messages": HI, "response_format": form, "max_tokens": 300},
        "/v1/completions": {"prompt": "hi", "response_format": form, "max_tokens": 300},
        "/v1/responses": {"input": "hi", "text": {"format": typed}, "max_output_tokens": 300},
        "/v1/messages": {"messages": HI, "output_config": {"format": typed}, "max_tokens": 300,
                         **off},
        "/api/chat": {"messages": HI, "format": schema, "stream": False, "think": False},
        "/completion": {"prompt": "hi", "json_schema": schema, "n_predict": 300},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = server.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, (path, answer.text)
        assert json.loads(structured(answer)) == wanted, path


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("strict", [False, True])
def test_the_arguments_of_a_forced_call_have_it(server, text, strict):
    function = {"name": "f", "parameters": const(text), "strict": strict}
    tools = [{"type": "function", "function": function}]
    answer = chat(server, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": text}


def outgrowing():
    """A schema that compiles, and outgrows the limits of the parser after the first member.

    Each of the other members may then begin in each of the tokens with a quotation mark.
    """
    names = {f"p{i}": {"const": 1} for i in range(700)}
    return {"type": "object", "properties": names, "required": ["p0", "p699"]}


def test_a_schema_that_outgrows_the_limits_is_the_requests_fault(server):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": outgrowing()}}
    answer = chat(server, response_format=form)
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", "response_format")
    assert error["message"].startswith("response_format ")
    assert "cannot be kept up to the end of the response: it is too complex" in error["message"]
    stream = chat(server, response_format=form, stream=True)
    frames = [line[6:] for line in stream.text.splitlines() if line.startswith("data: ")]
    (shown,) = [frame for frame in frames if '"error"' in frame] or [stream.text]
    told = json.loads(shown)["error"]
    assert (told["type"], told["param"]) == ("BadRequestError", "response_format")
    assert chat(server, structured_outputs={"choice": ["fine"]}).status_code == 200
