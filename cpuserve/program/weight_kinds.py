"""The weight kinds that linears multiply, one record for each.

csrc/kernels/table/weights.h has the same list for the kernels, and the layout of each kind.
"""

from dataclasses import dataclass
from typing import Literal

WeightKind = Literal[
    "dense_bf16", "dense_f16", "dense_f32", "w8_g32", "w4_g32", "w4m_g32", "w4m_g128", "w8_channel",
    "w8_channel_g128", "q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "q5_0", "q5_1", "iq4_nl", "iq4_xs",
    "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "mxfp4", "tq2_0", "q2_0",
    "pq2_0", "q1_0", "e4m3_g128", "nf4_g64", "fp4_g64", "nvfp4", "w8z_g32", "w8z_g128", "w4z_g32",
    "w4z_g64", "w2z_g32", "w2z_g64", "w2z_g128", "w2z_g256", "w3z_g32", "w3z_g64", "w3z_g128",
    "w3z_g256",
]  # fmt: skip
SourceType = Literal[
    "f32", "f16", "bf16", "gguf_q8_0", "gguf_q4_0", "gguf_q4_1", "s8_channel", "u4m_g128",
    "gguf_q4_k", "gguf_q5_k", "gguf_q6_k", "gguf_q2_k", "gguf_q3_k", "gguf_q5_0", "gguf_q5_1",
    "gguf_iq4_nl", "gguf_iq4_xs", "gguf_iq3_s", "gguf_iq3_xxs", "gguf_iq2_s", "gguf_iq2_xs",
    "gguf_iq2_xxs", "gguf_iq1_m", "gguf_iq1_s", "gguf_mxfp4", "gguf_tq2_0", "gguf_q2_0",
    "gguf_pq2_0", "gguf_q1_0", "e4m3_g128", "nf4_g64", "fp4_g64", "nvfp4", "u8z_g32", "u8z_g128",
    "u4z_g32", "u4z_g64", "u2z_g32", "u2z_g64", "u2z_g128", "u2z_g256", "u3z_g32", "u3z_g64",
    "u3z_g128", "u3z_g256",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class KindRecord:
    """A weight kind.

    rows: the format of the activation rows that the kind multiplies (`row_formats.act_format`).
    dot: the type of the dot products, by its name in the hardware probes.
    source: the type of checkpoint rows that packers copy; None: packers quantize floats.
    block: (weights, bytes) of a block of `source`; None if rows do not consist of equal blocks.
    reordered: whether columns may be in another order (the activation order of GPTQ).
    zeros: whether the groups have integer zero points.
    """

    name: WeightKind
    rows: str
    dot: Literal["f32", "bf16", "int8", "int4"]
    source: SourceType | None = None
    block: tuple[int, int] | None = None
    reordered: bool = False
    zeros: bool = False


def _with_zeros(
    name: WeightKind, dot: Literal["int8", "int4"], source: SourceType, block: tuple[int, int]
) -> KindRecord:
    return KindRecord(name, "q8g32", dot, source, block, reordered=True, zeros=True)


KINDS = (
    KindRecord("dense_bf16", "bf16", "bf16"),
    KindRecord("dense_f16", "f32", "f32"),
    KindRecord("dense_f32", "f32", "f32"),
    KindRecord("w8_g32", "q8g32", "int8", "gguf_q8_0", (32, 34), reordered=True),
    KindRecord("w4_g32", "q8g32", "int4", "gguf_q4_0", (32, 18), reordered=True),
    KindRecord("w4m_g32", "q8g32", "int4", "gguf_q4_1", (32, 20)),
    KindRecord("w4m_g128", "q8g128", "int4", "u4m_g128", (128, 68), reordered=True),
    KindRecord("w8_channel", "q8row", "int8", "s8_channel"),
    KindRecord("w8_channel_g128", "q8g128", "int8"),
    KindRecord("q4_k", "q8g256", "int4", "gguf_q4_k", (256, 144)),
    KindRecord("q5_k", "q8g256", "int4", "gguf_q5_k", (256, 176)),
    KindRecord("q6_k", "q8g256", "int4", "gguf_q6_k", (256, 210)),
    KindRecord("q2_k", "q8g256", "int4", "gguf_q2_k", (256, 84)),
    KindRecord("q3_k", "q8g256", "int4", "gguf_q3_k", (256, 110)),
    KindRecord("q5_0", "q8g32", "int4", "gguf_q5_0", (32, 22)),
    KindRecord("q5_1", "q8g32", "int4", "gguf_q5_1", (32, 24)),
    KindRecord("iq4_nl", "q8g32", "int8", "gguf_iq4_nl", (32, 18)),
    KindRecord("iq4_xs", "q8g256", "int8", "gguf_iq4_xs", (256, 136)),
    KindRecord("iq3_s", "q8g256", "int8", "gguf_iq3_s", (256, 110)),
    KindRecord("iq3_xxs", "q8g256", "int8", "gguf_iq3_xxs", (256, 98)),
    KindRecord("iq2_s", "q8g256", "int8", "gguf_iq2_s", (256, 82)),
    KindRecord("iq2_xs", "q8g256", "int8", "gguf_iq2_xs", (256, 74)),
    KindRecord("iq2_xxs", "q8g256", "int8", "gguf_iq2_xxs", (256, 66)),
    KindRecord("iq1_m", "q8g256", "int8", "gguf_iq1_m", (256, 56)),
    KindRecord("iq1_s", "q8g256", "int4", "gguf_iq1_s", (256, 50)),
    KindRecord("mxfp4", "q8g32", "int4", "gguf_mxfp4", (32, 17)),
    KindRecord("tq2_0", "q8g256", "int4", "gguf_tq2_0", (256, 66)),
    KindRecord("q2_0", "q8g256", "int4", "gguf_q2_0", (64, 18)),
    KindRecord("pq2_0", "q8g256", "int4", "gguf_pq2_0", (128, 34)),
    KindRecord("q1_0", "q8g256", "int4", "gguf_q1_0", (128, 18)),
    KindRecord("e4m3_g128", "bf16", "bf16", "e4m3_g128"),
    KindRecord("nf4_g64", "bf16", "bf16", "nf4_g64", (64, 34)),
    KindRecord("fp4_g64", "bf16", "bf16", "fp4_g64", (64, 34)),
    KindRecord("nvfp4", "bf16", "bf16", "nvfp4"),
    _with_zeros("w8z_g32", "int8", "u8z_g32", (32, 35)),
    _with_zeros("w8z_g128", "int8", "u8z_g128", (128, 131)),
    _with_zeros("w4z_g32", "int4", "u4z_g32", (32, 19)),
    _with_zeros("w4z_g64", "int4", "u4z_g64", (64, 35)),
    _with_zeros("w2z_g32", "int4", "u2z_g32", (32, 11)),
    _with_zeros("w2z_g64", "int4", "u2z_g64", (64, 19)),
    _with_zeros("w2z_g128", "int4", "u2z_g128", (128, 35)),
    _with_zeros("w2z_g256", "int4", "u2z_g256", (256, 67)),
    _with_zeros("w3z_g32", "int4", "u3z_g32", (32, 15)),
    _with_zeros("w3z_g64", "int4", "u3z_g64", (64, 27)),
    _with_zeros("w3z_g128", "int4", "u3z_g128", (128, 51)),
    _with_zeros("w3z_g256", "int4", "u3z_g256", (256, 99)),
)
