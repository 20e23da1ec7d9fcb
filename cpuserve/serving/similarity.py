"""Scores of pairs of texts, by a reranker or as the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import MAX_PROMPTS, GenerateCall
from cpuserve.serving.events import floats_of
from cpuserve.tokenizer.pairs import NO_INSTRUCTION

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext

Places = list[tuple[int, int]]


class PairScores:
    """The scores of the pairs of one call: a reranker computes them, embeddings are compared."""

    def __init__(self) -> None:
        self._places: Places | None = None

    def call(self, context: ModelContext, call: GenerateCall) -> GenerateCall:
        """Return the call that `context` can serve; InvalidRequest as `embedding_call`."""
        if context.embeds:
            call, self._places = embedding_call(call)
        return call

    def of(self, vectors: Sequence[bytes]) -> list[float]:
        """Return the score of each pair, of the vectors of the response."""
        if self._places is not None:
            return cosines(vectors, self._places)
        return [floats_of(vector)[0] for vector in vectors]  # a reranker's have one number


def each_once(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], Places]:
    """Return the different texts of `pairs`, and where the two texts of each pair are in them."""
    at: dict[str, int] = {}
    places = [(at.setdefault(a, len(at)), at.setdefault(b, len(at))) for a, b in pairs]
    return list(at), places


def embedding_call(call: GenerateCall) -> tuple[GenerateCall, Places]:
    """Return the call that embeds each text of call.pairs once, and where the texts of a pair are.

    Raises:
      InvalidRequest: there is an instruction, which only some rerankers take, or too many texts.
    """
    if call.instruction is not None:
        raise InvalidRequest(NO_INSTRUCTION, param="instruction")
    texts, places = each_once(call.pairs or [])
    if len(texts) > MAX_PROMPTS:
        msg = f"the pairs have {len(texts)} different texts: at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(msg, param="prompt")
    call.pairs, call.prompt = None, [*texts]
    return call, places


def cosines(vectors: Sequence[bytes], places: Places) -> list[float]:
    """Return the cosine of the embeddings at each pair of places.

    vectors: fp32, little-endian, of length 1 and of one width.
    """
    rows = [floats_of(vector) for vector in vectors]
    return [cosine(rows[a], rows[b]) for a, b in places]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors of length 1."""
    return float(sum(map(mul, a, b)))
