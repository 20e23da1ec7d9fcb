"""The results of embedding models for each task of vLLM, and sparse embeddings.

BGE-M3 computes three results in one pass: an embedding, a weight and a vector for each token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.vectors.classes import activated, rows_of

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.tokenizer import Tokenizer

# The numbers of a text, or a row of numbers for each of its tokens.
Data = list[float] | list[list[float]]
TOKEN_TASKS = ("token_embed", "token_classify")
# Tasks of models with the heads of BGE-M3, which compute several results in one pass.
BOTH, ALL = "embed&token_classify", "embed&token_embed&token_classify"
# For each task, the `vectors` of SamplingParams with its activation or scaling, and without.
_KINDS = {
    "embed": ("", "plain"),
    "token_embed": ("unit_tokens", "tokens"),
    "multi": ("unit_multi", "multi"),
    "token_classify": ("weights", "raw_weights"),
}


def embedding_tasks(context: ModelContext) -> tuple[str, ...]:
    """Return the tasks of an embedding model; () for a model that makes no embeddings."""
    if context.pooling == "splade":
        return ("embed",)
    if not context.embeds:
        return ()
    if "weights" not in context.token_widths:
        return ("embed", "token_embed")
    several = (BOTH, ALL) if "multi" in context.token_widths else (BOTH,)
    return ("embed", "token_embed", "token_classify", *several)


def vectors_of(task: str, context: ModelContext, *, activates: bool) -> str:
    """Return the kinds of vectors of a task, joined by "+".

    activates: False = vectors that are not scaled to length 1, and weights before their activation.
    """
    if context.pooling == "splade":
        if not activates:
            msg = "a sparse embedding is not possible without its activation: omit use_activation"
            raise InvalidRequest(msg, param="use_activation")
        return "words"
    has_own = "multi" in context.token_widths
    parts = ["multi" if part == "token_embed" and has_own else part for part in task.split("&")]
    return "+".join(_KINDS[part][not activates] for part in parts)


def results_of(
    task: str, values: array[float], ids: Sequence[int], context: ModelContext
) -> dict[str, Data]:
    """Return the result of each part of a task, from the values that the engine has computed.

    As in vLLM, special tokens around a text have no weight,
    and BGE-M3 has no vector of the first token.

    ids: the tokens of the prompt.
    """
    widths, found, at = context.token_widths, {}, 0
    first, last = _around(context.get_tokenizer(), ids)
    for part in task.split("&"):
        own = {"token_embed": "multi", "token_classify": "weights"}.get(part, "")
        per_token = widths.get(own, context.vector_width)
        end = at + per_token * (len(ids) if part in TOKEN_TASKS else 1)
        some, at = values[at:end], end
        data: Data = some.tolist()
        if part == "token_classify":
            data = some[first : len(some) - last].tolist()
        elif part == "token_embed":
            data = rows_of(some, len(ids))[first if own in widths else 0 :]
        found[part] = data
    return found


def data_of(task: str, results: dict[str, Data]) -> Data | dict[str, Data]:
    """Return the data of a task from the result of each part.

    As in vLLM, "embed&token_classify" has one list: the embedding, then the weights. The task
    "embed&token_embed&token_classify" has an object with the data of each part by its name.
    """
    if task == ALL:
        return results
    if task == BOTH:
        return [*results["embed"], *results["token_classify"]]
    return results[task]


def labels_of_task(task: str, values: array[float], tokens: int, activation: str) -> Data:
    """Return the values of the labels for a text, or for each of its tokens, from their logits.

    activation: as in `activated`; tokens: the number of tokens of the prompt.
    """
    of_tokens = task.startswith("token")
    rows = rows_of(values, tokens if of_tokens else 1)
    if activation != "none":
        rows = [activated(row, activation) for row in rows]
    return rows if of_tokens else rows[0]


def token_weights(
    weights: Sequence[float], ids: Sequence[int], context: ModelContext
) -> dict[int, float]:
    """Return the largest weight of each token id, in the order of the ids.

    Special tokens of BGE-M3, and token ids without a weight, are left out.

    weights: the weight of each token of the prompt; with SPLADE, of each token id.
    """
    if context.pooling == "splade":
        return {token: value for token, value in enumerate(weights) if value > 0}
    special = context.get_tokenizer().special_ids
    found: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if weight > 0 and token not in special:
            found[token] = max(weight, found.get(token, 0.0))
    return dict(sorted(found.items()))


def sparse_vectors(context: ModelContext) -> str:
    """Return the kind of vectors that makes sparse embeddings; InvalidRequest if there is none."""
    if context.pooling == "splade":
        return "words"
    if "weights" in context.token_widths:
        return "weights"
    msg = (
        f"{context.model_names[0]} makes no sparse embeddings: serve a model such as SPLADE, "
        "or BGE-M3 with its heads in safetensors. Pickles such as sparse_linear.pt are never "
        "read: write its tensors to sparse_linear.safetensors with safetensors.torch.save_file"
    )
    raise InvalidRequest(msg, role="model")


def _around(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, int]:
    """Return how many special tokens begin and end a prompt, 0 or 1 each."""
    around = tokenizer.around_nothing
    first = around[:1] == list(ids[:1]) and bool(around)
    last = len(around) > 1 and around[-1:] == list(ids[-1:])
    return int(first), int(last)
