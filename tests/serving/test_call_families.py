# ruff: noqa: E501 calls are easier to read on one line
"""The table of families: each parser of vLLM's names reads and writes its family's calls."""

import json

import pytest

from cpuserve.config.fields import FIELDS
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text, ToolCallDelta
from cpuserve.serving.tools.base import WholeFormat
from cpuserve.serving.tools.families import family, hinted, names
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.thoughts import reasoning_tags
from cpuserve.serving.tools.use import tool_use
from tests.helpers.depth import deep_but

DSML, D, B = "\uff5cDSML\uff5c", "<\uff5ctool\u2581", "\uff5c>"
ONE = '{"city": "Paris", "days": 3}'
OBJECTS = f'[{{"name": "f", "arguments": {ONE}}}, {{"name": "g", "arguments": {{}}}}]'
INVOKE = (
    '<Xinvoke name="f">\n<Xparameter name="city"A>Paris</Xparameter>\n'
    '<Xparameter name="days"B>3</Xparameter>\n</Xinvoke>\n<Xinvoke name="g">\n</Xinvoke>\n'
)
DEEPSEEK = INVOKE.replace("X", DSML).replace("A", ' string="true"').replace("B", ' string="false"')
ARGS = "<arg_key>city</arg_key>_<arg_value>Paris</arg_value>_<arg_key>days</arg_key>_"
GLM = f"<tool_call>f_{ARGS}<arg_value>3</arg_value>_</tool_call>_<tool_call>g_</tool_call>"
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
PYTHON = "f(city='Paris', days=3), g()"
BRACES = "call:f{city:MParisM,days:3}"
# How the models of each parser write the call of f with ONE, and of g without arguments.
WRITTEN = {
    "apertus": f'<|tools_prefix|>[{{"f": {ONE}}}, {{"g": {{}}}}]<|tools_suffix|>',
    "cohere_command_r": 'Action:\n```json\n[\n    {\n        "tool_name": "f",\n        "parameters": '
        f'{ONE}\n    }},\n    {{\n        "tool_name": "g",\n        "parameters": {{}}\n    }}\n]```',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
        f'{ONE}}},\n    {{"tool_call_id": "1", "tool_name": "g", "parameters": {{}}}}\n]<|END_ACTION|>',
    "deepseek_v3": f"{D}calls\u2581begin{B}{D}call\u2581begin{B}function{D}sep{B}f\n```json\n{ONE}\n"
        f"```{D}call\u2581end{B}\n{D}call\u2581begin{B}function{D}sep{B}g\n```json\n{{}}\n```"
        f"{D}call\u2581end{B}{D}calls\u2581end{B}",
    "deepseek_v31": f"{D}calls\u2581begin{B}{D}call\u2581begin{B}f{D}sep{B}{ONE}{D}call\u2581end{B}"
        f"{D}call\u2581begin{B}g{D}sep{B}{{}}{D}call\u2581end{B}{D}calls\u2581end{B}",
    "deepseek_v32": f"<{DSML}function_calls>\n{DEEPSEEK}</{DSML}function_calls>",
    "deepseek_v4": f"<{DSML}tool_calls>\n{DEEPSEEK}</{DSML}tool_calls>",
    "functiongemma": f"<start_function_call>{BRACES}<end_function_call><start_function_call>call:g{{}}"
        "<end_function_call>".replace("M", "<escape>"),
    "gemma4": f"<|tool_call>{BRACES}<tool_call|><|tool_call>call:g{{}}<tool_call|>",
    "glm45": GLM.replace("_", "\n").replace("arg\n", "arg_").replace("tool\n", "tool_"),
    "glm47": GLM.replace(">_<", "><").replace("f_<", "f<").replace("g_<", "g<"),
    "granite": f"<|tool_call|>{OBJECTS}",
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {ONE}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "hunyuan_a13b": f"<tool_calls>{OBJECTS}</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        f"<|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_call_begin|>functions.g:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "llama3_json": f'{{"name": "f", "parameters": {ONE}}}; {{"name": "g", "parameters": {{}}}}',
    "llama4_json": f'{{"name": "f", "parameters": {ONE}}}; {{"name": "g", "parameters": {{}}}}',
    "llama4_pythonic": f"[{PYTHON}]",
    "pythonic": f"[{PYTHON}]",
    "minimax": "<tool_calls>\n" + OBJECTS[1:-1].replace("}, {", "}\n{") + "\n</tool_calls>",
    "minimax_m2": "<minimax:tool_call>\n" + INVOKE.replace("X", "").replace("A>", ">").replace(
        "B>", ">") + "</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]{OBJECTS}",
    "mistral_args": f"[TOOL_CALLS]f[ARGS]{ONE}[TOOL_CALLS]g[ARGS]{{}}",
    "nemotron_json": f"<TOOLCALL>{OBJECTS}</TOOLCALL>",
    "olmo3": "<function_calls>\n" + PYTHON.replace("), ", ")\n") + "\n</function_calls>",
    "openai": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        f"{ONE}<|call|><|start|>assistant to=functions.g<|channel|>commentary<|message|>{{}}<|call|>",
    "phi4_mini_json": f"functools{OBJECTS}",
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "seed_oss": QWEN.replace("tool_call>", "seed:tool_call>").replace(">\nParis\n", ">Paris").replace(
        ">\n3\n", ">3"),
}  # fmt: skip
WRITTEN["gemma4"] = WRITTEN["gemma4"].replace("M", '<|"|>')
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def test_the_options_know_the_parsers_of_the_table():
    choices = {field.name: field.all_choices for field in FIELDS}
    assert sorted(WRITTEN) == sorted(choices["tool_call_parser"][2:]) == names()
    known = [name for name in choices["reasoning_parser"][2:] if name != "openai_gptoss"]
    assert sorted(reasoning_tags()) == sorted(known), "harmony has channels"
    with pytest.raises(KeyError):
        family("unknown")


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_option_accepts_each_name_of_its_table_and_lists_them(option):
    field = next(field for field in FIELDS if field.name == option)
    for name in field.all_choices:
        assert field.parse(name.upper()) == name
    with pytest.raises(ValueError, match=r"choose one of auto, none, .*granite.*seed_oss"):
        field.parse("unknown")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
def test_the_calls_of_a_family_are_read(name, whole):
    parser = family(name).parser(0, schemas={"f": SCHEMA, "g": {}})
    text = WRITTEN[name]
    pieces = [p for part in ([text] if whole else text) for p in parser.push(part)]
    pieces += parser.flush()
    calls = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
    assert [[of, json.loads(text)] for of, text in calls] == [["f", json.loads(ONE)], ["g", {}]]
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == ""
    assert parser.ends_with_call


@pytest.mark.parametrize("name", names())
def test_parsers_of_a_class_share_the_keys_of_their_attributes(name):
    parser = family(name).parser(0, schemas={"f": SCHEMA, "g": {}})
    parser.push(WRITTEN[name])
    # CPython shares the keys of up to 30 attributes; more take 1.5 KB in each stream.
    assert len(vars(parser)) <= 30


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("schema", deep_but([SCHEMA], [SCHEMA, None]), ids=["schema", "free"])
def test_forced_calls_are_what_the_family_writes(name, schema, allows):
    found = family(name)
    functions = [{"name": "f", **({"parameters": schema} if schema else {})}, {"name": "g"}]
    tools = [{"type": "function", "function": function} for function in functions]
    call = GenerateCall(tools=tools, tool_choice="required")
    used = tool_use(call, LearnedFormat(found))
    begin = used.opening[-10:]
    text = WRITTEN[name].partition(begin)[2]
    assert text.startswith("f"), used.opening
    assert allows(used.form, text), text
    assert not allows(used.form, "h" + text[1:])
    parser = found.parser(0, used.opening, {"f": SCHEMA, "g": {}})
    assert not parser.num_closed
    parser.push(text)
    assert parser.num_closed == 2


def test_a_template_or_a_token_shows_a_family():
    assert hinted("List: <|tool_list_start|>", lambda _: False) == "lfm2"
    assert hinted("nothing", lambda text: text == "<|tool_call_start|>") == "lfm2"
    assert hinted("write functools[{", lambda _: False) == "phi4_mini_json"
    assert hinted("<tool_call>NAME\n<arg_key>", lambda _: False) == "glm45"
    assert hinted("<|python_start|>", lambda _: False) == "llama4_json"
    assert hinted("nothing", lambda _: False) is None
    assert isinstance(family("openai"), WholeFormat)
