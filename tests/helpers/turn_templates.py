"""Chat templates of our own where each text, thought and call of a response has a header."""

from tests.helpers.family_templates import ARGUMENTS, TEXT_OR_JSON, in_section, marked, objects

SOURCE = (
    "{%- if tools %}{{- 'Tools: ' }}{{- tools | tojson }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content and 'THOUGHT' %}"
    "{{- 'BEGUNTHOUGHT' + m.reasoning_content + 'END' }}{%- endif %}"
    "{%- if m.content %}{{- 'BEGUNTEXT' + m.content + 'END' }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}CALL{%- endfor %}{{- 'LAST' }}"
    "{%- else %}{{- '(' + m.role + ')' + m.content + 'LAST' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'BEGUN' }}{%- endif %}"
)


def turned(begun, text, thought, end, call, last):
    """Return a template; `begun` starts a header, `text` and `thought` end it for their part."""
    parts = {"BEGUN": begun, "TEXT": text, "THOUGHT": thought, "END": end, "LAST": last}
    source = SOURCE.replace("CALL", call)
    for name, part in parts.items():
        source = source.replace(name, part)
    return source


INVOKE = (
    "{{- '<|start|>assistant to=' + f.name + '<|message|><x:calls>\\n<x:invoke name=\"' }}"
    "{{- f.name + '\">\\n' }}{%- for k, v in f.arguments.items() %}"
    "{{- '<x:parameter name=\"' + k + '\">' }}"
    f"{TEXT_OR_JSON}"
    "{{- '</x:parameter>\\n' }}{%- endfor %}{{- '</x:invoke>\\n</x:calls><|eom|>' }}"
)
REPEATED = (
    "{{- '<|model|>' + f.name + '<|call|>{\"name\": \"' + f.name + '\", \"args\": ' }}"
    f"{ARGUMENTS}{{{{- '}}<|end_message|>' }}}}"
)
# By name of the family: its template, and the `kind` of writing arguments that the server learns.
TURNS = {
    "Functionary 3.2": (
        turned(">>>", "all\\n", "", "", marked(">>>", "'\\n'", ""), "<|eot_id|>"), "named_json"),
    "Muse": (
        turned("<|start|>assistant", " to=user<|message|>", " to=self<|message|>", "<|eom|>",
               INVOKE, "<|eot|>"), "tags"),
    "HyperCLOVA X": (
        turned("<|im_start|>assistant", "\\n", "/think\\n", "<|im_end|>\\n",
               objects("<|im_start|>assistant -> tool/function_call\\n[", "]<|im_end|>\\n"),
               "<|stop|>\\n"), "json_objects"),
    "Inkling": (
        turned("<|model|>", "<|text|>", "<|thinking|>", "<|end_message|>", REPEATED,
               "<|end_sampling|>"), "named_json"),
    "Solar": (
        turned("<|begin|>assistant", "<|content|>", "<|think|>", "<|end|>",
               marked("<|call:begin|>", "'<|call:args|>'", "<|call:end|>",
                      "<|begin|>assistant<|calls|>"), "<|eos|>\\n"), "named_json"),
}  # fmt: skip
# Headers of texts only, after the thought.
COHERE = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}"
    "{{- '<|turn|>' + m.role + ':' }}{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}"
    "{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{%- endif %}"
    "{%- if m.content %}{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}"
    + objects("<|START_ACTION|>[", "]<|END_ACTION|>")
    + "{%- endfor %}{{- '<|end|>' }}{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|turn|>assistant:' }}{%- endif %}"
)
K3 = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}"
    "{{- '<|open|>' + m.role + '<|sep|>' }}{%- if m.role == 'assistant' %}"
    "{{- '<|open|>think<|sep|>' + (m.reasoning_content or '') + '<|close|>think<|sep|>' }}"
    "{{- '<|open|>response<|sep|>' + m.content + '<|close|>response<|sep|>' }}"
    "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}"
    + in_section(
        "<|open|>tools<|sep|>",
        "{{- '<|open|>call tool=\"' + f.name + '\"<|sep|>' }}"
        "{%- for k, v in f.arguments.items() %}"
        "{{- '<|open|>argument key=\"' + k + '\"<|sep|>' }}"
        + TEXT_OR_JSON
        + "{{- '<|close|>argument<|sep|>' }}{%- endfor %}{{- '<|close|>call<|sep|>' }}",
        "",
        "<|close|>tools<|sep|>",
    )
    + "{%- endfor %}{%- else %}{{- m.content }}{%- endif %}{{- '<|close|>message<|sep|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|open|>assistant<|sep|><|open|>think<|sep|>' }}{%- endif %}"
)
HEADED = {"Cohere": (COHERE, "json_objects"), "Kimi K3": (K3, "tags")}
ALL = {**TURNS, **HEADED}
