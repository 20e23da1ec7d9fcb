"""Chat templates that write calls in the ways of model families."""

# A ChatML template. `chatml` replaces TEXT, which writes the text of message m, and CALLS, which
# writes its calls.
CHATML = """{%- if tools %}{{- '<|im_start|>system\\nTOOLS ' }}{{- tools | tojson }}
{{- '<|im_end|>\\n' }}{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}TEXT
{%- for c in m.tool_calls or [] %}{%- set f = c.function %}CALLS{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENED' }}{%- endif %}"""


def chatml(calls, text="{{- m.content }}", tools="Tools:", opened=""):
    source = CHATML.replace("CALLS", calls).replace("TEXT", text).replace("OPENED", opened)
    return source.replace("TOOLS", tools)


GAP = "{{- '\\n' if m.content or not loop.first }}"
JSON_CALL = """{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
TAGS = """{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}
{%- for k, v in f.arguments.items() %}{{- '<parameter=' + k + '>\\n' }}
{{- VALUE }}{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}"""
AS_JSON = "v if v is string else v | tojson"
XML = """{{- '<tool_call>' + f.name + BREAK }}{%- for k, v in f.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>' + BREAK + '<arg_value>' }}
{{- v if v is string else v | tojson }}{{- '</arg_value>' + BREAK }}{%- endfor %}
{{- '</tool_call>' }}"""
LLAMA = """{%- if tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\nTools: ' }}
{{- tools | tojson }}{{ '<|eot_id|>' }}{%- endif %}{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}{{- '{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson }}{{- '}<|eom_id|>' }}{%- else %}{{- m.content + '<|eot_id|>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GPT_OSS = """{%- if tools %}{{ 'namespace functions ' }}{{ tools | tojson }}{%- endif %}
{%- for m in messages %}{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}
{%- if m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}
{%- endif %}{{- '<|start|>assistant to=functions.' + f.name }}
{{- '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}{{- '<|call|>' }}{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
