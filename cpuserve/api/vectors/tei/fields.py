"""The request fields that the TEI endpoints share, and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.vectors.route import vectors_call
from cpuserve.api.vectors.tei.errors import EmptyInput, TooManyInputs
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall

if TYPE_CHECKING:
    from collections.abc import Sized

_SIDES = ("left", "right")


class TeiFields(msgspec.Struct, kw_only=True):
    """The request fields that most TEI endpoints share.

    truncate: whether longer texts are cut to the length of the context; None = true.
    truncation_direction: the side that is cut, "left" or "right" (the default).
    """

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    priority: int | None = None
    timeout: float | None = None

    def call(self, **more: Any) -> GenerateCall:
        """Return a GenerateCall with these fields; `more`: further fields of the call.

        Raises:
          InvalidRequest: truncation_direction has another value.
        """
        side = (self.truncation_direction or "right").lower()
        if side not in _SIDES:
            msg = f'truncation_direction must be "left" or "right", got {side[:40]!r}'
            raise InvalidRequest(msg, param="truncation_direction")
        most = None if self.truncate is False else -1
        return vectors_call(self, truncate_prompt_tokens=most, truncation_side=side, **more)


def check_inputs(name: str, inputs: Sized) -> None:
    """Raise EmptyInput or TooManyInputs unless the number of inputs is within the limits."""
    if not inputs:
        msg = f"{name} is empty: give at least one text"
        raise EmptyInput(msg, param=name)
    if not isinstance(inputs, str) and len(inputs) > MAX_PROMPTS:
        msg = f"{name} has {len(inputs)} texts: at most {MAX_PROMPTS} are allowed"
        raise TooManyInputs(msg, param=name)
