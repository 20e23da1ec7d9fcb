"""Scores of pairs of texts, by a reranker or as the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import mul
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall
from cpuserve.serving.calls.events import floats_of
from cpuserve.tokenizer.pairs import NO_INSTRUCTION

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.models.context import ModelContext

Places = list[tuple[int, int]]


def pair_scores(
    context: ModelContext, call: GenerateCall
) -> tuple[GenerateCall, Callable[[WholeResponse], list[float]]]:
    """Return the call that this model needs for pairs, and a function that returns their scores.

    A reranker computes the scores itself. With an embedding model, each score is a cosine.

    Raises:
      InvalidRequest: see embedding_call.
    """
    if not context.embeds:  # a reranker's vector is one score
        return call, lambda response: [choice.values[0] for choice in response.choices]
    call, places = embedding_call(call)
    return call, lambda response: cosines([choice.vector for choice in response.choices], places)


def each_once(pairs: Sequence[tuple[str, ...]]) -> tuple[list[str], Places]:
    """Return the distinct texts of `pairs`, and for each pair the indices of its two texts."""
    at: dict[str, int] = {}
    places = [(at.setdefault(a, len(at)), at.setdefault(b, len(at))) for a, b in pairs]
    return list(at), places


def embedding_call(call: GenerateCall) -> tuple[GenerateCall, Places]:
    """Return the call that embeds each text of call.pairs once, and each pair's two text indices.

    Raises:
      InvalidRequest: the call has an instruction, which only some rerankers take,
        or too many texts.
    """
    if call.instruction is not None:
        raise InvalidRequest(NO_INSTRUCTION, role="instruction")
    texts, places = each_once(call.pairs or [])
    if len(texts) > MAX_PROMPTS:
        msg = f"the pairs have {len(texts)} different texts: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, role="prompt")
    call.pairs, call.prompt, call.vectors = None, [*texts], ""
    return call, places


def cosines(vectors: Sequence[bytes], places: Places) -> list[float]:
    """Return the cosine of the two embeddings of each pair; places: their indices in `vectors`.

    vectors: little-endian fp32 vectors of length 1, all with the same number of elements.
    """
    rows = [floats_of(vector) for vector in vectors]
    return [cosine(rows[a], rows[b]) for a, b in places]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors of length 1."""
    return float(sum(map(mul, a, b)))
