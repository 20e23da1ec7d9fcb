"""The formats of the rows that linears and Combine read in the native executor.

Source: csrc/kernels/table/rows.h, ActFormat.
"""

from typing import Final

from cpuserve.program.weight_kinds import KINDS

CONVERTED_KIND: Final = "w8_g32"  # the weight kind of matrices in a format without kernels
# The format of the activation rows that a matrix of each weight kind multiplies.
ACT_FORMAT: dict[str, str] = {kind.name: kind.rows for kind in KINDS}
# The type of the dot products of each weight kind, by its name in the hardware probes.
DOT_OF_KIND: dict[str, str] = {kind.name: kind.dot for kind in KINDS}
# The row format of the queries of attention, for each type of the KV cache.
KV_ROW_FORMAT = {
    "bf16": "bf16",
    "f16": "f32",
    "f32": "f32",
    "int8": "bf16",
    "fp8_e4m3": "bf16",
    "int8_v4": "bf16",
}
# The weight kinds that may have their columns in another order (the activation order of GPTQ).
REORDERED = tuple(kind.name for kind in KINDS if kind.reordered)
# With activation_bits 16, an activation is the sum of two int8 terms, with about 15 bits.
TWO_TERMS = {"q8g32": "q8g32x2", "q8g256": "q8g256x2"}
# Formats with a scale that covers more columns than a tile or a head.
# Linears and attention write only parts of rows, so other ops have to write these formats.
WHOLE_ROW = ("q8g128", "q8row", "q8g256", "q8g256x2")
# The weight kinds of linears that read fp32 rows.
FLOAT_ROWS = tuple(kind for kind, rows in ACT_FORMAT.items() if rows == "f32")


def act_format(kind: str, activation_bits: int) -> str:
    """Return the format of the rows that a matrix of `kind` multiplies; f32 for unknown kinds."""
    rows = ACT_FORMAT.get(kind, "f32")
    return TWO_TERMS.get(rows, rows) if activation_bits == 16 else rows


def takes_two_terms(kind: str) -> bool:
    """Return whether a matrix of `kind` can multiply activations of two int8 terms."""
    return ACT_FORMAT.get(kind) in TWO_TERMS


def rows_of_token(kind: str, activation_bits: int) -> int:
    """Return how many int8 or float rows a matrix of `kind` multiplies for a token: 1 or 2."""
    return 2 if act_format(kind, activation_bits) in TWO_TERMS.values() else 1


def combined_format(activations: str) -> str:
    """Return the row format of the results of experts, until Combine adds them up.

    activations: the row format that the experts multiply.

    A prompt writes and reads these results once. In fp32, 1,024 tokens with 8 experts each
    have 32 MB in a layer of width 1,024, far more than L2 holds; bf16 halves these bytes.
    The error of bf16 is at most 2^-9 of each value: as much as the error of bf16 activations,
    and less than the error of int8 activations, which is up to 1/254 of the largest value in
    their group. With fp32 or two-term activations (about 15 bits), bf16 would add the larger
    error, so results stay fp32.
    """
    return "f32" if activations in ("f32", *TWO_TERMS.values()) else "bf16"
