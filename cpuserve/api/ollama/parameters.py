"""The parameters of created models: defaults for requests that do not set these options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cpuserve.api.ollama.options import OllamaOptions
from cpuserve.api.request.field_errors import wrong_field
from cpuserve.api.request.fields import NO_EFFECT, OPTIONS, check_fields
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import names_in
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import unsupported
from cpuserve.serving.calls.params import check_repeat_penalty, checked_stop

_IGNORED = {name for row in NO_EFFECT if OPTIONS in row.endpoints for name in row.names}
# Ollama options that have other names in SamplingParams.
_NAMES = {own: name for name, own in names_in("ollama").items()}


def sampling_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SamplingParams values that the parameters of a created model set.

    Raises:
      InvalidRequest: a parameter is unknown, not supported, or out of range.
    """
    for name in parameters:
        if name not in OllamaOptions.__struct_fields__ and name not in _IGNORED:
            msg = f"parameters: {name[:80]} is not known: omit it"
            raise unsupported(msg, f"parameters.{name[:80]}")
    try:
        options = msgspec.convert(dict(parameters), OllamaOptions, strict=False)
    except msgspec.ValidationError as error:
        found = wrong_field(error)
        msg = f"parameters: {found.message}"
        raise InvalidRequest(msg, param="parameters") from None
    check_fields(options)
    check_repeat_penalty(options.repeat_penalty)
    fields = {name: getattr(options, name) for name in parameters if name not in _IGNORED}
    if (fields.get("num_predict") or 0) <= 0:
        fields.pop("num_predict", None)  # without this limit, a response may fill the context
    fields["stop"] = checked_stop(fields.get("stop"))
    values = {_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    SamplingParams(**values)  # raises InvalidRequest for a value out of range
    return values


def parameter_lines(parameters: Mapping[str, Any]) -> str:
    """Return parameters as lines of a Modelfile, without the word PARAMETER."""
    lines = []
    for name, value in parameters.items():
        for each in value if isinstance(value, list) else [value]:
            shown = f'"{each}"' if isinstance(each, str) else str(each).lower()
            lines.append(f"{name:<30} {shown}")
    return "\n".join(lines)
