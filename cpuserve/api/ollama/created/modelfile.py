"""Parse the text of a Modelfile into fields of /api/create, and write it for /api/show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpuserve.base.errors import InvalidRequest

ROLES = ("system", "user", "assistant")
_QUOTES = '"""'
# Modelfile parameters that may occur several times; their values become a list.
_LISTS = ("stop",)
_WORDS = {"true": True, "false": False}


def read_modelfile(text: str) -> dict[str, Any]:
    """Return the fields of /api/create that a Modelfile sets.

    The fields `from` and `adapters` have the text of their instructions.
    Values of `parameters` that are numbers or booleans are converted from text.

    Raises:
      InvalidRequest: a line is no instruction, or the instruction FROM is missing.
    """
    found: dict[str, Any] = {"parameters": {}, "messages": [], "license": [], "adapters": []}
    for instruction, rest in _instructions(text):
        if instruction in ("from", "template", "system"):
            found[instruction] = rest
        elif instruction == "adapter":
            found["adapters"].append(rest)
        elif instruction == "license":
            found["license"].append(rest)
        elif instruction == "parameter":
            _add_parameter(found["parameters"], rest)
        elif instruction == "message":
            role, _, content = rest.partition(" ")
            if role not in ROLES:
                why = f"MESSAGE {role[:40]!r} is no role: use {', '.join(ROLES)}"
                raise _wrong(why)
            found["messages"].append({"role": role, "content": _unquoted(content.strip())})
        elif instruction == "requires":
            continue  # REQUIRES: a version of Ollama, which does not apply here
        else:
            why = (
                f"{instruction[:40].upper()!r} is no instruction: use FROM, SYSTEM, PARAMETER, "
                "TEMPLATE, ADAPTER, MESSAGE and LICENSE"
            )
            raise _wrong(why)
    if not found.get("from"):
        why = "it has no FROM: name the model that it is made from"
        raise _wrong(why)
    return found


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"modelfile: {why}", param="modelfile")


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (lower-case name, text) of each instruction; a quoted text may span several lines."""
    lines = iter(text.splitlines())
    for line in lines:
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, _, rest = stripped.partition(" ")
        begun = rest.strip()
        for quote in (_QUOTES, '"'):
            at = begun.find(quote)
            if at < 0 or (begun[:at] and name.lower() not in ("message", "parameter")):
                continue
            if begun.find(quote, at + len(quote)) < 0:
                begun = "\n".join([begun, *_until(quote, lines, name)])
            break
        plain = begun if name.lower() == "message" else _unquoted(begun)
        yield name.lower(), plain


def _until(quote: str, lines: Iterator[str], name: str) -> Iterator[str]:
    """Yield lines up to the first one with `quote`; InvalidRequest if none has it."""
    for line in lines:
        yield line
        if quote in line:
            return
    why = f"{name[:40]} has no end: close it with {quote}"
    raise _wrong(why)


def _unquoted(text: str) -> str:
    stripped = text.strip()
    for quote in (_QUOTES, '"'):
        if len(stripped) >= 2 * len(quote) and stripped.startswith(quote):
            end = stripped.rfind(quote)
            if end > 0:
                return stripped[len(quote) : end]
    return text


def _add_parameter(parameters: dict[str, Any], text: str) -> None:
    name, _, given = text.partition(" ")
    value = _unquoted(given.strip())
    if not name or not value:
        why = f"PARAMETER {name[:40]} has no value: write a name and a value"
        raise _wrong(why)
    if name in _LISTS:
        parameters.setdefault(name, []).append(value)
    else:
        parameters[name] = _typed(value)


def _typed(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def write_modelfile(
    source: str,
    *,
    system: str,
    template: str,
    parameters: str,
    messages: Sequence[Mapping[str, Any]],
    licenses: Sequence[str],
) -> str:
    """Return the text of a Modelfile; parameters: lines of a name and a value."""
    lines = [f"FROM {source}"]
    lines += [f"TEMPLATE {_QUOTES}{template}{_QUOTES}"] if template else []
    lines += [f"SYSTEM {_QUOTES}{system}{_QUOTES}"] if system else []
    lines += [f"PARAMETER {' '.join(line.split(None, 1))}" for line in parameters.splitlines()]
    lines += [f"MESSAGE {each['role']} {_QUOTES}{each['content']}{_QUOTES}" for each in messages]
    lines += [f"LICENSE {_QUOTES}{text}{_QUOTES}" for text in licenses]
    return "\n".join(lines) + "\n"
