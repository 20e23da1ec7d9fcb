"""Reads from files and metadata how a checkpoint computes embeddings or scores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.load import read_any_json, read_json
from cpuserve.loader.tasks import task_prompts
from cpuserve.models import architecture_of
from cpuserve.models.base import CLASSIFIERS, GGUF_RERANKERS, JUDGES, RERANKERS, TAGGERS
from cpuserve.models.config import read_architectures

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.loader.dense_module import Dense, Head

MAX_BYTES = 1_000_000
# A file of a sentence-transformers module, such as 1_Pooling/config.json.
MODULE_FILE = re.compile(r"(document_)?\d+_\w+/[\w.-]+\.(json|safetensors)")
# Keys in the config.json of a Pooling module; newer files have "pooling_mode": "lasttoken".
MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
# The activations of Dense modules, by the torch class in their config.
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "Sigmoid": "sigmoid"}
# The value of Head.pooling for each pooling_strategy of SpladePooling.
STRATEGIES = {"max": "splade", "sum": "splade_sum"}
# Head.logs (how often log(1 + x) is applied) for each activation_function. SpladePooling applies it
# once more after the activation, so the number is one more than the function's name says.
LOGS = {"relu": 1, "log1p_relu": 2}
# Modules of sentence-transformers that compute sparse vectors from other vectors,
# or without a model.
SPARSE = (".SparseAutoEncoder", ".CSRSparsity", ".SparseStaticEmbedding", ".IDF")
NAMES = {"lasttoken": "last", "mean": "mean", "cls": "first"}
GGUF_TYPES = {1: "mean", 2: "first", 3: "last"}  # LLAMA_POOLING_TYPE_*


def checkpoint_pooling(path: Path, file: GgufFile | None = None) -> tuple[str, str]:
    """Return (pooling, reason as a text); the pooling is "none" if the model generates text.

    file: the GGUF file at `path` if it is open already, because opening one takes 10 ms.

    Raises:
        ModelError: the checkpoint is an embedding model with a pooling that is not supported.
    """
    if not path.is_dir():
        return _gguf(file or GgufFile(path))
    modules = _modules(path)
    _check_sparse(modules)
    for folder in _splade_modules(path, modules):
        _splade_settings(folder)
        return "splade", f"{folder.name} says so"
    for folder in modules.of(".Pooling"):
        config = folder / "config.json"
        return _mode(read_json(config, "pooling config"), config), f"{folder.name} says so"
    return "none", "the model generates text"


def splade_head(path: Path) -> Head:
    """Return the head of a SPLADE model: the maximum of the logits, unless its files say otherwise.

    Raises:
        ModelError: its pooling settings are not supported.
    """
    from cpuserve.loader.dense_module import Head

    folders = _splade_modules(path, _modules(path)) if path.is_dir() else iter(())
    strategy, activation = next(map(_splade_settings, folders), ("max", "relu"))
    return Head(STRATEGIES[strategy], unit=False, logs=LOGS[activation])


def usual_length(path: Path) -> int | None:
    """Return how many tokens of a text sentence-transformers keeps; None = all tokens.

    Raises:
        ModelError: the setting is not a number of tokens.
    """
    file = path / "sentence_bert_config.json"
    if not file.exists():
        return None
    length = read_json(file, "settings of sentence-transformers").get("max_seq_length")
    if length is None:
        return None
    if type(length) is not int or length < 1:
        msg = f"{file}: max_seq_length is {str(length)[:40]}, but it must be at least 1"
        raise ModelError(msg)
    return length


def prompts_of(path: Path) -> dict[str, str]:
    """Return the prompts that go before texts, by name; "" is the name of the default prompt.

    Raises:
        ModelError: the prompts are not texts, or there is no prompt with the default name.
    """
    given, config = _own_prompts(path), path / "config.json"
    if not config.exists():
        return given
    return {**task_prompts(path, read_json(config, "config")), **given}


def _own_prompts(path: Path) -> dict[str, str]:
    """Return the prompts in the files of sentence-transformers (see `prompts_of`)."""
    file = path / "config_sentence_transformers.json"
    if not file.exists():
        return {}
    settings = read_json(file, "settings of sentence-transformers")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(v, str) for v in prompts.values()):
        msg = f"{file}: prompts is not an object of texts"
        raise ModelError(msg)
    for folder in _modules(path).of(".Pooling"):
        config = read_json(folder / "config.json", "pooling config")
        if config.get("include_prompt") is False:
            return {}  # the pooling would leave out the tokens of prompts: this is not supported
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
        if name in GGUF_RERANKERS:
            return name
        msg = f"rerankers of {name} are not read from GGUF files: only {', '.join(GGUF_RERANKERS)}"
        raise ModelError(msg)
    return name if name in RERANKERS and len(labels_of(config)) == 1 else None


def classifier(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (pooling, architecture) of a classifier for texts or tokens; None for other models."""
    name = next(iter(read_architectures(config)), "")
    if name in TAGGERS:
        return "token_classify", name
    return ("classify", name) if name in {*RERANKERS, *CLASSIFIERS} else None


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Return the labels of a classifier, in the order of its outputs.

    Raises:
        ModelError: the ids of the labels are not 0, 1, 2, ..., or the labels are not texts.
    """
    named = config.get("id2label") or {}
    # Without both keys, transformers assumes 2 labels.
    count = config.get("num_labels") or len(named) or 2
    wanted = [str(index) for index in range(count)] if type(count) is int else []
    if not named:
        return [f"LABEL_{index}" for index in wanted]
    found = {str(key): value for key, value in named.items()} if isinstance(named, dict) else {}
    if sorted(found) != sorted(wanted) or not all(isinstance(v, str) for v in found.values()):
        msg = f"config.json: id2label must have a text for each number from 0 to {count} - 1"
        raise ModelError(msg)
    return [found[index] for index in wanted]


def can_judge(config: Mapping[str, Any]) -> bool:
    """Whether models with this architecture may be rerankers that say "yes" or "no"."""
    return architecture_of(config) in JUDGES


def dense_layers(path: Path) -> tuple[Dense, ...]:
    """Return the Dense modules of a checkpoint, in the order that embeddings pass through them.

    Raises:
        ModelError: an activation is not supported, or the tensors of a module do not fit.
    """
    if not path.is_dir():
        return _gguf_dense(path)
    return tuple(_dense(folder) for folder in _modules(path).of(".Dense"))


def _gguf_dense(path: Path) -> tuple[Dense, ...]:
    """Return the Dense modules in a GGUF file (EmbeddingGemma): matrices without activation."""
    from cpuserve.loader.dense_module import Dense
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.models.gemma import DENSE
    from cpuserve.quant import dequantize

    weights = open_checkpoint(path).weights
    stored = [f"{name}.weight" for name in DENSE if f"{name}.weight" in weights.names()]
    return tuple(Dense(dequantize(weights.get(name)), None, "none") for name in stored)


def _dense(folder: Path) -> Dense:
    from cpuserve.loader.dense_module import Dense
    from cpuserve.loader.safetensors import SafetensorsStore
    from cpuserve.quant import open_weights
    from cpuserve.quant.dense import dequantize

    config = read_json(folder / "config.json", "module config")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        msg = f"{folder}: the activation {activation[:40]} is not supported, only " + ", ".join(
            ACTIVATIONS
        )
        raise ModelError(msg)
    tensors = open_weights("dense", SafetensorsStore(folder), {})

    def read(name: str) -> npt.NDArray[np.float32]:
        if name not in tensors.names():
            msg = f"{folder}: its safetensors have no {name}"
            raise ModelError(msg)
        return dequantize(tensors.get(name))

    shape = (config.get("out_features"), config.get("in_features"))
    weight = read("linear.weight")
    bias = read("linear.bias") if config.get("bias", True) else None
    if weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        msg = f"{folder}: the matrix has the shape {list(weight.shape)}, its config {list(shape)}"
        raise ModelError(msg)
    return Dense(weight, bias, ACTIVATIONS[activation])


@dataclass(frozen=True, slots=True)
class _Modules:
    """The type and the folder of each module of sentence-transformers."""

    listed: tuple[tuple[str, Path], ...]

    def of(self, kind: str) -> Iterator[Path]:
        """Yield the folder of each module of this kind."""
        return (folder for type_, folder in self.listed if type_.endswith(kind))


def _modules(path: Path) -> _Modules:
    """Return the modules that modules.json lists; none if there is no such file."""
    file = path / "modules.json"
    listed = read_any_json(file, "module list", MAX_BYTES) if file.exists() else []
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        msg = f"module list {file} is not a list of JSON objects"
        raise ModelError(msg)
    types = (str(item.get("type", "")) for item in listed)
    folders = (path / Path(str(item.get("path", ""))).name for item in listed)
    return _Modules(tuple(zip(types, folders, strict=True)))


def _mode(config: dict[str, Any], file: Path) -> str:
    named = config.get("pooling_mode")
    modes = [mode for key, mode in MODES.items() if config.get(key) is True]
    modes += [NAMES[named]] if isinstance(named, str) and named in NAMES else []
    if len(modes) != 1:
        msg = (
            f"{file}: this way of pooling is not supported; cpuserve knows the last token, the "
            "first one (cls) and the mean. Choose one of them with --pooling"
        )
        raise ModelError(msg)
    return modes[0]


def _splade_modules(path: Path, modules: _Modules) -> Iterator[Path]:
    """Yield the folder of each SpladePooling, in modules.json and in the documents of a Router."""
    yield from modules.of(".SpladePooling")
    for _ in modules.of(".Router"):
        types = read_json(path / "router_config.json", "router config").get("types")
        for name, kind in types.items() if isinstance(types, dict) else ():
            if str(kind).endswith(".SpladePooling") and name.startswith("document"):
                yield path / Path(name).name


def _splade_settings(folder: Path) -> tuple[str, str]:
    """Return (pooling_strategy, activation_function) of a SpladePooling module."""
    config, found = read_json(folder / "config.json", "pooling config"), []
    for key, known, usual in (
        ("pooling_strategy", STRATEGIES, "max"),
        ("activation_function", LOGS, "relu"),
    ):
        value = config.get(key) or usual
        if not isinstance(value, str) or value not in known:
            msg = f"{folder}: {key} is {str(value)[:40]}, but only {', '.join(known)} are supported"
            raise ModelError(msg)
        found.append(value)
    return found[0], found[1]


def _check_sparse(modules: _Modules) -> None:
    """Raise ModelError if a module computes sparse vectors in a way that is not supported."""
    for kind in SPARSE:
        for folder in modules.of(kind):
            msg = f"{folder}: modules of the type {kind.removeprefix('.')} are not supported"
            raise ModelError(msg)


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
