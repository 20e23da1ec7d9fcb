"""Tools for templates that have no words for them."""

from cpuserve.tokenizer.chat import ChatTemplate
from tests.helpers.bare_tokens import bare_tokens

TOKENS = bare_tokens()
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}@{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)
USER_ONLY = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}"
    "{% else %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
TURNS = [
    USER,
    {"role": "assistant", "content": "So:", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "done"},
]
WRITTEN = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


def render(source, messages, tools=None):
    return ChatTemplate(source, TOKENS).render(messages, tools=tools, add_generation_prompt=False)


def test_tools_are_described_in_the_system_message():
    text = render(PLAIN, [USER], [TOOL])
    assert text.startswith("[system]You can call")
    assert text.endswith("[user]hi")
    assert '{"type": "function", "function": {"name": "f"' in text
    assert '<tool_call>\n{"name": "name_of_function", "arguments": {' in text
    system = {"role": "system", "content": "Be brief."}
    assert render(PLAIN, [system, USER], [TOOL]).startswith("[system]Be brief.\n\nYou can call")
    assert render(PLAIN, [USER]) == "[user]hi"


def test_a_template_without_a_system_message_has_them_in_the_users():
    assert render(USER_ONLY, [USER], [TOOL]).startswith("[user]You can call")


def test_calls_and_results_of_earlier_turns_are_written_as_texts():
    text = render(USER_ONLY, TURNS, [TOOL])
    assert text.endswith(
        f"[assistant]So:\n{WRITTEN}\n{WRITTEN}[user]<tool_response>\ndone\n</tool_response>"
    )
    assert render(PLAIN, TURNS, [TOOL]).endswith(f"{WRITTEN}[tool]done")


def test_the_description_shows_calls_as_the_template_writes_them():
    text = render(CALLS, TURNS, [TOOL])
    assert '@name_of_function{"name_of_argument": "value"}' in text
    assert "tool_call>" not in text
    assert text.endswith('[assistant]So:@f{"a": "é"}@f{"a": "é"}[tool]done')


def test_a_template_that_shows_tools_gets_no_description():
    assert render("{{ tools[0].function.name }}", [USER], [TOOL]) == "f"
    assert not ChatTemplate("{{ tools }}", TOKENS).describes_tools
    assert ChatTemplate(PLAIN, TOKENS).describes_tools
    assert not ChatTemplate(None, TOKENS).describes_tools
