"""Scores of pairs of texts, by a reranker or as the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall
from cpuserve.serving.calls.events import floats_of
from cpuserve.tokenizer.pairs import NO_INSTRUCTION

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

Places = list[tuple[int, int]]


class PairScores:
    """Computes the score of each pair of one call, with a reranker or from two embeddings."""

    def __init__(self) -> None:
        self._places: Places | None = None

    def call(self, context: ModelContext, call: GenerateCall) -> GenerateCall:
        """Return `call` for a reranker, and embedding_call(call) for an embedding model."""
        if context.embeds:
            call, self._places = embedding_call(call)
        return call

    def of(self, vectors: Sequence[bytes]) -> list[float]:
        """Return the score of each pair; vectors: the vectors of the response, in its order."""
        if self._places is not None:
            return cosines(vectors, self._places)
        return [floats_of(vector)[0] for vector in vectors]  # a reranker's vector is one score


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
