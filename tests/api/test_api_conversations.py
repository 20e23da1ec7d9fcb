"""What a conversation may hold in each dialect: cut-off calls, pictures, and other servers' turns.

What the model wrote and what tools returned stays in a conversation, so a refusal would end it.
"""

import json
import typing

import pytest
from anthropic.types import beta
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses

from cpuserve.api.anthropic.conversation import chat_messages as block_messages
from cpuserve.api.openai.chat.conversation import chat_messages
from cpuserve.api.openai.responses.conversation import chat_messages as item_messages
from tests.api.fakes import Api
from tests.api.tools import TEMPLATE, WEATHER, prompt_of, says, template, tool_api

HI = {"role": "user", "content": "hi"}
PICTURE = "data:image/png;base64,aGk="
# A template that takes arguments as text or as an object, as those of Qwen do.
TAKES_TEXT = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {%
if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{
call.function.arguments | tojson }}{% endif %}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Dialect(typing.NamedTuple):
    """How a dialect writes a conversation in which the model calls a tool."""

    path: str
    field: str  # that has the messages
    call: typing.Callable  # the arguments -> the model's turn
    result: typing.Callable  # a text, or a picture if it is None -> what the tool returned
    picture: dict[str, typing.Any]  # of the user
    more: tuple[tuple[str, typing.Any], ...] = ()

    def ask(self, api, messages, **fields):
        more = dict(self.more)
        return api.post(self.path, **{self.field: messages}, model="tiny", **more, **fields)


def chat_call(arguments):
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [{"role": "assistant", "content": "I look.", "tool_calls": [call]}]


def chat_result(text):
    shown = [{"type": "image_url", "image_url": {"url": PICTURE}}] if text is None else text
    return [{"role": "tool", "tool_call_id": "c1", "content": shown}]


def item_call(arguments):
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments}
    return [{"role": "assistant", "content": "I look."}, call]


def item_result(text):
    shown = [{"type": "input_image", "image_url": PICTURE}] if text is None else text
    return [{"type": "function_call_output", "call_id": "c1", "output": shown}]


def block_call(arguments):
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments}
    return [{"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def block_result(text):
    shown = [IMAGE] if text is None else text
    return [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": shown}
    ]}]  # fmt: skip


def ollama_result(text):
    message = {"role": "tool", "tool_name": "weather", "content": text or ""}
    return [{**message, "images": ["aGk="]} if text is None else message]


def by_user(part):
    return {"role": "user", "content": [part]}


CHAT = Dialect(
    "/v1/chat/completions", "messages", chat_call, chat_result,
    by_user({"type": "image_url", "image_url": {"url": PICTURE}}),
)  # fmt: skip
RESPONSES = Dialect(
    "/v1/responses", "input", item_call, item_result,
    by_user({"type": "input_image", "image_url": PICTURE}),
)  # fmt: skip
MESSAGES = Dialect(
    "/v1/messages", "messages", block_call, block_result, by_user(IMAGE), (("max_tokens", 64),)
)  # fmt: skip
OLLAMA = Dialect(
    "/api/chat", "messages", chat_call, ollama_result,
    {**HI, "images": ["aGk="]}, (("stream", False),),
)  # fmt: skip
DIALECTS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "ollama": OLLAMA}
each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
SAID = {"role": "assistant", "content": "I see."}


def text_api():
    """An Api whose template takes arguments as text."""
    return tool_api(says("Fine."), source=TAKES_TEXT)


@pytest.mark.matrix
@each_dialect
@pytest.mark.parametrize("takes_text", [False, True], ids=["objects", "text"])
@pytest.mark.parametrize(
    "arguments",
    ['{"text": "beginning and mo', '{"cmd": "ls" "x"}', "no JSON", "[1]", [1], "null", None, 3, ""],
    ids=str,
)
def test_a_call_that_was_cut_off_does_not_end_the_conversation(dialect, arguments, takes_text):
    api = text_api() if takes_text else tool_api(says("Fine."))
    messages = [HI, *dialect.call(arguments), *dialect.result("failed"), SAID, HI]
    answer = dialect.ask(api, messages)
    assert answer.status_code == 200, answer.text
    written = "{}" if arguments in (None, "") else arguments
    shown = written if isinstance(written, str) else json.dumps(written)
    call = f'<tool_call>{{"name": "weather", "arguments": {shown if takes_text else "{}"}}}'
    assert call in prompt_of(api)


@each_dialect
def test_what_this_server_sent_at_max_tokens_is_taken_back(dialect):
    """The turn is sent back as it came, which is how agents keep their history."""
    function = WEATHER["function"]
    tools = [WEATHER]
    if dialect is RESPONSES:
        tools = [{"type": "function", **function}]
    elif dialect is MESSAGES:
        tools = [{"name": "weather", "input_schema": function["parameters"]}]
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    first = dialect.ask(tool_api(says(cut, finish="length")), [HI], tools=tools).json()
    if dialect is RESPONSES:
        (call,) = turn = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "cut off"}
    elif dialect is MESSAGES:
        turn = [{"role": "assistant", "content": first["content"]}]
        block = {"type": "tool_result", "tool_use_id": first["content"][0]["id"]}
        result = {"role": "user", "content": [{**block, "content": "cut off", "is_error": True}]}
    else:
        turn = [first["message"] if dialect is OLLAMA else first["choices"][0]["message"]]
        call = turn[0]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "cut off"}
    api = tool_api(says("Fine."))
    answer = dialect.ask(api, [HI, *turn, result, SAID, HI], tools=tools)
    assert answer.status_code == 200, answer.text
    assert '"name": "weather", "arguments": {}}</tool_call>' in prompt_of(api)


def test_a_call_that_was_cut_off_needs_no_output_in_a_response():
    call = {**RESPONSES.call('{"ci')[1], "status": "incomplete"}
    api = tool_api(says("Fine."))
    assert RESPONSES.ask(api, [HI, call, HI]).status_code == 200
    assert RESPONSES.ask(api, [HI, {**call, "status": "completed"}, HI]).status_code == 400


LINE = "[An image was left out: you can read text only.]"


@each_dialect
def test_a_picture_that_a_tool_returned_is_a_line_of_text(dialect):
    api = tool_api(says("Fine."))
    turn = [HI, *dialect.call({}), *dialect.result(None)]
    for messages in (turn, [*turn, SAID, HI]):
        answer = dialect.ask(api, messages)
        assert answer.status_code == 200, answer.text
        assert f"<|im_start|>tool\n{LINE}" in prompt_of(api).replace("tool\n\n", "tool\n")
        assert "aGk" not in prompt_of(api)


@each_dialect
def test_only_the_last_turn_of_the_user_is_refused_for_a_picture(dialect):
    api = tool_api(says("Fine."))
    tooled = [*dialect.call({}), *dialect.result("done")]
    refused = [[dialect.picture], [HI, dialect.picture], [dialect.picture, HI],
               [HI, SAID, dialect.picture, HI], [HI, *tooled, SAID, dialect.picture]]  # fmt: skip
    taken = [[dialect.picture, SAID, HI], [dialect.picture, *tooled],
             [HI, *tooled, dialect.picture], [HI, *tooled, dialect.picture, SAID, HI]]  # fmt: skip
    for messages in refused:
        answer = dialect.ask(api, messages)
        assert answer.status_code == 400, messages
        assert "reads text only" in answer.text
        assert f"{dialect.field}[{messages.index(dialect.picture)}]" in answer.text.replace(
            "messages.", "messages["
        ).replace(".content", "].content")
    assert not api.engine.asked
    for messages in taken:
        answer = dialect.ask(api, messages)
        assert answer.status_code == 200, (messages, answer.text)
        assert LINE in prompt_of(api)


@pytest.mark.matrix
@pytest.mark.parametrize("returned", [None, 5, {"ok": True}, [], ["a", {"b": 1}], [None]], ids=str)
@each_dialect
def test_whatever_a_tool_returned_is_taken(dialect, returned):
    if dialect is OLLAMA:
        result = [{"role": "tool", "tool_name": "weather", "content": returned}]
    else:
        (message,) = dialect.result("@")
        result = json.loads(json.dumps([message]).replace('"@"', json.dumps(returned)))
    api = tool_api(says("Fine."))
    answer = dialect.ask(api, [HI, *dialect.call({}), *result])
    assert answer.status_code == 200, answer.text


def sample(kind, call_id="c9"):
    """A value of a TypedDict of a client library, whose members have any texts."""
    hints = typing.get_type_hints(kind)
    given = dict.fromkeys(hints, "x y")
    (given["type"],) = (
        word
        for part in (hints["type"], *typing.get_args(hints["type"]))
        for word in typing.get_args(part)
        if isinstance(word, str)
    )
    for name in ("id", "call_id", "tool_use_id"):
        if name in hints:
            given[name] = call_id
    return {**given, "status": "completed"}


ITEMS = [kind for kind in typing.get_args(responses.ResponseInputItemParam)
         if "role" not in typing.get_type_hints(kind)]  # fmt: skip
CALLS = {"function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call",
         "computer_call", "tool_search_call"}  # fmt: skip
OUTPUTS = {f"{name}_output": name for name in CALLS} | {"tool_search_output": "tool_search_call"}


@pytest.mark.parametrize("kind", ITEMS, ids=lambda kind: kind.__name__)
def test_items_of_another_servers_history_are_taken(kind):
    item = sample(kind)
    name = item["type"]
    items = [HI, item, SAID, HI]
    if name in CALLS:
        output = next(kind for kind, of in reversed(OUTPUTS.items()) if of == name)
        items.insert(2, {"type": output, "call_id": "c9", "output": "done"})
    elif name in OUTPUTS:
        call = {"type": OUTPUTS[name], "call_id": "c9", "name": "f", "arguments": ""}
        items.insert(1, call)
    answer = RESPONSES.ask(tool_api(says("Fine.")), items)
    if name == "item_reference":
        assert answer.status_code == 404, "no such item is stored"
    else:
        assert answer.status_code == 200, answer.text


def test_what_another_server_did_is_told():
    api = tool_api(says("Fine."))
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed",
              "action": {"type": "search", "query": "cats today"}}  # fmt: skip
    patch = {"type": "custom_tool_call", "call_id": "p1", "name": "apply_patch", "input": "*** Be"}
    shell = {"type": "local_shell_call", "id": "s1", "call_id": "s1", "status": "completed",
             "action": {"type": "exec", "command": ["ls"]}}  # fmt: skip
    picture = {"type": "image_generation_call", "id": "i1", "result": "A" * 5000}
    compacted = {"type": "compaction", "encrypted_content": "gAAAA"}
    shot = {"type": "computer_screenshot", "image_url": PICTURE}
    items = [
        compacted, HI, search, picture, {"role": "assistant", "content": "Found."}, patch, shell,
        {"type": "custom_tool_call_output", "call_id": "p1", "output": "patched"},
        {"type": "local_shell_call_output", "id": "s1", "output": "a.txt"},
        {"type": "computer_call", "call_id": "k1", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "k1", "output": shot},
        HI,
    ]  # fmt: skip
    answer = RESPONSES.ask(api, items)
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(api)
    search = '[web_search_call: {"action":{"query":"cats today"}}]'
    assert f"assistant\n{search}\n[image_generation_call: {{}}]\nFound.\n<tool_call>" in prompt
    assert '{"name": "apply_patch", "arguments": {"input": "*** Be"}}' in prompt
    assert '{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}' in prompt
    assert "tool\npatched<|im_end|>\n<|im_start|>tool\na.txt<|im_end|>" in prompt
    assert "compacted by another server" in prompt
    assert "[A screenshot was left out: you can read text only.]" in prompt
    assert not any(hidden in prompt for hidden in ("gAAAA", "AAAAA", "ws_1", "base64"))


def test_an_unknown_item_is_refused():
    answer = RESPONSES.ask(Api(), [HI, {"type": "mesage", "content": "hi"}])
    assert answer.status_code == 400
    assert "input[1] has type 'mesage'" in answer.text


BLOCKS = [kind for kind in typing.get_args(beta.BetaContentBlockParam) if isinstance(kind, type)]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("place", ["assistant", "result"])
def test_blocks_of_another_servers_history_are_taken(kind, place):
    block = sample(kind, "c1")
    if place == "result":
        messages = [HI, *block_call({}), *block_result([block])]
    else:
        messages = [HI, {"role": "assistant", "content": [block]}, HI]
        if block["type"] == "tool_use":
            messages.insert(2, block_result("done")[0])
    answer = MESSAGES.ask(tool_api(says("Fine.")), messages)
    refused = place == "assistant" and block["type"] == "tool_result"
    assert answer.status_code == (400 if refused else 200), answer.text


def test_results_of_a_tool_say_what_the_model_cannot_see():
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    inner = [{"type": "text", "text": "part"}, IMAGE]
    blocks = [
        {"type": "document", "title": "Plan", "source": pdf},
        {"type": "document", "source": {"type": "content", "content": inner}},
        {"type": "tool_reference", "tool_name": "Edit"},
        {"type": "text", "text": "end"},
    ]
    api = tool_api(says("Fine."))
    for messages in ([*block_call({}), *block_result(blocks)],
                     # Claude Code sends a PDF next to the result of the tool that read it.
                     [*block_call({}), by_user({}) | {"content": [
                         *block_result("read")[0]["content"], blocks[0]]}]):  # fmt: skip
        assert MESSAGES.ask(api, [HI, *messages]).status_code == 200
    damaged = "Failed to load document (PDFium: Data format error)."
    lines = ["[A PDF document (Plan) was left out: it is a damaged PDF document "
             f"({damaged}): save it again.]", f"part\n{LINE}",
             "[The tool Edit is not available any more.]", "end"]  # fmt: skip
    assert "<|im_start|>tool\n" + "\n".join(lines) + "<|im_end|>" in prompt_of(api, 0)
    assert f"tool\nread<|im_end|>\n<|im_start|>user\n{lines[0]}<|im_end|>" in prompt_of(api, 1)


@pytest.mark.parametrize(("failed", "line"), [(True, "[The tool reports an error.]\n"),
                                             (False, ""), (None, "")])  # fmt: skip
@pytest.mark.parametrize("content", ["no such file", [{"type": "text", "text": "no such file"}]])
def test_the_model_is_told_that_a_tool_failed(failed, line, content):
    api = tool_api(says("Fine."))
    (message,) = block_result(content)
    message["content"][0]["is_error"] = failed
    assert MESSAGES.ask(api, [HI, *block_call({}), message]).status_code == 200
    assert f"<|im_start|>tool\n{line}no such file<|im_end|>" in prompt_of(api)


def test_a_result_of_nothing_but_an_error_is_told():
    api = tool_api(says("Fine."))
    (message,) = block_result(None)
    message["content"] = [{"type": "tool_result", "tool_use_id": "c1", "is_error": True}]
    assert MESSAGES.ask(api, [HI, *block_call({}), message]).status_code == 200
    assert "<|im_start|>tool\n[The tool reports an error.]<|im_end|>" in prompt_of(api)


THOUGHT = {
    "chat reasoning_content": (CHAT, [{**SAID, "reasoning_content": "Hm."}]),
    "chat reasoning": (CHAT, [{**SAID, "reasoning": "Hm."}]),
    "chat both": (CHAT, [{**SAID, "reasoning": "Hm.", "reasoning_content": "Hm."}]),
    "chat one empty": (CHAT, [{**SAID, "reasoning": "Hm.", "reasoning_content": ""}]),
    "chat part": (CHAT, [{"role": "assistant", "content": [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "text", "text": "I see."}]}]),
    "responses content": (RESPONSES, [{"type": "reasoning", "id": "r", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None}, SAID]),
    "responses summary": (RESPONSES, [{"type": "reasoning", "id": "r", "summary": [
        {"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAA"}, SAID]),
    "messages": (MESSAGES, [{"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "gAAA"}, {"type": "text", "text": "I see."}]}]),
    "ollama": (OLLAMA, [{**SAID, "thinking": "Hm."}]),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "turn"), THOUGHT.values(), ids=THOUGHT)
def test_earlier_thoughts_reach_the_template_in_one_field(dialect, turn):
    api = text_api()
    assert dialect.ask(api, [HI, *turn, HI]).status_code == 200
    assert "<|im_start|>assistant\n<think>Hm.</think>I see.<|im_end|>" in prompt_of(api)
    assert "gAAA" not in prompt_of(api)


def test_thoughts_stand_before_the_calls_of_their_turn():
    api = text_api()
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call, result = RESPONSES.call("{}")[1], RESPONSES.result("18")
    assert RESPONSES.ask(api, [HI, thought, call, *result, thought, HI]).status_code == 200
    prompt = prompt_of(api)
    assert prompt.count("<think>Hm.</think>") == 1, "the last turn was left before it said anything"
    assert "<|im_start|>assistant\n<think>Hm.</think><tool_call>" in prompt


def test_text_of_an_assistant_that_is_no_string_is_taken():
    for content in (5, {"a": 1}, [None, 3], [{"type": "tool_use", "id": "x"}], [{"type": "text"}]):
        answer = CHAT.ask(Api(), [HI, {"role": "assistant", "content": content}, HI])
        assert answer.status_code == 200, answer.text


def test_the_input_of_a_custom_tool_is_an_argument_in_chat_completions():
    api = text_api()
    custom = {"id": "c1", "type": "custom", "custom": {"name": "weather", "input": "*** Be"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [custom]}
    assert CHAT.ask(api, [HI, turn, *chat_result("done"), HI]).status_code == 200
    assert '{"name": "weather", "arguments": {"input": "*** Be"}}' in prompt_of(api)


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(
    ("dialect", "on", "off"),
    [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"thinking": {"type": "disabled"}}),
        (OLLAMA, {"think": True}, {"think": False}),
    ],
    ids=["messages", "ollama"],
)  # fmt: skip
def test_the_wish_to_think_reaches_templates_under_the_name_that_they_read(
    dialect, on, off, variable
):
    api = tool_api(says("Hi"), source=f"{{{{ {variable} | default('unset') }}}}")
    for fields in ({}, on, off):
        assert dialect.ask(api, [HI], **fields).status_code == 200
    assert [prompt_of(api, i) for i in range(3)] == ["unset", "True", "False"]


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.%s; cc_entrypoint=sdk-cli;"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_line_about_billing_is_no_part_of_the_prompt(path):
    """It changes with each session of Claude Code, which would share no prefix with another."""
    api, counts = Api(), []
    rules = {"type": "text", "text": "Be kind."}
    for system in (
        "Be kind.",
        [rules],
        [{"type": "text", "text": BILLING % "85d"}, rules],
        [{"type": "text", "text": BILLING % "3d9e"}, rules],
        (BILLING % "071") + "\nBe kind.",
    ):
        answer = api.post(path, messages=[HI], system=system, max_tokens=9, model="tiny").json()
        counts.append(answer["usage"]["input_tokens"] if "usage" in answer else answer)
    assert counts == [counts[0]] * 5
    assert all(ids == api.engine.asked[0][0] for ids, _ in api.engine.asked)
    alone = [{"type": "text", "text": BILLING % "85d"}]
    for system in (alone, None):
        api.post("/v1/messages", messages=[HI], system=system, max_tokens=9, model="tiny")
    assert api.engine.asked[-1][0] == api.engine.asked[-2][0]


def test_tokenize_takes_what_chat_completions_take():
    api = tool_api(says("Fine."))
    messages = [HI, *chat_call('{"ci'), *chat_result(None)]
    asked = {"messages": messages, "tools": [WEATHER], "model": "tiny"}
    counted = api.post("/tokenize", **asked)
    assert counted.status_code == 200, counted.text
    assert api.post("/v1/chat/completions", **asked).status_code == 200
    assert counted.json()["tokens"] == api.engine.asked[0][0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.just("text"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "content", "source", "thinking", "title",
                                       "data", "refusal", "image_url", "a"]), inner, max_size=4),
    max_leaves=9,
)  # fmt: skip


@pytest.mark.deep
@given(returned=JSON, said=JSON, arguments=JSON)
@settings(max_examples=200, deadline=None)
def test_any_json_from_a_tool_or_the_model_is_taken(returned, said, arguments):
    tool = {"role": "tool", "tool_call_id": "c1", "content": returned}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": returned}
    asked = {"role": "assistant", "content": said, "tool_calls": [
        {"id": "c1", "function": {"name": "f", "arguments": arguments}}]}  # fmt: skip
    turns = [
        chat_messages([HI, asked, tool, HI]),
        item_messages(
            [HI, {"role": "assistant", "content": said}, call,
             {"type": "function_call_output", "call_id": "c1", "output": returned}, HI], None
        ),
        block_messages(
            [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
            None,
        ),
    ]  # fmt: skip
    for messages in turns:
        for source in (TEMPLATE, TAKES_TEXT):
            text = template(source).render(messages)
            assert text.count("<tool_call>") >= 1
            assert all(isinstance(message["content"], str | list | None) for message in messages)


@pytest.mark.parametrize("depth", [320, 440])
def test_what_another_server_nested_deeply_is_no_error_of_ours(depth):
    api = tool_api(says("ok"))
    nested = json.loads('{"a": [' * depth + "1" + "]}" * depth)
    block = {"type": "server_tool_use", "id": "x", "name": "search", "input": nested}
    item = {"type": "mcp_call", "id": "x", "name": "search", "arguments": nested}

    turn = {"role": "assistant", "content": [block]}
    message = api.post("/v1/messages", model="tiny", max_tokens=9, messages=[HI, turn, HI])
    response = api.post("/v1/responses", model="tiny", input=[HI, item, HI])

    assert (message.status_code, response.status_code) == (200, 200)
    assert "[server_tool_use]" in prompt_of(api, 0)
    assert "[mcp_call]" in prompt_of(api, 1)
