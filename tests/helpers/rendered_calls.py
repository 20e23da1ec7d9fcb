"""Calls as the chat templates of tests/helpers write them, for tests of every family at once."""

from cpuserve.serving.tools.learn import learn_format
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.helpers.call_templates import (
    AS_JSON,
    GAP,
    GPT_OSS,
    JSON_CALL,
    LLAMA,
    TAGS,
    chatml,
)
from tests.helpers.family_templates import LEARNED, template
from tests.helpers.turn_templates import ALL as TURNED

NAME, OTHER = "get_weather", "other.tool"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": ".", "parameters": SCHEMA}}
    for n in (NAME, OTHER)
]
SOURCES = {
    **{family: template(family) for family in LEARNED},
    **{family: source for family, (source, _) in TURNED.items()},
    "Hermes": chatml(GAP + JSON_CALL),
    "Qwen3-Coder": chatml(GAP + TAGS.replace("VALUE", AS_JSON)),
    "Llama 3": LLAMA,
    "gpt-oss": GPT_OSS,
}
ONE_CALL = ("Llama 3", "gpt-oss")  # their templates write one call only
# What ends the turn, which is not a part of the response.
ENDS = ("<|im_end|>\n", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|stop|>\n", "<|end_sampling|>",
        "<|eos|>\n", "<|end|>", "<|close|>message<|sep|>")  # fmt: skip
_found = {}


def learned(family):
    """What is found for the template of a family, and the template."""
    if family not in _found:
        source = ChatTemplate(SOURCES[family], tokenizer())
        _found[family] = (learn_format(source), source)
    return _found[family]


def written(family, *calls, said=""):
    """The response of the template with a text and calls of (name, arguments)."""
    _, source = learned(family)
    asked = [{"role": "user", "content": "x"}]
    prompt = source.render(asked, tools=TOOLS)
    turn = {"role": "assistant", "content": said, "tool_calls": [
        {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]}  # fmt: skip
    text = source.render([*asked, turn], tools=TOOLS, add_generation_prompt=False)
    text = text.removeprefix(prompt)
    for end in ENDS:
        text = text.removesuffix(end)
    return text
