"""The arguments of plugins of vLLM that cpuserve honours: extra_args, and vllm_xargs of bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.sampling.fields import SamplerFields

# The fields of the processors of n-grams in vLLM (DeepSeek-OCR) and in the package of MinerU.
EXTRAS = ("no_repeat_ngram_size", "ngram_size", "window_size", "whitelist_token_ids")


def known_extras(extras: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of SamplerFields that `extras` sets, and the keys that have no effect.

    Raises:
      InvalidRequest: a value has the wrong type.
    """
    given = {name: extras[name] for name in EXTRAS if extras.get(name) is not None}
    for name, value in given.items():
        try:
            msgspec.convert({name: value}, SamplerFields)
        except msgspec.ValidationError:
            msg = f"{name} has the wrong type, got {brief(value)!r}"
            raise InvalidRequest(msg, role=name) from None
    return given, [str(name) for name in extras if name not in EXTRAS]
