"""response_format and structured_outputs become one form of the text, or an error."""

import json

import msgspec
import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.structured import MAX_CHARS, StructuredOutputs
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.response_format import structured_outputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}


def key_of(**fields):
    form = structured_outputs(GenerateCall(**fields))
    return None if form is None else form.key


def test_every_way_to_ask_for_a_schema_means_the_same_grammar():
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    keys = {
        key_of(response_format=named),
        key_of(structured_outputs={"json": SCHEMA}),
        SamplingParams(structured_outputs={"json": SCHEMA}).structured_outputs.key,
        StructuredOutputs(json=json.dumps(SCHEMA, separators=(",", ":"))).key,
    }
    assert keys == {
        ("json", '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"null"}}}')
    }


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, ("json", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_object", "schema": {"maxProperties": 1}}},
            ("json", '{"maxProperties":1}'),
        ),
        ({"structured_outputs": {"json_object": True}}, ("json", '{"type":"object"}')),
        ({"structured_outputs": {"json": True}}, ("json", "true")),
        ({"structured_outputs": {"json": {}}}, ("json", "{}")),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": False}},
            ("open_json", "{}"),
        ),
        ({"structured_outputs": {"regex": "a+", "json": None}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["b", "a"]}}, ("choice", '["b","a"]')),
        ({"structured_outputs": {"grammar": "start: /a/"}}, ("grammar", "start: /a/")),
    ],
    ids=str,
)
def test_a_form_has_a_kind_and_a_text(fields, key):
    assert key_of(**fields) == key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_object": False}, "none is set"),
        ({"json_object": True, "regex": "a"}, "got regex and json_object"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"at most {MAX_CHARS}"),
        ({"choice": ["a" * MAX_CHARS, "b"]}, f"at most {MAX_CHARS}"),
        ({"choice": ["a", ""]}, "empty choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_form_that_cannot_be_is_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message) as raised:
        StructuredOutputs(**fields)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "fields",
    [{"choice": ["a"], "role": "max_tokens"}, {"choice": ["a"], "regex": "b", "role": "x"},
     {"choice": ["a"], "calls": "start: x"}, {"choice": ["a"], "caller": "x"},
     {"choice": ["a"], "later": True}, {"choice": ["a"], "other": 1}],
    ids=str,
)  # fmt: skip
def test_an_unknown_member_is_refused_also_if_the_server_has_one_of_that_name(fields):
    for make in (
        lambda: structured_outputs(GenerateCall(structured_outputs=fields)),
        lambda: SamplingParams(structured_outputs=fields),
    ):
        with pytest.raises(
            InvalidRequest, match=r"unknown field `(role|calls|caller|later|other)`"
        ) as raised:
            make()
        assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"type": "json_object", "shema": {}}, "response_format has the unknown field 'shema'"),
        ({"type": "text", "grammer": "x"}, "response_format has the unknown field 'grammer'"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strct": True}},
            "response_format.json_schema has the unknown field 'strct'",
        ),
    ],
)
def test_an_unknown_member_of_response_format_is_refused(value, where):
    with pytest.raises(InvalidRequest, match=where) as raised:
        structured_outputs(GenerateCall(response_format=value))
    assert raised.value.param == "response_format"
    inner = {"name": "a", "description": "b", "schema": {}, "strict": None, "other": None}
    known = {"type": "json_schema", "json_schema": inner, "strict": True, "more": None}
    assert structured_outputs(GenerateCall(response_format=known)) is not None


def test_a_forced_tool_call_leaves_no_text_for_a_format():
    """Agents with a type of output send its format with every request."""
    call = GenerateCall(response_format={"type": "json_object"}, tools=[{}], tool_choice="required")
    assert structured_outputs(call) is None
    call.tool_choice = "auto"
    assert structured_outputs(call).json_object


def test_a_forced_tool_call_excludes_structured_outputs():
    call = GenerateCall(structured_outputs={"regex": "a"}, tools=[{}], tool_choice="required")
    with pytest.raises(InvalidRequest, match="tool_choice") as raised:
        structured_outputs(call)
    assert raised.value.param == "tool_choice"


def test_the_form_survives_the_way_to_the_engine():
    for form in (
        {"json": SCHEMA},
        {"choice": ["a", "b"]},
        {"json_object": True},
        StructuredOutputs(regex="a", calls="start: x"),
    ):
        params = SamplingParams(structured_outputs=form)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        assert sent == params
        assert sent.structured_outputs.key == params.structured_outputs.key
    assert SamplingParams().structured_outputs is None
