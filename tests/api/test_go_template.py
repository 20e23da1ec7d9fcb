"""Templates in the syntax of Go become Jinja templates that render the same prompts."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cpuserve.api.ollama.go_template import is_go_template, to_jinja
from cpuserve.errors import InvalidRequest

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
    "tools": "{{ if .Tools }}{{ end }}{{ .Prompt }}",
    "calls": "{{ range .Messages }}{{ .ToolCalls }}{{ end }}",
    "with": "{{ with .System }}{{ . }}{{ end }}",
    "pipeline": "{{ .Prompt | printf }}",
    "function": '{{ printf "%s" .Prompt }}',
    "open action": "{{ .Prompt",
    "open block": "{{ if .Prompt }}x",
    "end alone": "{{ .Prompt }}{{ end }}",
    "two else": "{{ if .Prompt }}{{ else }}{{ else }}{{ end }}",
    "number": "{{ .Prompt }}{{ 1 }}",
    "variable": "{{ $x }}{{ .Prompt }}",
    "assigned again": "{{ $x := .System }}{{ $x = .Prompt }}",
    "range of a text": "{{ range .Prompt }}{{ end }}",
    "parenthesis": "{{ if (eq .Prompt .System }}{{ end }}",
    "quotes": '{{ "a" "b" }}{{ .Prompt }}{{ " }}',
    "depth": "{{ if .Prompt }}" * 60 + "{{ end }}" * 60,
}


def rendered(source, messages, **more):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    talk = [{"role": role, "content": content} for role, content in messages]
    more.setdefault("add_generation_prompt", True)
    return environment.from_string(to_jinja(source)).render(messages=talk, **more)


@pytest.mark.parametrize(("source", "messages", "expected"), CASES.values(), ids=CASES)
def test_a_template_renders_as_in_ollama(source, messages, expected):
    assert is_go_template(source)
    assert rendered(source, messages) == expected


def test_a_finished_turn_is_whole_without_a_generation_prompt():
    text = rendered(CHATML, [ASKED, ("assistant", "B")], add_generation_prompt=False)
    assert text.endswith(f"B{END}")


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
