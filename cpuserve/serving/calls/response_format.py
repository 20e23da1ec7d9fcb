"""The structured output that a request asks for: response_format and structured_outputs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.structured import StructuredOutputs, structured_from

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall

_FIELD = "response_format"
_FORMATS = "text, json_object, json_schema, regex or structural_tag"


def structured_outputs(call: GenerateCall) -> StructuredOutputs | None:
    """Return the structured output of the text; None if the text is free or a tool call is forced.

    Raises:
      InvalidRequest: a field is invalid, both fields are set,
        or structured_outputs is set and tool_choice forces a tool call.
    """
    asked = _response_format(call.response_format)
    forced = bool(call.tools) and call.tool_choice == "required"
    if call.structured_outputs in (None, {}):
        # Agents send response_format with every request; it applies to texts, not to tool calls.
        return None if forced else asked
    if asked is not None:
        msg = "response_format and structured_outputs exclude each other: set one of them"
        raise InvalidRequest(msg, param="structured_outputs")
    form = structured_from(call.structured_outputs)
    if forced:
        msg = "structured_outputs and a forced tool_choice exclude each other: set one of them"
        raise InvalidRequest(msg, param="tool_choice")
    return form


def _response_format(value: Any) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=value)
    if isinstance(value, dict) and isinstance(kind, str):
        check_known(value, _FIELD)
    if kind == "text":
        return None
    if (form := _form(value, kind, _FIELD)) is not None:
        return form
    msg = f"response_format must be an object whose type is {_FORMATS}"
    raise InvalidRequest(msg, param=_FIELD)


def grammar_of(value: Any, field: str = "grammar") -> StructuredOutputs | None:
    """Return the structured output of `grammar`, the field of TGI; None if it is not set.

    Raises:
      InvalidRequest: the value of `field` is no grammar.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str):
        check_known(value, field)
    if (form := _form(value, kind, field)) is not None:
        return form
    msg = f'{field} must be {{"type": "json", "json_schema" or "regex", "value": ...}}'
    raise InvalidRequest(msg, param=field)


def _form(value: Any, kind: object, field: str) -> StructuredOutputs | None:
    """Return the structured output of a value of this type; None for an unknown type.

    Clients of TGI put the schema or the expression into `value`.
    """
    match kind:
        case "json_object" | "json":
            _check_members(value, kind, field, ("schema", "value"))
            return _json_object(_one_of(value, "schema", "value", field), kind, field)
        case "json_schema":
            _check_members(value, kind, field, ("json_schema", "value"))
            return _json_schema(_one_of(value, "json_schema", "value", field), field)
        case "regex":
            _check_members(value, kind, field, ("value", "regex", "pattern"))
            return _regex(value, field)
    return None


_KNOWN_OF_SCHEMA = ("name", "description", "schema", "strict")
_KNOWN = ("type", "json_schema", "value", "regex", "pattern", "grammar", *_KNOWN_OF_SCHEMA)


def check_known(value: dict[str, Any], field: str) -> None:
    """Raise InvalidRequest for a member without a meaning: it may be a known one, misspelt.

    value: a format with a type. `json_schema` is its inner object in chat and completions.
    """
    _check_names(value, field, _KNOWN, field)
    if isinstance(inner := value.get("json_schema"), dict):
        _check_names(inner, f"{field}.json_schema", _KNOWN_OF_SCHEMA, field)


def _check_names(value: dict[str, Any], where: str, known: tuple[str, ...], field: str) -> None:
    for name, given in value.items():
        if name not in known and given is not None:
            msg = f"{where} has the unknown field {name[:80]!r}: known are {', '.join(known)}"
            raise InvalidRequest(msg, param=field)


# Members of a value that ask for a structure. Each type has some of them.
_STRUCTURES = ("schema", "value", "json_schema", "regex", "pattern", "grammar")


def _check_members(value: dict[str, Any], kind: str, field: str, own: tuple[str, ...]) -> None:
    """Raise InvalidRequest for a member that asks for a structure and that the type lacks."""
    for name in _STRUCTURES:
        if name not in own and value.get(name) is not None:
            msg = f"{field} of the type {kind} has no {name}: send {own[0]}"
            raise InvalidRequest(msg, param=field)


def _one_of(value: dict[str, Any], first: str, second: str, field: str) -> Any:
    """Return the value of one of two members with the same meaning; None if neither is set."""
    given = [value[name] for name in (first, second) if value.get(name) is not None]
    if len(given) > 1:
        msg = f"{field} has both {first} and {second}: send one of them"
        raise InvalidRequest(msg, param=field)
    return given[0] if given else None


def _json_object(schema: Any, kind: str, field: str) -> StructuredOutputs:
    """Return the output structure of any JSON object, or of a schema that the client has added."""
    if schema is None:
        return StructuredOutputs(json_object=True)
    if isinstance(schema, str):  # some clients of TGI encode it
        with suppress(msgspec.DecodeError, RecursionError):
            schema = msgspec.json.decode(schema)
    if not isinstance(schema, dict):
        msg = f"the schema of {field} {kind} must be a JSON schema, which is an object"
        raise InvalidRequest(msg, param=field)
    return StructuredOutputs(json=schema)


def _json_schema(value: Any, field: str) -> StructuredOutputs:
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, dict | bool):
        msg = f'{field} needs {{"json_schema": {{"name": ..., "schema": a JSON schema}}}}'
        raise InvalidRequest(msg, param=field)
    return StructuredOutputs(json=schema)


def _regex(value: dict[str, Any], field: str) -> StructuredOutputs:
    given = [value[name] for name in ("value", "regex", "pattern") if value.get(name) is not None]
    if len(given) != 1 or not (isinstance(given[0], str) and given[0]):
        msg = f'{field} of the type regex needs {{"value": a regular expression}}'
        raise InvalidRequest(msg, param=field)
    return StructuredOutputs(regex=given[0])
