"""Reads the heads of rerankers, which score pairs of texts, and of classifiers.

The heads are computed as in the classes ...ForSequenceClassification of transformers.
Qwen3-Reranker has no such head. As its model card says,
the score is the probability that the next token is "yes", if only "yes" and "no" are considered.
The last activation is the one that CrossEncoder of sentence-transformers uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from cpuserve.base.errors import ModelError
from cpuserve.loader.dense_module import Activation, Dense, Head, VectorNorm, through
from cpuserve.loader.modules import (
    Stack,
    activation_of,
    layers_of,
    pooling_name,
    read_stack,
    settings_of,
)
from cpuserve.loader.pooling import labels_of, ranker
from cpuserve.models.bert import POOLER
from cpuserve.models.config import (
    read_architectures,
    read_bool,
    read_choice,
    read_float,
    read_int,
    refuse,
)
from cpuserve.program.parts import rows
from cpuserve.quant import dequantize

if TYPE_CHECKING:
    from cpuserve.loader.dense_module import Float32
    from cpuserve.loader.load import Checkpoint

# The matrix of the logits, or the embeddings that it is tied to.
LOGITS = ("lm_head", "model.embed_tokens")
LAST = "cls.output"  # the name of the last linear of a head in GGUF files
ANSWERS = ("yes", "no")
POOLINGS = {"cls": "first", "mean": "mean"}

Read = Callable[[str], "Float32"]


def class_head(checkpoint: Checkpoint) -> tuple[Head, list[str]]:
    """Return the head of a classifier for texts or tokens, without activation, and its labels.

    The head computes a logit for each label.

    Raises:
        ModelError: its tensors are missing, or do not fit each other or the labels in the config.
    """
    stack = _stack(checkpoint)
    if stack.scores:
        names, count = checkpoint.config.get("id2label"), stack.num_scores
        named = isinstance(names, Mapping) and len(names) == count
        labels = labels_of(checkpoint.config if named else {"num_labels": count})
        return _of_modules(stack, "none").without_activation(), labels
    name, labels = read_architectures(checkpoint.config)[0], labels_of(checkpoint.config)
    make = TAGGER_HEADS.get(name) or HEADS[name]
    settings = {**checkpoint.config, **_activation_setting(checkpoint)}
    head = make(_reader(checkpoint, "classifier", set()), settings).without_activation()
    _check(checkpoint, head, len(labels))
    return head, labels


def one_label(config: Mapping[str, Any]) -> list[str]:
    """Return the label of a reranker's score, which a config without one label does not name."""
    names = config.get("id2label")
    named = isinstance(names, Mapping) and len(names) == 1
    return labels_of(config if named else {"num_labels": 1})


def rank_head(checkpoint: Checkpoint, token_id: Callable[[str], int]) -> Head:
    """Return the head of a reranker.

    token_id: a function that returns the id of a text that is one token.

    Raises:
        ModelError: its tensors are missing or do not fit each other.
    """
    config, weights = {**checkpoint.config, **_activation_setting(checkpoint)}, checkpoint.weights
    stack = _stack(checkpoint)
    if stack.scores:
        return _of_modules(stack, _activation(config))
    name = ranker(config)
    done: set[str] = set()
    if name is None:
        return Head("last", (_judge(checkpoint, token_id, stack, _activation(config)),), unit=False)
    head = HEADS[name](_reader(checkpoint, "reranker", done), config)
    if others := sorted(n for n in weights.names() - done if n.startswith("cls.")):
        msg = f"{checkpoint.path}: the head has tensors that are not supported: {others[0]}"
        raise ModelError(msg)
    _check(checkpoint, head, 1)
    return head


def _stack(checkpoint: Checkpoint) -> Stack:
    """Return the modules of sentence-transformers; GGUF files have none."""
    return read_stack(checkpoint.path) if checkpoint.path.is_dir() else Stack()


def _of_modules(stack: Stack, activation: str) -> Head:
    """Return the head of a CrossEncoder that is made of modules; activation: of its scores."""
    assert stack.pooling is not None
    layers = (*layers_of(stack.of_text), Activation(activation))
    return Head(
        pooling_name(stack.pooling), layers, unit=False, of_tokens=layers_of(stack.of_tokens)
    )


def _activation_setting(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the activation of scores in the files of sentence-transformers, as a config has it.

    They have it since release 5; it goes before the one of config.json.
    """
    settings = settings_of(checkpoint.path) if checkpoint.path.is_dir() else {}
    class_name = (
        settings.get("activation_fn") if settings.get("model_type") == "CrossEncoder" else None
    )
    return {} if class_name is None else {"sentence_transformers": {"activation_fn": class_name}}


def _reader(checkpoint: Checkpoint, kind: str, done: set[str]) -> Read:
    """Return a function that reads a tensor of a head and adds its name to `done`."""
    weights = checkpoint.weights

    def read(tensor: str) -> Float32:
        done.add(tensor)
        if tensor not in weights.names():
            msg = f"{checkpoint.path}: a {kind} needs the tensor {tensor}, which is missing"
            raise ModelError(msg)
        return dequantize(weights.get(tensor))

    return read


def _bert(read: Read, config: Mapping[str, Any]) -> Head:
    layers = _dense(read, POOLER, "tanh"), _dense(read, "classifier", _activation(config))
    return Head("first", layers, unit=False)


def _gte(read: Read, config: Mapping[str, Any]) -> Head:
    if (types := read_int(config, "type_vocab_size", 1, low=0)) > 1 and len(labels_of(config)) == 1:
        refuse("type_vocab_size", types, "at most 1: pairs with token types are not supported")
    return _bert(read, config)


def _distilbert(read: Read, config: Mapping[str, Any]) -> Head:
    layers = _dense(read, "pre_classifier", "relu"), _dense(read, "classifier", _activation(config))
    return Head("first", layers, unit=False)


def _deberta(read: Read, config: Mapping[str, Any]) -> Head:
    then = read_choice(config, "pooler_hidden_act", "gelu", {"gelu": "gelu", "tanh": "tanh"})
    layers = _dense(read, POOLER, then), _dense(read, "classifier", _activation(config))
    return Head("first", layers, unit=False)


def _roberta(read: Read, config: Mapping[str, Any]) -> Head:
    first = _dense(read, "classifier.dense", "tanh")
    layers = first, _dense(read, "classifier.out_proj", _activation(config))
    return Head("first", layers, unit=False)


def _modernbert(read: Read, config: Mapping[str, Any]) -> Head:
    then = read_choice(config, "classifier_activation", "gelu", {"gelu": "gelu"})
    bias = read_bool(config, "classifier_bias", False)
    shift = read("head.norm.bias") if read_bool(config, "norm_bias", False) else None
    norm = VectorNorm(read("head.norm.weight"), shift, read_float(config, "norm_eps", 1e-5))
    last = _dense(read, "classifier", _activation(config))
    pooling = read_choice(config, "classifier_pooling", "cls", POOLINGS)
    return Head(pooling, (_dense(read, "head.dense", then, bias=bias), norm, last), unit=False)


def _decoder(read: Read, config: Mapping[str, Any]) -> Head:
    return Head("last", (_dense(read, "score", _activation(config), bias=False),), unit=False)


def _gguf_bert(read: Read, _: Mapping[str, Any]) -> Head:
    """Return the head of RoBERTa; GGUF files of BERT rerankers lack the pooler of their head."""
    return Head("first", (_dense(read, "cls", "tanh"), _dense(read, LAST, "sigmoid")), unit=False)


def _gguf_modernbert(read: Read, config: Mapping[str, Any]) -> Head:
    """Return the head of ModernBERT, with mean pooling as in llama.cpp: no key in files says it."""
    norm = VectorNorm(read("cls.norm.weight"), None, read_float(config, "norm_eps", 1e-5))
    layers = _dense(read, "cls", "gelu", bias=False), norm, _dense(read, LAST, "sigmoid")
    return Head("mean", layers, unit=False)


def _gguf_decoder(read: Read, _: Mapping[str, Any]) -> Head:
    """Return a head with one row, or with the difference of the rows for "yes" and "no"."""
    weight = read(f"{LAST}.weight")
    row = weight[:1] - weight[1:] if weight.shape[0] == 2 else weight
    return Head("last", (Dense(row, None, "sigmoid"),), unit=False)


def _tagger(read: Read, _: Mapping[str, Any]) -> Head:
    return Head("all", (_dense(read, "classifier", "none"),), unit=False)


def _modernbert_tagger(read: Read, config: Mapping[str, Any]) -> Head:
    return replace(_modernbert(read, config), pooling="all")


def _decoder_tagger(read: Read, _: Mapping[str, Any]) -> Head:
    return Head("all", (_dense(read, "score", "none"),), unit=False)


HEADS = {
    # The config of a GGUF file has the architecture of the model without its head.
    "BertModel": _gguf_bert,
    "ModernBertModel": _gguf_modernbert,
    "Qwen3ForCausalLM": _gguf_decoder,
    "BertForSequenceClassification": _bert,
    "CamembertForSequenceClassification": _roberta,
    "DebertaV2ForSequenceClassification": _deberta,
    "DistilBertForSequenceClassification": _distilbert,
    "Gemma2ForSequenceClassification": _decoder,
    "GteForSequenceClassification": _gte,
    "LlamaForSequenceClassification": _decoder,
    "MistralForSequenceClassification": _decoder,
    "ModernBertForSequenceClassification": _modernbert,
    "NewForSequenceClassification": _gte,
    "Qwen2ForSequenceClassification": _decoder,
    "Qwen3ForSequenceClassification": _decoder,
    "RobertaForSequenceClassification": _roberta,
    "XLMRobertaForSequenceClassification": _roberta,
}
TAGGER_HEADS = {
    "BertForTokenClassification": _tagger,
    "CamembertForTokenClassification": _tagger,
    "DebertaV2ForTokenClassification": _tagger,
    "DistilBertForTokenClassification": _tagger,
    "Gemma2ForTokenClassification": _decoder_tagger,
    "GteForTokenClassification": _tagger,
    "LlamaForTokenClassification": _decoder_tagger,
    "MistralForTokenClassification": _decoder_tagger,
    "ModernBertForTokenClassification": _modernbert_tagger,
    "NewForTokenClassification": _tagger,
    "Qwen2ForTokenClassification": _decoder_tagger,
    "Qwen3ForTokenClassification": _decoder_tagger,
    "RobertaForTokenClassification": _tagger,
    "XLMRobertaForTokenClassification": _tagger,
}
# The activation of a classifier's logits, by problem_type in the config.
BY_PROBLEM = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def class_activation(checkpoint: Checkpoint) -> str:
    """Return the activation of the logits of a classifier: "softmax", "sigmoid" or "none".

    As in vLLM, problem_type decides first, then the settings of sentence-transformers,
    then the number of labels: a sigmoid for one label, a softmax for several labels.
    """
    config, stack = {**checkpoint.config, **_activation_setting(checkpoint)}, _stack(checkpoint)
    found = BY_PROBLEM.get(str(config.get("problem_type")))
    several = (stack.num_scores or len(labels_of(config))) > 1
    if found is None and _named_activation(config) is not None:
        found = _activation(config)
    found = found or "softmax"
    return "sigmoid" if found == "softmax" and not several else found


def _dense(read: Read, name: str, activation: str, *, bias: bool = True) -> Dense:
    return Dense(read(f"{name}.weight"), read(f"{name}.bias") if bias else None, activation)


def _activation(config: Mapping[str, Any]) -> str:
    """Return the activation that computes a score: a sigmoid, unless the config has another."""
    named = _named_activation(config)
    return "sigmoid" if named is None else activation_of(named, "config.json")


def _named_activation(config: Mapping[str, Any]) -> object:
    newer = config.get("sentence_transformers")
    named = newer.get("activation_fn") if isinstance(newer, Mapping) else None
    return named or config.get("sbert_ce_default_activation_function")


def _judge(
    checkpoint: Checkpoint, token_id: Callable[[str], int], stack: Stack, activation: str
) -> Dense:
    """Return the softmax over the logits of "yes" and "no": the sigmoid of their difference.

    activation: another function of the difference, if a LogitScore follows the model.
    """
    weights = checkpoint.weights
    stored = [part for part in LOGITS if f"{part}.weight" in weights.names()]
    if not stored:
        msg = f"{checkpoint.path} has no matrix of logits ({' or '.join(LOGITS)})"
        raise ModelError(msg)
    ids = [token_id(text) for text in ANSWERS]
    if (module := stack.answers) is not None:
        token_ids = [module.config.get(key) for key in ("true_token_id", "false_token_id")]
        if token_ids != ids:
            module.refuse(f"asks for the tokens {token_ids}, not for {ids}, which are yes and no")
    yes, no = (dequantize(weights.get(f"{rows(stored[0], id_, 1)}.weight")) for id_ in ids)
    return Dense(yes - no, None, "sigmoid" if module is None else activation)


def _check(checkpoint: Checkpoint, head: Head, outputs: int) -> None:
    """Raise a ModelError unless each layer fits the next, and the last has `outputs` outputs."""
    width = cast("Dense | VectorNorm", head.layers[0]).weight.shape[-1]
    try:
        width = through(head.layers, width)
    except ValueError as error:
        msg = f"{checkpoint.path}: in the head, {error}"
        raise ModelError(msg) from None
    if width != outputs:
        wanted = "one score" if outputs == 1 else f"one for each of {outputs} labels"
        msg = f"{checkpoint.path}: the head gives {width} numbers instead of {wanted}"
        raise ModelError(msg)
