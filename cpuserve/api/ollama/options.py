"""The fields in `options` of a request; a created model has these fields in `parameters`."""

from __future__ import annotations

import msgspec

from cpuserve.api.request.fields import with_refused, with_sampling


@with_refused("ollama options")
@with_sampling("ollama")
class OllamaOptions(msgspec.Struct, kw_only=True):
    """Sampling parameters. Options about the context size and the machine are ignored."""

    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
