"""Families: encoders of texts."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily

FAMILIES = (
    ModelFamily(
        ("BertModel",),
        "cpuserve.models.bert:Bert",
        rerankers=("BertForSequenceClassification",),
        taggers=("BertForTokenClassification",),
        masked=("BertForMaskedLM",),
        gguf_rerankers=True,
    ),
    ModelFamily(
        ("DebertaV2Model",),
        "cpuserve.models.deberta:DebertaV2",
        rerankers=("DebertaV2ForSequenceClassification",),
        taggers=("DebertaV2ForTokenClassification",),
    ),
    ModelFamily(
        ("DistilBertModel",),
        "cpuserve.models.bert:DistilBert",
        classifiers=("DistilBertForSequenceClassification",),
        taggers=("DistilBertForTokenClassification",),
        masked=("DistilBertForMaskedLM",),
    ),
    ModelFamily(("EuroBertModel",), "cpuserve.models.decoders:EuroBert"),
    ModelFamily(
        ("GteModel", "NewModel"),
        "cpuserve.models.gte:Gte",
        rerankers=("GteForSequenceClassification", "NewForSequenceClassification"),
        taggers=("GteForTokenClassification", "NewForTokenClassification"),
    ),
    ModelFamily(("JinaBertModel", "JinaBertForMaskedLM"), "cpuserve.models.jina_v2:JinaV2"),
    ModelFamily(("JinaEmbeddingsV3Model",), "cpuserve.models.gte:JinaV3"),
    ModelFamily(("JinaEmbeddingsV5Model",), "cpuserve.models.decoders:JinaV5"),
    ModelFamily(
        ("LlamaBidirectionalModel",),
        "cpuserve.models.decoders:EuroBert",
        differs={
            "about": "Llama without a causal mask (llama-embed-nemotron, NV-EmbedQA). "
            "Source: transformers modeling_llama.",
            "defaults": {},
        },
    ),
    ModelFamily(("ModernBertDecoderForCausalLM",), "cpuserve.models.modernbert:ModernBertDecoder"),
    ModelFamily(
        ("ModernBertModel",),
        "cpuserve.models.modernbert:ModernBert",
        rerankers=("ModernBertForSequenceClassification",),
        taggers=("ModernBertForTokenClassification",),
        gguf_rerankers=True,
    ),
    ModelFamily(("MPNetModel",), "cpuserve.models.bert:MpNet"),
    ModelFamily(("MT5EncoderModel",), "cpuserve.models.t5:Mt5Encoder"),
    ModelFamily(("NomicBertModel",), "cpuserve.models.nomic_bert:NomicBert"),
    ModelFamily(("T5EncoderModel",), "cpuserve.models.t5:T5Encoder"),
    ModelFamily(("UMT5EncoderModel",), "cpuserve.models.t5:Umt5Encoder"),
    ModelFamily(
        ("XLMRobertaModel", "CamembertModel", "RobertaModel"),
        "cpuserve.models.bert:Roberta",
        rerankers=(
            "CamembertForSequenceClassification",
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
        ),
        taggers=(
            "CamembertForTokenClassification",
            "RobertaForTokenClassification",
            "XLMRobertaForTokenClassification",
        ),
        masked=("CamembertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM"),
        shared_gguf={"XLMRobertaModel": "bert", "RobertaModel": "bert"},
    ),
)
