"""Reads from files and metadata how a checkpoint computes embeddings or scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.load import read_json
from cpuserve.loader.modules import (
    SETTINGS,
    Module,
    Stack,
    layers_of,
    pooling_name,
    read_stack,
    settings_of,
    transformer_settings,
)
from cpuserve.loader.tasks import task_prompts
from cpuserve.models import FAMILIES, architecture_of
from cpuserve.models.config import MAX_INT32, read_architectures

if TYPE_CHECKING:
    from cpuserve.loader.dense_module import Dense, Head

# A file of a sentence-transformers module, such as 1_Pooling/config.json.
MODULE_FILE = re.compile(r"(document_)?\d+_\w+/[\w.-]+\.(json|safetensors)")
# The value of Head.pooling for each pooling_strategy of SpladePooling.
STRATEGIES = {"max": "splade", "sum": "splade_sum"}
# Head.logs (how often log(1 + x) is applied) for each activation_function. SpladePooling applies it
# once more after the activation, so the number is one more than the function's name says.
LOGS = {"relu": 1, "log1p_relu": 2}
GGUF_TYPES = {1: "mean", 2: "first", 3: "last"}  # LLAMA_POOLING_TYPE_*


def checkpoint_pooling(
    path: Path, file: GgufFile | None = None, stack: Stack | None = None
) -> tuple[str, str]:
    """Return (pooling, reason as a text); the pooling is "none" if the model generates text.

    file: the GGUF file at `path` if it is open already, because opening one takes 10 ms.
    stack: the modules in the directory `path`, if they are known already.

    Raises:
        ModelError: the checkpoint is an embedding model with a pooling that is not supported.
    """
    if not path.is_dir():
        return _gguf(file or GgufFile(path))
    stack = stack or read_stack(path)
    if stack.splade is not None:
        _splade_settings(stack.splade)
        return "splade", f"{stack.splade.folder.name} says so"
    if stack.scores:
        kind = "rank" if stack.num_scores == 1 else "classify"
        return kind, f"{stack.of_text[-1].folder.name} computes scores"
    if stack.pooling is not None:
        name = pooling_name(stack.pooling)
        return "several" if "+" in name else name, f"{stack.pooling.folder.name} says so"
    return "none", "the model generates text"


def module_head(path: Path, pooling: str) -> Head:
    """Return the head of the modules of a checkpoint (`read_stack`).

    pooling: see EngineConfig.pooling; it may differ from the one of the module Pooling.

    Raises:
        ModelError: a module is not supported, or its tensors do not fit.
    """
    from cpuserve.loader.dense_module import FirstColumns, Head, UnitLength

    if not path.is_dir():
        return Head(pooling, _gguf_dense(path))
    stack = read_stack(path)
    if stack.scores:
        msg = f"--pooling {pooling}: the modules of {path} compute scores, not embeddings"
        raise ModelError(msg)
    if pooling == "several":
        assert stack.pooling is not None
        pooling = pooling_name(stack.pooling)
    layers = layers_of(stack.of_text)
    while layers and isinstance(layers[-1], UnitLength):  # a request may ask for other lengths
        layers = layers[:-1]
    if (width := _count_of(path, "truncate_dim")) is not None:
        layers = (*layers, FirstColumns(width))
    return Head(pooling, layers, of_tokens=layers_of(stack.of_tokens))


def _count_of(path: Path, key: str) -> int | None:
    """Return the number of values that a setting of the whole model keeps; None = all."""
    count = settings_of(path).get(key)
    if count is not None and (type(count) is not int or count < 1):
        msg = f"{path / SETTINGS}: {key} is {str(count)[:40]}, but it must be at least 1"
        raise ModelError(msg)
    return count


def splade_head(path: Path) -> Head:
    """Return the head of a SPLADE model: the maximum of the logits, unless its files say otherwise.

    Raises:
        ModelError: its pooling settings are not supported.
    """
    from cpuserve.loader.dense_module import Head, LargestValues

    module = read_stack(path).splade if path.is_dir() else None
    strategy, activation = ("max", "relu") if module is None else _splade_settings(module)
    max_active = _count_of(path, "max_active_dims") if path.is_dir() else None
    layers = () if max_active is None else (LargestValues(max_active),)
    return Head(STRATEGIES[strategy], layers, unit=False, logs=LOGS[activation])


def lowers_case(path: Path) -> bool:
    """Whether sentence-transformers writes texts in lower case before they are tokenized."""
    return transformer_settings(path).get("do_lower_case") is True


def usual_length(path: Path) -> int | None:
    """Return how many tokens of a text sentence-transformers keeps; None = all tokens.

    Raises:
        ModelError: the setting is not a number of tokens.
    """
    length = transformer_settings(path).get("max_seq_length")
    if length is None and (path / "modules.json").exists():
        file = path / "tokenizer_config.json"  # newer releases have the length there
        settings = read_json(file, "tokenizer config") if file.exists() else {}
        length = settings.get("model_max_length")
        if not isinstance(length, int) or length > MAX_INT32:  # "no limit" is about 1e30
            return None
    if length is None:
        return None
    if type(length) is not int or length < 1:
        msg = f"{path}: max_seq_length is {str(length)[:40]}, but it must be at least 1"
        raise ModelError(msg)
    return length


def prompts_of(path: Path) -> dict[str, str]:
    """Return the prompts that go before texts, by name; "" is the name of the default prompt.

    Raises:
        ModelError: the prompts are not texts, or there is no prompt with the default name.
    """
    own_prompts, config = _own_prompts(path), path / "config.json"
    if not config.exists():
        return own_prompts
    return {**task_prompts(path, read_json(config, "config")), **own_prompts}


def _own_prompts(path: Path) -> dict[str, str]:
    """Return the prompts in the files of sentence-transformers (see `prompts_of`)."""
    settings, file = settings_of(path), path / SETTINGS
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(
        isinstance(v, str | None) for v in prompts.values()
    ):
        msg = f"{file}: prompts is not an object of texts"
        raise ModelError(msg)
    prompts = {name: text or "" for name, text in prompts.items()}
    pooling = read_stack(path).pooling
    if any(prompts.values()) and pooling and pooling.config.get("include_prompt") is False:
        pooling.refuse("leaves out the tokens of prompts (include_prompt), which is not supported")
    if default is None:
        return prompts
    if default not in prompts:
        msg = f"{file}: default_prompt_name is {str(default)[:40]!r}, which prompts does not have"
        raise ModelError(msg)
    return {**prompts, "": prompts[default]}


def ranker(config: Mapping[str, Any]) -> str | None:
    """Return the architecture in a reranker's config; None if the model is not a reranker.

    Raises:
        ModelError: a GGUF file has a head that is not supported.
    """
    name = next(iter(read_architectures(config)), "")
    if config.get("is_ranker"):  # only the config of a GGUF file has the key is_ranker
        names = [family.name for family in FAMILIES.texts.values() if family.gguf_rerankers]
        if name in names:
            return name
        msg = f"rerankers of {name} are not read from GGUF files: only {', '.join(sorted(names))}"
        raise ModelError(msg)
    return name if name in FAMILIES.rerankers and len(labels_of(config)) == 1 else None


def classifier(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (pooling, architecture) of a classifier for texts or tokens; None for other models."""
    name = next(iter(read_architectures(config)), "")
    if name in FAMILIES.taggers:
        return "token_classify", name
    return ("classify", name) if name in {*FAMILIES.rerankers, *FAMILIES.classifiers} else None


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Return the labels of a classifier, in the order of its outputs.

    Raises:
        ModelError: the ids of the labels are not 0, 1, 2, ..., or the labels are not texts.
    """
    id2label = config.get("id2label") or {}
    # Without both keys, transformers assumes 2 labels.
    count = config.get("num_labels") or len(id2label) or 2
    indices = [str(index) for index in range(count)] if type(count) is int else []
    if not id2label:
        return [f"LABEL_{index}" for index in indices]
    labels = (
        {str(key): value for key, value in id2label.items()} if isinstance(id2label, dict) else {}
    )
    if sorted(labels) != sorted(indices) or not all(isinstance(v, str) for v in labels.values()):
        msg = f"config.json: id2label must have a text for each number from 0 to {count} - 1"
        raise ModelError(msg)
    return [labels[index] for index in indices]


def can_judge(config: Mapping[str, Any]) -> bool:
    """Whether models with this architecture may be rerankers that say "yes" or "no"."""
    family = FAMILIES.texts.get(architecture_of(config))
    return family is not None and family.judges


def _gguf_dense(path: Path) -> tuple[Dense, ...]:
    """Return the Dense modules in a GGUF file (EmbeddingGemma): matrices without activation."""
    from cpuserve.loader.dense_module import Dense
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.models.gemma import DENSE
    from cpuserve.quant import dequantize

    weights = open_checkpoint(path).weights
    stored = [f"{name}.weight" for name in DENSE if f"{name}.weight" in weights.names()]
    return tuple(Dense(dequantize(weights.get(name)), None, "none") for name in stored)


def _splade_settings(module: Module) -> tuple[str, str]:
    """Return (pooling_strategy, activation_function) of a SpladePooling module."""
    config, found = module.config, []
    for key, known, usual in (
        ("pooling_strategy", STRATEGIES, "max"),
        ("activation_function", LOGS, "relu"),
    ):
        value = config.get(key) or usual
        if not isinstance(value, str) or value not in known:
            shown = f"{str(value)[:40]}, but only {', '.join(known)} are supported"
            msg = f"{module.folder}: {key} is {shown}"
            raise ModelError(msg)
        found.append(value)
    return found[0], found[1]


def _gguf(file: GgufFile) -> tuple[str, str]:
    key = f"{file.value('general.architecture')}.pooling_type"
    kind = file.value(key)
    if kind in (None, 0):
        return "none", "the model generates text"
    if not isinstance(kind, int) or kind not in GGUF_TYPES:
        msg = (
            f"GGUF {file.path}: {key} is {kind!r:.40}, which is not supported; choose with "
            "--pooling"
        )
        raise ModelError(msg)
    return GGUF_TYPES[kind], f"{key} says so"
