"""Tiny SPLADE models with random heads, and their sparse embeddings with transformers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch

from tests.helpers.tiny import tiny_model

# The family of each kind and its class in transformers.
KINDS = {
    "bert": ("bert", "BertForMaskedLM"),
    "distilbert": ("distilbert", "DistilBertForMaskedLM"),
    "roberta": ("xlm-roberta", "RobertaForMaskedLM"),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaForMaskedLM"),
}
HEADS = ("cls", "lm_head", "vocab_")


@functools.cache
def splade(kind: str, *, tied: bool = True) -> Path:
    """The directory of a tiny model of this kind, with random weights in its head."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, name = KINDS[kind]
    source = tiny_model(family)
    directory = source.with_name(f"{source.name}-{name}-{tied}")
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": [name], "tie_word_embeddings": tied}
    config |= {"pad_token_id": 1} if "roberta" in kind else {}
    config |= {"model_type": "roberta"} if kind == "roberta" else {}
    (directory / "config.json").write_text(json.dumps(config))
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for part, tensor in model.named_parameters():
        if part.startswith(HEADS):
            scale = 0.3 if tensor.dim() < 2 else 2.0 * tensor.shape[1] ** -0.5
            tensor.data = scale * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(directory)
    return directory


def expected_words(
    path: Path, ids: list[int], strategy: str = "max", activation: str = "relu"
) -> torch.Tensor:
    """The sparse embedding [vocab] in fp32, with these settings of SpladePooling."""
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    values = torch.log1p(torch.relu(logits))
    if activation == "log1p_relu":
        values = torch.log1p(values)
    return values.double().sum(dim=0) if strategy == "sum" else values.amax(dim=0).double()
