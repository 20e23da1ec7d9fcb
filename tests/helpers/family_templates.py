"""Chat templates of our own that write calls as model families do; see call_templates.py."""

from tests.helpers.call_templates import AS_JSON, TAGS, XML, chatml

ARGUMENTS = "{{- f.arguments | tojson }}"
TEXT_OR_JSON = "{{- v if v is string else v | tojson }}"


def in_section(begin, call, between, end):
    """Calls between two texts, with a text between them."""
    return (
        f"{{{{- '{begin}' if loop.first else '{between}' }}}}{call}{{{{- '{end}' if loop.last }}}}"
    )


def objects(begin, end, name="name", arguments="arguments", first="", between=", "):
    """A list of objects."""
    call = f'{{{{- \'{{{first}"{name}": "\' + f.name + \'", "{arguments}": \' }}}}{ARGUMENTS}'
    return in_section(begin, call + "{{- '}' }}", between, end)


def invokes(begin, end, prefix="", shown=""):
    """<invoke name=NAME> with <parameter name=KEY> for each argument."""
    values = (
        "{%- for k, v in f.arguments.items() %}"
        f"{{{{- '<{prefix}parameter name=\"' + k + '\"' + {shown or repr('')} + '>' }}}}"
        f"{TEXT_OR_JSON}{{{{- '</{prefix}parameter>\\n' }}}}{{%- endfor %}}"
    )
    call = f"{{{{- '<{prefix}invoke name=\"' + f.name + '\">\\n' }}}}{values}"
    return in_section(f"{begin}\\n", call + f"{{{{- '</{prefix}invoke>\\n' }}}}", "", end)


def marked(before, middle, end, section="", between="", close=""):
    """Calls with the name before the object of the arguments."""
    call = f"{{{{- '{before}' + f.name + {middle} }}}}{ARGUMENTS}{{{{- '{end}' }}}}"
    return in_section(section, call, between, close)


PYTHON_VALUES = (
    "{%- for k, v in f.arguments.items() %}{{- k + '=' }}{%- if v is string %}"
    '{{- "\'" + v + "\'" }}{%- elif v is mapping %}{{- v | tojson }}{%- else %}{{- v | string }}'
    "{%- endif %}{{- ', ' if not loop.last }}{%- endfor %}"
)


def python(begin, between, end):
    """Calls as Python writes them."""
    return in_section(begin, "{{- f.name + '(' }}" + PYTHON_VALUES + "{{- ')' }}", between, end)


def braces(begin, end, mark):
    """Calls as Gemma writes them."""
    value = (
        "{%- macro value(v) %}{%- if v is string %}{{- 'M' + v + 'M' }}{%- elif v is boolean %}"
        "{{- v | tojson }}{%- elif v is mapping %}{{- '{' }}{%- for k, w in v.items() %}"
        "{{- k + ':' + value(w) }}{{- ',' if not loop.last }}{%- endfor %}{{- '}' }}"
        "{%- elif v is sequence %}{{- '[' }}"
        "{%- for w in v %}{{- value(w) }}{{- ',' if not loop.last }}{%- endfor %}{{- ']' }}"
        "{%- else %}{{- v }}{%- endif %}{%- endmacro %}"
    ).replace("'M'", f"'{mark}'")
    return (
        value + f"{{{{- '{begin}call:' + f.name + '{{' }}}}"
        "{%- for k, v in f.arguments.items() %}{{- k + ':' + value(v) }}"
        "{{- ',' if not loop.last }}{%- endfor %}" + f"{{{{- '}}{end}' }}}}"
    )


def elements(begin, end, mark):
    """A tag for each argument, with tags inside, as MiniMax M3 writes them; mark: before each <."""
    value = (
        "{%- macro value(v) %}{%- if v is mapping %}{%- for k, w in v.items() %}"
        "{{- 'M<' + k + '>' + value(w) + 'M</' + k + '>' }}{%- endfor %}{%- elif v is string %}"
        "{{- v }}{%- elif v is iterable %}{%- for w in v %}{{- 'M<item>' + value(w) + 'M</item>' }}"
        "{%- endfor %}{%- else %}{{- v | tojson }}{%- endif %}{%- endmacro %}"
    )
    call = (
        "{{- 'M<invoke name=\"' + f.name + '\">' }}{{- value(f.arguments) }}{{- 'M</invoke>\\n' }}"
    )
    return value.replace("M", mark) + in_section(begin, call.replace("M", mark), "", end)


KEYED = in_section(
    "<|tools_prefix|>[", "{{- '{\"' + f.name + '\": ' }}" + ARGUMENTS + "{{- '}' }}", ", ",
    "]<|tools_suffix|>",
)  # fmt: skip
DSML = "\uff5cDSML\uff5c"
STRING = "(' string=\"true\"' if v is string else ' string=\"false\"')"
CDATA = (
    "{{- '<function name=\"' + f.name + '\">' }}{%- for k, v in f.arguments.items() %}"
    "{{- '<param name=\"' + k + '\">' }}{%- if v is string %}{{- '<![CDATA[' + v + ']]>' }}"
    "{%- else %}{{- v | string }}{%- endif %}{{- '</param>' }}{%- endfor %}{{- '</function>' }}"
)
SEED = TAGS.replace("tool_call>", "seed:tool_call>").replace("VALUE", "v | string")
# By name of the family: how its template writes calls, and the `kind` of writing that the server
# learns from it.
LEARNED = {
    "GLM 4.5": (XML.replace("BREAK", "'\\n'"), "tags"),
    "GLM 4.7": (XML.replace("BREAK", "''"), "tags"),
    "Seed-OSS": (SEED, "tags"),
    "MiniMax M2": (invokes("<minimax:tool_call>", "</minimax:tool_call>"), "tags"),
    "DeepSeek V3.2": (
        invokes(f"<{DSML}function_calls>", f"</{DSML}function_calls>", DSML, STRING), "tags"),
    "texts in CDATA": (CDATA, "tags"),
    "Apriel, Hunyuan": (objects("<tool_calls>[", "]</tool_calls>"), "json_objects"),
    "Nemotron": (objects("<TOOLCALL>[", "]</TOOLCALL>"), "json_objects"),
    "Granite": (objects("<|tool_call|>[", "]"), "json_objects"),
    "Phi-4-mini": (objects("functools[", "]"), "json_objects"),
    "MiniMax M1": (
        objects("<tool_calls>\\n", "\\n</tool_calls>", between="\\n"), "json_objects"),
    "Mistral, a list": (objects("[TOOL_CALLS][", "]"), "json_objects"),
    "Cohere": (
        objects("<|START_ACTION|>[\\n    ", "\\n]<|END_ACTION|>", "tool_name", "parameters",
                '"tool_call_id": "\' ~ loop.index0 ~ \'", ', ",\\n    "), "json_objects"),
    "Apertus": (KEYED, "json_objects"),
    "Ministral": (marked("[TOOL_CALLS]", "'[ARGS]'", ""), "named_json"),
    "Mistral, with ids": (
        marked("[TOOL_CALLS]", "'[CALL_ID]' + c.id + '[ARGS]'", ""), "named_json"),
    "DeepSeek R1": (
        marked("<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>",
               "'\\n```json\\n'", "\\n```<\uff5ctool\u2581call\u2581end\uff5c>",
               "<\uff5ctool\u2581calls\u2581begin\uff5c>", "\\n",
               "<\uff5ctool\u2581calls\u2581end\uff5c>"), "named_json"),
    "DeepSeek V3.1": (
        marked("<\uff5ctool\u2581call\u2581begin\uff5c>", "'<\uff5ctool\u2581sep\uff5c>'",
               "<\uff5ctool\u2581call\u2581end\uff5c>",
               "<\uff5ctool\u2581calls\u2581begin\uff5c>", "",
               "<\uff5ctool\u2581calls\u2581end\uff5c>"), "named_json"),
    "Kimi K2": (
        marked("<|tool_call_begin|>functions.",
               "':' ~ loop.index0 ~ '<|tool_call_argument_begin|>'", "<|tool_call_end|>",
               "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"), "named_json"),
    "Functionary": (marked("<function=", "'>'", "</function>"), "named_json"),
    "a text after the last call": (
        marked("<function=", "'>'", "</function>", close="<|tool_response|>"), "named_json"),
    "LFM2": (python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"), "pythonic"),
    "OLMo 3": (python("<function_calls>\\n", "\\n", "\\n</function_calls>"), "pythonic"),
    "Llama 4": (python("[", ", ", "]"), "pythonic"),
    "Gemma 4": (braces("<|tool_call>", "<tool_call|>", '<|"|>'), "braces"),
    "FunctionGemma": (
        braces("<start_function_call>", "<end_function_call>", "<escape>"), "braces"),
    "Command R": (
        objects("Action:\\n```json\\n[\\n    ", "\\n]```", "tool_name", "parameters",
                between=",\\n    "), "json_objects"),
    "MiroThinker": (
        marked("<server_name>tools</server_name>\\n<tool_name>",
               "'</tool_name>\\n<arguments>\\n'", "\\n</arguments>\\n", "<use_mcp_tool>\\n", "",
               "</use_mcp_tool>"), "named_json"),
    "MiniCPM3": (
        python("<|tool_call_start|>\\n```python\\n", "\\n", "\\n```\\n<|tool_call_end|>"),
        "pythonic"),
    "MiniMax M3": (
        elements("]<]minimax[>[<tool_call>\\n", "]<]minimax[>[</tool_call>", "]<]minimax[>["),
        "elements"),
    "plain tags": (elements("<calls>", "</calls>", ""), "elements"),
    "of its own": (marked("@@", "''", ""), "named_json"),
    "a space before the name": (marked("@call ", "'\\n'", "\\n@end"), "named_json"),
}  # fmt: skip


def template(family):
    """The chat template of a family."""
    return chatml(LEARNED[family][0])


__all__ = ["AS_JSON", "LEARNED", "template"]
