"""The number formats of an engine: dtype, activations, KV cache, and quantization of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cpuserve.base.errors import ConfigError
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.platforms.base import NOUN, ModelFacts
from cpuserve.platforms.execution import Execution
from cpuserve.platforms.isa_level import BF16_DOT

MADE_WHILE_LOADING = ("int8", "w8a8", "int4", "int4_mixed")
CHECKPOINTS = (
    *("gguf", "awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4"),
    *("modelopt", "modelopt_fp4", "auto-round", "fbgemm_fp8", "torchao", "quark", "mlx"),
    *("bitnet", "hqq"),
)
# Formats of `cpuserve quantize`: they leave embeddings and output heads unquantized.
PARTIAL = ("compressed-tensors",)
KV_OF = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Types of keys and values that have no kernels: the type that is used instead, and why.
KV_INSTEAD = {"fp8_e5m2": ("int8", "instead of fp8_e5m2: as many bytes, a thirtieth of the loss")}
# Types that need values of their own and kernels: the type that is used elsewhere.
WITH_VALUES = {"int8_v4": "int8"}
ACTIVATIONS = {8: "one int8 term", 16: "two int8 terms, about 15 bits"}
SCHEMES = {
    "int8": "quantized while loading: a scale per output, activations int8 with a scale per 128",
    "w8a8": "quantized while loading: a scale per output, activations int8 with a scale per token",
    "int8_fine": "quantized while loading: a scale per 32 inputs, because the model is small",
    "int4_fine": "quantized while loading: a scale and minimum per 32 inputs, because the model "
    "is small; embedding, output head, value and down projections int8",
    "int4": "quantized while loading: a scale and minimum per 128, activations int8 with a scale "
    "per 128; embedding and output head int8",
    "int4_mixed_fine": "quantized while loading: a scale and minimum per 32 inputs, because the "
    "model is small; embedding, output head, value and down projections, and every second layer "
    "int8",
    "int4_mixed": "quantized while loading: as int4; value and down projections int8, too",
}
# In models with fewer weights, int8 activations can change a response.
# When SmolLM2-135M states the capital of France, its best two logits differ by 0.08,
# and int8 rounding changes logits by 0.3 rms. 16-bit activations (two int8 terms) cost little here,
# because prompts of so small a model are fast to compute.
FRAGILE_WEIGHTS = 300_000_000


class Formats(NamedTuple):
    """The number formats that were chosen, under the names of their fields in EngineConfig."""

    dtype: str
    activation_bits: int
    quantize: str
    tower_quantize: str
    kv_dtype: str


def choose_formats(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, execution: Execution
) -> Formats:
    """Choose the number formats; ConfigError for a quantization that the model cannot have."""
    model_impl, executor = execution.model_impl, execution.executor
    dtype = _dtype(options, ledger, facts, execution.isa)
    quantize = _online_scheme(options, facts, model_impl)
    bits = _activation_bits(options, ledger, facts, executor, quantize)
    kv_dtype = _kv_dtype(options, ledger, facts, dtype, execution)
    _quantization(options, ledger, facts, quantize)
    tower = _tower_quantization(options, ledger, facts)
    return Formats(dtype, bits, quantize, tower, kv_dtype)


def _dtype(options: EngineOptions, ledger: Ledger, facts: ModelFacts, isa: str) -> str:
    """Return the type of the weights and activations that are not quantized."""
    asked = options.dtype or "auto"
    by_hand = "" if asked == "auto" else "as requested"
    if facts.quantization is not None:
        got = "bfloat16" if asked == "auto" else asked
        why = f"{facts.quantization}: matrices keep their format, the rest is computed in {got}"
    elif asked == "auto" and _narrows(facts, isa):
        got, why = "bfloat16", "the checkpoint has float32, which an encoder's vectors hardly need"
        why += _arithmetic(got, isa)
    else:
        got = facts.dtype if asked == "auto" else asked
        why = "as in the checkpoint" if asked == "auto" else f"the checkpoint has {facts.dtype}"
        why += _arithmetic(got, isa)
        if asked == "auto" and got == "float16" and isa in BF16_DOT:
            # A 1B model on AMX computes 1,066 prompt tokens/s in bfloat16, and 161 in float16.
            why += "; --dtype bfloat16 runs prompts faster here, but rounds weights to 8 bits of 11"
    return ledger.decide("dtype", got, f"{by_hand}; {why}" if by_hand else why)


def _narrows(facts: ModelFacts, isa: str) -> bool:
    """Whether "auto" computes this checkpoint in bfloat16: a float32 encoder at a BF16_DOT level.

    Encoders are usually stored as float32.
    In bfloat16, their vectors have a cosine above 0.9999 to the float32 vectors.
    Prompts, which are all that an encoder computes, take a third of the time on AMX.
    """
    return facts.whole_prompts and facts.dtype == "float32" and isa in BF16_DOT


def _arithmetic(dtype: str, isa: str) -> str:
    if dtype == "float16":
        return "; stored as float16, computed in float32"
    if dtype == "bfloat16" and isa != "none":
        return (
            "; this level multiplies it directly"
            if isa in BF16_DOT
            else "; converted to float32 in registers"
        )
    return ""


def _activation_bits(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, executor: str, quantize: str
) -> int:
    """Return 8 or 16 bits; 16 needs C++ kernels and weights that multiply two int8 terms."""
    asked = options.activation_bits or "auto"
    two_terms = facts.two_terms or quantize.endswith("_fine")
    if not two_terms or executor != "native":
        if options.activation_bits is not None:
            why = "no weight is quantized"
            if executor != "native":
                why = "torch computes in float32"
            elif facts.quantization or quantize != "none":
                why = (
                    "two int8 terms need integer weights in groups of 32 or 64, types of GGUF, or "
                    "weights of 2 or 3 bits; these use int8, and codes of floats bf16"
                )
            ledger.decide("activation_bits", "no effect", why)
        return 8
    if asked != "auto":
        return ledger.decide(
            "activation_bits", int(asked), f"as requested; {ACTIVATIONS[int(asked)]}"
        )
    millions = f"{facts.matrix_weights / 1e6:.0f} million weights"
    if facts.matrix_weights < FRAGILE_WEIGHTS:
        why = f"{ACTIVATIONS[16]}: with {millions}, the rounding of one term could change answers"
        return ledger.decide("activation_bits", 16, why)
    return ledger.decide("activation_bits", 8, f"{ACTIVATIONS[8]}: enough for {millions}")


def _kv_dtype(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, dtype: str, execution: Execution
) -> str:
    """Return the type of the KV cache."""
    asked = options.kv_cache_dtype or "auto"
    if execution.model_impl == "transformers":
        return ledger.decide(
            "kv_cache_dtype", KV_OF[dtype], "the dtype, in the cache of transformers"
        )
    if asked in KV_INSTEAD:
        return ledger.decide("kv_cache_dtype", *KV_INSTEAD[asked])
    if asked in WITH_VALUES:
        why = ""
        if execution.executor != "native":
            why = "the torch executor has no 4-bit values"
        elif facts.kv_layers and all(kv.latent for kv in facts.kv_layers):
            why = "the keys of this model are also its values"
        if why:
            return ledger.decide("kv_cache_dtype", WITH_VALUES[asked], f"instead of {asked}: {why}")
    asked_type = dtype if asked == "auto" else asked
    got = KV_OF.get(asked_type, asked_type)
    return ledger.decide("kv_cache_dtype", got, "the dtype" if asked == "auto" else "as requested")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _online_scheme(options: EngineOptions, facts: ModelFacts, model_impl: str) -> str:
    """Return EngineConfig.quantize: how dense matrices are quantized while they are loaded."""
    asked = (options.quantization or "auto").lower()
    dense = facts.quantization is None or facts.quantization.startswith(PARTIAL)
    if asked not in MADE_WHILE_LOADING or not dense or model_impl != "cpuserve":
        return "none"
    return scheme_for(asked, facts.matrix_weights)


def scheme_for(asked: str, matrix_weights: int) -> str:
    """Return the scheme for `asked` (one of MADE_WHILE_LOADING) and this number of weights."""
    # w8a8 has fixed groups; for int8 and int4, cpuserve chooses the size of the groups.
    small = matrix_weights < FRAGILE_WEIGHTS and asked != "w8a8"
    return f"{asked}_fine" if small else asked


def _quantization(options: EngineOptions, ledger: Ledger, facts: ModelFacts, quantize: str) -> None:
    """Record the format of the weights; ConfigError if another format was requested."""
    have = (facts.quantization or "none").lower()
    asked = (options.quantization or "auto").lower()
    if quantize != "none":
        kept = "" if facts.quantization is None else f"{have} is kept; all else "
        ledger.decide("quantization", asked, kept + SCHEMES[quantize])
        return
    if asked != "auto" and asked not in have.split() and asked != have:
        why = f"the checkpoint's format is {have}"
        if facts.quantization is None:
            why += f", which can only be quantized to {_listed(MADE_WHILE_LOADING)} while loading"
            why += (
                ", and only for models that cpuserve implements"
                if asked in MADE_WHILE_LOADING
                else ""
            )
        msg = f"{ledger.asked('quantization')}: {why}; leave the option out"
        raise ConfigError(msg)
    ledger.decide("quantization", have, "read from the checkpoint")


def _tower_quantization(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> str:
    """Return EngineConfig.tower_quantize: how the dense matrices of a tower are quantized."""
    asked = options.mm_encoder_quantization or "auto"
    if facts.tower is None:
        if options.mm_encoder_quantization is not None:
            why = f"no effect: this model reads no {NOUN}s"
            ledger.decide("mm_encoder_quantization", "none", why)
        return "none"
    got = "none" if asked == "auto" else asked
    why = f"int8 loses detail of {NOUN}s" if asked == "auto" else "as requested"
    return ledger.decide("mm_encoder_quantization", got, why)
