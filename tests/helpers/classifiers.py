"""Tiny classifiers of texts and of tokens, and the logits that transformers computes with them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from tests.helpers.heads import roberta_keys, transformers_model, with_random_head
from tests.helpers.tiny import tiny_model

# The family of each kind and its class in transformers.
TEXTS = {
    "bert": ("bert", "BertForSequenceClassification"),
    "roberta": ("xlm-roberta", "RobertaForSequenceClassification"),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaForSequenceClassification"),
    "camembert": ("xlm-roberta", "CamembertForSequenceClassification"),
    "modernbert": ("modernbert", "ModernBertForSequenceClassification"),
    "deberta": ("deberta", "DebertaV2ForSequenceClassification"),
    "distilbert": ("distilbert", "DistilBertForSequenceClassification"),
    "gte": ("gte", "GteForSequenceClassification"),
    "mistral": ("mistral", "MistralForSequenceClassification"),
    "gemma2": ("gemma2", "Gemma2ForSequenceClassification"),
    "llama": ("llama", "LlamaForSequenceClassification"),
    "qwen2": ("qwen2", "Qwen2ForSequenceClassification"),
    "qwen3": ("qwen3", "Qwen3ForSequenceClassification"),
}
TOKENS = {
    kind: (family, name.replace("Sequence", "Token")) for kind, (family, name) in TEXTS.items()
}
LABELS = ["bad", "fair", "good"]
PROMPTS = ["The quick brown fox", "jumps over", "the lazy dog \u00e9, \u6f22\u5b57!", "a" * 90]


@functools.cache
def classifier(kind: str, *, tokens: bool = False, labels: int = 3, problem: str = "") -> Path:
    """The directory of a tiny classifier of this kind, with random weights in its head."""
    family, name = (TOKENS if tokens else TEXTS)[kind]
    source = tiny_model(family)
    directory = source.with_name(f"{source.name}-{name}-{labels}-{problem}")
    config = {"architectures": [name], "id2label": dict(enumerate(LABELS[:labels]))}
    config |= {"label2id": {v: k for k, v in config["id2label"].items()}}
    config |= {"problem_type": problem} if problem else {}
    return with_random_head(source, directory, config | roberta_keys(kind), seed=2)


def expected_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """The logits [labels], or [tokens, labels], with transformers in fp32."""
    model = transformers_model(path)
    # Decoders take the last token that is no padding, and these prompts have none.
    is_decoder = type(model).__name__.startswith(("Llama", "Qwen", "Mistral", "Gemma"))
    model.config.pad_token_id = None if is_decoder else 1
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].double()
