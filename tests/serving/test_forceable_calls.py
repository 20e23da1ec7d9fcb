"""Every format of calls can be forced: what the template writes is allowed, and nothing else.

For every family: a call of any function, of a named one, of a strict one in free text, and a
structured output after a thought. The grammar accepts the template's own call, and the parser
reads it back.
"""

import json
import re

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.grammars.compiler import Compiler
from cpuserve.serving.calls.call import GenerateCall, Prompt
from cpuserve.serving.calls.events import ToolCallDelta
from cpuserve.serving.tools.families import family as family_of
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.use import response_structure, tool_use
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.rendered_calls import NAME, ONE_CALL, OTHER, SOURCES, TOOLS, learned, written
from tests.helpers.tiny import tiny_end_ids, tiny_model

GOOD = {"city": 'Paris "x"\nand', "days": 3}
families = pytest.mark.parametrize("family", SOURCES)
STRICT = [
    {"type": "function", "function": {
        **tool["function"], "strict": True,
        "parameters": {**tool["function"]["parameters"], "additionalProperties": False}}}
    for tool in TOOLS
]  # fmt: skip


def use(family, tools=TOOLS, **fields):
    return tool_use(GenerateCall(tools=tools, messages=[], **fields), learned(family)[0])


def after(opening, text):
    """The rest of a response behind the beginning that the server forces."""
    if text.startswith(opening):
        return text[len(opening) :]
    parts = [re.escape(part) for part in re.split(r"(?<=CALL_ID\])\w+", opening)]
    found = re.match(r"\w+".join(parts), text)  # the server writes an id of its own
    assert found, (opening, text)
    return text[found.end() :]


def answer(family, *calls, said=""):
    """What the template writes after the thought that the prompt of some families begins."""
    text = written(family, *calls, said=said)
    tags = learned(family)[0].tags
    if family == "Kimi K3":
        text = text.removeprefix(tags.close).removeprefix("<|close|>response<|sep|>")
    return text.removesuffix("\n")


def ends_of(text):
    """A text, and the same without the end mark: a single call may end before it."""
    return [text, text.removesuffix("\n</tool_call>")]


def read(family, opening, text):
    used = use(family)
    parser = used.parser(0, Prompt([]), opening)
    found = []
    for piece in parser.push(text) + parser.flush():
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                found.append([piece.name, ""])
            found[-1][1] += piece.arguments
    return [(name, json.loads(arguments)) for name, arguments in found]


@families
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["loose", "strict"])
@pytest.mark.parametrize("fields", [{}, {"tool_name": NAME}], ids=["any", "named"])
def test_a_forced_call_is_what_the_template_writes(family, tools, fields, allows):
    used = use(family, tools, tool_choice="required", **fields)
    good = after(used.opening, answer(family, (NAME, GOOD)))
    assert any(allows(used.form, text) for text in ends_of(good)), (used.opening, good)
    assert read(family, used.opening, good) == [(NAME, GOOD)]
    wrong = [{"city": "P", "days": "x y"}, {"city": "P"}, {"city": "P", "days": 1.5}]
    for arguments in wrong:
        bad = after(used.opening, answer(family, (NAME, arguments)))
        assert not any(allows(used.form, text) for text in ends_of(bad)), bad
    if not fields:
        bad = after(used.opening, answer(family, ("unknown", GOOD)))
        assert not any(allows(used.form, text) for text in ends_of(bad)), bad
    assert not allows(used.form, "I look."), family


@families
def test_several_forced_calls_are_what_the_template_writes(family, allows):
    if family in ONE_CALL:
        return
    used = use(family, tool_choice="required")
    text = answer(family, (NAME, GOOD), (OTHER, {"city": "", "days": 1}))
    good = after(used.opening, text)
    assert allows(used.form, good), good


@families
def test_calls_of_strict_functions_in_text_fit_their_schema(family, allows):
    form = use(family, STRICT).form
    good = answer(family, (NAME, GOOD))
    assert allows(form, good), good
    for arguments in ({"city": "P"}, {"city": "P", "days": "x y"}):
        bad = answer(family, (NAME, arguments))
        assert not allows(form, bad), bad
    header = {"gpt-oss": "<|channel|>final<|message|>"}.get(family, "")
    turns = learned(family)[0].turns
    if turns is not None and turns.begun:
        header = turns.text
    for text in ("No call.", "a [b] <c> {d} (e)", "[get] it"):
        assert allows(form, header + text), text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


@families
def test_a_structured_output_comes_after_a_thought_with_calls_beside_it(family, allows):
    found = learned(family)[0]
    call = GenerateCall(tools=TOOLS, messages=[], **FORM)
    used = tool_use(call, found)
    assert used.opens_after_thought == found.thinks
    form = response_structure(call, used)
    header = {"gpt-oss": "<|channel|>final<|message|>"}.get(family, "")
    if found.turns is not None:
        header = found.turns.text
    assert allows(form, header + '{"a": 1}'), form
    assert not allows(form, header + '{"a": "x"}')
    assert not allows(form, header + "I look.")
    good = answer(family, (NAME, GOOD))
    assert allows(form, good), good
    bad = answer(family, (NAME, {"city": "P", "days": "x y"}))
    assert allows(form, bad), "the function is not strict"
    assert not allows(form, answer(family, ("unknown", GOOD)))


@families
def test_a_structured_output_without_tools_comes_after_a_thought(family, allows):
    found = learned(family)[0]
    call = GenerateCall(messages=[], **FORM)
    used = tool_use(call, found)
    assert (used is not None and used.opens_after_thought) == found.thinks
    assert allows(response_structure(call, used), '{"a": 1}')
    assert not allows(response_structure(call, used), '{"a": "x"}')


# A schema with the parts that writings other than JSON have rules of their own for.
RICH = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b c"]},
        "place": {"$ref": "#/$defs/place"},
        "list": {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 1,
                 "maxItems": 2},
        "sure": {"type": "boolean"},
        "more": {"type": "object", "additionalProperties": {"type": "string"}},
        "any": {},
    },
    "required": ["kind", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {
        "name": {"type": "string"}, "in": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    }, "required": ["name"], "additionalProperties": False}},
}  # fmt: skip
FITS = [
    {"kind": "a", "place": {"name": "x"}},
    {"kind": "b c", "place": {"name": "x", "in": {"name": "y"}}, "list": [1, None], "sure": True},
    {"kind": "a", "place": {"name": "x", "in": None}, "more": {"k": "v", "l": "w"}},
    {"kind": "a", "place": {"name": "x"}, "list": [1], "any": [1, "x", {"k": False}]},
]
UNFIT = [
    {"kind": "c", "place": {"name": "x"}},
    {"kind": "a"},
    {"kind": "a", "place": {"name": 1}},
    {"kind": "a", "place": {"name": "x", "other": 1}},
    {"kind": "a", "place": {"name": "x"}, "list": []},
    {"kind": "a", "place": {"name": "x"}, "list": [1, 2, 3]},
    {"kind": "a", "place": {"name": "x"}, "list": ["x"]},
    {"kind": "a", "place": {"name": "x"}, "sure": 1},
    {"kind": "a", "place": {"name": "x"}, "more": {"k": 1}},
    {"kind": "a", "place": {"name": "x"}, "extra": 1},
]


@pytest.mark.parametrize("family", ["LFM2", "OLMo 3", "Gemma 4", "gpt-oss", "Seed-OSS"])
def test_the_schema_of_a_strict_function_is_kept(family, allows):
    tool = {"name": NAME, "parameters": RICH, "strict": True}
    used = use(family, [{"type": "function", "function": tool}], tool_choice="required")
    for arguments in FITS:
        text = after(used.opening, answer(family, (NAME, arguments)))
        assert allows(used.form, text), text
    for arguments in UNFIT:
        text = after(used.opening, answer(family, (NAME, arguments)))
        assert not allows(used.form, text), text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_words_in_tags_may_be_those_of_python(name, allows):
    """Qwen3-Coder's template writes True, although lists and objects are JSON."""
    found = family_of(name)
    schema = {"type": "object", "properties": {"a": {"type": ["boolean", "null"]}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    call = GenerateCall(tools=tools, messages=[], tool_choice="required")
    used = tool_use(call, LearnedFormat(found))
    for word, value in (("True", True), ("false", False), ("None", None), ("null", None)):
        whole = found.written([("f", {"a": "WORD"})]).replace("WORD", word)
        text = whole.removeprefix(used.opening)
        assert any(allows(used.form, one) for one in ends_of(text)), text
        pieces = used.parser(0, Prompt([]), used.opening).push(text)
        assert json.loads("".join(p.arguments for p in pieces)) == {"a": value}
    bad = found.written([("f", {"a": "WORD"})]).removeprefix(used.opening)
    assert not any(allows(used.form, one) for one in ends_of(bad))


@families
def test_a_format_writes_calls_that_it_reads(family):
    """So calls of earlier turns are written for templates that leave them out."""
    found = learned(family)[0].calls
    calls = [(NAME, GOOD), (OTHER, {"city": "x", "days": 0})]
    text = found.written(calls)
    header = learned(family)[0].turns
    if header is not None:
        text = text.removeprefix(header.begun)
    assert read(family, "", text) == calls


def test_braces_are_sorted_where_the_family_sorts_them(allows):
    found = LearnedFormat(family_of("gemma4"))
    tool = {"name": "f", "parameters": {"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}}
    tools = [{"type": "function", "function": tool}]
    used = tool_use(GenerateCall(tools=tools, messages=[], tool_choice="required"), found)
    assert allows(used.form, "f{a:1,b:2}<tool_call|>")
    assert not allows(used.form, "f{b:2,a:1}<tool_call|>")


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        (False, "no value"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"enum": []}, "an empty enum"),
        ({"type": "date"}, "the type 'date'"),
    ],
    ids=str,
)
def test_a_schema_that_no_rule_can_express_is_refused_for_strict_functions(name, part, why):
    tool = {"name": "f", "parameters": {"properties": {"a": part}, "required": ["a"]}}
    tools = [{"type": "function", "function": {**tool, "strict": True}}]
    found = LearnedFormat(family_of(name))
    with pytest.raises(InvalidRequest, match=why):
        tool_use(GenerateCall(tools=tools, messages=[], tool_choice="required"), found)
    loose = [{"type": "function", "function": tool}]
    assert tool_use(GenerateCall(tools=loose, messages=[], tool_choice="required"), found).form


# The marks of each family as they are in its tokenizer: one added token for each.
MARKS = {
    "Gemma 4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "LFM2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "gpt-oss": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"],
    "GLM 4.5": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
                "</arg_value>"],
    "Seed-OSS": ["<seed:tool_call>", "</seed:tool_call>"],
    "Kimi K2": ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
}  # fmt: skip


@pytest.mark.parametrize("family", MARKS)
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["loose", "strict"])
def test_marks_may_be_special_tokens(tmp_path, family, tools):
    content = json.loads(Tokenizer.load(tiny_model("llama")).to_json())
    first = 1 + max(
        [*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]
    )
    content["added_tokens"] += [
        {"id": first + i, "content": mark, "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for i, mark in enumerate(MARKS[family])
    ]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    compiler = Compiler(tmp_path, 512, sorted(tiny_end_ids("llama")))
    loaded = Tokenizer.load(tmp_path)

    def allows(form, text):
        matcher = compiler.compile(compiler.prepare(*form.key))
        ids = loaded.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for fields in ({"tool_choice": "required"}, {"tool_choice": "required", "tool_name": NAME}):
        used = use(family, tools, **fields)
        good = after(used.opening, answer(family, (NAME, GOOD)))
        assert max(loaded.encode(good, add_special_tokens=False)) >= first
        assert allows(used.form, good), good
        bad = after(used.opening, answer(family, (NAME, {"city": "P"})))
        assert not allows(used.form, bad), bad
    if tools is STRICT:
        form = use(family, tools).form
        assert allows(form, answer(family, (NAME, GOOD)))
        assert not allows(form, answer(family, (NAME, {"city": "P"})))
