"""What calls of strict functions must look like; the matching itself is llguidance's."""

import json
import re

import numpy as np
import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.grammars.compiler import (
    Compiler,
    GrammarError,
    with_other_tokens,
    with_special,
)
from cpuserve.sampling.grammar_marks import OTHER_TOKENS
from cpuserve.sampling.structured import MAX_CHARS, StructuredOutputs
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text
from cpuserve.serving.tools.families import FORMATS as ALL
from cpuserve.serving.tools.families import HERMES, QWEN3_CODER
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.use import response_structure, tool_use
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

FORMATS = [found for found in ALL if found is not HARMONY]  # test_forceable_calls has harmony
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/s"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"s": {"type": "string"}}}  # fmt: skip


def tool(name, schema=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def use(*tools, found=HERMES, **fields):
    return tool_use(GenerateCall(tools=list(tools), **fields), LearnedFormat(found))


@pytest.fixture(scope="module")
def matcher_behind():
    """Return the matcher of a grammar behind a text; None if the grammar does not allow it."""
    compiler = Compiler(tiny_model("llama"), 512, sorted(tiny_end_ids("llama")))
    tokenizer = Tokenizer.load(tiny_model("llama"))

    def behind(form, text):
        matcher = compiler.compile(compiler.prepare(*form.key))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher if matcher.try_consume_tokens(ids) == len(ids) else None

    return behind


@pytest.fixture
def matches(matcher_behind):
    """Whether a grammar allows a text, and no more behind it."""
    return lambda *of: (found := matcher_behind(*of)) is not None and found.is_stopped()


@pytest.fixture
def allows(matcher_behind):
    """Whether a grammar allows a text, behind which more may follow."""
    return lambda *of: (found := matcher_behind(*of)) is not None and found.is_accepting()


@pytest.mark.parametrize("found", [HERMES, LLAMA3_JSON], ids=lambda f: f.name)
def test_a_named_strict_function_gets_arguments_of_its_schema(matches, found):
    used = use(tool("f", CITY, strict=True), tool("g"), found=found,
               tool_choice="required", tool_name="f")  # fmt: skip
    assert used.form.role == "tools"
    for text, fits in (
        (' {"city": "P"}}', True),
        ('{"city": "P"}}', True),
        (' {"city": 1}}', False),
        (" {}}", False),
        (' {"city": "P"}', False),
        (' [["city"]]}', False),
    ):
        assert matches(used.form, text) == fits, text
        if fits:
            first, *rest = found.parser(0, used.opening).push(text)
            assert first.name == "f"
            arguments = first.arguments + "".join(piece.arguments for piece in rest)
            assert json.loads(arguments) == {"city": "P"}


@pytest.mark.parametrize("found", [HERMES, LLAMA3_JSON], ids=lambda f: f.name)
def test_a_required_call_names_a_function_and_fits_its_schema(matches, found):
    used = use(tool("f", CITY, strict=True), tool("g", CITY), found=found, tool_choice="required")
    key = {"hermes": "arguments", "llama3_json": "parameters"}[found.name]
    for name, arguments, fits in (
        ("f", '{"city": "P"}', True),
        ("f", '{"b": 1}', False),
        ("g", '{"city": "P"}', True),
        ("g", '{"b": 1}', False),
        ("g", "[1]", False),
        ("h", "{}", False),
    ):
        text = f'{name}", "{key}": {arguments}}}'
        assert matches(used.form, text) == fits, text
        if fits:
            pieces = found.parser(0, used.opening).push(text)
            assert pieces[0].name == name
            assert "".join(piece.arguments for piece in pieces) == arguments


def call_text(found, name, arguments):
    """Return the text that follows the forced beginning of a call, if no function is forced."""
    if found is QWEN3_CODER:
        values = json.loads(arguments).items()
        inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
        return f"{name}>\n{inside}</function>"
    key = {"hermes": "arguments", "llama3_json": "parameters"}[found.name]
    return f'{name}", "{key}": {arguments}}}'


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_required_call_names_an_offered_function_also_if_none_is_strict(matches, found):
    used = use(tool("f", CITY), tool("g"), found=found, tool_choice="required",
               parallel_tool_calls=False)  # fmt: skip
    for name, arguments in (("f", '{"city": "x"}'), ("g", '{"b": "x", "c": "y"}'), ("g", "{}")):
        text = call_text(found, name, arguments)
        assert matches(used.form, text), text
        pieces = found.parser(0, used.opening, used.schemas).push(text)
        assert pieces[0].name == name
        assert json.loads("".join(p.arguments for p in pieces)) == json.loads(arguments)
    for name in ("Paris", "fg", ""):
        assert not matches(used.form, call_text(found, name, "{}")), name


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_each_of_several_required_calls_names_an_offered_function(allows, found):
    used = use(tool("f"), tool("g"), found=found, tool_choice="required")
    between = {"llama3_json": "; "}.get(found.name, "\n</tool_call>\n") + used.opening
    end = "" if found is LLAMA3_JSON else "\n</tool_call>"
    one, two = call_text(found, "f", "{}"), call_text(found, "g", '{"b": "x"}')
    for text in (one, one + end, one + between + two, one + between + two + between + one + end):
        assert allows(used.form, text), text
        parser = found.parser(0, used.opening)
        pieces = parser.push(text) + parser.flush()
        names = [p.name for p in pieces if getattr(p, "name", "")]
        assert names == ["f", "g", "f"][: len(names)]
        assert parser.num_closed == len(names) == 1 + text.count(between)
    for text in (one + between, one + between + call_text(found, "h", "{}"), one + "Paris"):
        assert not allows(used.form, text), text


FORMS = {
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
               '{"city": "P"}', '{"city": 1}'),
    "object": ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    "regex": ({"structured_outputs": {"regex": "a/b+"}}, "a/bb", "ab"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
}  # fmt: skip


def form_or_calls(found, fields, **more):
    """Return what an answer with these fields and the functions f and g must look like."""
    call = GenerateCall(tools=[tool("f", CITY), tool("g")], **fields, **more)
    return response_structure(call, tool_use(call, LearnedFormat(found)))


def whole_calls(found, *calls):
    """Return the text of an answer that consists of these calls."""
    between = {"llama3_json": "; "}.get(found.name, "\n</tool_call>\n") + found.opening(None)
    end = "" if found is LLAMA3_JSON else "\n</tool_call>"
    return found.opening(None) + between.join(call_text(found, *call) for call in calls) + end


@pytest.mark.matrix
@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(("fields", "fits", "other"), FORMS.values(), ids=FORMS.keys())
def test_an_answer_with_tools_has_its_form_or_is_calls(allows, found, fields, fits, other):
    form = form_or_calls(found, fields)
    one, two = ("f", "{}"), ("g", '{"b": "x"}')
    assert allows(form, fits)
    for calls in ([one], [two, one]):
        text = whole_calls(found, *calls)
        assert allows(form, text), text
        parser = found.parser(0)
        pieces = parser.push(text) + parser.flush()
        assert [p.name for p in pieces if getattr(p, "name", "")] == [name for name, _ in calls]
    unknown = whole_calls(found, ("h", "{}"))
    is_object = found is LLAMA3_JSON and form.json_object
    for text in (other, "I look.", "" if is_object else unknown, fits + whole_calls(found, one)):
        assert not allows(form, text), text


def test_a_grammar_forms_the_whole_answer_also_with_tools(allows):
    form = form_or_calls(HERMES, {"structured_outputs": {"grammar": 'start: "<" /[a-z]+/ ">"'}})
    assert allows(form, "<tool>")
    assert not allows(form, whole_calls(HERMES, ("f", "{}")))


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_form_may_be_replaced_by_one_call_if_calls_may_not_be_parallel(allows, found):
    form = form_or_calls(found, FORMS["schema"][0], parallel_tool_calls=False)
    one = found.opening(None) + call_text(found, "f", "{}")
    assert allows(form, one)
    assert not allows(form, whole_calls(found, ("f", "{}"), ("g", "{}")))


def test_a_call_in_the_format_of_llama_3_may_begin_with_its_tag(allows):
    text = whole_calls(LLAMA3_JSON, ("f", "{}"))
    assert allows(form_or_calls(LLAMA3_JSON, FORMS["schema"][0]), "<|python_tag|>" + text)


def test_what_is_wrong_with_a_form_is_told_as_without_tools(matcher_behind):
    for schema, reason in (
        ({"uniqueItems": True}, "uniqueItems at #"),
        ({"$ref": "#"}, "no finite text"),
    ):
        fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        form = form_or_calls(HERMES, fields)
        assert form.role == "structured_outputs"
        with pytest.raises(GrammarError, match=reason) as raised:
            matcher_behind(form, "")
        assert "tool_call" not in str(raised.value)


def test_a_form_and_functions_that_are_too_long_together_are_refused():
    call = GenerateCall(structured_outputs={"regex": "a" * MAX_CHARS}, tools=[tool("f")])
    expected = rf"structured_outputs and tools have \d+ characters: at most {MAX_CHARS}"
    with pytest.raises(InvalidRequest, match=expected) as raised:
        response_structure(call, tool_use(call, LearnedFormat(HERMES)))
    assert raised.value.param == "structured_outputs"


PLAIN = "So < than {1} it [is]."


def city(found):
    """A schema of a city; in the format that does not quote strings, without a reference."""
    return CITY | {"properties": {"city": {"type": "string"}}} if found is QWEN3_CODER else CITY


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_calls_in_free_text_fit_the_schemas_of_strict_functions(allows, found):
    form = use(tool("f", city(found), strict=True), tool("g", CITY), found=found).form
    assert form.role == "tools"
    marker = "<|python_tag|>" if found is LLAMA3_JSON else ""
    good, bad = ("f", '{"city": "P"}'), ("f", '{"city": "P", "b": "x"}')
    for before in ("", PLAIN + marker, whole_calls(found, ("g", '{"b": "x"}')) + "\n"):
        for behind in ("", PLAIN, "\n" + whole_calls(found, good)):
            text = before + whole_calls(found, good) + behind
            assert allows(form, text), text
            names = ["f"] + (["f"] if "P" in behind and behind is not PLAIN else [])
            parser = found.parser(0, schemas={"f": city(found), "g": CITY})
            pieces = parser.push(text) + parser.flush()
            told = [p.name for p in pieces if getattr(p, "name", "")]
            assert told == (["g"] if before[:1] in "{<" and before else []) + names
        assert not allows(form, before + whole_calls(found, bad)), before
        assert allows(form, before + whole_calls(found, ("g", '{"b": "x"}'))), before
    for text in ("", PLAIN, "<tool", "<func", '{"name": "Bob", "city": "P"}', '{"f": {}}', "\n{"):
        assert allows(form, text), text
    unknown = whole_calls(found, ("h", "{}"))
    assert allows(form, unknown) == (found is LLAMA3_JSON)  # which may be an answer in JSON
    assert not allows(form, PLAIN + marker + unknown)


@pytest.mark.parametrize("found", [HERMES, LLAMA3_JSON], ids=lambda f: f.name)
def test_a_call_in_free_text_may_have_the_white_space_that_models_write(allows, found):
    form = use(tool("f", CITY, strict=True), found=found).form
    marker, key = ("<tool_call>", "arguments") if found is HERMES else ("", "parameters")
    for form_of_call in (
        '{"name":"f","KEY":{"city":VALUE}}',
        '\n{\n  "name": "f",\n  "KEY": {\n    "city": VALUE\n  }\n}',
        '{"type": "function", "name": "f", "KEY": {"city": VALUE}}',
    ):
        call = marker + form_of_call.replace("KEY", key)
        assert allows(form, call.replace("VALUE", '"P"')), call
        assert not allows(form, call.replace("VALUE", "1")), call


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_calls_in_place_of_a_form_fit_the_schemas_of_strict_functions(allows, found):
    tools = [tool("f", city(found), strict=True), tool("g")]
    call = GenerateCall(tools=tools, **FORMS["schema"][0])
    form = response_structure(call, tool_use(call, LearnedFormat(found)))
    assert allows(form, FORMS["schema"][1])
    assert allows(form, whole_calls(found, ("f", '{"city": "P"}'), ("g", '{"b": "x"}')))
    assert not allows(form, whole_calls(found, ("f", '{"b": "x"}')))


def test_special_tokens_in_free_text_are_all_but_the_marker():
    grammar = f"text: /a/{OTHER_TOKENS}<b>\nx: /c/"
    assert with_other_tokens(grammar, {"<b>": 7, "<c>": 9, "<d>": 3}) == (
        "text: /a/ | <[3,9]>\nx: /c/"
    )
    assert with_other_tokens(grammar, {"<b>": 7}) == grammar


def with_tokens(directory, *texts, special=True):
    """Write a tokenizer with further tokens to `directory`, and return the id of the first one."""
    content = json.loads(Tokenizer.load(tiny_model("llama")).to_json())
    first = 1 + max(
        [*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]
    )
    content["added_tokens"] += [
        {"id": first + i, "content": text, "special": special, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate(texts)
    ]  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return first


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_free_text_may_have_special_tokens_and_markers_may_be_some(tmp_path, found, special):
    """Models write thoughts between such tokens, and a call behind another one."""
    marker = "<|python_tag|>" if found is LLAMA3_JSON else "<tool_call>"
    with_tokens(tmp_path, marker, "</tool_call>", "<think>", special=special)
    tokenizer = Tokenizer.load(tmp_path)
    ends = sorted(tiny_end_ids("llama"))
    compiler = Compiler(tmp_path, 512, ends)
    form = use(tool("f", city(found), strict=True), found=found).form
    start = marker if found is LLAMA3_JSON else ""

    def matcher_behind(text):
        matcher = compiler.compile(compiler.prepare(*form.key))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher if matcher.try_consume_tokens(ids) == len(ids) else None

    good, bad = (
        "<think>Hm.<think>" + start + whole_calls(found, ("f", arguments))
        for arguments in ('{"city": "P"}', '{"b": "x"}')
    )
    assert matcher_behind(good + "</tool_call><think>" + good)
    assert matcher_behind(bad) is None
    mask = np.zeros(compiler.words, np.int32)
    begun = "<function=" if found is QWEN3_CODER else marker
    for text, ends_here in ((good, True), ("<think>Hm", True), ("Hm" + begun, False)):
        compiler.fill(matcher_behind(text), mask, ())
        allowed = [bool(mask[end // 32] >> (end % 32) & 1) for end in ends]
        assert allowed == [ends_here] * len(ends), text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("found", [HERMES, QWEN3_CODER], ids=lambda f: f.name)
def test_calls_may_be_written_with_special_tokens(tmp_path, found, special):
    """Models write these tokens, which the library calls special also if the tokenizer does not."""
    first = with_tokens(tmp_path, "<tool_call>", "</tool_call>", special=special)
    tokenizer = Tokenizer.load(tmp_path)
    compiler = Compiler(tmp_path, 512, sorted(tiny_end_ids("llama")))
    text = whole_calls(found, ("f", "{}"), ("g", "{}"))
    forced = use(tool("f"), tool("g"), found=found, tool_choice="required")
    for form, written, expected in (
        (form_or_calls(found, FORMS["schema"][0]), text, [0, 1, 0, 1]),
        (forced.form, text.removeprefix(forced.opening), [1, 0, 1]),
    ):
        matcher = compiler.compile(compiler.prepare(*form.key))
        ids = tokenizer.encode(written, add_special_tokens=False)
        assert [i - first for i in ids if i >= first] == expected
        assert matcher.try_consume_tokens(ids) == len(ids)


def test_special_tokens_are_found_in_the_texts_of_a_grammar_alone():
    grammar = (
        'start: "a<b>\\n" x | "<c><b>"\nx: %json {"const": "<b>"}\ny[suffix="<b>"]: /(.|\\n)*/'
    )
    assert with_special(grammar, {"<b>": 7}) == (
        'start: ( "a" ( "<b>" | <[7]> ) "\\n" ) x | ( "<c>" ( "<b>" | <[7]> ) )\n'
        'x: %json {"const": "<b>"}\ny[suffix="<b>"]: /(.|\\n)*/'
    )
    assert with_special(grammar, {}) == grammar


def test_a_function_without_a_schema_keeps_its_arguments_beside_a_strict_one(matches):
    used = use(tool("f", CITY, strict=True), tool("g"), found=QWEN3_CODER,
               tool_choice="required")  # fmt: skip
    assert matches(used.form, call_text(QWEN3_CODER, "g", '{"any": "x"}'))
    assert not matches(used.form, call_text(QWEN3_CODER, "f", '{"any": "x"}'))


def test_nothing_is_formed_where_nothing_is_left_to_force():
    strict, free = tool("f", CITY, strict=True), tool("g", CITY, strict=False)
    assert use(free).form is None
    assert use(strict, free, tool_choice="none") is None
    assert use(tool("g"), tool_choice="required", tool_name="g").form is None
    assert use(strict, tool("g"), tool_choice="required", tool_name="g").form is None


UNKEPT = {
    "keyword": {"not": {"type": "integer"}, "type": "integer"},
    "pattern": {"type": "array", "items": {"type": "string", "pattern": "("}},
}


@pytest.mark.parametrize("choice", [None, "get.it"], ids=["any", "named"])
@pytest.mark.parametrize("schema", UNKEPT.values(), ids=UNKEPT)
@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_forced_call_whose_schema_cannot_be_kept_is_free_unless_it_is_strict(
    allows, found, schema, choice
):
    bad = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    value = "7" if schema["type"] == "integer" else "[1]"
    fields = {"found": found, "tool_choice": "required", "tool_name": choice}
    text = call_text(found, "get.it", f'{{"a": {value}}}')
    if choice:
        head = "get.it>\n" if found is QWEN3_CODER else text[: text.index(":") + 1]
        text = text.removeprefix(head)
    tools = [tool("ok", CITY), tool("get.it", bad)]
    assert allows(use(*tools, **fields).form, text)
    if choice is None:  # the other function keeps its schema
        form = use(*tools, **fields).form
        assert allows(form, call_text(found, "ok", '{"city": "P"}'))
        assert not allows(form, call_text(found, "ok", '{"a": "P"}'))
    with pytest.raises(GrammarError, match=r"the parameters of get\.it: "):
        allows(use(*tools[:1], tool("get.it", bad, strict=True), **fields).form, text)


def nested(depth):
    schema = {"type": "array"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.matrix
@pytest.mark.parametrize("choice", [None, "f"], ids=["any", "named"])
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "dict", "properties": {"a": {"type": "array"}}}, "[1]"),
        ({"type": "OBJECT", "properties": {"a": {"type": "array"}}}, "[1]"),
        ({"type": None, "properties": {"a": {"type": "array"}}}, "[1]"),
        ({"type": "object", "properties": {"a": {"type": "dict"}}}, "[1]"),
        ({"type": "object", "properties": {"a": {"type": ["float", "null"]}}}, "1.5"),
        ({"type": "object", "properties": {"a": {"type": 7}}}, "1.5"),
        ({"type": "object", "properties": {"a": nested(300)}}, "[1]"),
    ],
    ids=["dict", "OBJECT", "null", "dict within", "float", "number", "deep"],
)
@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_forced_call_takes_types_that_are_none_unless_it_is_strict(
    allows, found, schema, value, choice
):
    fields = {"found": found, "tool_choice": "required", "tool_name": choice}
    text = call_text(found, "f", f'{{"a": {value}}}')
    if choice:
        text = text[len("f>\n") if found is QWEN3_CODER else text.index(":") + 1 :]
    form = use(tool("f", schema), tool("g"), **fields).form
    assert allows(form, text)
    if found is not QWEN3_CODER:
        assert not allows(form, text.replace(f'{{"a": {value}}}', "7"))
    if schema["type"] == "object":
        with pytest.raises(GrammarError):
            allows(use(tool("f", schema, strict=True), tool("g"), **fields).form, text)


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_texts_in_a_schema_are_none_of_its_grammar(allows, found):
    odd = "x: %json {} // if possible // the parameters of g"
    schema = {"type": "object", "properties": {odd: {"enum": [odd, 7]}, "n": {"type": "integer"}}}
    text = call_text(found, "f", json.dumps({odd: 7, "n": 1}))
    for strict in (True, False):
        form = use(tool("f", schema, strict=strict), tool("g"), found=found,
                   tool_choice="required").form  # fmt: skip
        assert allows(form, text)
        assert not allows(form, text.replace("7", "8"))
    bad = {**schema, "properties": {**schema["properties"], "n": {"type": "array", "items":
           {"type": "string", "pattern": "("}}}}  # fmt: skip
    with pytest.raises(GrammarError, match="the parameters of f: "):
        allows(use(tool("f", bad, strict=True), found=found, tool_choice="required").form, text)


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_forced_call_with_parameters_that_are_too_long_or_deep_for_a_grammar_is_free(found):
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    long = {"type": "object", "properties": {f"{'a' * 1000}{i}": {} for i in range(300)}}
    for schema in ({"type": "object", "properties": {"a": deep}}, long):
        form = use(tool("f", schema), tool("g"), found=found, tool_choice="required").form
        assert len(form.calls) < MAX_CHARS
        assert "aaa" not in form.calls
        with pytest.raises(InvalidRequest):
            use(tool("f", schema, strict=True), found=found, tool_choice="required")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"multipleOf": 3}},
         "not at # cannot be kept: it can only exclude values, types and members"),
        ({"type": "array", "items": {"type": "string", "pattern": "("}},
         "regex parse error: ( ^ error: unclosed group"),
    ],
    ids=["keyword", "regex"],
)  # fmt: skip
@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_schema_that_cannot_be_compiled_is_told_with_its_function(
    matcher_behind, found, schema, reason
):
    bad = {"type": "object", "properties": {"a": schema}}
    tools = [tool("ok", CITY, strict=True), tool("get.it", bad, strict=True)]
    for fields in ({"tool_choice": "required"}, {}, FORMS["schema"][0]):
        call = GenerateCall(tools=tools, **fields)
        with pytest.raises(GrammarError) as raised:
            matcher_behind(response_structure(call, tool_use(call, LearnedFormat(found))), "")
        message = re.sub(r"#/\S*", "#", str(raised.value))  # its place depends on the format
        assert message == f"the parameters of get.it: {reason}"


def test_an_error_in_a_grammar_of_the_client_quotes_it(matcher_behind):
    with pytest.raises(GrammarError, match=r"at 1.*start: %json"):
        matcher_behind(StructuredOutputs(grammar='start: %json {"not": {}}'), "")


def test_a_schema_that_is_no_json_is_refused():
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="cannot be kept") as raised:
        use(tool("f", deep, strict=True), tool_choice="required")
    assert raised.value.param == "tools"
    call = GenerateCall(tools=[tool("f", deep, strict=True)], **FORMS["schema"][0])
    with pytest.raises(InvalidRequest, match="cannot be kept"):
        response_structure(call, tool_use(call, LearnedFormat(HERMES)))


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("written", ["", "Par", "\r\n"], ids=["empty", "cut", "space"])
def test_a_forced_call_without_a_name_leaves_no_text(found, written):
    for cut in range(len(written) + 1):
        parser = found.parser(0, found.opening(None))
        pieces = parser.push(written[:cut]) + parser.push(written[cut:]) + parser.flush()
        assert "".join(piece.text for piece in pieces).strip() == ""
        assert parser.num_calls == 0


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_text_like_the_opening_behind_a_forced_call_is_kept(found):
    opening = found.opening(None)
    parser = found.parser(0, opening)
    end = {"llama3_json": "; "}.get(found.name, "\n</tool_call>")
    rest = {"hermes": '", 7', "llama3_json": 'Par"}'}.get(found.name, "Par\n")
    pieces = parser.push(call_text(found, "f", "{}") + end + opening + rest) + parser.flush()
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == opening + rest


@pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
def test_a_text_ends_with_a_call_until_something_else_follows(found):
    one = found.opening(None) + call_text(found, "f", '{"a": "b"}')
    end = "; " if found is LLAMA3_JSON else "\n</tool_call>\n"
    for text, ends in (
        *((one + end[:at], True) for at in range(len(end) + 1)),
        *((one + end + one[:at], False) for at in range(1, len(one))),
        (one + end + one, True),
        *((one + end + other, False) for other in ("I", "<", "<|", "{")),
        *((one[:at], False) for at in range(len(one))),
    ):
        parser = found.parser(0)
        parser.push(text)
        parser.flush()
        assert parser.ends_with_call == ends, text
