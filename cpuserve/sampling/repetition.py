"""RepetitionDetection: end a response that repeats itself, with the fields of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest

MAX_PATTERN = 1024  # tokens; each generated token is compared with this many earlier tokens
MAX_COUNT = 1 << 16
ROLE = "repetition_detection"


class RepetitionDetection(
    msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True
):
    """Ends a response when its last tokens are a pattern that occurs min_count times in a row.

    max_pattern_size, min_pattern_size: the sizes of patterns in tokens;
    max_pattern_size 0 = no detection; min_pattern_size 0 = 1 token.

    Raises:
        InvalidRequest: a value is out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidRequest if a value is out of range."""
        least, most = self.min_pattern_size, self.max_pattern_size
        if not 0 <= least <= most <= MAX_PATTERN:
            msg = (
                f"{ROLE} needs 0 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN}, "
                f"got {least} and {most}"
            )
            raise InvalidRequest(msg, role=ROLE)
        if most and not 2 <= self.min_count <= MAX_COUNT:
            msg = f"{ROLE}.min_count must be between 2 and {MAX_COUNT}, got {self.min_count}"
            raise InvalidRequest(msg, role=ROLE)

    def finds(self, ids: Sequence[int], num_output: int) -> bool:
        """Return whether the last of `num_output` generated tokens completes a repetition.

        ids: the token ids of the prompt and of the output.
        """
        end = len(ids)
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            length = size * self.min_count
            if length > num_output:
                return False
            # Most patterns differ at the last token, which makes the search short.
            if ids[end - 1] == ids[end - 1 - size] and all(
                ids[i] == ids[i - size] for i in range(end - 1, end - 1 - length + size, -1)
            ):
                return True
        return False


def repetition_from(fields: Any) -> RepetitionDetection:
    """Return the RepetitionDetection that `fields`, an object of a client or of this type, sets.

    Raises:
        InvalidRequest: the object has an unknown member, or one with a wrong type or value.
    """
    if isinstance(fields, RepetitionDetection):
        return fields
    try:
        return msgspec.convert(fields, RepetitionDetection)
    except msgspec.ValidationError as error:
        msg = f"{ROLE} is invalid: {error}"
        raise InvalidRequest(msg, role=ROLE) from error
