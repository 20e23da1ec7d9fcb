"""PoolingParams: the vectors, labels or scores that a prompt asks for, with the fields of vLLM."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import RequestOutputKind

# The fields that must have one of these values, and why other values are refused.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "step_tag_id": ((None,), "no pooler of steps is supported"),
    "returned_token_ids": ((None,), "no pooler of steps is supported"),
    "late_interaction_params": ((None,), "`score` compares the vectors of tokens itself"),
    "extra_kwargs": ((None, {}), "no plugins read them"),
}


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The parameters of `LLM.embed`, `encode`, `classify` and `score`.

    use_activation: False = logits, or vectors that are not scaled to length 1; None = True.
    dimensions: keep this number of leading values of an embedding, and scale it again.
    task: as pooling_task of `encode`.
    skip_reading_prefix_cache: True = the whole prompt is computed.
    requires_token_ids, output_kind: have no effect.
    step_tag_id, returned_token_ids, late_interaction_params, extra_kwargs: refused if set.

    Raises:
        InvalidRequest: a value has a wrong type, is out of range, or is refused.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the name of the parameter, for a value that is refused."""
        for name, (neutral, why) in REFUSED.items():
            if getattr(self, name) not in neutral:
                msg = f"{name} is not supported, because {why}: omit it"
                raise InvalidRequest(msg, role=name)
        size: object = self.dimensions
        if size is not None and (not isinstance(size, int) or size < 1):
            msg = f"dimensions must be a whole number of at least 1, got {size!r}"
            raise InvalidRequest(msg, role="dimensions")

    def clone(self) -> PoolingParams:
        """Return a copy that shares nothing with these parameters."""
        return deepcopy(self)
