"""Calls of custom tools: the text in the arguments, wherever the response is cut."""

import json

import pytest

from cpuserve.sampling.structured import InputGrammar
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.custom import InputText, as_function
from cpuserve.serving.tools.families import HERMES, family
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.use import tool_use
from tests.serving.test_call_families import WRITTEN

TEXT = '*** Begin Patch\n+say("hi\\n")\t\u00fc\U0001f600\n*** End Patch\n'
OBJECT = json.dumps({"input": TEXT})


def cuts(text):
    """The text in pieces of one, two and seven characters, and whole."""
    return [[text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 7, len(text) or 1)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (OBJECT, TEXT),
        (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
        ('\n { "input" :\t"a" } ', "a"),
        ('{"input": "a"', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "\\q\\/\\ud83d\\ude00\\ud83dx\\ude00"}', "\\q/\U0001f600\ufffdx\ufffd"),
        ('{"input": ""}', ""),
        ("{}", ""),
        ("", ""),
        ('{"inp', ""),
        ('{"patch": "a"}', "a"),
        ('{"why": "b", "input": "a"}', "a"),
        ('{"why": "b", "text": "a"}', '{"why": "b", "text": "a"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("*** Begin Patch\n", "*** Begin Patch\n"),
        ('"quoted"', '"quoted"'),
        ("[1]", "[1]"),
        ("{ int x; }", "{ int x; }"),
    ],
)
def test_the_text_is_found_however_the_arguments_are_written_and_cut(arguments, text):
    for pieces in cuts(arguments):
        reader = InputText()
        found = "".join(map(reader.push, pieces)) + reader.flush()
        assert found == text, pieces


def test_the_text_arrives_while_it_is_written():
    reader = InputText()
    assert [reader.push(piece) for piece in ('{"input": "a', "b\\", 'n", ', "}")] == [
        "a",
        "b",
        "\n",
        "",
    ]


ANY = InputGrammar()


def edit(grammar=ANY):
    functions = [as_function("edit", "Edit files.", grammar), {"name": "weather"}]
    tools = [{"type": "function", "function": function} for function in functions]
    return GenerateCall(messages=[], tools=tools, custom_tools={"edit": grammar})


def read(found, pieces, **fields):
    """The (kind, text) of the pieces that a parser finds."""
    call = edit()
    call.tools += [{"type": "function", "function": {"name": name}} for name in "fg"]
    for name, value in fields.items():
        setattr(call, name, value)
    parser = tool_use(call, LearnedFormat(found)).parser(0, _Prompt, "")
    told = [p for piece in pieces for p in parser.push(piece)] + parser.flush()
    result = []
    for piece in told:
        if isinstance(piece, ToolCallDelta):
            if piece.id is not None:
                result.append([piece.name, ""])
                custom = piece.custom
            assert piece.custom == custom
            assert piece.call == sum(name != "text" for name, _ in result) - 1
            result[-1][1] += piece.arguments
        else:
            assert isinstance(piece, Text | Thought)
            if not result or result[-1][0] != "text":
                result.append(["text", ""])
            result[-1][1] += piece.text
    return result, parser


class _Prompt:
    thinks = continues = False


CITY = '{"city": "Paris"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "edit", "arguments": {OBJECT}}}\n</tool_call>\n'
              f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function=edit>\n<parameter=input>\n{TEXT}\n</parameter>\n"
                   "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\n"
                   "Paris\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": f'{{"name": "edit", "parameters": {OBJECT}}}; '
                   f'{{"name": "weather", "parameters": {CITY}}}',
    "mistral_args": f"[TOOL_CALLS]edit[ARGS]{OBJECT}[TOOL_CALLS]weather[ARGS]{CITY}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0"
               f"<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|><|tool_call_begin|>"
               f"functions.weather:1<|tool_call_argument_begin|>{CITY}<|tool_call_end|>"
               "<|tool_calls_section_end|>",
    "glm45": f"<tool_call>edit\n<arg_key>input</arg_key>\n<arg_value>{TEXT}</arg_value>\n"
             "</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris"
             "</arg_value>\n</tool_call>",
    "gemma4": f'<|tool_call>call:edit{{input:<|"|>{TEXT}<|"|>}}<tool_call|>'
              '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "openai": f"<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{OBJECT}"
              "<|call|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>"
              f"json<|message|>{CITY}<|call|>",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_custom_call_and_a_function_call_in_one_turn(name):
    for pieces in cuts(CALLS[name]):
        found, parser = read(family(name), pieces)
        assert found == [["edit", TEXT], ["weather", CITY]]
        assert parser.num_closed == 2
        assert parser.ends_with_call


HEAD = "<|channel|>commentary to=functions.edit <|message|>"


@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", "<|start|>assistant<|channel|>final", ""])
def test_harmony_may_write_the_text_itself(end):
    """gpt-oss writes patches like this; the token that ends the last call is not in the text."""
    for pieces in cuts(HEAD + TEXT + end):
        found, parser = read(HARMONY, pieces)
        assert found == [["edit", TEXT]]
        assert parser.last_closed
        assert parser.ends_with_call == bool(end), "without its end, max_tokens may have cut it"
        assert parser.num_closed == bool(end)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_each_family_may_make_several_calls_in_one_turn(name):
    found, parser = read(family(name), [WRITTEN[name]])
    assert [called for called, _ in found] == ["f", "g"]
    one, parser = read(family(name), [WRITTEN[name]], parallel_tool_calls=False)
    assert [called for called, _ in one][:1] == ["f"]
    assert parser.num_closed == 1
    assert parser.is_full


@pytest.mark.parametrize("per_piece", [1, 1000])
def test_a_custom_call_is_whole_when_the_parser_is_full(per_piece):
    """The response ends there, so nothing is flushed."""
    call = edit()
    call.parallel_tool_calls = False
    parser = tool_use(call, LearnedFormat(HERMES)).parser(0, _Prompt, "")
    written = '<tool_call>\n{"name": "edit", "arguments": {"patch": "a"}}\n</tool_call>'
    told = []
    for i in range(0, len(written), per_piece):
        told += parser.push(written[i : i + per_piece])
        if parser.is_full:
            break
    assert "".join(piece.arguments for piece in told) == "a"


def test_the_grammar_of_a_custom_tool_is_kept_on_channels_and_in_braces(allows):
    grammar = InputGrammar("regex", "ab+")
    for found, good in (
        (HARMONY, ("abb", '{"input": "abb"}')),
        (family("gemma4"), ('input:<|"|>abb<|"|>}<tool_call|>',)),
    ):
        forced = edit(grammar)
        forced.tool_choice, forced.tool_name = "required", "edit"
        used = tool_use(forced, LearnedFormat(found))
        for text in good:
            assert allows(used.form, text), text
            assert not allows(used.form, text.replace("abb", "c")), text
            pieces = used.parser(0, _Prompt, used.opening).push(text)
            assert "".join(p.arguments for p in pieces if isinstance(p, ToolCallDelta)) == "abb"
        assert tool_use(edit(grammar), LearnedFormat(found)).form is not None


def test_a_grammar_is_shown_to_the_model_and_kept():
    function = as_function("edit", "Edit files.", InputGrammar("lark", 'start: "a"\n'))
    assert function["description"].startswith("Edit files.\n\n")
    assert function["description"].endswith('Lark grammar:\nstart: "a"')
    use = tool_use(edit(InputGrammar("lark", 'start: "a"')), LearnedFormat(HERMES))
    assert "x-input-grammar" in use.form.calls
    assert tool_use(edit(), LearnedFormat(HERMES)).form is None, "any text needs no grammar"
