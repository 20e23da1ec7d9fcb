"""Formats that are learned from what a template writes: found, read at any cut, and forced."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text, ToolCallDelta
from cpuserve.serving.tools.learn import learn_format
from cpuserve.serving.tools.thoughts import Around
from cpuserve.serving.tools.use import tool_use
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.helpers.depth import deep_but
from tests.helpers.family_templates import LEARNED, template

ARGUMENTS = {
    "city": 'a "b"\nc',
    "days": 3,
    "sure": False,
    "list": ["x", 2],
    "more": {"k": "v"},
    "rate": 1.5,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "sure": {"type": "boolean"},
        "list": {"type": "array"}, "more": {"type": "object"}, "rate": {"type": "number"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "description": ".", "parameters": SCHEMA}}
    for name in ("get_weather", "other.tool")
]
SCHEMAS = {"get_weather": SCHEMA, "other.tool": SCHEMA}
families = pytest.mark.parametrize("family", LEARNED)
_found = {}


def learned(family):
    """What is found for a family's template, and the template."""
    if family not in _found:
        source = ChatTemplate(template(family), tokenizer())
        _found[family] = (learn_format(source), source)
    return _found[family]


def call(number, arguments, name="get_weather"):
    function = {"name": name, "arguments": arguments}
    return {"id": f"call1234{number}", "type": "function", "function": function}


def answer(family, content, *calls):
    """How the template writes an answer."""
    _, source = learned(family)
    asked = [{"role": "user", "content": "x"}]
    turn = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    text = source.render([*asked, turn], tools=TOOLS, add_generation_prompt=False)
    return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


def parsed(found, *texts, gap="", schemas=SCHEMAS):
    """(text, [[name, arguments]], ids, parser) of an answer that comes in these texts."""
    parser = found.parser(0, schemas=schemas, around=Around(gap))
    pieces = [p for text in texts for p in parser.push(text)] + parser.flush()
    calls, ids = [], []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
                ids.append(piece.id)
            calls[-1][1] += piece.arguments
    said = "".join(p.text for p in pieces if isinstance(p, Text))
    return said, [[name, json.loads(text)] for name, text in calls], ids, parser


@families
def test_the_way_of_writing_is_found(family):
    found, _ = learned(family)
    assert found.calls is not None, found.why
    assert found.calls.name == LEARNED[family][1], found.calls
    assert "learned" in found.why


@pytest.mark.matrix
@families
@pytest.mark.parametrize("content", ["", "I look."])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_the_template_writes_is_read_wherever_it_is_cut(family, content, count):
    found = learned(family)[0].calls
    names = ["get_weather", "other.tool", "get_weather"][:count]
    if family == "Llama 4":  # its calls have no marker, so none follows a text
        content = ""
    calls = [call(i, ARGUMENTS, name) for i, name in enumerate(names)]
    text = answer(family, content, *calls)
    said, read, ids, parser = parsed(found, text)
    assert (said, read) == (content, [[name, ARGUMENTS] for name in names])
    assert parser.ends_with_call
    assert len(set(ids)) == count
    assert parsed(found, *text)[:2] == (said, read)
    for cut in range(0, len(text), 7):
        assert parsed(found, text[:cut], text[cut:])[:2] == (said, read)


@families
def test_a_call_without_arguments_is_read(family):
    found = learned(family)[0].calls
    _, read, _, parser = parsed(found, answer(family, "", call(0, {}), call(1, {"days": 1})))
    assert read == [["get_weather", {}], ["get_weather", {"days": 1}]]
    assert parser.num_closed == 2


@families
def test_a_call_that_is_cut_off_is_not_complete(family):
    found = learned(family)[0].calls
    text = answer(family, "", call(0, {"city": "Paris", "days": 3}))
    for end in range(len(text) - 1):
        parser = found.parser(0, schemas=SCHEMAS)
        parser.push(text[:end])
        parser.flush()
        assert parser.num_closed <= parser.num_calls <= 1
        if text.index("Paris") >= end:
            assert not parser.num_closed


def test_ids_are_as_the_family_writes_them():
    kimi = learned("Kimi K2")[0].calls
    text = answer("Kimi K2", "", call(0, {}), call(1, {}, "other.tool"))
    assert parsed(kimi, text)[2] == ["functions.get_weather:0", "functions.other.tool:1"]
    assert parsed(kimi, text.replace(":1<", ":7<"))[2][1] == "functions.other.tool:7"
    given = learned("Mistral, with ids")[0].calls
    text = answer("Mistral, with ids", "", call(0, {}), call(1, {}))
    assert parsed(given, text)[2] == ["call12340", "call12341"]


def test_a_template_that_takes_nine_characters_only_gets_such_ids():
    source = template("Ministral").replace(
        "{%- for m in messages %}",
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{%- if c.id | length != 9 %}"
        "{{- raise_exception('nine') }}{%- endif %}{%- endfor %}",
    )
    found = learn_format(ChatTemplate(source, tokenizer())).calls
    (number,) = parsed(found, '[TOOL_CALLS]f[ARGS]{"a": 1}')[2]
    assert re.fullmatch("[A-Za-z0-9]{9}", number)


def test_types_come_from_the_tag_or_from_the_schema():
    deepseek, glm = (learned(name)[0].calls for name in ("DeepSeek V3.2", "GLM 4.5"))
    text = answer("DeepSeek V3.2", "", call(0, {"a": "7", "b": 7}))
    assert parsed(deepseek, text, schemas={})[1] == [["get_weather", {"a": "7", "b": 7}]]
    text = answer("GLM 4.5", "", call(0, {"city": "7", "days": 7}))
    assert parsed(glm, text)[1] == [["get_weather", {"city": "7", "days": 7}]]


def test_what_only_looks_like_a_call_is_text():
    for family, text in {
        "Llama 4": "[see](https://x.org) and [f(1)]",
        "Phi-4-mini": "import functools, then functools.cache",
        "GLM 4.5": "write <tool_call> and then <tool_call>{}",
        "DeepSeek V3.1": "<\uff5ctool\u2581calls\u2581begin\uff5c>nothing",
        "LFM2": "the mark <|tool_call_start|> begins it",
        "Gemma 4": "a <|tool_call>call: f(x)",
    }.items():
        found = learned(family)[0].calls
        for texts in ([text], text):
            said, calls, _, _ = parsed(found, *texts)
            assert (said, calls) == (text, []), family


def test_a_text_that_is_not_quoted_as_python_does_is_read():
    found = learned("LFM2")[0].calls
    text = "<|tool_call_start|>[get_weather(city='It's \"so\"', days=3, list=[1, None,])]"
    assert parsed(found, text)[1] == [
        ["get_weather", {"city": 'It\'s "so"', "days": 3, "list": [1, None]}]
    ]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "value", deep_but(["\\'", ", ", "{a"], ["\\'", '\\"', "'", '"', ", ", "( ", "a ", "{a", "\\"])
)
@pytest.mark.parametrize("begin", ["", "[", "['", '["', "{"])
def test_a_long_value_takes_little_time(value, begin):
    """Squared, its length would take minutes."""
    long = begin + value * 60_000
    for family, text in {
        "LFM2": f"<|tool_call_start|>[get_weather(more={long}, days=1)]<|tool_call_end|>",
        "Seed-OSS": "<seed:tool_call>\n<function=get_weather>\n<parameter=more>\n"
        f"{long}\n</parameter>\n</function>\n</seed:tool_call>",
        "Gemma 4": f"<|tool_call>call:get_weather{{more:{long}}}<tool_call|>",
        "Granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {{"more": {long}}}}}]',
    }.items():
        parser = learned(family)[0].calls.parser(0, schemas=SCHEMAS)
        assert parser.push(text) + parser.flush()


ATOMS = sorted(
    {part for family in LEARNED for part in re.findall(r"<[^<>]*>|\[\w+\]|\w+|\W", template(family))
     if len(part) < 40 and part.strip()} - {"{", "%"}
)  # fmt: skip


@pytest.mark.parametrize("family", deep_but([*LEARNED][::16], LEARNED))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_text_is_a_fault_and_no_cut_matters(family, data):
    found = learned(family)[0].calls
    whole = answer(family, "", call(0, {"city": "x", "list": [1]}), call(1, {}))
    start = data.draw(st.integers(0, len(whole)))
    text = whole[:start] + "".join(
        data.draw(
            st.lists(st.sampled_from(ATOMS) | st.text(max_size=3) | st.just(whole), max_size=9)
        )
    )

    def told(*texts):
        parser = found.parser(0, schemas=SCHEMAS)
        pieces = [p for one in texts for p in parser.push(one)] + parser.flush()
        joined = []
        for piece in pieces:
            if isinstance(piece, Text):
                same = joined and joined[-1][0] == "text"
                joined.append(("text", joined.pop()[1] + piece.text if same else piece.text))
            elif piece.name is not None:
                joined.append((piece.name, piece.arguments))
            else:
                joined.append((joined[-1][0], joined.pop()[1] + piece.arguments))
        return joined, parser.num_closed, parser.ends_with_call

    assert told(*text) == told(text)


@pytest.mark.matrix
@families
@pytest.mark.parametrize("text", ["word ", " ", "\n", "[", "{", "<", '"', "'", "=", ",", "a:"])
def test_little_is_held_back_so_that_time_is_linear(family, text):
    found = learned(family)[0].calls
    whole = answer(family, "", call(0, {"city": "x", "days": 1}))
    for begun in (0, 8, whole.index("get_weather") + 4, whole.index("city") + 2, len(whole)):
        parser = found.parser(0, schemas=SCHEMAS)
        parser.push(whole[:begun])
        most = 0
        for _ in range(1500 // len(text)):
            parser.push(text)
            most = max(most, len(parser._held))
        assert most <= 1100


FORCED = [*LEARNED]


def use(family, tools, **fields):
    return tool_use(GenerateCall(tools=tools, **fields), learned(family)[0])


def strict(*names):
    chosen = [t["function"] for t in TOOLS if t["function"]["name"] in names]
    return [{"type": "function", "function": {**f, "strict": True}} for f in chosen]


@pytest.mark.parametrize("family", deep_but(FORCED[::3], FORCED))
@pytest.mark.parametrize("tools", [TOOLS, strict("get_weather", "other.tool")], ids=["", "strict"])
def test_a_forced_call_is_what_the_template_writes(family, tools, allows):
    found = learned(family)[0].calls
    good = answer(family, "", call(0, {"city": "P", "days": 3}))
    bad = answer(family, "", call(0, {"city": "P", "days": {"x": 1}}))
    for fields in ({}, {"tool_name": "get_weather"}):
        used = use(family, tools, tool_choice="required", **fields)
        behind = len(used.opening)
        if "with ids" in family and fields:
            behind = good.index("[ARGS]") + len("[ARGS]")
        if family not in ("Mistral, with ids", "Kimi K2"):
            assert good.startswith(used.opening)
        assert allows(used.form, good[behind:]), good[behind:]
        assert not allows(used.form, bad[behind:]), bad[behind:]
        parser = found.parser(0, used.opening, SCHEMAS)
        pieces = parser.push(good[behind:]) + parser.flush()
        assert pieces[0].name == "get_weather"
        told = "".join(p.arguments for p in pieces if isinstance(p, ToolCallDelta))
        assert json.loads(told) == {"city": "P", "days": 3}
        assert parser.num_closed == 1


@pytest.mark.parametrize("family", deep_but(FORCED[1::3], FORCED))
def test_several_forced_calls_are_what_the_template_writes(family, allows):
    used = use(family, TOOLS, tool_choice="required")
    text = answer(family, "", call(0, {"city": "P", "days": 3}), call(1, {"city": "", "days": 1}))
    assert allows(used.form, text[len(used.opening) :])
    other = text.replace("get_weather", "unknown")
    assert not allows(used.form, other[len(used.opening) :])


@pytest.mark.parametrize("family", deep_but(FORCED[2::3], FORCED))
def test_calls_of_strict_functions_in_text_fit_their_schema(family, allows):
    used = use(family, strict("get_weather"))
    said = "" if family == "Llama 4" else "I look."  # its calls only begin a response
    good = answer(family, said, call(0, {"city": "P", "days": 3}))
    bad = answer(family, said, call(0, {"city": "P", "days": {"x": 1}}))
    assert allows(used.form, good)
    assert allows(used.form, "no call")
    assert not allows(used.form, bad)


@pytest.mark.parametrize("family", FORCED)
def test_a_forced_call_of_a_function_without_a_schema_can_end(family, allows):
    names = [{"type": "function", "function": {"name": t["function"]["name"]}} for t in TOOLS]
    used = use(family, names, tool_choice="required")
    text = answer(family, "", call(0, {"city": "a < b", "days": 3}), call(1, {}, "other.tool"))
    assert allows(used.form, text[len(used.opening) :])
    assert not allows(used.form, text[len(used.opening) : -len("get_weather")])


def test_lists_and_objects_inside_of_tags_fit_the_schema(allows):
    inner = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
             "required": ["a"]}  # fmt: skip
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": inner},
              "more": {"type": "object"}}, "required": ["list"]}  # fmt: skip
    tool = {"name": "get_weather", "parameters": schema, "strict": True}
    used = use("MiniMax M3", [{"type": "function", "function": tool}], tool_choice="required")
    for arguments, fits in (
        ({"list": [{"a": 1}, {"a": 2, "b": "x < y"}], "more": {"k": {"l": "v"}}}, True),
        ({"list": []}, True),
        ({"list": [{"b": "x"}]}, False),
        ({"list": [{"a": "x"}]}, False),
        ({"list": [1]}, False),
        ({"list": [], "more": "text"}, False),
    ):
        text = answer("MiniMax M3", "", call(0, arguments))
        assert allows(used.form, text[len(used.opening) :]) == fits, arguments
        if fits:
            found = learned("MiniMax M3")[0].calls
            read = parsed(found, text, schemas={"get_weather": schema})[1]
            assert read == [["get_weather", arguments]]


def test_a_schema_that_tags_inside_of_tags_cannot_keep_is_refused():
    for part in (
        {"type": "array", "minItems": 1},
        {"type": "object", "properties": {"a b": {"type": "string"}}},
        {"$ref": "#"},
        {"anyOf": [{"type": "object", "properties": {k: {}}} for k in "ab"]},
    ):
        schema = {"type": "object", "properties": {"list": part}, "required": ["list"]}
        tool = {"name": "f", "parameters": schema, "strict": True}
        with pytest.raises(InvalidRequest, match="cannot be kept"):
            use("MiniMax M3", [{"type": "function", "function": tool}])
        loose = {"name": "f", "parameters": schema}
        assert use("MiniMax M3", [{"type": "function", "function": loose}], tool_choice="required")
