"""The formats by model family; each has the name of the vLLM tool parser.

Most templates show how calls are written, and need no entry. Formats of one family are in its
record (ToolTables), and others in the table here.
The entries are for --tool-call-parser, and for templates that show no calls:
`hinted` recognizes these templates by a text in the template or by a special token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from cpuserve.base.registry import imported
from cpuserve.models import FAMILIES, add_plugins
from cpuserve.serving.tools.brace_calls import Braces
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.layout import ID, CallLayout, LayoutFormat, Writing
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.object_calls import NAMED_JSON, Objects
from cpuserve.serving.tools.python_calls import PYTHON
from cpuserve.serving.tools.tag_calls import Tags

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import ToolFormat

# Parts of several formats.
_NAMED, _ARGUMENTS = '{"name": "', '", "arguments": '
_DSML = "\uff5cDSML\uff5c"
_D, _SEP, _END = "<\uff5ctool\u2581", "<\uff5ctool\u2581sep\uff5c>", "end\uff5c>"
_KINDS = ("string", "integer", "number", "boolean", "array", "object", "null")
_OF_KIND = tuple((kind, f'" string="{str(kind == "string").lower()}">') for kind in _KINDS)


def _list(section: str, close: str) -> CallLayout:
    """Return the layout of a JSON list of objects between two texts."""
    return CallLayout(f"{section}[", _NAMED, _ARGUMENTS, "}", ", ", f"]{close}")


def _deepseek(before: str, middle: str, end: str, between: str) -> CallLayout:
    section, close = f"{_D}calls\u2581begin\uff5c>", f"{_D}calls\u2581{_END}"
    begin, end = f"{_D}call\u2581begin\uff5c>{before}", f"{end}{_D}call\u2581{_END}"
    return CallLayout(section, begin, middle, end, between, close)


def _invokes(tag: str, prefix: str = "") -> CallLayout:
    """Return the layout with <invoke name="NAME"> inside of `tag`."""
    begin, end = f'<{prefix}invoke name="', f"</{prefix}invoke>\n"
    return CallLayout(f"<{prefix}{tag}>\n", begin, '">\n', end, "", f"</{prefix}{tag}>")


def _python(section: str, between: str, close: str) -> CallLayout:
    return CallLayout(section, "", "(", "", between, close)


def _parameters(heads: tuple[tuple[str, str], ...], prefix: str = "") -> Tags:
    return Tags(f'<{prefix}parameter name="', heads, f"</{prefix}parameter>\n")


# A row is (name, layout, writing). Models write the calls of Hermes with other white space too,
# and some omit the <tool_call> of Qwen3-Coder.
_ROWS: tuple[tuple[str, CallLayout, Writing], ...] = (
    ("apertus", CallLayout("<|tools_prefix|>[", '{"', '": ', "}", ", ", "]<|tools_suffix|>"),
     Objects(keyed=True)),
    ("cohere_command_r", CallLayout("Action:\n```json\n[", '\n    {\n        "tool_name": "',
     '",\n        "parameters": ', "\n    }", ",", "\n]```"), Objects()),
    ("cohere_command3", CallLayout("<|START_ACTION|>[\n    ",
     f'{{"tool_call_id": "{ID}", "tool_name": "', '", "parameters": ', "}", ",\n    ",
     "\n]<|END_ACTION|>"), Objects()),
    ("deepseek_v3", _deepseek(f"function{_SEP}", "\n```json\n", "\n```", "\n"), NAMED_JSON),
    ("deepseek_v31", _deepseek("", _SEP, "", ""), NAMED_JSON),
    ("deepseek_v32", _invokes("function_calls", _DSML), _parameters(_OF_KIND, _DSML)),
    ("deepseek_v4", _invokes("tool_calls", _DSML), _parameters(_OF_KIND, _DSML)),
    ("functiongemma", CallLayout("", "<start_function_call>call:", "{", "<end_function_call>"),
     Braces("<escape>", sorts=True)),
    ("glm45", CallLayout("", "<tool_call>", "\n", "</tool_call>", "\n"),
     Tags("<arg_key>", (("", "</arg_key>\n<arg_value>"),), "</arg_value>\n")),
    ("glm47", CallLayout("", "<tool_call>", "", "</tool_call>"),
     Tags("<arg_key>", (("", "</arg_key><arg_value>"),), "</arg_value>")),
    ("granite", _list("<|tool_call|>", ""), Objects()),
    ("hermes", CallLayout("", f"<tool_call>\n{_NAMED}", _ARGUMENTS, "}", "\n</tool_call>\n",
     "\n</tool_call>"), Objects(loose=True)),
    ("hunyuan_a13b", _list("<tool_calls>", "</tool_calls>"), Objects()),
    ("llama4_pythonic", _python("[", ", ", "]"), PYTHON),
    ("mcp", CallLayout("<use_mcp_tool>\n", f"<server_name>{ID}</server_name>\n<tool_name>",
     "</tool_name>\n<arguments>\n", "\n</arguments>", "\n", "\n</use_mcp_tool>", server="tools"),
     NAMED_JSON),
    ("minimax", CallLayout("<tool_calls>\n", _NAMED, _ARGUMENTS, "}\n", "", "</tool_calls>"),
     Objects()),
    ("minimax_m2", _invokes("minimax:tool_call"), _parameters((("", '">'),))),
    ("mistral", CallLayout("[TOOL_CALLS][", _NAMED, _ARGUMENTS, "}", ", ", "]", "nine"),
     Objects()),
    ("mistral_args", CallLayout("", "[TOOL_CALLS]", "[ARGS]", ids="nine"), NAMED_JSON),
    ("nemotron_json", _list("<TOOLCALL>", "</TOOLCALL>"), Objects()),
    ("olmo3", _python("<function_calls>\n", "\n", "\n</function_calls>"), PYTHON),
    ("phi4_mini_json", _list("functools", ""), Objects()),
    ("pythonic", _python("[", ", ", "]"), PYTHON),
    ("qwen3_coder", CallLayout("", "<tool_call>\n<function=", ">\n", "</function>",
     "\n</tool_call>\n", "\n</tool_call>", may_skip=True),
     Tags("<parameter=", (("", ">\n"),), "\n</parameter>\n", loose=True)),
    ("seed_oss", CallLayout("", "<seed:tool_call>\n<function=", ">\n",
     "</function>\n</seed:tool_call>", "\n"),
     Tags("<parameter=", (("", ">"),), "</parameter>\n", python=True)),
)  # fmt: skip
_FAMILIES: dict[str, ToolFormat] = {row[0]: LayoutFormat(*row) for row in _ROWS}
HERMES, QWEN3_CODER = _FAMILIES["hermes"], _FAMILIES["qwen3_coder"]
# The formats with code of their own, and other names.
_FAMILIES |= {
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "openai": HARMONY,
    "qwen3_xml": QWEN3_CODER,
}
# Formats, and expressions for the texts that ask for them in a prompt.
_ASKED: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (QWEN3_CODER, ("<tool_call>", "<function=", "<parameter=")),
    (HERMES, (r"<tool_call>\s*\{+\s*[\"']?(name|arguments)\b",)),
    # The instructions of the templates of Llama 3.1, 3.2 and 3.3.
    (LLAMA3_JSON, ('"parameters": dictionary of argument name and its value',)),
    (HARMONY, ("namespace functions", "commentary")),
)
# The first format that can read the output of the chat template is used.
FORMATS: tuple[ToolFormat, ...] = tuple(found for found, _ in _ASKED)
# (family, texts): if a text is in the template or is a special token, the family is this one.
_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mcp", ("<use_mcp_tool>",)),
    ("granite", ("<|tool_call|>",)),
    ("cohere_command_r", ("followed by a json-formatted list of actions",)),
    ("phi4_mini_json", ("functools[",)),
    ("olmo3", ("<function_calls>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("llama4_pythonic", ("[func_name1(param",)),
    ("llama4_json", ("<|python_start|>",)),
    ("glm45", ("<arg_key>",)),
)


def family(name: str) -> ToolFormat:
    """Return the format with the name of a vLLM tool parser; KeyError if it is unknown."""
    if name in _FAMILIES:
        return _FAMILIES[name]
    if name not in FAMILIES.tools.calls:
        add_plugins()
    tool_format: ToolFormat = imported(FAMILIES.tools.calls[name])
    return tool_format


def names() -> list[str]:
    """Return the values of --tool-call-parser besides auto and none."""
    add_plugins()
    formats = {*_FAMILIES, *FAMILIES.tools.calls}
    return sorted(formats - {"mcp"})  # mcp is no parser of vLLM, only found by its hint


def asked(instructions: str) -> ToolFormat | None:
    """Return the format that a prompt with tools instructs the model to write, or None."""
    for found, texts in _ASKED:
        if all(re.search(text, instructions) for text in texts):
            return found
    return None


def hinted(source: str, has_token: Callable[[str], bool]) -> str | None:
    """Return the family that a text in the template or a special token identifies, or None.

    has_token: returns whether the model has a special token with this text.
    """
    for shows in (source.__contains__, has_token):
        rows = chain(FAMILIES.tools.hints.items(), _HINTS)
        families = (name for name, hints in rows if any(map(shows, hints)))
        if (name := next(families, None)) is not None:
            return name
    return None
