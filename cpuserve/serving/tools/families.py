"""The table of formats by model family; each has the name of the vLLM tool parser.

Most templates show how calls are written, and need no entry.
The entries are for --tool-call-parser, and for templates that show no calls:
`hinted` recognizes these templates by a text in the template or by a special token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.serving.tools.brace_calls import Braces
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.hermes import HERMES
from cpuserve.serving.tools.layout import ID, CallLayout, LayoutFormat, Writing
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.named_calls import NAMED_JSON
from cpuserve.serving.tools.object_calls import Objects
from cpuserve.serving.tools.python_calls import PYTHON
from cpuserve.serving.tools.qwen3_coder import QWEN3_CODER
from cpuserve.serving.tools.tag_calls import Tags
from cpuserve.serving.tools.thoughts import THINK, ThinkTags

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import ToolFormat

_NAMED, _ARGUMENTS = '{"name": "', '", "arguments": '
_LIST, _KEYED = Objects(), Objects(keyed=True)
_ARG_TAGS = (("", "</arg_key><arg_value>"),)
_DSML = "\uff5cDSML\uff5c"
_CALLS, _CALL, _SEP = (
    "tool\u2581calls\u2581", "tool\u2581call\u2581", "<\uff5ctool\u2581sep\uff5c>",
)  # fmt: skip


def _objects(section: str, close: str, writing: Objects = _LIST) -> tuple[CallLayout, Writing]:
    """Return the format of a JSON list of objects between two texts."""
    begin, middle = ('{"', '": ') if writing.keyed else (_NAMED, _ARGUMENTS)
    return CallLayout(f"{section}[", begin, middle, "}", ", ", f"]{close}"), writing


def _python(section: str, between: str, close: str) -> tuple[CallLayout, Writing]:
    return CallLayout(section, "", "(", "", between, close), PYTHON


def _deepseek(before: str, middle: str, end: str, between: str) -> tuple[CallLayout, Writing]:
    begin = f"<\uff5c{_CALL}begin\uff5c>{before}"
    section, close = f"<\uff5c{_CALLS}begin\uff5c>", f"<\uff5c{_CALLS}end\uff5c>"
    return CallLayout(
        section, begin, middle, f"{end}<\uff5c{_CALL}end\uff5c>", between, close
    ), NAMED_JSON


def _invokes(
    tag: str, prefix: str, heads: tuple[tuple[str, str], ...]
) -> tuple[CallLayout, Writing]:
    """Return the format with <invoke name="NAME"> and <parameter name="KEY"> inside of `tag`."""
    section, begin = f"<{prefix}{tag}>\n", f'<{prefix}invoke name="'
    layout = CallLayout(section, begin, '">\n', f"</{prefix}invoke>\n", "", f"</{prefix}{tag}>")
    return layout, Tags(f'<{prefix}parameter name="', heads, f"</{prefix}parameter>\n")


def _glm(line: str) -> tuple[CallLayout, Writing]:
    layout = CallLayout("", "<tool_call>", line, "</tool_call>", line)
    tags = Tags("<arg_key>", (("", f"</arg_key>{line}<arg_value>"),), f"</arg_value>{line}")
    return layout, tags


def _minimax() -> tuple[CallLayout, Writing]:
    layout, tags = _invokes("", "", (("", '">'),))
    section, close = "<minimax:tool_call>\n", "</minimax:tool_call>"
    return replace(layout, section=section, close=close), tags


def _seed() -> tuple[CallLayout, Writing]:
    begin, end = "<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>"
    layout = CallLayout("", begin, ">\n", end, "\n")
    return layout, Tags("<parameter=", (("", ">"),), "</parameter>\n", python=True)


def _dsml(tag: str) -> tuple[CallLayout, Writing]:
    kinds = ("string", "integer", "number", "boolean", "array", "object", "null")
    heads = tuple((kind, f'" string="{str(kind == "string").lower()}">') for kind in kinds)
    return _invokes(tag, _DSML, heads)


def _kimi() -> tuple[CallLayout, Writing]:
    section, close = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    begin, middle = "<|tool_call_begin|>functions.", f":{ID}<|tool_call_argument_begin|>"
    return CallLayout(section, begin, middle, "<|tool_call_end|>", "", close, "indexed"), NAMED_JSON


def _cohere() -> tuple[CallLayout, Writing]:
    begin, middle = f'{{"tool_call_id": "{ID}", "tool_name": "', '", "parameters": '
    layout = CallLayout(
        "<|START_ACTION|>[\n    ", begin, middle, "}", ",\n    ", "\n]<|END_ACTION|>"
    )
    return layout, _LIST


def _command_r() -> tuple[CallLayout, Writing]:
    begin, middle = '\n    {\n        "tool_name": "', '",\n        "parameters": '
    return CallLayout("Action:\n```json\n[", begin, middle, "\n    }", ",", "\n]```"), _LIST


def _mistral(list_of: bool) -> tuple[CallLayout, Writing]:
    if list_of:
        begin, close = _NAMED, "]"
        return CallLayout("[TOOL_CALLS][", begin, _ARGUMENTS, "}", ", ", close, "nine"), _LIST
    return CallLayout("", "[TOOL_CALLS]", "[ARGS]", "", "", "", "nine"), NAMED_JSON


def _mcp() -> tuple[CallLayout, Writing]:
    section, begin = "<use_mcp_tool>\n", f"<server_name>{ID}</server_name>\n<tool_name>"
    middle, end = "</tool_name>\n<arguments>\n", "\n</arguments>"
    close = "\n</use_mcp_tool>"
    layout = CallLayout(section, begin, middle, end, "\n", close, server="tools")
    return layout, NAMED_JSON


def _gemma(open_: str, close: str, mark: str) -> tuple[CallLayout, Writing]:
    return CallLayout("", f"{open_}call:", "{", close), Braces(mark, sorts=True)


_LAYOUTS: dict[str, Callable[[], tuple[CallLayout, Writing]]] = {
    "apertus": lambda: _objects("<|tools_prefix|>", "<|tools_suffix|>", _KEYED),
    "cohere_command_r": _command_r,
    "cohere_command3": _cohere,
    "deepseek_v3": lambda: _deepseek(f"function{_SEP}", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": lambda: _deepseek("", _SEP, "", ""),
    "deepseek_v32": lambda: _dsml("function_calls"),
    "deepseek_v4": lambda: _dsml("tool_calls"),
    "functiongemma": lambda: _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": lambda: _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": lambda: _glm("\n"),
    "glm47": lambda: _glm(""),
    "granite": lambda: _objects("<|tool_call|>", ""),
    "hunyuan_a13b": lambda: _objects("<tool_calls>", "</tool_calls>"),
    "kimi_k2": _kimi,
    "lfm2": lambda: _python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "llama4_pythonic": lambda: _python("[", ", ", "]"),
    "mcp": _mcp,
    "minimax": lambda: (
        CallLayout("<tool_calls>\n", _NAMED, _ARGUMENTS, "}\n", "", "</tool_calls>"), _LIST),
    "minimax_m2": _minimax,
    "mistral": lambda: _mistral(list_of=True),
    "mistral_args": lambda: _mistral(list_of=False),
    "nemotron_json": lambda: _objects("<TOOLCALL>", "</TOOLCALL>"),
    "olmo3": lambda: _python("<function_calls>\n", "\n", "\n</function_calls>"),
    "phi4_mini_json": lambda: _objects("functools", ""),
    "seed_oss": _seed,
}  # fmt: skip
_ALIASES = {"pythonic": "llama4_pythonic"}
_OWN: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "openai": HARMONY,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
}
# (family, texts): if a text is in the template or is a special token, the family is this one.
_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lfm2", ("<|tool_list_start|>", "<|tool_call_start|>", "keep_past_thinking")),
    ("mcp", ("<use_mcp_tool>",)),
    ("granite", ("<|tool_call|>",)),
    ("cohere_command_r", ("followed by a json-formatted list of actions",)),
    ("phi4_mini_json", ("functools[",)),
    ("olmo3", ("<function_calls>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("llama4_pythonic", ("[func_name1(param",)),
    ("llama4_json", ("<|python_start|>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm45", ("<arg_key>",)),
)

_SEED = ThinkTags("<seed:think>", "</seed:think>")
REASONING: dict[str, ThinkTags] = {
    "apriel": ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ThinkTags("<|channel>thought", "<channel|>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": _SEED,
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "granite", "hunyuan_a13b", "kimi_k2", "minimax_m2",
         "nemotron_v3", "olmo3", "qwen3", "step3"),
        THINK,
    ),
}  # fmt: skip
# Tags that no response contains, for models without thoughts.
NO_THOUGHTS = ThinkTags("\0think\0", "\0/think\0")


def family(name: str) -> ToolFormat:
    """Return the format with the name of a vLLM tool parser; KeyError if it is unknown."""
    if name in _OWN:
        return _OWN[name]
    layout, writing = _LAYOUTS[_ALIASES.get(name, name)]()
    return LayoutFormat(name, layout, writing)


def hinted(source: str, has_token: Callable[[str], bool]) -> str | None:
    """Return the family that a text in the template or a special token identifies, or None.

    has_token: returns whether the model has a special token with this text.
    """
    for shows in (source.__contains__, has_token):
        found = (name for name, hints in _HINTS if any(map(shows, hints)))
        if (name := next(found, None)) is not None:
            return name
    return None
