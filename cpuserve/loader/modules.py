"""The modules of sentence-transformers in a checkpoint; vectors pass them in their order.

modules.json lists them: a Transformer, then most often Pooling, Dense and Normalize. A module that
cannot be computed is an error with its name, because vectors without it would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import read_any_json, read_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.loader.dense_module import Dense, Layer

MAX_BYTES = 1_000_000
SETTINGS = "config_sentence_transformers.json"
# The settings of the module Transformer; older releases named them after the model.
TRANSFORMER_SETTINGS = (
    "sentence_bert_config.json",
    *(
        f"sentence_{name}_config.json"
        for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
# The activations of modules, by the torch class in their config.
ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
# Modes of Pooling with the names that Head.pooling has for them, and the keys of older files.
# The results of several modes follow each other in the order of these keys.
MODES = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "sqrt_mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The tasks of a Transformer, each with the name of its result: vectors or logits of tokens,
# the logits of a classifier, or the logits of the next token.
TASKS = {
    "feature-extraction": "token_embeddings",
    "fill-mask": "token_embeddings",
    "sequence-classification": "scores",
    "text-generation": "causal_logits",
}
OF_TOKENS, OF_TEXT, SCORES = "token_embeddings", "sentence_embedding", "scores"


@dataclass(frozen=True, slots=True)
class Module:
    """A module: the class in modules.json, such as "Pooling", its folder and its config.json."""

    kind: str
    folder: Path
    config: Mapping[str, Any]

    def refuse(self, reason: str) -> NoReturn:
        """Raise ModelError about this module."""
        msg = f"{self.folder}: the module {self.kind} {reason}"
        raise ModelError(msg)


@dataclass(frozen=True, slots=True)
class Stack:
    """The modules after the Transformer.

    task: the task of the Transformer, a key of TASKS; "" without a modules.json.
    of_tokens: the modules before the pooling. pooling: the Pooling; None = there is none.
    of_text: the modules after it. scores: whether the last one computes scores of pairs.
    splade: the SpladePooling. answers: the LogitScore, which scores a token.
    """

    task: str = ""
    of_tokens: tuple[Module, ...] = ()
    pooling: Module | None = None
    of_text: tuple[Module, ...] = ()
    scores: bool = False
    splade: Module | None = None
    answers: Module | None = None

    @property
    def num_scores(self) -> int:
        """How many scores the last module computes; 0 if it computes none."""
        return int(self.of_text[-1].config.get("out_features", 0)) if self.scores else 0


def read_stack(path: Path) -> Stack:
    """Return the modules of a model directory; their tensors are not read.

    Raises:
        ModelError: a module, or one of its settings, is not supported.
    """
    modules = _listed(path)
    if not modules:
        return Stack()
    first, later_modules = modules[0], modules[1:]
    settings = settings_of(path)
    kind = str(settings.get("model_type") or "")
    if kind == "MultiVectorEncoder":
        msg = f"{path / SETTINGS}: models of the type MultiVectorEncoder are not supported"
        raise ModelError(msg)
    if first.kind == "Router" and not later_modules:
        return Stack("fill-mask", splade=_of_documents(path, first))
    if not first.kind.endswith("Transformer"):
        first.refuse("is not supported as the first one, only Transformer")
    stack = Stack(_task(path, first))
    for module in later_modules:
        stack = _with_module(stack, module)
    if stack.task == "text-generation" and stack.answers is None:
        first.refuse("computes logits of tokens, and no LogitScore follows")
    prompts, default_name = settings.get("prompts"), settings.get("default_prompt_name")
    if kind == "CrossEncoder" and isinstance(prompts, Mapping) and prompts.get(default_name):
        first.refuse("has a default prompt, which is not supported for scores of pairs")
    if kind == "CrossEncoder" and later_modules and not (stack.scores or stack.answers):
        later_modules[-1].refuse("is the last one of a CrossEncoder, but computes no scores")
    if later_modules and not (stack.pooling or stack.splade or stack.answers):
        later_modules[-1].refuse("gets no pooled vector: there is no Pooling before it")
    return stack


def _with_module(stack: Stack, module: Module) -> Stack:
    """Return `stack` with one more module; ModelError if it cannot be there."""
    if stack.scores or stack.answers or stack.splade:
        module.refuse("is not supported after the module that computes the result")
    if module.kind == "LogitScore":
        if stack.task != "text-generation":
            module.refuse("needs a Transformer that generates text")
        return replace(stack, answers=module)
    if module.kind == "SpladePooling":
        if stack.task != "fill-mask" or stack.pooling is not None or stack.of_tokens:
            module.refuse("is supported only after a Transformer that predicts masked tokens")
        return replace(stack, splade=module)
    if stack.task != "feature-extraction":
        module.refuse(f"is not supported after a Transformer for {stack.task}")
    if module.kind == "Pooling":
        if stack.pooling is not None:
            module.refuse("is not supported twice")
        return replace(stack, pooling=module)
    if module.kind not in ("Dense", "Normalize", "LayerNorm", "Dropout"):
        module.refuse("is not supported")
    reads = str(module.config.get("module_input_name") or OF_TEXT)
    writes = str(module.config.get("module_output_name") or reads)
    place = OF_TOKENS if stack.pooling is None else OF_TEXT
    if reads != place or writes not in (place, *([SCORES] if place == OF_TEXT else [])):
        side = "before" if stack.pooling is None else "after"
        module.refuse(f"reads {reads} and writes {writes}, which is not supported {side} Pooling")
    if module.kind == "Dropout":  # it does nothing outside of training
        return stack
    if stack.pooling is None:
        return replace(stack, of_tokens=(*stack.of_tokens, module))
    if writes == SCORES and module.kind != "Dense":
        module.refuse("writes scores, which only Dense may")
    return replace(stack, of_text=(*stack.of_text, module), scores=writes == SCORES)


def _task(path: Path, first: Module) -> str:
    """Return the task of the Transformer; ModelError if its settings are not supported."""
    settings = transformer_settings(path)
    default = "fill-mask" if first.kind == "MLMTransformer" else "feature-extraction"
    task = settings.get("transformer_task") or default
    if not isinstance(task, str) or task not in TASKS:
        first.refuse(
            f"has the transformer_task {task!s:.40}, which is not one of {', '.join(TASKS)}"
        )
    name = settings.get("module_output_name") or TASKS[task]
    modes = settings.get("modality_config") or {}
    text = modes.get("text", {}) if isinstance(modes, Mapping) else None
    result = text.get("method_output_name") if isinstance(text, Mapping) else None
    output = "last_hidden_state" if task == "feature-extraction" else "logits"
    if name != TASKS[task] or result not in (None, output):
        first.refuse(
            f"writes {result or 'a result'} as {name!s:.40}, not {output} as {TASKS[task]}"
        )
    return task


def _of_documents(path: Path, router: Module) -> Module:
    """Return the SpladePooling for documents of a Router, the only use of it that is supported."""
    types = read_json(path / "router_config.json", "router config").get("types")
    for name, kind in types.items() if isinstance(types, dict) else ():
        if str(kind).endswith(".SpladePooling") and str(name).startswith("document"):
            return _module(str(kind), path / Path(name).name)
    return router.refuse("is supported only with a SpladePooling for documents")


def _listed(path: Path) -> Sequence[Module]:
    """Return the modules that modules.json lists; none if there is no such file."""
    file = path / "modules.json"
    modules = read_any_json(file, "module list", MAX_BYTES) if file.exists() else []
    if not isinstance(modules, list) or not all(isinstance(item, dict) for item in modules):
        msg = f"module list {file} is not a list of JSON objects"
        raise ModelError(msg)
    return [
        _module(str(item.get("type", "")), path / Path(str(item.get("path", ""))).name)
        for item in modules
    ]


def _module(type_: str, folder: Path) -> Module:
    """Return the module of a class, with the config in its folder if there is one."""
    package, _, kind = type_.rpartition(".")
    is_builtin = package.startswith("sentence_transformers.")
    # A Transformer has the files of the model. Published models have classes of their own for it.
    if kind.endswith("Transformer") or kind == "Router":
        return Module(kind, folder, {})
    file = folder / "config.json"
    # Normalize has a config only in newer files.
    config = read_json(file, "module config") if file.exists() or kind == "Pooling" else {}
    return Module(kind if is_builtin else type_, folder, config)


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings of the whole model (SETTINGS); {} if the directory has none."""
    file = path / SETTINGS
    return read_json(file, "settings of sentence-transformers") if file.exists() else {}


def transformer_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the module Transformer; {} if the directory has none."""
    for name in TRANSFORMER_SETTINGS:
        if (path / name).exists():
            return read_json(path / name, "settings of sentence-transformers")
    return {}


def pooling_name(module: Module) -> str:
    """Return the value of Head.pooling for a Pooling.

    Raises:
        ModelError: it has a mode that is not known.
    """
    named = module.config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named
    if named is None:
        modes = [mode for key, mode in KEYS.items() if module.config.get(key) is True] or ["mean"]
    if not isinstance(modes, list) or not modes or any(mode not in MODES for mode in modes):
        msg = (
            f"{module.folder / 'config.json'}: this way of pooling is not supported, only "
            f"{', '.join(MODES)}. Choose one with --pooling"
        )
        raise ModelError(msg)
    return "+".join(MODES[mode] for mode in modes)


def layers_of(modules: Sequence[Module]) -> tuple[Layer, ...]:
    """Return the layers of modules, with their tensors.

    Raises:
        ModelError: an activation is not supported, or tensors are missing or have other shapes.
    """
    return tuple(layer for module in modules for layer in _layers(module))


def _layers(module: Module) -> Iterator[Layer]:
    from cpuserve.loader.dense_module import Residual, UnitLength, VectorNorm

    if module.kind == "Normalize":
        yield UnitLength()
        return
    read_tensor = _reader(module)
    if module.kind == "LayerNorm":
        yield VectorNorm(read_tensor("norm.weight"), read_tensor("norm.bias"), 1e-5)
        return
    dense, residual = _dense(module, read_tensor), module.config.get("use_residual", False)
    if not residual:
        yield dense
        return
    square = dense.weight.shape[0] == dense.weight.shape[1]
    yield Residual(dense, None if square else read_tensor("residual.weight"))


def _reader(module: Module) -> Any:
    """Return a function that reads a tensor of a module by its name."""
    from cpuserve.loader.names import checkpoint_to_hf
    from cpuserve.loader.safetensors import SafetensorsStore
    from cpuserve.quant import open_weights
    from cpuserve.quant.dense import dequantize

    tensors = open_weights("dense", SafetensorsStore(module.folder), {})

    def read(stored: str) -> npt.NDArray[np.float32]:
        name = checkpoint_to_hf(stored)
        if name not in tensors.names():
            msg = f"{module.folder}: its safetensors have no {stored}"
            raise ModelError(msg)
        return dequantize(tensors.get(name))

    return read


def _dense(module: Module, read_vector: Any) -> Dense:
    from cpuserve.loader.dense_module import Dense

    config, folder = module.config, module.folder
    activation = activation_of(config.get("activation_function", "torch.Tanh"), str(folder))
    shape = (config.get("out_features"), config.get("in_features"))
    weight = read_vector("linear.weight")
    bias = read_vector("linear.bias") if config.get("bias", True) else None
    if weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        msg = f"{folder}: the matrix has the shape {list(weight.shape)}, its config {list(shape)}"
        raise ModelError(msg)
    return Dense(weight, bias, activation)


def activation_of(class_name: object, where: str) -> str:
    """Return the activation of a class of torch; ModelError, which begins with `where`, if none."""
    package, _, name = str(class_name).rpartition(".")
    if not package.startswith("torch") or name not in ACTIVATIONS:
        msg = f"{where}: the activation {name[:40]} is not supported, only {', '.join(ACTIVATIONS)}"
        raise ModelError(msg)
    return ACTIVATIONS[name]
