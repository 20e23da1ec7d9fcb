"""Families: decoders that have relatives in no other file here."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(("AfmoeForCausalLM",), "cpuserve.models.mixtures:Afmoe"),
    ModelFamily(
        ("Apertus1p5TextForCausalLM",),
        "cpuserve.models.decoders:Apertus15",
        text_types={
            "apertus1p5_text": TextType(
                sizes(266752, 4096, 14336, 32, 32, 65536, hidden_act="xielu")
            )
        },
        wholes=(Whole(("Apertus1p5ForConditionalGeneration",), "apertus1p5_text", tied=False),),
    ),
    ModelFamily(("ApertusForCausalLM",), "cpuserve.models.decoders:Apertus"),
    ModelFamily(("ArceeForCausalLM",), "cpuserve.models.decoders:Arcee"),
    ModelFamily(
        ("AriaTextForCausalLM",),
        "cpuserve.models.mixtures:AriaText",
        text_types={"aria_text": TextType(sizes(32000, 4096, 4096, 32, 32, 2048))},
        wholes=(Whole(("AriaForConditionalGeneration",), "aria_text", tied=False),),
    ),
    ModelFamily(
        ("BaichuanForCausalLM", "BaiChuanForCausalLM"), "cpuserve.models.decoders:Baichuan"
    ),
    ModelFamily(("BambaForCausalLM",), "cpuserve.models.hybrids:Bamba"),
    ModelFamily(("BioGptForCausalLM",), "cpuserve.models.plain:BioGpt"),
    ModelFamily(("BitNetForCausalLM",), "cpuserve.models.decoders:BitNet"),
    ModelFamily(("BloomForCausalLM",), "cpuserve.models.plain:Bloom"),
    ModelFamily(("CodeGenForCausalLM",), "cpuserve.models.plain:CodeGen"),
    ModelFamily(("CTRLLMHeadModel",), "cpuserve.models.plain:Ctrl"),
    ModelFamily(("DbrxForCausalLM",), "cpuserve.models.mixtures:Dbrx"),
    ModelFamily(("DeciLMForCausalLM",), "cpuserve.models.deci:DeciLm"),
    ModelFamily(("DiffLlamaForCausalLM",), "cpuserve.models.decoders:DiffLlama"),
    ModelFamily(("Dots1ForCausalLM",), "cpuserve.models.mixtures:Dots1"),
    ModelFamily(("FalconForCausalLM", "RWForCausalLM"), "cpuserve.models.plain:Falcon"),
    ModelFamily(
        ("FalconH1ForCausalLM",),
        "cpuserve.models.falcon_h1:FalconH1",
        label="Falcon-H1",
        example_of="states",
    ),
    ModelFamily(("FalconMambaForCausalLM",), "cpuserve.models.mamba:FalconMamba"),
    ModelFamily(("FlexOlmoForCausalLM",), "cpuserve.models.olmo:FlexOlmo"),
    ModelFamily(("FlintForCausalLM",), "cpuserve.models.mixtures:Flint"),
    ModelFamily(("GPT2LMHeadModel",), "cpuserve.models.plain:Gpt2"),
    ModelFamily(("GPTBigCodeForCausalLM",), "cpuserve.models.plain:GptBigCode"),
    ModelFamily(("GPTJForCausalLM",), "cpuserve.models.plain:GptJ"),
    ModelFamily(("GPTNeoForCausalLM",), "cpuserve.models.plain:GptNeo"),
    ModelFamily(("GPTNeoXForCausalLM",), "cpuserve.models.plain:GptNeoX"),
    ModelFamily(
        ("GptOssForCausalLM",),
        "cpuserve.models.mixtures:GptOss",
        text_types={"gpt_oss": TextType()},
    ),
    ModelFamily(("HeliumForCausalLM",), "cpuserve.models.decoders:Helium"),
    ModelFamily(
        ("InternLM2ForCausalLM",),
        "cpuserve.models.decoders:InternLm2",
        text_types={"internlm2": TextType()},
    ),
    ModelFamily(
        ("InternLM3ForCausalLM",),
        "cpuserve.models.decoders:InternLm3",
        saved_as=(("LlamaForCausalLM", "internlm3"),),
    ),
    ModelFamily(("Jais2ForCausalLM",), "cpuserve.models.decoders:Jais2"),
    ModelFamily(("JambaForCausalLM",), "cpuserve.models.hybrids:Jamba"),
    ModelFamily(("Kolibri1ForCausalLM",), "cpuserve.models.mixtures:Kolibri1"),
    ModelFamily(("LagunaForCausalLM",), "cpuserve.models.mixtures:Laguna"),
    ModelFamily(("LaraMiniForCausalLM",), "cpuserve.models.hybrids:LaraMini"),
    ModelFamily(("Mamba2ForCausalLM",), "cpuserve.models.mamba:Mamba2Model"),
    ModelFamily(("MambaForCausalLM",), "cpuserve.models.mamba:MambaModel"),
    ModelFamily(("MellumForCausalLM",), "cpuserve.models.mixtures:Mellum"),
    ModelFamily(
        ("Molmo2ForCausalLM",),
        "cpuserve.models.molmo2:Molmo2",
        text_types={
            "molmo2_text": TextType(
                sizes(151936, 4096, 12288, 36, 32, 36864, num_key_value_heads=8)
            )
        },
        wholes=(Whole(("Molmo2ForConditionalGeneration",), "molmo2_text", tied=False),),
    ),
    ModelFamily(("MptForCausalLM", "MPTForCausalLM"), "cpuserve.models.plain:Mpt"),
    ModelFamily(
        ("MuseGlimmerForCausalLM",),
        "cpuserve.models.muse_glimmer:MuseGlimmer",
        text_types={
            "muse_glimmer_text": TextType(
                sizes(202048, 6656, 19968, 52, 32, 131072, num_key_value_heads=2, head_dim=128)
            )
        },
        wholes=(Whole(("MuseGlimmerForConditionalGeneration",), "muse_glimmer_text"),),
    ),
    ModelFamily(("NanoChatForCausalLM",), "cpuserve.models.decoders:NanoChat"),
    ModelFamily(("Olmo2ForCausalLM",), "cpuserve.models.olmo:Olmo2"),
    ModelFamily(
        ("Olmo3ForCausalLM",),
        "cpuserve.models.olmo:Olmo3",
        shared_gguf={"Olmo3ForCausalLM": "olmo2"},
    ),
    ModelFamily(("OlmoeForCausalLM",), "cpuserve.models.olmo:Olmoe"),
    ModelFamily(("OlmoForCausalLM",), "cpuserve.models.olmo:Olmo"),
    ModelFamily(("OlmoHybridForCausalLM",), "cpuserve.models.olmo_hybrid:OlmoHybrid"),
    ModelFamily(("OpenAIGPTLMHeadModel",), "cpuserve.models.plain:OpenAiGpt"),
    ModelFamily(("OPTForCausalLM",), "cpuserve.models.plain:Opt"),
    ModelFamily(("OrionForCausalLM",), "cpuserve.models.decoders:Orion"),
    ModelFamily(("PanguEmbeddedForCausalLM",), "cpuserve.models.decoders:PanguEmbedded"),
    ModelFamily(("PersimmonForCausalLM",), "cpuserve.models.plain:Persimmon"),
    ModelFamily(("SeedOssForCausalLM",), "cpuserve.models.decoders:SeedOss"),
    ModelFamily(("SmolLM3ForCausalLM",), "cpuserve.models.decoders:SmolLm3"),
    ModelFamily(
        ("StableLmForCausalLM", "StableLMEpochForCausalLM"), "cpuserve.models.decoders:StableLm"
    ),
    ModelFamily(("Starcoder2ForCausalLM",), "cpuserve.models.decoders:Starcoder2"),
    ModelFamily(("XGLMForCausalLM",), "cpuserve.models.plain:Xglm"),
    ModelFamily(("Zamba2ForCausalLM",), "cpuserve.models.zamba2:Zamba2"),
    ModelFamily(("ZambaForCausalLM",), "cpuserve.models.zamba:Zamba"),
)
