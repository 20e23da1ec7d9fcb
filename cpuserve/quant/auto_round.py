"""AutoRound checkpoints (Intel): matrices packed as in GPTQ or in AWQ.

packing_format says how: "auto_round:auto_gptq" as GPTQ, "auto_round:gptqmodel" and "auto_round"
as GPTQ with plain zero points, "auto_round:auto_awq" as AWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.quant.awq import AwqWeights
from cpuserve.quant.gptq import BITS, GptqWeights
from cpuserve.quant.packed import expect
from cpuserve.quant.registry import weight_format

if TYPE_CHECKING:
    from cpuserve.quant.base import Weights
    from cpuserve.quant.stored import TensorStore

WHOLE = 16  # bits of matrices that are not quantized


@weight_format("auto-round")
def auto_round_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of an AutoRound checkpoint; ModelError for another packing or type."""
    settings = config.get("quantization_config") or {}
    expect(settings, "an AutoRound", data_type="int")
    bits = settings.get("bits", 4)
    if bits not in BITS:
        expect(settings, "an AutoRound", bits="2, 3, 4 or 8")
    own = settings.get("extra_config") or {}
    others = {
        name: each.get("bits")
        for name, each in (own.items() if isinstance(own, Mapping) else ())
        if isinstance(each, Mapping) and each.get("bits", bits) not in (bits, WHOLE)
    }
    if others:
        name, other = next(iter(others.items()))
        msg = (
            f"AutoRound checkpoint with {bits} bits and {other!s:.20} bits in {name!s:.60} is not "
            "supported; use the unquantized checkpoint with --quantization int4 or int8"
        )
        raise ModelError(msg)
    packing = settings.get("packing_format", "auto_round:auto_gptq")
    if packing in ("auto_round", "auto_round:gptqmodel"):
        return GptqWeights(store, bits=bits, zero_offset=0)
    if packing == "auto_round:auto_gptq":
        return GptqWeights(store, bits=bits, zero_offset=1)
    expect({"packing_format": packing}, "an AutoRound", packing_format="auto_round:auto_awq")
    expect(settings, "an AutoRound", bits=4)
    return AwqWeights(store)
