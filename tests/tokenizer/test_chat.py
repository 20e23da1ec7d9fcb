# ruff: noqa: E501 templates are easier to read on one line
"""Chat templates: the features that models need, and what clients may send."""

import json

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.chat import ChatTemplate
from tests.helpers.bare_tokens import bare_tokens

TOKENS = bare_tokens(bos_token="<s>", eos_token="</s>")
HI = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source, messages=HI, /, **kwargs):
    return ChatTemplate(source, TOKENS).render(messages, **kwargs)


def test_messages_become_a_prompt():
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_requests_with_tools_take_the_template_for_tools():
    template = ChatTemplate("plain", TOKENS, "{{ tools[0].name }}")
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[]) == "plain"
    assert template.render(HI, tools=[{"name": "f"}]) == "f"
    assert template.tool_source == "{{ tools[0].name }}"
    assert ChatTemplate("{{ tools | length }}", TOKENS).render(HI, tools=[{}]) == "1"


def test_special_tokens_and_further_variables_are_there():
    assert render("{{ bos_token }}{{ eos_token }}{{ x }}", x=3) == "<s></s>3"


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ {'a': '<é>&'} | tojson }}", '{"a": "<é>&"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{{ f('a') }}", "<1><a>"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ '%s-%02d' % ('a', 7) }}{{ '{:>3}'.format(1) }}", "a-07  1"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}", "37"),
        ("{% set a, b = 'x', 'y' %}{{ b }}{{ a }}", "yx"),
        ("{{ messages[0].content.split('i')[0].strip() | upper }}", "H"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ (messages | first).content | trim | replace('H', 'h') }}", "hi"),
        ("{{ 7 // 2 }}{{ 2 ** 8 }}{{ 'ab' * 2 }}{{ -3 % 2 }}", "3256abab1"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | length }}", "2"),
        ("{{ tools is none }}{{ undefined_thing is defined }}", "TrueFalse"),
        ("{{ dict(a=1).items() | list }}", "[('a', 1)]"),
    ],
)
def test_what_templates_use_works(source, out):
    assert render(source) == out


def test_output_equals_transformers_on_published_style_templates():
    from transformers.utils import chat_template_utils

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "Be <terse> & kind."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>x</think>4"},
        {"role": "user", "content": "Ü"},
    ]
    sources = [
        CHATML,
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set c = m.content.split('</think>')[-1].lstrip('\\n') %}{% else %}{% set c = m.content %}"
        "{% endif %}[{{ m.role }}] {{ c | trim }}\n{% if loop.last %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}",
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set s = messages[0]['content'] %}\n"
        "    {%- set rest = messages[1:] %}\n{%- endif %}\n{{- s }}{% for m in rest %}\n"
        "    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
        "{% endif %}\n    {{- m.role ~ ':' ~ m.content }}\n{%- endfor %}",
    ]
    for source in sources:
        # A template that shows no tools gets a system message that describes them.
        given = tools if "tools" in source else None
        theirs = chat_template_utils.render_jinja_template(
            [messages], tools=given, chat_template=source, add_generation_prompt=True,
            **TOKENS.special_tokens,
        )[0][0]  # fmt: skip
        assert render(source, messages, tools=given) == theirs


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none_to_the_template(tools):
    # Templates test "if tools is not none", so an empty list would add an empty tool section.
    assert render("{{ tools is none }}", tools=tools) == "True"
    assert render("{{ tools is none }}", tools=[{"type": "function"}]) == "False"


def test_content_parts_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\] has type 'image_url'"):
        render(CHATML, [{"role": "user", "content": image}])


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (None, "messages must be"), ([], "messages must be"), ("hi", "messages must be"),
        ([1], r"messages\[0\] must be"), ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": 1, "content": "x"}], "role"), ([{"role": "", "content": "x"}], "role"),
        ([{"role": "a\n<|im_end|>", "content": "x"}], "role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": {"a": 1}}], "content"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] must have"),
        ([{"role": "user", "content": [7]}], r"content\[0\]"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], r"tool_calls\[0\]"),
        ([{"role": "assistant", "content": "", "tool_calls": 1}], "tool_calls must be a list"),
    ],
)  # fmt: skip
def test_wrong_messages_are_the_clients_error(messages, where):
    with pytest.raises(InvalidRequest, match=where) as caught:
        render(CHATML, messages)
    assert caught.value.status == 400


def test_tool_call_arguments_reach_the_template_as_objects():
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"x": [1, "é"]})}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[0].tool_calls[0].function.arguments.x[1] }}|{{ messages[0].content }}"
    assert render(source, messages) == "é|"


OBJECTS = "{% for n, v in call.function.arguments | items %}{{ n }}={{ v }}{% endfor %}"
DUMPED = "{{ call.function.arguments | tojson }}"
BOTH = (
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}"
)
TEXTS = "{{ '```json' + call.function.arguments + '```' }}"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("writes", "shown"),
    [(OBJECTS, "[]"), (DUMPED, "[{}]"), (BOTH, "[%s]"), (TEXTS, "[```json%s```]")],
    ids=["members", "dumped", "both", "text"],
)
@pytest.mark.parametrize(
    "written",
    ['{"text": "beginning and mo', "{", "no JSON", "[1]", "3", "null", '"a"', '{"a": "\\ud800"}',
     '{"a":' * 5000 + "1" + "}" * 5000, '{"a": %s}' % ("9" * 5000)],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_arguments_that_are_no_object_are_empty_or_the_text_itself(writes, shown, written):
    """A call that was cut off stays in the history, and the conversation goes on."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    source = "{%% for call in messages[-1].tool_calls or [] %%}[%s]{%% endfor %%}"
    # The messages of a probe end with the user's, so the template looks for the call.
    source = source.replace("messages[-1]", "(messages | selectattr('tool_calls') | first)")
    assert render(source % writes, messages) == (shown % written if "%s" in shown else shown)


@pytest.mark.parametrize("given", [None, "", {}, [], 5, [1], "missing"], ids=str)
def test_arguments_that_are_no_text_are_an_object(given):
    function = {"name": "f"} if given == "missing" else {"name": "f", "arguments": given}
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, messages) == "{}"


def test_developer_is_system_where_the_template_does_not_know_it():
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


LATE = [*HI, {"role": "system", "content": "Be kind."}]
REFUSES_LATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
LEAVES_OUT_LATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [REFUSES_LATE, LEAVES_OUT_LATE], ids=["refused", "left out"])
def test_a_late_system_message_that_would_be_lost_is_one_of_the_user(source):
    first = {"role": "system", "content": "Be."}
    known = "system: Be.\nuser: Hi\nuser: Be kind.\n"
    assert render(source, [first, *LATE]) == known
    assert render(source, [first, *LATE[:1], {**LATE[1], "role": "developer"}]) == known


@pytest.mark.parametrize("source", [REFUSES_LATE, LEAVES_OUT_LATE], ids=["refused", "left out"])
def test_a_late_system_message_between_calls_is_no_question_of_the_user(source):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
        {"role": "system", "content": "Go on."},
        {"role": "assistant", "content": "Yes."},
    ]
    assert "tool: Done.\n\nGo on.\nassistant: Yes.\n" in render(source, turns)


def test_a_late_system_message_stays_one_where_the_template_writes_it():
    assert render(CHATML, LATE, add_generation_prompt=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n"
    )


def test_no_template_says_what_to_do():
    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template"):
        render(None)


@pytest.mark.parametrize(
    "name",
    ["messages", "chat_template", "tokenize", "_x", "a-b", "self", "raise_exception"],
)
def test_reserved_variables_cannot_be_set(name):
    with pytest.raises(InvalidRequest, match="cannot be set"):
        render(CHATML, **{name: "x"})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__init__.__self__ }}", "{{ ''.format.__self__.__class__.mro() }}",
        "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}",
        "{{ '{0.__class__.__mro__}'.format('') }}", "{{ ''|attr('__class__') }}{{ x.y }}",
        "{{ raise_exception('because') }}", "{{ nothing.at.all }}", "{% if %}", "{{ 1 / 0 }}",
    ],
)  # fmt: skip
def test_escapes_and_mistakes_are_the_requests_error(source):
    with pytest.raises(InvalidRequest):
        render(source)


def test_the_templates_own_message_is_passed_on():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_may_change_lists_of_its_own_render():
    source = "{% set _ = messages.append(1) %}{{ messages | length }}{% set ids = [] %}" + (
        "{% set _ = ids.append(2) %}{{ ids }}"
    )
    assert [render(source) for _ in range(2)] == ["2[2]", "2[2]"]


def test_the_result_of_a_filter_is_written_as_a_list():
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_tools_have_the_names_that_templates_know():
    assert render("{{ xml_tools[0].function.name }}", tools=TOOLS) == "f"
    functions, _, date = render("{{ functions + ' on ' + datetime }}", tools=TOOLS).partition(
        " on "
    )
    assert json.loads(functions) == [TOOLS[0]["function"]]
    assert len(date) == len("2026-01-01")
    assert render("{{ functions is defined or tools is defined }}") == "True"


def test_a_template_does_not_change_the_callers_messages():
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
    copy = json.dumps(messages)
    render(CHATML, messages)
    assert json.dumps(messages) == copy


def test_a_long_honest_chat_is_within_the_limits():
    chat = [
        {"role": "user", "content": "word " * 2000},
        {"role": "assistant", "content": "ok"},
    ] * 500
    assert len(render(CHATML, chat)) > 5_000_000
