"""The structured output that a request asks for: response_format and structured_outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.structured import StructuredOutputs, structured_from

if TYPE_CHECKING:
    from cpuserve.serving.call import GenerateCall

_FIELD = "response_format"
_FORMATS = "text, json_object, json_schema or structural_tag"


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
    match kind:
        case "text":
            return None
        case "json_object":
            return _json_object(value.get("schema"))
        case "json_schema":
            return _json_schema(value.get("json_schema"))
        case "structural_tag":
            return StructuredOutputs(structural_tag=value)
    msg = f"response_format must be an object whose type is {_FORMATS}"
    raise InvalidRequest(msg, param=_FIELD)


def _json_object(schema: Any) -> StructuredOutputs:
    """Return the output structure of any JSON object, or of a schema that the client has added."""
    if schema is None:
        return StructuredOutputs(json_object=True)
    if not isinstance(schema, dict):
        msg = "the schema of response_format json_object must be a JSON schema, which is an object"
        raise InvalidRequest(msg, param=_FIELD)
    return StructuredOutputs(json=schema)


def _json_schema(value: Any) -> StructuredOutputs:
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, dict | bool):
        msg = 'response_format needs {"json_schema": {"name": ..., "schema": a JSON schema}}'
        raise InvalidRequest(msg, param=_FIELD)
    return StructuredOutputs(json=schema)
