"""Harmony as the documentation of the format shows it: what each form of a header means."""

import json

import pytest

from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.learn import learn_format
from cpuserve.serving.tools.thoughts import Around
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.helpers.call_templates import GPT_OSS

THINKS = "<|channel|>analysis<|message|>A sum of two numbers.<|end|>"
ANSWERS = "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
NEEDS = "<|channel|>analysis<|message|>The weather is needed.<|end|>"
WEATHER = ("get_weather", {"city": "Oslo"})
# A response after the prompt `<|start|>assistant`: (thought, text, calls).
SHOWN = {
    "a thought and an answer": (THINKS + ANSWERS, ("A sum of two numbers.", "It is 4.", [])),
    "an answer alone": (
        ANSWERS.removeprefix("<|start|>assistant"), ("", "It is 4.", [])),
    "the recipient after the channel": (
        f"{NEEDS}<|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        ("The weather is needed.", "", [WEATHER])),
    "without a space before the type": (
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>"
        '{"city": "Oslo"}<|call|>', ("", "", [WEATHER])),
    "the recipient before the channel": (
        f"{NEEDS}<|start|>assistant to=functions.get_weather<|channel|>commentary"
        '<|constrain|>json<|message|>{"city": "Oslo"}<|end|>',
        ("The weather is needed.", "", [WEATHER])),
    "the recipient after the role of the prompt": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        ("", "", [WEATHER])),
    "the type as a word": (
        "<|channel|>commentary to=functions.get_weather json<|message|>"
        '{"city": "Oslo"}<|call|>', ("", "", [WEATHER])),
    "a call on the channel of thoughts": (
        "<|channel|>analysis to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}<|call|>', ("", "", [WEATHER])),
    "a preamble": (
        f"{NEEDS}<|start|>assistant<|channel|>commentary<|message|>**Plan**:\n1. Ask\n2. Tell"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather<|constrain|>json"
        '<|message|>{"city": "Oslo"}<|call|>',
        ("The weather is needed.", "**Plan**:\n1. Ask\n2. Tell", [WEATHER])),
    "thoughts between calls": (
        f'{NEEDS}<|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>'
        '{"city": "Oslo"}<|call|><|start|>assistant<|channel|>analysis<|message|>And now the time.'
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
        ("The weather is needed. | And now the time.", "", [WEATHER, ("get_time", {})])),
    # ggml-org/llama.cpp#27720: 4 of 100 turns of gpt-oss-20b began with such a header.
    "words in a header without a message": (
        f"<|channel|>We need the sum. <|end|><|start|>assistant{THINKS}{ANSWERS}",
        ("A sum of two numbers.", "It is 4.", [])),
    "a channel twice": (
        f"<|channel|>commentary?<|channel|>analysis<|message|>A sum.<|end|>{ANSWERS}",
        ("A sum.", "It is 4.", [])),
    "a header that ends before its message": (
        f"<|channel|>commentary?commentary?<|end|>{ANSWERS}", ("", "It is 4.", [])),
    "a channel that does not exist": (
        f"<|channel|>thinking<|message|>A sum.<|end|>{ANSWERS}", ("A sum.", "It is 4.", [])),
    "a recipient without a namespace": (
        '<|channel|>commentary to=get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        ("", "", [WEATHER])),
    "a built-in tool": (
        "<|channel|>analysis to=browser.search code<|message|>{\"query\": \"x\"}<|call|>",
        ("", "", [])),
    "python": (
        "<|channel|>analysis to=python code<|message|>print(2 + 2)<|call|>", ("", "", [])),
    "a message that ends as none should": (
        "<|channel|>final<|message|>It is 4.<|start|>assistant<|channel|>final<|message|>Really.",
        ("", "It is 4.\nReally.", [])),
}  # fmt: skip


def told(*texts):
    """(thought, text, calls) of a response that comes in these texts."""
    parser = HARMONY.parser(0, around=Around(functions=frozenset({"get_weather", "get_time"})))
    pieces = [p for text in texts for p in parser.push(text)] + parser.flush()
    calls, thoughts = [], {}  # thoughts by the number of calls before them
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
        elif isinstance(piece, Thought):
            thoughts[len(calls)] = thoughts.get(len(calls), "") + piece.text
    said = "".join(p.text for p in pieces if isinstance(p, Text))
    return (
        " | ".join(thoughts.values()),
        said,
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


@pytest.mark.parametrize(("text", "meant"), SHOWN.values(), ids=SHOWN)
def test_each_form_of_the_documentation_is_read_at_any_cut(text, meant):
    assert told(text) == meant
    assert told(*text) == meant
    for cut in range(len(text)):
        assert told(text[:cut], text[cut:]) == meant


def test_what_the_template_writes_of_an_earlier_turn_is_what_was_read():
    template = ChatTemplate(GPT_OSS, tokenizer())
    assert learn_format(template).calls is HARMONY
    name, arguments = WEATHER
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": "x"}
    for turn, meant in (
        ({"role": "assistant", "content": "It is 4."}, ("", "It is 4.", [])),
        ({"role": "assistant", "content": "", "tool_calls": [call]}, ("", "", [WEATHER])),
    ):
        prompt = template.render([asked], add_generation_prompt=True)
        text = template.render([asked, turn], add_generation_prompt=False)
        assert told(text.removeprefix(prompt)) == meant
