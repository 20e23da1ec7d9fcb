"""The fields in `options` of a request; a created model has these fields in `parameters`."""

from __future__ import annotations

import msgspec

from cpuserve.api.request.fields import with_refused


@with_refused("ollama options")
class OllamaOptions(msgspec.Struct, kw_only=True):
    """Sampling parameters. Options about the context size and the machine are ignored."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
