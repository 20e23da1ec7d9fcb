"""Thoughts: apart from the text in every dialect, counted, limited, and before what is forced."""

import json

import pytest

from cpuserve.engine.ipc import Output
from cpuserve.serving.models.recent_prompts import ids_of
from tests.api.fakes import events_of, logprob_of, tokenizer
from tests.api.tools import CALL, TEMPLATE, WEATHER, prompt_of, says, tool_api
from tests.helpers.call_templates import GPT_OSS
from tests.helpers.tiny import tiny_end_ids
from tests.helpers.turn_templates import TURNS

WRITES = (
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}"
)
# The model opens its thoughts; the prompt opens them, unless enable_thinking is false; harmony.
OPENS = TEMPLATE.replace("{{ message.content }}", WRITES + "{{ message.content }}")
OPENED = OPENS.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
MUSE = TURNS["Muse"][0]
THOUGHT, ANSWER = "She greets me.\n\nSo do I.", "Hello!"
FAMILIES = {
    "the model opens": (OPENS, f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"),
    "the prompt opens": (OPENED, f"{THOUGHT}\n</think>\n\n{ANSWER}"),
    "harmony": (
        GPT_OSS,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final"
        f"<|message|>{ANSWER}",
    ),
    "headers": (
        MUSE,
        f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>{ANSWER}",
    ),
}
every_family = pytest.mark.parametrize(("source", "text"), FAMILIES.values(), ids=FAMILIES)
every_cut = pytest.mark.parametrize("per_output", [1, 3, 1000])
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


def chat(api, *, stream, **fields):
    """(thought, text, reasoning tokens) of a chat completion."""
    if not stream:
        body = api.chat(**fields).json()
        message = body["choices"][0]["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        thought, text = message.get("reasoning", ""), message["content"]
    else:
        asked = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        *chunks, body = events_of(api.chat(**asked))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thought == "".join(delta.get("reasoning", "") for delta in deltas)
        text = "".join(delta.get("content") or "" for delta in deltas)
    return thought, text, body["usage"]["completion_tokens_details"]["reasoning_tokens"]


def responses(api, *, stream, summary=False, **fields):
    if summary:
        fields["reasoning"] = {"summary": "auto"}
    part, text, has, lacks = (
        ("reasoning_summary_part", "reasoning_summary_text", "summary", "content")
        if summary
        else ("content_part", "reasoning_text", "content", "summary")
    )
    response = api.post("/v1/responses", input="hi", stream=stream, **fields)
    if stream:
        lines = [json.loads(line[6:]) for line in response.text.splitlines() if line[:5] == "data:"]
        kinds = [line["type"] for line in lines]
        assert [line["sequence_number"] for line in lines] == list(range(len(lines)))
        parts = [line["delta"] for line in lines if line["type"] == f"response.{text}.delta"]
        (done,) = [line for line in lines if line["type"] == f"response.{text}.done"]
        assert done["text"] == "".join(parts)
        first = kinds.index(f"response.{text}.delta")
        assert kinds[first - 2 : first] == ["response.output_item.added", f"response.{part}.added"]
        assert kinds[kinds.index(f"response.{text}.done") + 1] == f"response.{part}.done"
        assert all("reasoning" not in kind or part[:-5] in kind for kind in kinds if summary)
        body = lines[-1]["response"]
    else:
        body = response.json()
    thought, message = body["output"]
    assert (thought["type"], thought[lacks], message["type"]) == ("reasoning", [], "message")
    assert thought[has][0]["type"] == ("summary_text" if summary else "reasoning_text")
    counted = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    return thought[has][0]["text"], message["content"][0]["text"], counted


def messages(api, *, stream, **fields):
    body = {"messages": HI, "max_tokens": 1000, "model": "tiny", "stream": stream, **fields}
    response = api.post("/v1/messages", **body)
    if stream:
        lines = [json.loads(line[6:]) for line in response.text.splitlines() if line[:5] == "data:"]
        deltas = [line["delta"] for line in lines if line["type"] == "content_block_delta"]
        kinds = [delta["type"] for delta in deltas]
        last = kinds.index("signature_delta")
        assert set(kinds[:last]) <= {"thinking_delta"}
        assert set(kinds[last + 1 :]) == {"text_delta"}
        thought = "".join(delta.get("thinking", "") for delta in deltas)
        return thought, "".join(delta.get("text", "") for delta in deltas), None
    first, second = response.json()["content"]
    assert (first["type"], second["type"]) == ("thinking", "text")
    assert first["signature"]
    return first["thinking"], second["text"], None


def ollama(api, *, stream, **fields):
    response = api.post("/api/chat", messages=HI, model="tiny", stream=stream, **fields)
    lines = [json.loads(line) for line in response.text.splitlines()]
    told = [line["message"] for line in lines]
    thought = "".join(message.get("thinking", "") for message in told)
    return thought, "".join(message["content"] for message in told), None


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}
every_dialect = pytest.mark.parametrize("ask", DIALECTS.values(), ids=DIALECTS)


@pytest.mark.matrix
@every_family
@every_dialect
@every_cut
@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_apart_from_the_text(source, text, ask, per_output, stream):
    thought, told, counted = ask(tool_api(says(text, per_output), source=source), stream=stream)
    assert (thought, told) == (THOUGHT, ANSWER)
    if counted is not None:
        num = len(tokenizer().encode(THOUGHT, add_special_tokens=False))
        assert num <= counted <= num + len(text) - len(THOUGHT) - len(ANSWER)


def said_in(channel, text):
    return f"<|channel|>{channel}<|message|>{text}<|end|><|start|>assistant"


FINAL = "<|channel|>final<|message|>d"
SEVERAL = {
    "a space between": (OPENS, "<think>\na\n</think> <think>\nc\n</think>\n\nd", "d"),
    "text between": (OPENS, "<think>\na\n</think>\n\nb\n\n<think>\nc\n</think>\n\nd", "b\n\nd"),
    "nothing between": (OPENS, "<think>\na\n</think><think>\nc\n</think>\n\nd", "d"),
    "two analyses": (GPT_OSS, said_in("analysis", "a") + said_in("analysis", "c") + FINAL, "d"),
    "a preamble between": (
        GPT_OSS,
        said_in("analysis", "a") + said_in("commentary", "b") + said_in("analysis", "c") + FINAL,
        "b\nd",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize(("source", "text", "answer"), SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("ask", [chat, ollama])
@every_cut
@pytest.mark.parametrize("stream", [False, True])
def test_several_thoughts_are_one_text_with_gaps(source, text, answer, ask, per_output, stream):
    thought, told, _ = ask(tool_api(says(text, per_output), source=source), stream=stream)
    assert (thought, told) == ("a\n\nc", answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_after_a_call_has_a_gap(stream):
    text = f"<think>\na\n</think>\n\n{CALL}<think>\nc\n</think>\n\nd"
    api = tool_api(says(text, 3), source=OPENS)
    assert ollama(api, stream=stream, tools=[WEATHER])[0] == "a\n\nc"


@pytest.mark.matrix
@every_family
@every_cut
@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_the_summary_if_the_request_asks_for_summaries(
    source, text, per_output, stream
):
    api = tool_api(says(text, per_output), source=source)
    assert responses(api, stream=stream, summary=True)[:2] == (THOUGHT, ANSWER)


@every_family
def test_a_stop_string_does_not_act_in_a_thought(source, text):
    api = tool_api(says(text), source=source)
    assert chat(api, stream=False, stop=["me", "\n\n", "!"])[:2] == (THOUGHT, "Hello")


@every_family
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_left_out_where_the_client_wants_none(source, text, stream):
    api = tool_api(says(text), source=source)
    assert chat(api, stream=stream, include_reasoning=False)[:2] == ("", ANSWER)
    said = ANSWER if source is OPENED else text  # the prompt has an empty thought
    assert ollama(tool_api(says(said), source=source), stream=stream, think=False)[:2] == (
        "",
        ANSWER,
    )
    api = tool_api(says(said), source=source)
    body = {"messages": HI, "max_tokens": 99, "model": "tiny", "thinking": {"type": "disabled"}}
    assert "greets" not in api.post("/v1/messages", **body, stream=stream).text


def test_a_thought_that_is_cut_off_is_no_text():
    api = tool_api(says(THOUGHT, finish="length"), source=OPENED)
    assert chat(api, stream=False)[:2] == (THOUGHT, "")


@every_cut
@pytest.mark.parametrize("source", [OPENS, OPENED], ids=["the model opens", "the prompt opens"])
@pytest.mark.parametrize("end", ["", "\n</think>\n\n"], ids=["open", "closed"])
def test_a_call_with_which_a_thought_ends_is_a_call(source, end, per_output):
    """vllm-project/vllm#35687, cubist38/mlx-openai-server#284: it was a thought, and no call."""
    text = ("" if source is OPENED else "<think>\n") + f"{THOUGHT}\n{CALL}{end}"
    api = tool_api(says(text, per_output), source=source)
    assert chat(api, stream=True, tools=[WEATHER])[:2] == (THOUGHT, "")
    (told,) = api.chat(tools=[WEATHER]).json()["choices"]
    assert (told["message"]["reasoning"], told["finish_reason"]) == (THOUGHT, "tool_calls")
    (call,) = told["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    anthropic = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    body = api.post("/v1/messages", messages=HI, max_tokens=99, tools=[anthropic]).json()
    assert [block["type"] for block in body["content"]] == ["thinking", "tool_use"]
    assert body["stop_reason"] == "tool_use"


def test_a_call_in_a_thought_that_max_tokens_cuts_is_no_call():
    api = tool_api(says(f"{THOUGHT}\n{CALL}", finish="length"), source=OPENED)
    (told,) = api.chat(tools=[WEATHER]).json()["choices"]
    assert told["message"]["reasoning"] == f"{THOUGHT}\n{CALL}"
    assert told["finish_reason"] == "length"
    assert "tool_calls" not in told["message"]


def turns(*texts):
    """A script that says the next text for each request."""

    def script(engine, number, prompt, params):
        yield from says(texts[number])(engine, number, prompt, params)

    return script


@pytest.mark.matrix
@every_family
@every_cut
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_comes_after_the_thought(source, text, per_output, stream):
    form = '{"a": 1}'

    def script(engine, number, prompt, params):
        said = form if number else text
        yield from says(said, per_output)(engine, number, prompt, params)

    api = tool_api(script, source=source)
    assert chat(api, stream=stream, **FORM)[:2] == (THOUGHT, form)
    (_, first), (_, second) = api.engine.asked
    assert first.structured_outputs.later
    assert not first.masks_tokens
    assert second.masks_tokens
    assert first.structured_outputs.key == second.structured_outputs.key
    assert THOUGHT in prompt_of(api)
    ends = {GPT_OSS: "<|channel|>final<|message|>", MUSE: " to=user<|message|>"}
    assert prompt_of(api).endswith(ends.get(source, "</think>\n\n"))


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("source", [OPENS, OPENED], ids=["the model opens", "the prompt opens"])
def test_a_forced_call_comes_after_the_thought(source, choice):
    opening = '<tool_call>\n{"name": "weather", "arguments":'
    if choice == "required":
        opening = '<tool_call>\n{"name": "'
    begun = "" if source is OPENED else "<think>\n"
    api = tool_api(
        turns(f"{begun}{THOUGHT}\n</think>\n\n", CALL.removeprefix(opening)), source=source
    )
    (told,) = api.chat(tools=[WEATHER], tool_choice=choice).json()["choices"]
    assert told["message"]["reasoning"] == THOUGHT
    assert told["finish_reason"] == "tool_calls"
    (call,) = told["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert prompt_of(api).endswith("</think>\n\n" + opening)


def test_a_forced_call_comes_after_a_thought_with_a_header():
    thought = f" to=self<|message|>{THOUGHT}<|eom|>"
    opening = ' to=weather<|message|><x:calls>\n<x:invoke name="weather">\n'
    given = '<x:parameter name="city">Paris</x:parameter>\n</x:invoke>\n</x:calls><|eom|>'
    api = tool_api(turns(thought, given), source=MUSE)
    named = {"type": "function", "function": {"name": "weather"}}
    (told,) = api.chat(tools=[WEATHER], tool_choice=named).json()["choices"]
    assert told["message"]["reasoning"] == THOUGHT
    assert told["finish_reason"] == "tool_calls"
    (call,) = told["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert prompt_of(api).endswith(thought + "<|start|>assistant" + opening)


@pytest.mark.parametrize("first", ["", "It is so.", "\n\nIt"])
def test_a_form_of_a_model_that_does_not_think_begins_again(first):
    form = '{"a": 1}'
    api = tool_api(turns(first, form), source=OPENS)
    body = api.chat(**FORM).json()
    message = body["choices"][0]["message"]
    assert message["content"] == form
    assert "reasoning" not in message
    assert api.engine.asked[0][0] == api.engine.asked[1][0]
    assert body["usage"]["completion_tokens"] == 1 + len(
        tokenizer().encode(form, add_special_tokens=False)
    )


def test_a_call_of_a_model_that_does_not_think_is_remembered_with_its_forced_beginning():
    rest = ' {"city": "Paris"}}\n</tool_call>'
    api = tool_api(turns("It is so.", rest), source=OPENS)
    choice = {"type": "function", "function": {"name": "weather"}}
    assert api.chat(tools=[WEATHER], tool_choice=choice).status_code == 200
    (first, _), (second, _) = api.engine.asked
    assert len(second) > len(first)
    (known,) = api.context.recent.of("127.0.0.1", ("", 1.0, ""))
    found = ids_of(known.ids)  # up to the end of the call
    written = [*second, *tokenizer().encode(rest, add_special_tokens=False)]
    assert found == written[: len(found)]
    assert len(found) > len(second)


def test_a_response_that_goes_on_after_its_thought_counts_as_one_request():
    def script(engine, number, prompt, params):
        said = '{"a": 1}' if number else f"{THOUGHT}\n</think>\n\n"
        for output in says(said)(engine, number, prompt, params):
            # Of the second prompt, which has the first one and the thought, nearly all is cached.
            output.cached_tokens = 7 if not number else len(prompt) - 1
            yield output

    api = tool_api(script, source=OPENED)
    usage = api.chat(**FORM).json()["usage"]
    (ids, _), _ = api.engine.asked
    assert api.engine.continued == [False, True]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7
    metrics = api.context.metrics
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (len(ids), 7)
    assert sum(metrics.finished.values()) == 1
    assert sum(metrics.request_prompt.counts) == 1


def test_a_thought_that_the_template_forbids_delays_no_form():
    api = tool_api(says('{"a": 1}'), source=OPENED)
    fields = {"chat_template_kwargs": {"enable_thinking": False}, **FORM}
    assert chat(api, stream=False, **fields)[:2] == ("", '{"a": 1}')
    assert len(api.engine.asked) == 1


def endless(engine, number, prompt, params):
    """A thought without an end; after a given one, a text."""
    text = "Hm. " * 500 if not number else ANSWER
    tokens = [*tokenizer().encode(text, add_special_tokens=False)][: params.max_tokens]
    if number:
        tokens.append(min(tiny_end_ids("llama")))
    for start in range(0, len(tokens), 3):
        last = start + 3 >= len(tokens)
        reason = "stop" if number else "length"
        yield Output(number, tokens[start : start + 3], reason if last else None)


BUDGETS = {
    "vllm": (chat, {"thinking_token_budget": 16}),
    "llama.cpp": (chat, {"thinking_budget_tokens": 16}),
    "anthropic": (messages, {"thinking": {"type": "enabled", "budget_tokens": 16}}),
}


@pytest.mark.parametrize(("ask", "fields"), BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_ends_with_its_budget_and_an_answer_follows(ask, fields, stream):
    api = tool_api(endless, source=OPENED)
    thought, text, counted = ask(api, stream=stream, **fields)
    assert text == ANSWER
    kept = tokenizer().encode("Hm. " * 500, add_special_tokens=False)[:16]
    assert thought == tokenizer().decode(kept).rstrip("\n")
    assert prompt_of(api).endswith("\n</think>\n\n")
    assert api.engine.aborted == 1
    assert counted is None or counted == 16


def test_a_budget_of_nothing_ends_the_thought_at_once():
    api = tool_api(turns(ANSWER), source=OPENED)
    assert chat(api, stream=False, thinking_token_budget=0)[:2] == ("", ANSWER)
    assert prompt_of(api).endswith("<think>\n\n</think>\n\n")


def test_max_tokens_bounds_thought_and_text_together():
    api = tool_api(endless, source=OPENED)
    body = api.chat(max_tokens=18, thinking_token_budget=16).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] >= 18


@pytest.mark.parametrize("value", ["x", 1.5])
def test_a_budget_that_is_no_number_is_refused(value):
    response = tool_api(says("x")).chat(thinking_token_budget=value)
    assert response.status_code == 400


def test_thoughts_come_back_to_the_template():
    api = tool_api(says(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"), source=OPENS)
    history = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    more = {"role": "user", "content": "And?"}
    message = api.chat().json()["choices"][0]["message"]
    api.chat(messages=[*HI, message, more])
    assert history in prompt_of(api)
    fields = {"include": ["reasoning.encrypted_content"]}
    output = api.post("/v1/responses", input="hi", **fields).json()["output"]
    item = {key: value for key, value in output[0].items() if key != "content"}
    api.post("/v1/responses", input=[*HI, item, output[1], more])
    assert history in prompt_of(api)
    item["encrypted_content"] = "of another server"
    assert api.post("/v1/responses", input=[*HI, item, output[1], more]).status_code == 200
    assert history not in prompt_of(api)
    body = {"max_tokens": 99, "model": "tiny"}
    for display in ({}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        content = api.post("/v1/messages", messages=HI, **body, **display).json()["content"]
        assert (content[0]["thinking"] == "") == bool(display)
        turn = {"role": "assistant", "content": content}
        api.post("/v1/messages", messages=[*HI, turn, more], **body)
        assert history in prompt_of(api)
    told = api.post("/api/chat", messages=HI, model="tiny", stream=False).json()["message"]
    api.post("/api/chat", messages=[*HI, told, more], model="tiny", stream=False)
    assert history in prompt_of(api)


def test_min_tokens_counts_the_thought_and_the_form_together():
    api = tool_api(turns(f"{THOUGHT}\n</think>\n\n", '{"a": 1}'), source=OPENED)
    api.chat(min_tokens=100, **FORM)
    (ids, first), (more, second) = api.engine.asked
    assert first.min_tokens == 100
    assert second.min_tokens == 100 - (len(more) - len(ids))


def test_a_response_that_begins_again_has_its_prompts_logprobs_and_fits_the_context():
    def script(engine, number, prompt, params):
        scores = [None, *(logprob_of(token, 0) for token in prompt[1:])]
        (first, *outputs) = says("No." if not number else CALL[41:], 1)(
            engine, number, prompt, params
        )
        first.prompt_logprobs = scores if params.prompt_logprobs is not None else None
        yield from (first, *outputs)

    api = tool_api(script, source=OPENS)
    required = {"tools": [WEATHER], "tool_choice": "required"}
    body = api.chat(prompt_logprobs=0, **required).json()
    (_, first), (ids, second) = api.engine.asked
    assert first.prompt_logprobs == second.prompt_logprobs == 0
    assert len(body["prompt_logprobs"]) == len(ids)
    assert len(ids) + second.max_tokens == api.context.max_model_len
