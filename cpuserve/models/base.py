"""The interface of a model family, and the built-in families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from cpuserve.base.registry import Registry

if TYPE_CHECKING:
    from cpuserve.models.spec import ModelSpec
    from cpuserve.program.builder import Builder

BUILTIN = {
    "AfmoeForCausalLM": "cpuserve.models.afmoe:Afmoe",
    "ApertusForCausalLM": "cpuserve.models.apertus:Apertus",
    "Apertus1p5TextForCausalLM": "cpuserve.models.apertus:Apertus15",
    "ArceeForCausalLM": "cpuserve.models.arcee:Arcee",
    "AriaTextForCausalLM": "cpuserve.models.aria:AriaText",
    "AXK1ForCausalLM": "cpuserve.models.deepseek:AxK1",
    "AXK2ForCausalLM": "cpuserve.models.axk2:AxK2",
    "BaiChuanForCausalLM": "cpuserve.models.baichuan:Baichuan",
    "BaichuanForCausalLM": "cpuserve.models.baichuan:Baichuan",
    "BailingHybridForCausalLM": "cpuserve.models.bailing:BailingHybrid",
    "BailingMoeForCausalLM": "cpuserve.models.bailing:BailingMoe",
    "BailingMoeV2ForCausalLM": "cpuserve.models.bailing:BailingMoeV2",
    "BailingMoeV3ForCausalLM": "cpuserve.models.bailing:BailingMoeV3",
    "BambaForCausalLM": "cpuserve.models.bamba:Bamba",
    "BertModel": "cpuserve.models.bert:Bert",
    "BioGptForCausalLM": "cpuserve.models.biogpt:BioGpt",
    "BitNetForCausalLM": "cpuserve.models.bitnet:BitNet",
    "BloomForCausalLM": "cpuserve.models.bloom:Bloom",
    "CamembertModel": "cpuserve.models.bert:Roberta",
    "CodeGenForCausalLM": "cpuserve.models.gptj:CodeGen",
    "Cohere2MoeForCausalLM": "cpuserve.models.cohere:Cohere2Moe",
    "Cohere2ForCausalLM": "cpuserve.models.cohere:Cohere2",
    "CohereCompassForCausalLM": "cpuserve.models.cohere:CohereCompass",
    "CohereForCausalLM": "cpuserve.models.cohere:Cohere",
    "CTRLLMHeadModel": "cpuserve.models.ctrl:Ctrl",
    "CwmForCausalLM": "cpuserve.models.llama:Cwm",
    "DbrxForCausalLM": "cpuserve.models.dbrx:Dbrx",
    "DebertaV2Model": "cpuserve.models.deberta:DebertaV2",
    "DeciLMForCausalLM": "cpuserve.models.deci:DeciLm",
    "DeepseekForCausalLM": "cpuserve.models.deepseek_moe:DeepseekMoe",
    "DeepseekV2ForCausalLM": "cpuserve.models.deepseek:DeepseekV2",
    "DeepseekV32ForCausalLM": "cpuserve.models.deepseek:DeepseekV32",
    "DeepseekV3ForCausalLM": "cpuserve.models.deepseek:DeepseekV3",
    "DeepseekV4ForCausalLM": "cpuserve.models.deepseek_v4:DeepseekV4",
    "DiffLlamaForCausalLM": "cpuserve.models.diffllama:DiffLlama",
    "DistilBertModel": "cpuserve.models.distilbert:DistilBert",
    "Dots1ForCausalLM": "cpuserve.models.dots1:Dots1",
    "Ernie4_5_ForCausalLM": "cpuserve.models.ernie4_5:Ernie45",
    "Ernie4_5_MoeForCausalLM": "cpuserve.models.ernie4_5:Ernie45Moe",
    "Ernie4_5_VLMoeForCausalLM": "cpuserve.models.ernie4_5:Ernie45VlMoe",
    "Ernie4_5ForCausalLM": "cpuserve.models.ernie4_5:Ernie45",
    "EuroBertModel": "cpuserve.models.llama:EuroBert",
    "Exaone4ForCausalLM": "cpuserve.models.exaone4:Exaone4",
    "ExaoneForCausalLM": "cpuserve.models.exaone:Exaone",
    "ExaoneMoEForCausalLM": "cpuserve.models.exaone4:ExaoneMoe",
    "ExaoneMoeForCausalLM": "cpuserve.models.exaone4:ExaoneMoe",
    "FalconMambaForCausalLM": "cpuserve.models.mamba:FalconMamba",
    "FalconH1ForCausalLM": "cpuserve.models.falcon_h1:FalconH1",
    "FalconForCausalLM": "cpuserve.models.falcon:Falcon",
    "FlexOlmoForCausalLM": "cpuserve.models.olmo:FlexOlmo",
    "FlintForCausalLM": "cpuserve.models.flint:Flint",
    "GemmaForCausalLM": "cpuserve.models.gemma:Gemma",
    "Gemma2ForCausalLM": "cpuserve.models.gemma:Gemma2",
    "Gemma3ForCausalLM": "cpuserve.models.gemma:Gemma3",
    "Gemma3nForCausalLM": "cpuserve.models.gemma3n:Gemma3n",
    "Gemma3TextModel": "cpuserve.models.gemma:Gemma3Embedding",
    "Gemma4ForCausalLM": "cpuserve.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "cpuserve.models.gemma4:Gemma4Unified",
    "GlmForCausalLM": "cpuserve.models.glm4:Glm",
    "Glm4ForCausalLM": "cpuserve.models.glm4:Glm4",
    "Glm4MoeForCausalLM": "cpuserve.models.glm4:Glm4Moe",
    "Glm4MoeLiteForCausalLM": "cpuserve.models.deepseek:Glm4MoeLite",
    "GlmMoeDsaForCausalLM": "cpuserve.models.deepseek:GlmMoeDsa",
    "Glm5NextForCausalLM": "cpuserve.models.glm5_next:Glm5Next",
    "GPT2LMHeadModel": "cpuserve.models.gpt2:Gpt2",
    "GPTBigCodeForCausalLM": "cpuserve.models.gpt2:GptBigCode",
    "GPTJForCausalLM": "cpuserve.models.gptj:GptJ",
    "GPTNeoForCausalLM": "cpuserve.models.gpt_neo:GptNeo",
    "GPTNeoXForCausalLM": "cpuserve.models.gpt_neox:GptNeoX",
    "GptOssForCausalLM": "cpuserve.models.gpt_oss:GptOss",
    "GraniteForCausalLM": "cpuserve.models.granite:Granite",
    "GraniteMoeForCausalLM": "cpuserve.models.granite:GraniteMoe",
    "GraniteMoeHybridForCausalLM": "cpuserve.models.granite:GraniteMoeHybrid",
    "GraniteMoeSharedForCausalLM": "cpuserve.models.granite:GraniteMoe",
    "GraniteMoeSWAForCausalLM": "cpuserve.models.granite:GraniteMoeSwa",
    "GraniteSWAForCausalLM": "cpuserve.models.granite:GraniteSwa",
    "GteModel": "cpuserve.models.gte:Gte",
    "HeliumForCausalLM": "cpuserve.models.helium:Helium",
    "HunYuanDenseV1ForCausalLM": "cpuserve.models.hunyuan:HunyuanDense",
    "HunYuanMoEV1ForCausalLM": "cpuserve.models.hunyuan:HunyuanMoe",
    "HYV3ForCausalLM": "cpuserve.models.hy_v3:HunYuan3",
    "HYV4ForCausalLM": "cpuserve.models.hy_v4:HunYuan4",
    "HyperCLOVAXForCausalLM": "cpuserve.models.granite:HyperClovaX",
    "InternLM2ForCausalLM": "cpuserve.models.internlm2:InternLm2",
    "InternLM3ForCausalLM": "cpuserve.models.internlm2:InternLm3",
    "IQuestCoderForCausalLM": "cpuserve.models.llama:IQuestCoder",
    "Jais2ForCausalLM": "cpuserve.models.nemotron:Jais2",
    "JambaForCausalLM": "cpuserve.models.jamba:Jamba",
    "JinaBertForMaskedLM": "cpuserve.models.jina_v2:JinaV2",
    "JinaBertModel": "cpuserve.models.jina_v2:JinaV2",
    "JinaEmbeddingsV3Model": "cpuserve.models.gte:JinaV3",
    "JinaEmbeddingsV5Model": "cpuserve.models.jina_v5:JinaV5",
    "KimiLinearForCausalLM": "cpuserve.models.kimi_linear:KimiLinear",
    "Kolibri1ForCausalLM": "cpuserve.models.kolibri1:Kolibri1",
    "LagunaForCausalLM": "cpuserve.models.laguna:Laguna",
    "LaraMiniForCausalLM": "cpuserve.models.lara_mini:LaraMini",
    "Lfm2ForCausalLM": "cpuserve.models.lfm:Lfm2",
    "LFM2ForCausalLM": "cpuserve.models.lfm:Lfm2",
    "Lfm2MoeForCausalLM": "cpuserve.models.lfm:Lfm2Moe",
    "Lfm3ForCausalLM": "cpuserve.models.lfm:Lfm3",
    "LlamaBidirectionalModel": "cpuserve.models.llama:LlamaBidirectional",
    "Llama4ForCausalLM": "cpuserve.models.llama4:Llama4",
    "LLaMAForCausalLM": "cpuserve.models.llama:Llama",
    "LlamaForCausalLM": "cpuserve.models.llama:Llama",
    "LongcatFlashForCausalLM": "cpuserve.models.longcat:LongcatFlash",
    "MambaForCausalLM": "cpuserve.models.mamba:MambaModel",
    "Mamba2ForCausalLM": "cpuserve.models.mamba:Mamba2Model",
    "MellumForCausalLM": "cpuserve.models.mellum:Mellum",
    "MiMoForCausalLM": "cpuserve.models.qwen:Qwen2",
    "MiMoV2FlashForCausalLM": "cpuserve.models.mimo_v2:MiMoV2Flash",
    "MiMoV2ForCausalLM": "cpuserve.models.mimo_v2:MiMoV2",
    "MiniCPM3ForCausalLM": "cpuserve.models.deepseek:MiniCpm3",
    "MiniCPMForCausalLM": "cpuserve.models.granite:MiniCpm",
    "MiniMaxForCausalLM": "cpuserve.models.minimax:MiniMax",
    "MiniMaxM1ForCausalLM": "cpuserve.models.minimax:MiniMax",
    "MiniMaxM3SparseForCausalLM": "cpuserve.models.minimax_m3:MiniMaxM3",
    "MiniMaxText01ForCausalLM": "cpuserve.models.minimax:MiniMax",
    "MiniMaxM2ForCausalLM": "cpuserve.models.minimax_m2:MiniMaxM2",
    "MiniMaxM3VLForCausalLM": "cpuserve.models.minimax_m3:MiniMaxM3",
    "Ministral3ForCausalLM": "cpuserve.models.ministral3:Ministral3",
    "MinistralForCausalLM": "cpuserve.models.llama:Ministral",
    "Mistral4ForCausalLM": "cpuserve.models.ministral3:Mistral4",
    "MistralForCausalLM": "cpuserve.models.llama:Mistral",
    "MixtralForCausalLM": "cpuserve.models.mixtral:Mixtral",
    "ModernBertModel": "cpuserve.models.modernbert:ModernBert",
    "ModernBertDecoderForCausalLM": "cpuserve.models.modernbert:ModernBertDecoder",
    "Molmo2ForCausalLM": "cpuserve.models.molmo2:Molmo2",
    "MPTForCausalLM": "cpuserve.models.mpt:Mpt",
    "MptForCausalLM": "cpuserve.models.mpt:Mpt",
    "MPNetModel": "cpuserve.models.mpnet:MpNet",
    "MT5EncoderModel": "cpuserve.models.t5:Mt5Encoder",
    "MuseGlimmerForCausalLM": "cpuserve.models.muse_glimmer:MuseGlimmer",
    "NanoChatForCausalLM": "cpuserve.models.nanochat:NanoChat",
    "NemotronForCausalLM": "cpuserve.models.nemotron:Nemotron",
    "NemotronHForCausalLM": "cpuserve.models.nemotron_h:NemotronH",
    "NemotronHPuzzleForCausalLM": "cpuserve.models.nemotron_h:NemotronH",
    "NewModel": "cpuserve.models.gte:Gte",
    "NomicBertModel": "cpuserve.models.nomic_bert:NomicBert",
    "OlmoForCausalLM": "cpuserve.models.olmo:Olmo",
    "Olmo2ForCausalLM": "cpuserve.models.olmo:Olmo2",
    "Olmo3ForCausalLM": "cpuserve.models.olmo:Olmo3",
    "OlmoHybridForCausalLM": "cpuserve.models.olmo_hybrid:OlmoHybrid",
    "OlmoeForCausalLM": "cpuserve.models.olmo:Olmoe",
    "OpenAIGPTLMHeadModel": "cpuserve.models.openai_gpt:OpenAiGpt",
    "OPTForCausalLM": "cpuserve.models.opt:Opt",
    "OrionForCausalLM": "cpuserve.models.stablelm:Orion",
    "PanguEmbeddedForCausalLM": "cpuserve.models.pangu:PanguEmbedded",
    "PersimmonForCausalLM": "cpuserve.models.persimmon:Persimmon",
    "PhiForCausalLM": "cpuserve.models.phi:Phi",
    "Phi3ForCausalLM": "cpuserve.models.phi3:Phi3",
    "PhimoeForCausalLM": "cpuserve.models.mixtral:PhiMoe",
    "PhiMoEForCausalLM": "cpuserve.models.mixtral:PhiMoe",
    "Qwen2ForCausalLM": "cpuserve.models.qwen:Qwen2",
    "Qwen2MoeForCausalLM": "cpuserve.models.qwen2_moe:Qwen2Moe",
    "Qwen3_5ForCausalLM": "cpuserve.models.qwen3_next:Qwen35",
    "Qwen3_5MoeForCausalLM": "cpuserve.models.qwen3_next:Qwen35Moe",
    "Qwen3ForCausalLM": "cpuserve.models.qwen:Qwen3",
    "Qwen3MoeForCausalLM": "cpuserve.models.qwen3_moe:Qwen3Moe",
    "Qwen3NextForCausalLM": "cpuserve.models.qwen3_next:Qwen3Next",
    "Qwen4ExpForCausalLM": "cpuserve.models.qwen4_exp:Qwen4Exp",
    "RWForCausalLM": "cpuserve.models.falcon:Falcon",
    "RWKV6ForCausalLM": "cpuserve.models.rwkv6:Rwkv6",
    "Rwkv6ForCausalLM": "cpuserve.models.rwkv6:Finch",
    "RWKV6Qwen2ForCausalLM": "cpuserve.models.rwkv6:Rwkv6Qwen2",
    "RWKV7ForCausalLM": "cpuserve.models.rwkv:Rwkv7",
    "RobertaModel": "cpuserve.models.bert:Roberta",
    "Rwkv7ForCausalLM": "cpuserve.models.rwkv:Rwkv7",
    "RwkvHybridForCausalLM": "cpuserve.models.rwkv:Arwkv7",
    "SarvamMLAForCausalLM": "cpuserve.models.deepseek:SarvamMla",
    "SarvamMoEForCausalLM": "cpuserve.models.bailing:SarvamMoe",
    "SeedOssForCausalLM": "cpuserve.models.seed_oss:SeedOss",
    "SmolLM3ForCausalLM": "cpuserve.models.smollm3:SmolLm3",
    "SolarOpenForCausalLM": "cpuserve.models.glm4:SolarOpen",
    "StableLMEpochForCausalLM": "cpuserve.models.stablelm:StableLm",
    "StableLmForCausalLM": "cpuserve.models.stablelm:StableLm",
    "Starcoder2ForCausalLM": "cpuserve.models.starcoder2:Starcoder2",
    "Step3p5ForCausalLM": "cpuserve.models.step3:Step35",
    "T5EncoderModel": "cpuserve.models.t5:T5Encoder",
    "TeleChat3ForCausalLM": "cpuserve.models.llama:Llama",
    "UMT5EncoderModel": "cpuserve.models.t5:Umt5Encoder",
    "VaultGemmaForCausalLM": "cpuserve.models.gemma:VaultGemma",
    "XGLMForCausalLM": "cpuserve.models.biogpt:Xglm",
    "XLMRobertaModel": "cpuserve.models.bert:Roberta",
    "XverseForCausalLM": "cpuserve.models.llama:Llama",
    "YoutuForCausalLM": "cpuserve.models.deepseek:Youtu",
    "ZambaForCausalLM": "cpuserve.models.zamba:Zamba",
    "Zamba2ForCausalLM": "cpuserve.models.zamba2:Zamba2",
}

# Synonyms of architectures, each with the one that messages and reports show.
SAME = {
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "CamembertModel": "XLMRobertaModel",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "GraniteMoeSharedForCausalLM": "GraniteMoeForCausalLM",
    "JinaBertForMaskedLM": "JinaBertModel",
    "LFM2ForCausalLM": "Lfm2ForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "NewModel": "GteModel",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "RobertaModel": "XLMRobertaModel",
    "RWForCausalLM": "FalconForCausalLM",
    "Rwkv7ForCausalLM": "RWKV7ForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
}
# Families that a class of transformers runs, which is the architecture in the files that it saves:
# that class and the model_type, and the architecture of published files.
SAVED_AS = {
    ("DeepseekV3ForCausalLM", "sarvam_mla"): "SarvamMLAForCausalLM",
    ("Glm4MoeForCausalLM", "sarvam_moe"): "SarvamMoEForCausalLM",
    ("LlamaForCausalLM", "exaone"): "ExaoneForCausalLM",
    ("LlamaForCausalLM", "internlm3"): "InternLM3ForCausalLM",
    ("LlamaForCausalLM", "iquestcoder"): "IQuestCoderForCausalLM",
}
# Classifiers of texts, each with the architecture of the model below the head. Classifiers with one
# label are rerankers, which score pairs of texts. loader/ranking.py reads the heads.
RERANKERS = {
    "BertForSequenceClassification": "BertModel",
    "CamembertForSequenceClassification": "CamembertModel",
    "DebertaV2ForSequenceClassification": "DebertaV2Model",
    "GteForSequenceClassification": "GteModel",
    "ModernBertForSequenceClassification": "ModernBertModel",
    "NewForSequenceClassification": "NewModel",
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
    "RobertaForSequenceClassification": "RobertaModel",
    "XLMRobertaForSequenceClassification": "XLMRobertaModel",
}
# Classifiers of texts that are not rerankers: with one label they are reward models.
CLASSIFIERS = {
    "DistilBertForSequenceClassification": "DistilBertModel",
    "Gemma2ForSequenceClassification": "Gemma2ForCausalLM",
    "LlamaForSequenceClassification": "LlamaForCausalLM",
    "MistralForSequenceClassification": "MistralForCausalLM",
    "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
}
# Classifiers of single tokens.
TAGGERS = {
    "BertForTokenClassification": "BertModel",
    "CamembertForTokenClassification": "CamembertModel",
    "DebertaV2ForTokenClassification": "DebertaV2Model",
    "DistilBertForTokenClassification": "DistilBertModel",
    "Gemma2ForTokenClassification": "Gemma2ForCausalLM",
    "GteForTokenClassification": "GteModel",
    "LlamaForTokenClassification": "LlamaForCausalLM",
    "MistralForTokenClassification": "MistralForCausalLM",
    "ModernBertForTokenClassification": "ModernBertModel",
    "NewForTokenClassification": "NewModel",
    "Qwen2ForTokenClassification": "Qwen2ForCausalLM",
    "Qwen3ForTokenClassification": "Qwen3ForCausalLM",
    "RobertaForTokenClassification": "RobertaModel",
    "XLMRobertaForTokenClassification": "XLMRobertaModel",
}
# Models that predict masked tokens, each with the architecture below the head.
# Their vectors over the vocabulary are sparse embeddings (SPLADE).
MASKED = {
    "BertForMaskedLM": "BertModel",
    "CamembertForMaskedLM": "CamembertModel",
    "DistilBertForMaskedLM": "DistilBertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
}
# The linear of the classifier heads of decoders, which no op reads.
DECODER_HEAD = ("score.weight", "score.bias")
# The architectures of rerankers that are read from GGUF files, and the linears and norms of a head.
GGUF_RERANKERS = ("BertModel", "ModernBertModel", "Qwen3ForCausalLM")
GGUF_HEAD = ("cls", "cls.norm", "cls.output")
# Families that have rerankers which generate "yes" or "no" (Qwen3-Reranker).
JUDGES = ("Qwen3ForCausalLM",)


class ModelDef(Protocol):
    """One model family: it reads hyperparameters from a config and builds a Program.

    A family may have an attribute `stored`: how files call its tensors (StoredNames).
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Hugging Face config; ModelError for an invalid value."""

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of a model with hyperparameters `s` to its builder `b`."""


MODELS: Registry[type[ModelDef]] = Registry("model architecture", BUILTIN)
