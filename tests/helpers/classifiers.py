"""Tiny classifiers of texts and of tokens, and the logits that transformers computes with them."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch

from tests.helpers.tiny import tiny_model

# The family of each kind and its class in transformers.
TEXTS = {
    "bert": ("bert", "BertForSequenceClassification"),
    "roberta": ("xlm-roberta", "RobertaForSequenceClassification"),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaForSequenceClassification"),
    "modernbert": ("modernbert", "ModernBertForSequenceClassification"),
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
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, name = (TOKENS if tokens else TEXTS)[kind]
    source = tiny_model(family)
    directory = source.with_name(f"{source.name}-{name}-{labels}-{problem}")
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": [name], "id2label": dict(enumerate(LABELS[:labels]))}
    config |= {"label2id": {v: k for k, v in config["id2label"].items()}}
    config |= {"problem_type": problem} if problem else {}
    config |= {"pad_token_id": 1} if "roberta" in kind else {}
    config |= {"model_type": "roberta"} if kind == "roberta" else {}
    (directory / "config.json").write_text(json.dumps(config))
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for part, tensor in model.named_parameters():
        if part.startswith(("classifier", "head", "score")) or "pooler" in part:
            scale = 0.3 if tensor.dim() < 2 else 3.0 * tensor.shape[1] ** -0.5
            tensor.data = scale * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(directory)
    return directory


def expected_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """The logits [labels], or [tokens, labels], with transformers in fp32."""
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()
    # Decoders take the last token that is no padding, and these prompts have none.
    model.config.pad_token_id = None if name.startswith(("Llama", "Qwen")) else 1
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].double()
