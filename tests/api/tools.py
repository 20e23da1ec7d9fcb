"""An Api whose model calls tools, in Hermes' format unless asked otherwise, and scripts that do."""

from __future__ import annotations

import functools
from typing import Any

from cpuserve.engine.ipc import Output
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import Api, Script, tokenizer
from tests.helpers.tiny import tiny_end_ids

TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}. Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{% if message.content and loop.first
%}{{ '\\n' }}{% endif %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def says(text: str, per_output: int = 3, finish: str = "stop") -> Script:
    """Return a script that writes `text`, some tokens an output, then ends."""

    def script(engine, number, prompt, params):
        tokens = tokenizer().encode(text, add_special_tokens=False)
        if finish == "stop":
            tokens.append(min(tiny_end_ids("llama")))
        for start in range(0, len(tokens), per_output):
            last = start + per_output >= len(tokens)
            yield Output(number, tokens[start : start + per_output], finish if last else None)

    return script


@functools.cache
def template(source: str = TEMPLATE) -> ChatTemplate:
    """The template."""
    return ChatTemplate(source, tokenizer())


def tool_api(script: Script, *, source: str = TEMPLATE, **options: Any) -> Api:
    """Return an Api whose chat template has tools, with room for them in its context."""
    api = Api(script, **options)
    api.engine.info.update(kv_tokens=4096, max_model_len=4096)
    api.context.max_model_len = 4096
    api.context.set_ready(tokenizer(), template(source))
    return api


def prompt_of(api: Api, which: int = -1) -> str:
    """Return the text of a prompt that the engine got."""
    return tokenizer().decode(api.engine.asked[which][0], skip_special_tokens=False)
