# ruff: noqa: E501 templates are easier to read on one line
"""Messages are given to a template as it takes them: parts or texts, places of roles, thoughts."""

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.traits import ROLES, THOUGHTS
from tests.helpers.bare_tokens import bare_tokens

TOKENS = bare_tokens(bos_token="<s>", eos_token="</s>")


def render(source, messages, /, **kwargs):
    kwargs = {"add_generation_prompt": False, **kwargs}
    return ChatTemplate(source, TOKENS).render(messages, **kwargs)


def transformers_renders(source, messages):
    from transformers.utils import chat_template_utils

    rendered = chat_template_utils.render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=False, **TOKENS.special_tokens
    )
    return rendered[0][0]


def user(content):
    return {"role": "user", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


# In the manner of SmolVLM: parts only, and the first one decides on a space.
PARTS_ONLY = (
    "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}{{ ':' }}"
    "{% else %}{{ ': ' }}{% endif %}{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}\n{% endfor %}"
)
# In the manner of Llama 3.2 Vision and Qwen2-VL: both.
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
TRIMS_EACH = BOTH.replace("{{ c.text }}", "<{{ c.text | trim }}>")
STRICT_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ raise_exception('lists only') }}{% endif %}[{{ m.role }}]"
    "{% for c in m.content %}{{ c.text }}{% endfor %}\n{% endfor %}"
)
# A text of the system, parts of the user.
MIXED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}|{% else %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\n{% endif %}{% endfor %}"
)
TEXTS_ONLY = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
WRITES_LISTS = "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}\n{% endfor %}"


@pytest.mark.parametrize(
    "source", [PARTS_ONLY, BOTH, TRIMS_EACH, STRICT_PARTS], ids=["parts", "both", "trims", "strict"]
)
@pytest.mark.parametrize("role", ROLES)
def test_parts_are_written_as_transformers_writes_them(source, role):
    messages = [user(parts("a")), {"role": role, "content": parts(" one ", "two\n", "three")}]
    assert render(source, messages) == transformers_renders(source, messages)
    assert "two\n" in render(source, messages) or source is TRIMS_EACH


@pytest.mark.parametrize("source", [PARTS_ONLY, STRICT_PARTS], ids=["parts", "strict"])
def test_a_text_is_one_part_where_the_template_takes_parts_only(source):
    said = [("user", "Hi\nthere"), ("assistant", ""), ("user", "Go on")]
    texts = [{"role": role, "content": text} for role, text in said]
    lists = [{"role": role, "content": parts(text)} for role, text in said]
    assert render(source, texts) == transformers_renders(source, lists)
    absent = [texts[0], {"role": "assistant", "content": None}, texts[2]]
    assert render(source, absent) == render(source, texts)


def test_each_role_has_its_form():
    messages = [{"role": "system", "content": parts("Be", "kind")}, user("Hi")]
    assert render(MIXED, messages) == "Be\nkind|Hi"


@pytest.mark.parametrize("source", [TEXTS_ONLY, WRITES_LISTS], ids=["trims", "tojson"])
def test_a_template_that_would_write_a_list_out_gets_a_text(source):
    text = render(source, [user(parts("one", "two"))])
    assert "one" in text
    assert "type" not in text


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_all_dialects_are_text_parts_to_the_template(kind):
    given = [{"type": kind, "text": "a", "cache_control": {}}, "b"]
    assert render(BOTH, [user(given)]) == "[user]ab"


# --- places of roles ----------------------------------------------------------------------------

CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
# In the manner of Llama 2, Mistral and Gemma.
LLAMA2 = ALTERNATES + (
    "{% if m.role == 'user' %}[INST] {% if loop.first and first %}<<SYS>>{{ first }}<</SYS>>{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% else %} {{ m.content }}{% endif %}{% endfor %}"
)
MISTRAL = ALTERNATES + (
    "{% if m.role == 'user' %}[INST]{% if loop.last and first %}{{ first }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only the first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
PARTS_ALTERNATE = GEMMA.replace(
    "{{ m.content | trim }}", "{% for c in m.content %}{{ c.text }}{% endfor %}"
)
ALTERNATING = {"llama2": LLAMA2, "mistral": MISTRAL, "gemma": GEMMA, "parts": PARTS_ALTERNATE}
ORDERS = [
    "user", "system user", "user system", "user assistant system user", "system system user",
    "system developer user", "system user assistant system system user", "user user",
    "user assistant assistant user", "user system user", "developer user assistant developer user",
]  # fmt: skip


def conversation(order, form):
    return [{"role": r, "content": form(f"said{i}")} for i, r in enumerate(order.split())]


@pytest.mark.matrix
@pytest.mark.parametrize("form", [str, parts], ids=["text", "parts"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ALTERNATING.values(), ids=ALTERNATING)
def test_no_order_of_roles_is_refused_or_loses_a_text(source, order, form):
    text = render(source, conversation(order, form))
    places = [text.find(f"said{i}") for i in range(len(order.split()))]
    assert -1 not in places
    if source is not MISTRAL:  # it writes the first system message before the last one of the user
        assert places == sorted(places)


@pytest.mark.parametrize("order", ORDERS)
def test_a_template_that_takes_all_orders_gets_the_messages_as_they_are(order):
    text = render(CHATML, conversation(order, str))
    roles = order.replace("developer", "system").split()
    assert text == "".join(f"[{role}]said{i}\n" for i, role in enumerate(roles))


@pytest.mark.parametrize(
    ("source", "order", "wanted"),
    [
        (LLAMA2, "user assistant system user", "[INST] said0 [/INST] said1[INST] said2\n\nsaid3 [/INST]"),
        (LLAMA2, "system system user", "[INST] <<SYS>>said0\n\nsaid1<</SYS>>said2 [/INST]"),
        (GEMMA, "system user", "<user>said0\n\nsaid1\n"),
        (ONE_SYSTEM, "system system user", "[system]said0\n\nsaid1\n[user]said2\n"),
        (ONE_SYSTEM, "user assistant system user", "[user]said0\n[assistant]said1\n[user]said2\n[user]said3\n"),
    ],
)  # fmt: skip
def test_messages_are_merged_with_the_neighbour_of_their_role(source, order, wanted):
    assert render(source, conversation(order, str)) == wanted


def test_a_message_with_calls_is_not_merged_with_the_next():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        user("a"),
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "assistant", "content": "c"},
    ]
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render(LLAMA2, messages)


def test_a_template_for_tools_is_tried_with_tools():
    source = "{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}" + GEMMA
    tool = {"type": "function", "function": {"name": "g"}}
    template = ChatTemplate(CHATML, TOKENS, source)
    text = template.render(conversation("system user user", str), tools=[tool])
    assert text.strip() == "<g><user>said0\n\nsaid1\n\nsaid2"


# --- thoughts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", THOUGHTS)
@pytest.mark.parametrize(
    "read",
    [
        "{0}.reasoning_content",
        "{0}['reasoning']",
        '{0}["thinking"]',
        "{0}.get('reasoning_content')",
    ],
)
def test_thoughts_reach_a_template_under_the_name_that_it_reads(given, read):
    name = read.format("m")
    source = f"{{% for m in messages %}}{{% if {name} %}}<think>{{{{ {name} }}}}</think>{{% endif %}}{{{{ m.content }}}}{{% endfor %}}"
    messages = [user("a"), {"role": "assistant", "content": "b", given: "hm"}, user("c")]
    assert render(source, messages) == "a<think>hm</think>bc"


@pytest.mark.parametrize("given", THOUGHTS)
def test_thoughts_are_left_out_where_the_template_reads_none_and_where_they_are_no_text(given):
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    for thought in ("hm", "", ["hm"], {"a": 1}):
        assert "thinking" not in render(
            source, [{"role": "assistant", "content": "b", given: thought}]
        )
        assert "hm" not in render(source, [{"role": "assistant", "content": "b", given: thought}])


def test_thoughts_that_a_template_refuses_next_to_text_and_calls_do_not_end_the_conversation():
    """In the manner of gpt-oss."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('not both') }}"
        "{% endif %}{{ m.thinking or m.content }}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [call]}
    assert render(source, [user("a"), said, {"role": "tool", "content": "c"}]) == "a|b|c|"
    assert render(source, [user("a"), {**said, "content": ""}]) == "a|hm|"


CALLING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls and CONDITION %}{{ 'CALL ' + ARGUMENTS }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
AS_JSON, AS_TEXT = (
    "m.tool_calls[0].function.arguments | tojson",
    "m.tool_calls[0].function.arguments",
)


@pytest.mark.parametrize("arguments", [AS_JSON, AS_TEXT, f"{AS_TEXT} | string"])
@pytest.mark.parametrize("condition", ["true", "not m.content", "m.content is none"])
def test_calls_are_given_with_the_content_and_arguments_with_which_they_are_written(
    condition, arguments
):
    """DeepSeek R1's template writes no call if the content is a text, or its arguments are none."""
    source = CALLING.replace("CONDITION", condition).replace("ARGUMENTS", arguments)
    function = {"name": "f", "arguments": {"a": "é"}}
    call = {"id": "1", "type": "function", "function": function}
    for content in ("I look.", "", None):
        messages = [user("x"), {"role": "assistant", "content": content, "tool_calls": [call]}]
        assert render(source, messages) == '[user]x[assistant]CALL {"a": "é"}'
    told = {"role": "assistant", "content": "I look.", "tool_calls": []}
    assert render(source, [user("x"), told]) == "[user]x[assistant]I look."
