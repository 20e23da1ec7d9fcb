"""Tiny models in the files of sentence-transformers, with all kinds of modules.

    path = write_stack("dense", directory)

Their weights are noise from numpy, so tests need no sentence-transformers. The script
tests/golden/make_sentence_transformers_golden.py computes their vectors and scores with it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.helpers.tiny import tiny_model

WIDTH = 64  # of the vectors of tiny encoders
TEXTS = [
    "Which river flows through Budapest?",
    "The Danube flows through Vienna, Bratislava, Budapest and Belgrade.",
    "A Recipe for GOULASH: onions, paprika, beef. " * 3,
    "a",
]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[2]), (TEXTS[3], TEXTS[0])]
FIRST, LAST = "<|im_start|>", "<|im_end|>"
_ST, _BASE = (
    "sentence_transformers.sentence_transformer.modules",
    "sentence_transformers.base.modules",
)
TYPES = {
    "Transformer": f"{_BASE}.transformer.Transformer",
    "Dense": f"{_BASE}.dense.Dense",
    "Normalize": f"{_BASE}.normalize.Normalize",
    "Pooling": f"{_ST}.pooling.Pooling",
    "LayerNorm": f"{_ST}.layer_norm.LayerNorm",
    "Dropout": f"{_ST}.dropout.Dropout",
    "CNN": f"{_ST}.cnn.CNN",
    "LSTM": f"{_ST}.lstm.LSTM",
    "BoW": f"{_ST}.bow.BoW",
    "WordEmbeddings": f"{_ST}.word_embeddings.WordEmbeddings",
    "WordWeights": f"{_ST}.word_weights.WordWeights",
    "WeightedLayerPooling": f"{_ST}.weighted_layer_pooling.WeightedLayerPooling",
    "StaticEmbedding": f"{_ST}.static_embedding.StaticEmbedding",
    "CLIPModel": f"{_ST}.clip_model.CLIPModel",
    "Router": f"{_BASE}.router.Router",
    "Asym": "sentence_transformers.models.Asym.Asym",
    "LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    "MLMTransformer": "sentence_transformers.sparse_encoder.modules.mlm_transformer.MLMTransformer",
    "SpladePooling": "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
    "SparseAutoEncoder": "sentence_transformers.sparse_encoder.modules.sparse_auto_encoder"
    ".SparseAutoEncoder",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask"
    ".MultiVectorMask",
}
Modules = list[tuple[str, dict[str, Any]]]


class Made(NamedTuple):
    """A model: its modules with their configs, its family, its settings and its Transformer's."""

    modules: Modules
    family: str = "bert"
    settings: dict[str, Any] = {}  # noqa: RUF012
    transformer: dict[str, Any] = {}  # noqa: RUF012


def pooling(*modes: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """The module Pooling; modes: as sentence-transformers names them."""
    mode = modes[0] if len(modes) == 1 else list(modes)
    return "Pooling", {"embedding_dimension": WIDTH, "pooling_mode": mode, **more}


def dense(inputs: int, outputs: int, activation: str = "Tanh", **more: Any) -> tuple[str, dict]:
    """The module Dense; activation: a class of torch.nn."""
    sizes = {"in_features": inputs, "out_features": outputs, "bias": True}
    kinds = {"Identity": "linear.Identity"}
    name = f"torch.nn.modules.{kinds.get(activation, f'activation.{activation}')}"
    return "Dense", {**sizes, "activation_function": name, **more}


NORMALIZE = ("Normalize", {})
TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
SCORES = {"module_output_name": "scores"}
CROSS = {"model_type": "CrossEncoder"}
PROMPTS = {"prompts": {"query": "Represent the Query: ", "document": None}}
EMBEDDERS = {
    "mean": Made([pooling("mean"), NORMALIZE]),
    "cls": Made([pooling("cls")]),
    "max": Made([pooling("max")]),
    "lasttoken": Made([pooling("lasttoken")], "xlm-roberta"),
    "weightedmean": Made([pooling("weightedmean"), NORMALIZE]),
    "mean_sqrt_len": Made([pooling("mean_sqrt_len_tokens")]),
    "joined": Made([pooling("cls", "mean", "max", "lasttoken"), dense(256, 32)], "modernbert"),
    "older keys": Made(
        [
            (
                "Pooling",
                {
                    "word_embedding_dimension": WIDTH,
                    "pooling_mode_max_tokens": True,
                    "pooling_mode_mean_tokens": True,
                    "pooling_mode_cls_token": False,
                },
            )
        ]
    ),
    "dense": Made([pooling("mean"), dense(64, 48), dense(48, 32, "GELU", bias=False), NORMALIZE]),
    "residual": Made(
        [
            pooling("mean"),
            dense(64, 64, "SiLU", use_residual=True),
            dense(64, 40, "ReLU", use_residual=True),
        ]
    ),
    "layer norm": Made([pooling("mean"), ("LayerNorm", {"dimension": 64}), NORMALIZE]),
    "normalize in the middle": Made([pooling("mean"), NORMALIZE, dense(64, 32)]),
    "dense before pooling": Made(
        [dense(64, 40, **TOKENS), ("Normalize", TOKENS), pooling("mean", embedding_dimension=40)]
    ),
    "dropout": Made([pooling("mean"), ("Dropout", {"dropout": 0.5}), dense(64, 16, "Identity")]),
    "truncated": Made([pooling("mean"), NORMALIZE], settings={"truncate_dim": 16}),
    "prompts": Made([pooling("mean")], settings={**PROMPTS, "default_prompt_name": "query"}),
    "lower case": Made([pooling("mean")], transformer={"do_lower_case": True}),
    "cut": Made([pooling("mean")], transformer={"max_seq_length": 20}),
    "umt5": Made([pooling("mean"), dense(64, 32, "Identity")], "umt5"),
}
SCORERS = {
    "one score": Made([pooling("cls"), dense(64, 1, "Identity", **SCORES)], settings=CROSS),
    "layers and a score": Made(
        [
            pooling("mean", "cls"),
            dense(128, 64, "GELU"),
            ("LayerNorm", {"dimension": 64}),
            dense(64, 1, "Tanh", **SCORES),
        ],
        "modernbert",
        {**CROSS, "activation_fn": "torch.nn.modules.linear.Identity"},
    ),
    "three scores": Made(
        [pooling("mean"), dense(64, 3, "Identity", **SCORES)],
        settings={**CROSS, "activation_fn": "torch.nn.modules.linear.Identity"},
    ),
}


def write_stack(name: str, directory: Path) -> Path:
    """Write the model of this name to `directory`, and return the directory."""
    return write_modules({**EMBEDDERS, **SCORERS}[name], directory)


def write_modules(made: Made, directory: Path) -> Path:
    """Write a model to `directory`, which must not exist, and return the directory."""
    shutil.copytree(tiny_model(made.family), directory)
    file = directory / "tokenizer_config.json"  # published encoders have no chat template
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}
    file.write_text(json.dumps(kept))
    _join_pairs(directory / "tokenizer.json")
    names = ["Transformer", *(name for name, _ in made.modules)]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": TYPES[name]}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    _write(directory / "modules.json", listed)
    _write(directory / "sentence_bert_config.json", made.transformer)
    settings = {"model_type": "SentenceTransformer", "prompts": {}, **made.settings}
    _write(directory / "config_sentence_transformers.json", settings)
    rng = np.random.default_rng(5)
    for path, (name, config) in zip(paths[1:], made.modules, strict=True):
        (directory / path).mkdir()
        _write(directory / path / "config.json", config)
        if tensors := _tensors(name, config, rng):
            save_file(tensors, directory / path / "model.safetensors", {"format": "pt"})
    return directory


def _join_pairs(path: Path) -> None:
    """Let the tokenizer put special tokens around texts and pairs."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{FIRST} $A {LAST}",
        pair=f"{FIRST} $A {LAST} $B:1 {LAST}:1",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in (FIRST, LAST)],
    )
    tokenizer.save(str(path))


def _tensors(name: str, config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if name == "LayerNorm":
        return {
            "norm.weight": 1 + noise(config["dimension"]),
            "norm.bias": noise(config["dimension"]),
        }
    if name != "Dense":
        return {}
    outputs, inputs = config["out_features"], config["in_features"]
    found = {"linear.weight": noise(outputs, inputs) * np.float32(2 * inputs**-0.5)}
    if config["bias"]:
        found["linear.bias"] = noise(outputs)
    if config.get("use_residual") and inputs != outputs:
        found["residual.weight"] = noise(outputs, inputs) * np.float32(inputs**-0.5)
    return found


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def digest(path: Path) -> float:
    """The sum of all weights of a model, which tells whether a golden file is for these weights."""
    files = sorted(path.rglob("*.safetensors"))
    tensors = [t for file in files for _, t in sorted(load_file(file).items())]
    return float(sum(np.abs(tensor.astype(np.float64)).sum() for tensor in tensors))
