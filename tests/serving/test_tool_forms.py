"""What a forced call of strict functions must look like; the matching itself is llguidance's."""

import json

import pytest

from cpuserve.engine.grammars.compiler import Compiler
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import GenerateCall
from cpuserve.serving.tools.hermes import HERMES
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.use import tool_use
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/s"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"s": {"type": "string"}}}  # fmt: skip


def tool(name, schema=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def use(*tools, found=HERMES, **fields):
    return tool_use(GenerateCall(tools=list(tools), **fields), found)


@pytest.fixture(scope="module")
def matches():
    """Whether a grammar allows a text, and no more behind it."""
    compiler = Compiler(tiny_model("llama"), 512, sorted(tiny_end_ids("llama")))
    tokenizer = Tokenizer.load(tiny_model("llama"))

    def matches(form, text):
        matcher = compiler.compile(compiler.prepare(*form.key))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_stopped()

    return matches


@pytest.mark.parametrize("found", [HERMES, LLAMA3_JSON], ids=lambda f: f.name)
def test_a_named_strict_function_gets_arguments_of_its_schema(matches, found):
    used = use(tool("f", CITY, strict=True), tool("g"), found=found,
               tool_choice="required", tool_name="f")  # fmt: skip
    assert used.form.field == "tools"
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
def test_a_required_call_names_a_function_and_only_strict_ones_have_a_schema(matches, found):
    used = use(tool("f", CITY, strict=True), tool("g", CITY), found=found, tool_choice="required")
    key = {"hermes": "arguments", "llama3_json": "parameters"}[found.name]
    for name, arguments, fits in (
        ("f", '{"city": "P"}', True),
        ("f", '{"b": 1}', False),
        ("g", '{"b": 1}', True),
        ("g", "[1]", False),
        ("h", "{}", False),
    ):
        text = f'{name}", "{key}": {arguments}}}'
        assert matches(used.form, text) == fits, text
        if fits:
            pieces = found.parser(0, used.opening).push(text)
            assert pieces[0].name == name
            assert "".join(piece.arguments for piece in pieces) == arguments


def test_nothing_is_formed_where_nothing_is_forced_or_strict():
    strict, free = tool("f", CITY, strict=True), tool("g", CITY, strict=False)
    assert use(strict).form is None
    assert use(free, tool_choice="required").form is None
    assert use(strict, free, tool_choice="required", tool_name="g").form is None


def test_a_schema_that_is_no_json_is_refused():
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="cannot be kept") as raised:
        use(tool("f", deep, strict=True), tool_choice="required")
    assert raised.value.param == "tools"
