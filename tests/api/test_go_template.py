"""Templates in the syntax of Go become Jinja templates that render the same prompts."""

import pytest

from cpuserve.api.ollama.go_template import is_go_template, to_jinja
from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.rendering.process import ChatEnvironment

CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
LLAMA_2 = "[INST] {{ if .System }}<<SYS>>{{ .System }}<</SYS>>\n\n{{ end }}{{ .Prompt }} [/INST]"
LLAMA_3 = """{{- if .System }}<|sys|>{{ .System }}{{ end }}
{{- range .Messages }}
{{- if eq .Role "user" "assistant" }}<|{{ .Role }}|>

{{ .Content }}<|eot|>
{{- end }}
{{- end }}<|assistant|>

"""
GEMMA = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if or (eq .Role "user") (eq .Role "system") }}<user>
{{ .Content }}<end>
{{ if $last }}<model>
{{ end }}
{{- else if eq .Role "assistant" }}<model>
{{ .Content }}{{ if not $last }}<end>
{{ end }}
{{- end }}
{{- end }}"""
NESTED = (
    '{{ range $m := .Messages }}{{ if and (ne $m.Role "tool") (not (eq $m.Role `x`)) }}'
    "{{ $m.Content }}{{ else }}-{{ end }}{{ $.System }};{{ end }}"
)
SYSTEM, ASKED = ("system", "S"), ("user", "A")
TALK = [SYSTEM, ASKED, ("assistant", "B"), ("user", "C")]
END = "<|im_end|>\n"
CASES = {
    "one turn": (
        CHATML,
        [SYSTEM, ASKED],
        f"<|im_start|>system\nS{END}<|im_start|>user\nA{END}<|im_start|>assistant\n",
    ),
    "two turns, the system text in the first only": (
        CHATML,
        TALK,
        f"<|im_start|>system\nS{END}<|im_start|>user\nA{END}<|im_start|>assistant\nB{END}"
        f"<|im_start|>user\nC{END}<|im_start|>assistant\n",
    ),
    "a response that the client has begun": (
        CHATML,
        [ASKED, ("assistant", "B")],
        f"<|im_start|>user\nA{END}<|im_start|>assistant\nB",
    ),
    "a system text in the middle begins a turn": (
        LLAMA_2,
        [ASKED, SYSTEM, ("user", "C")],
        "[INST] A [/INST][INST] <<SYS>>S<</SYS>>\n\nC [/INST]",
    ),
    "without .Response it is added at the end": (
        LLAMA_2,
        [ASKED, ("assistant", "B"), ("user", "C")],
        "[INST] A [/INST]B[INST] C [/INST]",
    ),
    "messages of one role are joined": (
        LLAMA_2,
        [ASKED, ("user", "C"), ("assistant", "B"), ("assistant", "D"), ASKED],
        "[INST] A\n\nC [/INST]B\n\nD[INST] A [/INST]",
    ),
    "messages": (
        LLAMA_3,
        TALK,
        "<|sys|>S<|user|>\n\nA<|eot|><|assistant|>\n\nB<|eot|><|user|>\n\nC<|eot|><|assistant|>\n\n",
    ),
    "the last message": (GEMMA, TALK, "<user>\nS<end>\n<user>\nA<end>\n<model>\nB<end>\n"
                         "<user>\nC<end>\n<model>\n"),
    "an open last response": (GEMMA, TALK[:3], "<user>\nS<end>\n<user>\nA<end>\n<model>\nB"),
    "names and nested conditions": (NESTED, [SYSTEM, ("tool", "T")], "SS;-S;"),
    "text that Jinja would read": (
        '{{/* "no" {{ */}}{% if %}\\n"é😀"{{ .Prompt }}{# x #} {{ "}}\\t" }}',
        [ASKED],
        '{% if %}\\n"é😀"A{# x #} }}\t',
    ),
    "content that looks like a template": (
        LLAMA_2,
        [("user", "{{ x }}{% %}")],
        "[INST] {{ x }}{% %} [/INST]",
    ),
}  # fmt: skip
REFUSED = {
    "calls": "{{ range .Messages }}{{ .ToolCalls }}{{ end }}",
    "field of a call": "{{ range .Messages }}{{ range .ToolCalls }}{{ .Role }}{{ end }}{{ end }}",
    "properties": "{{ range .Tools }}{{ range .Function.Parameters.Properties }}{{ end }}{{ end }}",
    "slice by a text": '{{ range slice .Messages "a" }}{{ .Role }}{{ end }}',
    "continue alone": "{{ continue }}{{ .Prompt }}",
    "another type": '{{ $x := 1 }}{{ $x = "a" }}{{ .Prompt }}',
    "index": "{{ index .Messages 0 }}",
    "with": "{{ with .System }}{{ . }}{{ end }}",
    "pipeline": "{{ .Prompt | printf }}",
    "function": '{{ printf "%s" .Prompt }}',
    "open action": "{{ .Prompt",
    "open block": "{{ if .Prompt }}x",
    "end alone": "{{ .Prompt }}{{ end }}",
    "two else": "{{ if .Prompt }}{{ else }}{{ else }}{{ end }}",
    "number": "{{ .Prompt }}{{ 1 }}",
    "variable": "{{ $x }}{{ .Prompt }}",
    "assigned before": "{{ $x = .Prompt }}",
    "range of a text": "{{ range .Prompt }}{{ end }}",
    "parenthesis": "{{ if (eq .Prompt .System }}{{ end }}",
    "quotes": '{{ "a" "b" }}{{ .Prompt }}{{ " }}',
    "depth": "{{ if .Prompt }}" * 60 + "{{ end }}" * 60,
}


def rendered(source, messages, **more):
    talk = [
        each if isinstance(each, dict) else {"role": each[0], "content": each[1]}
        for each in messages
    ]
    more.setdefault("add_generation_prompt", True)
    return ChatEnvironment().from_string(to_jinja(source)).render(messages=talk, **more)


@pytest.mark.parametrize(("source", "messages", "expected"), CASES.values(), ids=CASES)
def test_a_template_renders_as_in_ollama(source, messages, expected):
    assert is_go_template(source)
    assert rendered(source, messages) == expected


def test_a_finished_turn_is_whole_without_a_generation_prompt():
    text = rendered(CHATML, [ASKED, ("assistant", "B")], add_generation_prompt=False)
    assert text.endswith(f"B{END}")


# As templates of Ollama's library write tools: each tool alone (llama3.1), only their functions
# (qwen2.5), or all in one list (mistral).
EACH_TOOL = """{{- if or .System .Tools }}<sys>
{{- if .System }} {{ .System }}
{{- end }}
{{- if .Tools }} tools!
{{- end }}</sys>
{{- end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "user" }}<user>
{{- if and $.Tools $last }}
{{ range $.Tools }}
{{- . }}
{{ end }}
{{- end }}{{ .Content }}</user>{{ if $last }}<bot>{{ end }}
{{- else if eq .Role "assistant" }}<bot>
{{- if .ToolCalls }}
{{- range .ToolCalls }}{"name": "{{ .Function.Name }}", "parameters": {{ .Function.Arguments }}}
{{- end }}
{{- else }}{{ .Content }}
{{- end }}{{ if not $last }}</bot>{{ end }}
{{- else if eq .Role "tool" }}<result>{{ .Content }}</result>{{ if $last }}<bot>{{ end }}
{{- end }}
{{- end }}"""
FUNCTIONS = """{{- if .Messages }}{{ range .Tools }}{"function": {{ .Function }}}
{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
[{{ .Role }}] {{ if .Content }}{{ .Content }}
{{- else if .ToolCalls }}{{ range .ToolCalls }}<{{ .Function.Name }} {{ json .Function.Arguments }}>
{{- end }}{{ end }}{{ if and (ne .Role "assistant") $last }}[assistant]{{ end }}
{{ end }}
{{- else }}{{ .Prompt }}{{ end }}{{ .Response }}"""
ONE_LIST = """{{- range $index, $_ := .Messages }}
{{- if eq .Role "user" }}
{{- if and (eq (len (slice $.Messages $index)) 1) $.Tools }}[TOOLS] {{ $.Tools }}[/TOOLS]
{{- end }}[INST] {{ .Content }}[/INST]
{{- else if .ToolCalls }}[CALLS] [
{{- range $n, $call := .ToolCalls }}{{ if $n }}, {{ end }}{{ json $call.Function.Name }}
{{- end }}]</s>
{{- end }}
{{- end }}"""
LAST_USER = """{{- $at := -1 }}
{{- range $i, $m := .Messages }}{{ if eq $m.Role "user" }}{{ $at = $i }}{{ end }}{{ end }}
{{- range $i, $m := .Messages }}
{{- if eq .Role "system" }}{{ continue }}{{ end }}
{{- if and .Thinking (gt $i $at) }}<think>{{ .Thinking }}</think>{{ end }}{{ .Content }};
{{- end }}{{ if $.IsThinkSet }}{{ if $.Think }}/think{{ else }}/no_think{{ end }}{{ end }}"""
PLACE = {"type": "string", "description": "a <city> & more"}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "strict": True,
        "parameters": {"properties": {"place": PLACE}, "required": ["place"], "type": "object"},
        "description": "the time",
    },
}
SCHEMA = (
    '{"type":"object","required":["place"],"properties":{"place":{"type":"string",'
    '"description":"a \\u003ccity\\u003e \\u0026 more"}}}'
)
FUNCTION = f'{{"name":"now","description":"the time","parameters":{SCHEMA}}}'
CALL = {"function": {"name": "now", "arguments": {"place": "Pöx", "n": 1}}}
CALLED = [
    SYSTEM,
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "12"},
    {"role": "tool", "content": "13"},
    ("assistant", "noon"),
    ("user", "C"),
]
ARGUMENTS = '{"place":"Pöx","n":1}'
WRITTEN = f'{{"name": "now", "parameters": {ARGUMENTS}}}'
TOOL_CASES = {
    "each tool": (
        EACH_TOOL,
        CALLED,
        f"<sys> S tools!</sys><user>A</user><bot>{WRITTEN}{WRITTEN}</bot><result>12</result>"
        f'<result>13</result><bot>noon</bot><user>\n{{"type":"function","function":{FUNCTION}}}\n'
        "C</user><bot>",
    ),
    "a result is last": (
        EACH_TOOL,
        CALLED[1:4],
        f"<sys> tools!</sys><user>A</user><bot>{WRITTEN}{WRITTEN}</bot><result>12</result><bot>",
    ),
    "functions": (
        FUNCTIONS,
        CALLED,
        f'{{"function": {FUNCTION}}}\n[system] S\n[user] A\n[assistant] <now {ARGUMENTS}>'
        f"<now {ARGUMENTS}>\n[tool] 12\n[tool] 13\n[assistant] noon\n[user] C[assistant]\n",
    ),
    "one list": (
        ONE_LIST,
        CALLED,
        '[INST] A[/INST][CALLS] ["now", "now"]</s>[TOOLS] [{"type":"function","function":'
        f"{FUNCTION}}}][/TOOLS][INST] C[/INST]",
    ),
}


@pytest.mark.parametrize(("source", "messages", "expected"), TOOL_CASES.values(), ids=TOOL_CASES)
def test_a_template_writes_tools_as_go_would(source, messages, expected):
    assert rendered(source, messages, tools=[TOOL]) == expected


def test_a_request_without_tools_renders_none():
    assert rendered(EACH_TOOL, [ASKED]) == "<user>A</user><bot>"
    assert rendered(ONE_LIST, [ASKED], tools=None) == "[INST] A[/INST]"


def test_arguments_that_are_a_text_are_written_as_they_are():
    call = {"function": {"name": "now", "arguments": '{"a": 1}'}}
    talk = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"parameters": {"a": 1}}' in rendered(EACH_TOOL, talk)
    assert '<now {"a": 1}>' in rendered(FUNCTIONS, talk)


def test_thoughts_and_variables_that_change_are_rendered():
    talk = [
        SYSTEM,
        ASKED,
        {"role": "assistant", "content": "B", "reasoning_content": "old"},
        ("user", "C"),
        {"role": "assistant", "content": "D", "reasoning_content": "new"},
    ]
    assert rendered(LAST_USER, talk) == "A;B;C;<think>new</think>D;"
    assert rendered(LAST_USER, [ASKED], enable_thinking=True) == "A;/think"
    assert rendered(LAST_USER, [ASKED], enable_thinking=False) == "A;/no_think"


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_other_templates_are_refused(source):
    with pytest.raises(InvalidRequest, match="template: ") as raised:
        to_jinja(source)
    assert raised.value.param == "template"


def test_a_long_template_takes_little_time():
    text = "{{ if .Prompt }}" + '"`{{ .Prompt }}-' * 5000 + "{{ end }}"
    assert len(to_jinja(text)) > len(text)
    with pytest.raises(InvalidRequest):
        to_jinja('{{ .Prompt "' + '"' * 20_000)
