"""How a model writes answers is learned from what its chat template renders."""

import json
import re

import pytest

from cpuserve.serving.calls.events import ToolCallDelta
from cpuserve.serving.tools.families import HERMES, QWEN3_CODER, family
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.learn import learn_format
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.thoughts import NO_THOUGHTS, reasoning_tags
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.helpers.call_templates import AS_JSON, GAP, GPT_OSS, JSON_CALL, LLAMA, TAGS, chatml

THOUGHT = "{{- '<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' }}{{- m.content }}"

READ = {
    "Hermes": (chatml(JSON_CALL), HERMES, ""),
    "Qwen 2.5": (chatml(GAP + JSON_CALL), HERMES, "\n"),
    "text left out": (chatml(JSON_CALL, "{{- '' if m.tool_calls else m.content }}"), HERMES, ""),
    "an empty thought": (chatml(GAP + JSON_CALL, THOUGHT, opened="<think>\\n"), HERMES, "\n"),
    "Qwen3-Coder": (chatml(GAP + TAGS.replace("VALUE", AS_JSON)), QWEN3_CODER, "\n"),
    "words of Python": (chatml(TAGS.replace("VALUE", "v | tojson if v is mapping or "
        "(v is iterable and v is not string) else v | string")), QWEN3_CODER, ""),
    "Llama 3": (LLAMA, LLAMA3_JSON, ""),
    "gpt-oss": (GPT_OSS, HARMONY, ""),
    "only instructions": (chatml("", tools='Write <tool_call>\\n{"name": NAME, "arguments": {}}'
        "\\n</tool_call> "), HERMES, "\n"),
}  # fmt: skip
# Templates that do not show how calls are written, or write them in a way that is not known.
UNKNOWN = {
    "a name is lost": (chatml(JSON_CALL.replace("f.name", "'f'")), "does not show how calls"),
    "escapes are lost": (
        chatml("""{{- '<own_call>{"name": "' + f.name + '", "arguments": {"text": "' }}
        {{- f.arguments.text }}{{- '"}}</own_call>' }}"""),
        "calls are written as <own_call>",
    ),
    "no calls": (chatml(""), "does not show how calls"),
    "the marker alone": (chatml("", tools="<tool_call> "), "does not show how calls"),
    "a fault with calls": (
        chatml("{{ raise_exception('never') }}"),
        "does not show how calls",
    ),
}
REFUSED = {
    "a fault always": ("{{ nothing.at.all }}", "does not render a request"),
    "no template": (None, "no chat template"),
}


@pytest.mark.parametrize(("source", "found", "gap"), READ.values(), ids=READ)
def test_a_format_that_reads_the_templates_calls_is_found(source, found, gap):
    answers = learn_format(ChatTemplate(source, tokenizer()))
    assert (answers.calls, answers.gap) == (found, gap), answers.why


def test_a_format_of_whole_answers_is_found_without_tools_too():
    plain = GPT_OSS.replace("{{ tools | tojson }}", "")
    answers = learn_format(ChatTemplate(plain, tokenizer()))
    assert (answers.calls, answers.whole) == (HARMONY, HARMONY)
    assert "system message describes tools" in answers.why
    assert learn_format(ChatTemplate(READ["Llama 3"][0], tokenizer())).whole is None


@pytest.mark.parametrize(("source", "why"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_cannot_be_rendered_has_no_calls(source, why):
    answers = learn_format(ChatTemplate(source, tokenizer()))
    assert answers.calls is None
    assert re.search(why, answers.why), answers.why
    assert len(answers.why) < 400


HISTORY = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": "P"}}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "17 degrees"},
]  # fmt: skip
F = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "string"}}}}}]  # fmt: skip


def calls_in(found, text):
    parser = found.calls.parser(0, schemas={"f": F[0]["function"]["parameters"]})
    pieces = parser.push(text) + parser.flush()
    calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    return [p.name for p in calls if p.name], "".join(p.arguments for p in calls)


@pytest.mark.parametrize(("source", "why"), UNKNOWN.values(), ids=UNKNOWN)
def test_where_the_way_of_writing_is_not_known_the_system_message_describes_it(source, why):
    template = ChatTemplate(source, tokenizer())
    answers = learn_format(template)
    assert (answers.calls, answers.guided) == (HERMES, True)
    assert re.search(why, answers.why), answers.why
    assert "the system message describes" in answers.why
    assert len(answers.why) < 400
    prompt = template.render(HISTORY, tools=F)
    system, _, rest = prompt.partition("<|im_start|>user")
    assert system.count('"name": "f"') == 1
    assert '<tool_call>\n{"name": "name_of_function"' in system
    assert calls_in(answers, rest) == (["f"], '{"a": "P"}')


@pytest.mark.parametrize(
    ("name", "source", "describes"),
    [
        ("lfm2", chatml("", tools="List of tools: [ {{ keep_past_thinking }}"), False),
        ("granite", chatml("", tools="<|tool_call|>"), False),
        ("glm45", chatml("", tools="<arg_key>"), False),
        ("gemma4", chatml("", tools="<|tool_call> "), False),
        ("kimi_k2", chatml("", tools="<|tool_calls_section_begin|>"), False),
        ("llama4_pythonic", chatml("", tools="[func_name1(param"), False),
        ("mcp", "{{ raise_exception('x') if tools }}{# <use_mcp_tool> #}"
            + chatml("").replace("{%- if tools %}", "{%- if false %}"), True),
    ],
)  # fmt: skip
def test_a_template_of_a_known_family_gets_calls_in_the_way_of_the_family(name, source, describes):
    template = ChatTemplate(source, tokenizer())
    found = learn_format(template)
    assert found.calls == family(name), found.why
    assert f"the table of families has {name}" in found.why
    assert template.describes_tools == describes
    prompt = template.render(HISTORY, tools=F)
    turn = prompt.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    names, arguments = calls_in(found, turn)
    assert (names, json.loads(arguments)) == (["f"], {"a": "P"})
    assert ("name_of_function" in prompt.partition("<|im_start|>user")[0]) == describes


def test_a_template_that_sets_members_of_messages_is_rendered():
    """As MiroThinker's, which is written for the templates of llama.cpp."""
    source = "{%- for m in messages %}{%- set m.content = m.content + '!' %}{%- endfor %}" + chatml(
        ""
    )
    messages = [{"role": "user", "content": "hi"}]
    prompt = ChatTemplate(source, tokenizer()).render(messages)
    assert "hi!<|im_end|>" in prompt
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_model_whose_template_has_no_tools_calls_them_as_json():
    answers = learn_format(ChatTemplate("{{ messages[-1].content }}", tokenizer()))
    assert (answers.calls, answers.guided) == (HERMES, True), answers.why
    assert not learn_format(ChatTemplate(READ["Hermes"][0], tokenizer())).guided


def test_a_template_that_writes_the_time_is_understood_at_any_time():
    time = "{{- strftime_now('%H:%M:%S.%f') + ' ' }}"
    for source, found in (READ["Hermes"][:2], READ["Qwen3-Coder"][:2]):
        assert learn_format(ChatTemplate(time + source, tokenizer())).calls is found


def test_a_chat_template_without_tools_has_the_usual_format():
    """As SmolLM2's, which knows no tools: they are described, and histories have calls as texts."""
    source = chatml("").replace("{%- if tools %}", "{%- if false %}")
    template = ChatTemplate(source, tokenizer())
    found = learn_format(template)
    assert (found.calls, found.guided, found.tags, found.turns) == (HERMES, True, None, None)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "17 degrees"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = template.render(messages, tools=tools)
    written = prompt.rpartition("<|im_start|>assistant\n")[0]
    parser = found.calls.parser(0)
    pieces = parser.push(written) + parser.flush()
    calls = [p for p in pieces if isinstance(p, ToolCallDelta)]
    assert [p.name for p in calls if p.name][-1] == "f"
    assert '{"a": 1}' in "".join(p.arguments for p in calls)
    assert "17 degrees" in prompt
    assert '"name": "f"' in prompt.partition("<|im_start|>user")[0]


@pytest.mark.parametrize("tags", [("<mm:think>", "</mm:think>"), ("[HM]", "[/HM]"), ("Hm:", "##")])
def test_tags_of_thoughts_that_nobody_knows_are_found(tags):
    thought = f"{{{{- '{tags[0]}' + m.reasoning_content + '{tags[1]}' if m.reasoning_content }}}}"
    source = chatml(JSON_CALL, thought + "{{- m.content }}") + "{# not <thinking> #}"
    found = learn_format(ChatTemplate(source, tokenizer()))
    assert (found.tags.open, found.tags.close) == tags
    assert found.why_tags == "learned from the template's own thoughts"
    parser = found.calls.parser(0, around=found.around(thinks=False))
    pieces = parser.push(f"{tags[0]}So.{tags[1]}Yes.") + parser.flush()
    assert [(type(p).__name__, p.text) for p in pieces] == [("Thought", "So."), ("Text", "Yes.")]


def test_a_template_that_refuses_tools_is_rendered_without_them():
    source = "{{ raise_exception('never') if tools }}{{ messages[0].content }}"
    template = ChatTemplate(source, tokenizer())
    answers = learn_format(template)
    assert (answers.calls, answers.guided) == (HERMES, True), answers.why
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert '"name": "f"' in template.render([{"role": "user", "content": "x"}], tools=tools)


def test_a_template_that_shows_no_calls_is_found_in_the_table_of_families():
    shown = chatml("", tools="List: <|tool_list_start|>")
    found = learn_format(ChatTemplate(shown, tokenizer()))
    assert found.calls == family("lfm2")
    assert "the table of families has lfm2" in found.why
    source = ChatTemplate(chatml(""), tokenizer())
    source.has_token = lambda text: text == "<|tool_call_start|>"
    assert learn_format(source).calls == family("lfm2")


def test_named_parsers_come_first():
    source = ChatTemplate(READ["Hermes"][0], tokenizer())
    found = learn_format(source, "glm45", "seed_oss")
    assert (found.calls, found.tags) == (family("glm45"), reasoning_tags()["seed_oss"])
    assert (found.why, found.why_tags) == (
        "--tool-call-parser glm45", "--reasoning-parser seed_oss")  # fmt: skip
    found = learn_format(source, "none", "none")
    assert (found.calls, found.why) == (None, "--tool-call-parser is none")
    assert found.tags is NO_THOUGHTS


def test_the_template_for_tools_counts():
    answers = learn_format(ChatTemplate("{{ messages }}", tokenizer(), chatml(JSON_CALL)))
    assert answers.calls is HERMES


@pytest.mark.parametrize(
    ("source", "tag"),
    [(chatml("", opened="<think>"), "<think>"), (chatml("", opened="[THINK]"), "[THINK]")],
)
def test_the_tags_of_thoughts_are_those_that_the_template_names(source, tag):
    assert learn_format(ChatTemplate(source, tokenizer())).tags.open == tag


def test_few_conversations_are_rendered():
    """It is done before the server is ready."""
    template = ChatTemplate(chatml(GAP + JSON_CALL), tokenizer())
    count, render = 0, template.render

    def counted(*args, **fields):
        nonlocal count
        count += 1
        return render(*args, **fields)

    template.render = counted
    learn_format(template)
    assert count <= 11
