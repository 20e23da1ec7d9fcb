"""Tiny SPLADE models with random heads, and their sparse embeddings with transformers."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from tests.helpers.heads import roberta_keys, transformers_model, with_random_head
from tests.helpers.tiny import tiny_model

# The family of each kind and its class in transformers.
KINDS = {
    "bert": ("bert", "BertForMaskedLM"),
    "distilbert": ("distilbert", "DistilBertForMaskedLM"),
    "camembert": ("xlm-roberta", "CamembertForMaskedLM"),
    "roberta": ("xlm-roberta", "RobertaForMaskedLM"),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaForMaskedLM"),
}
HEADS = ("cls", "lm_head", "vocab_")


@functools.cache
def splade(kind: str, *, tied: bool = True) -> Path:
    """The directory of a tiny model of this kind, with random weights in its head."""
    family, name = KINDS[kind]
    source = tiny_model(family)
    directory = source.with_name(f"{source.name}-{name}-{tied}")
    config = {"architectures": [name], "tie_word_embeddings": tied, **roberta_keys(kind)}
    return with_random_head(source, directory, config, seed=2, heads=HEADS, factor=2.0)


def expected_words(
    path: Path, ids: list[int], strategy: str = "max", activation: str = "relu"
) -> torch.Tensor:
    """The sparse embedding [vocab] in fp32, with these settings of SpladePooling."""
    model = transformers_model(path)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    values = torch.log1p(torch.relu(logits))
    if activation == "log1p_relu":
        values = torch.log1p(values)
    return values.double().sum(dim=0) if strategy == "sum" else values.amax(dim=0).double()
