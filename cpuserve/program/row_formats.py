"""The formats of the rows that linears and Combine read in the native executor.

Source: csrc/kernels/table.h, ActFormat.
"""

from typing import Final

CONVERTED_KIND: Final = "w8_g32"  # the kind of a matrix in a format without kernels
# The weight kinds with integer codes and zero points.
ZERO_POINTS = (
    *("w8z_g32", "w8z_g128", "w4z_g32", "w4z_g64"),
    *("w2z_g32", "w2z_g64", "w2z_g128", "w2z_g256"),
    *("w3z_g32", "w3z_g64", "w3z_g128", "w3z_g256"),
)
# By the kind of the weights.
ACT_FORMAT = {
    "dense_bf16": "bf16",
    "dense_f16": "f32",
    "dense_f32": "f32",
    "w8_g32": "q8g32",
    "w4_g32": "q8g32",
    "w4m_g32": "q8g32",
    "w4m_g128": "q8g128",
    "w8_channel": "q8row",
    "w8_channel_g128": "q8g128",
    "q4_k": "q8g256",
    "q5_k": "q8g256",
    "q6_k": "q8g256",
    "q2_k": "q8g256",
    "q3_k": "q8g256",
    "q5_0": "q8g32",
    "q5_1": "q8g32",
    "iq4_nl": "q8g32",
    "iq4_xs": "q8g256",
    "mxfp4": "q8g32",
    "e4m3_g128": "bf16",
    "nf4_g64": "bf16",
    "fp4_g64": "bf16",
    "nvfp4": "bf16",
    **dict.fromkeys(ZERO_POINTS, "q8g32"),
}
# Dot-product type of each weight kind, as the probes call it; other kinds use "f32".
DOT_OF_KIND = {
    "dense_bf16": "bf16",
    "w8_g32": "int8",
    "w8_channel": "int8",
    "w8_channel_g128": "int8",
    "w4_g32": "int4",
    "w4m_g32": "int4",
    "w4m_g128": "int4",
    "q4_k": "int4",
    "q5_k": "int8",
    "q6_k": "int8",
    "q2_k": "int4",
    "q3_k": "int4",
    "q5_0": "int8",
    "q5_1": "int8",
    "iq4_nl": "int8",
    "iq4_xs": "int8",
    "mxfp4": "int8",
    "e4m3_g128": "bf16",
    "nf4_g64": "bf16",
    "fp4_g64": "bf16",
    "nvfp4": "bf16",
    "w8z_g32": "int8",
    "w8z_g128": "int8",
    "w4z_g32": "int4",
    "w4z_g64": "int4",
    "w2z_g32": "int4",
    "w2z_g64": "int4",
    "w2z_g128": "int4",
    "w2z_g256": "int4",
    "w3z_g32": "int4",
    "w3z_g64": "int4",
    "w3z_g128": "int4",
    "w3z_g256": "int4",
}
# The format in which attention reads queries, by the type of the KV cache.
KV_ROW_FORMAT = {
    "bf16": "bf16",
    "f16": "f32",
    "f32": "f32",
    "int8": "bf16",
    "fp8_e4m3": "bf16",
    "fp8_e5m2": "bf16",
}
# The kinds of matrices that may have their columns in another order (activation order).
REORDERED = ("w8_g32", "w4_g32", "w4m_g128", *ZERO_POINTS)
# With activation_bits 16, a value is the sum of two int8 terms: about 15 bits.
TWO_TERMS = {"q8g32": "q8g32x2", "q8g256": "q8g256x2"}
# Their scale covers more columns than a tile or a head. Linears and attention write parts of rows,
# so only other ops can write these formats.
WHOLE_ROW = ("q8g128", "q8row", "q8g256", "q8g256x2")
# The kinds with linears that read rows of fp32.
FLOAT_ROWS = tuple(kind for kind, rows in ACT_FORMAT.items() if rows == "f32")


def act_format(kind: str, activation_bits: int) -> str:
    """The format of rows that a matrix of `kind` multiplies; fp32 for unknown kinds."""
    rows = ACT_FORMAT.get(kind, "f32")
    return TWO_TERMS.get(rows, rows) if activation_bits == 16 else rows


def combined_format(activations: str) -> str:
    """The row format of what experts compute from `activations`, until Combine adds it up.

    A prompt writes and reads these rows once. In fp32, 1,024 tokens with 8 experts each have 32 MB
    a layer at a width of 1,024, far more than L2 holds; bf16 halves these bytes. It errs by at most
    2^-9 of each value: as much as bf16 activations did, and less than int8 ones, which err by up to
    1/254 of the largest value in their group. Results of fp32 or two-term activations stay fp32.
    """
    return "f32" if activations in ("f32", *TWO_TERMS.values()) else "bf16"
