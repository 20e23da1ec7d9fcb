"""Families: Hunyuan."""

from __future__ import annotations

from cpuserve.models.family import FINAL, Guesses, ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("HunYuanDenseV1ForCausalLM",),
        "cpuserve.models.hunyuan:HunyuanDense",
        text_types={"hunyuan_vl_text": TextType(sizes(290943, 4096, 11008, 32, 32, 2048))},
        wholes=(Whole(("HunYuanVLForConditionalGeneration",), "hunyuan_vl_text", tied=True),),
    ),
    ModelFamily(("HunYuanMoEV1ForCausalLM",), "cpuserve.models.hunyuan:HunyuanMoe"),
    ModelFamily(
        ("HYV3ForCausalLM",),
        "cpuserve.models.mixtures:HunYuan3",
        guesses=Guesses(FINAL),
        mtp_methods=("hy_v3_mtp",),
    ),
    ModelFamily(
        ("HYV4ForCausalLM",),
        "cpuserve.models.hy_v4:HunYuan4",
        text_types={
            "hy_v4_vl_text": TextType(
                sizes(
                    *(120832, 6144, 18432, 78, 64, 262144),
                    moe_intermediate_size=2048,
                    q_lora_rank=2048,
                    index_n_heads=32,
                    shares_norm_eps=True,
                )
            )
        },
        wholes=(Whole(("HYV4VLForConditionalGeneration",), "hy_v4_vl_text", tied=False),),
    ),
)
