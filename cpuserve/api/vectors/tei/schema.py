"""The bodies of the TEI endpoints for embeddings and ranking, and their GenerateCalls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.request.fields import TEI, with_refused
from cpuserve.api.vectors.tei.errors import EmptyInput, TooManyInputs
from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall
from cpuserve.serving.vectors.matryoshka import check_dimensions
from cpuserve.serving.vectors.pooling_tasks import sparse_vectors

if TYPE_CHECKING:
    from collections.abc import Sized

    from cpuserve.serving.models.context import ModelContext

# The inputs of a request: a text, token ids, or a list of texts or of token ids.
Inputs = str | list[str | int | list[int]]
_SIDES = ("left", "right")


class TeiFields(msgspec.Struct, kw_only=True):
    """The request fields that most TEI endpoints share.

    truncate: whether longer texts are cut to the length of the context; None = true.
    truncation_direction: the side that is cut, "left" or "right" (the default).
    """

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    priority: int | None = None
    timeout: float | None = None

    def call(self, **more: Any) -> GenerateCall:
        """Return a GenerateCall with these fields; `more`: further fields of the call."""
        return GenerateCall(
            model=self.model,
            max_tokens=0,
            embed=True,
            priority=self.priority,
            timeout=self.timeout,
            **{**cut(truncate=self.truncate, direction=self.truncation_direction), **more},
        )


class _EmbedFields(TeiFields, kw_only=True):
    """The request fields of endpoints that embed texts.

    prompt_name: the name of a prompt of the checkpoint, which is put before each text.
    """

    inputs: Inputs
    prompt_name: str | None = None


@with_refused(TEI)
class TeiEmbedRequest(_EmbedFields, kw_only=True):
    """The body of POST /embed.

    normalize: false = embeddings are not scaled to length 1.
    dimensions: the number of leading values of each embedding that are returned.
    """

    normalize: bool | None = None
    dimensions: int | None = None


@with_refused(TEI)
class EmbedAllRequest(_EmbedFields, kw_only=True):
    """The body of POST /embed_all, which returns an embedding per token."""


@with_refused(TEI)
class EmbedSparseRequest(_EmbedFields, kw_only=True):
    """The body of POST /embed_sparse, which returns a weight per token."""


class SparseValue(msgspec.Struct):
    """A token id of the vocabulary, and its weight in a sparse embedding."""

    index: int
    value: float


class SimilarityInput(msgspec.Struct, kw_only=True):
    """A source sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, kw_only=True):
    """Parameters of /similarity; their meaning is as in TeiEmbedRequest."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class SimilarityRequest(msgspec.Struct, kw_only=True):
    """The body of POST /similarity: compare sentences with a source sentence."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None


class TeiRerankRequest(TeiFields, kw_only=True):
    """The body of POST /rerank: texts to rank by their relevance for the query.

    raw_scores: return scores before the activation of the model.
    return_text: whether the response contains the texts.
    """

    query: str
    texts: list[str]
    raw_scores: bool | None = None
    return_text: bool | None = None


class TextRank(msgspec.Struct, omit_defaults=True):
    """A text of the request, given by its index, and its relevance score."""

    index: int
    score: float
    text: str | None = None


# The types of response bodies, which are plain lists.
Embeddings = list[list[float]]
TokenEmbeddings = list[list[list[float]]]
SparseEmbeddings = list[list[SparseValue]]


def cut(*, truncate: bool | None, direction: str | None) -> dict[str, Any]:
    """Return the truncation fields of a GenerateCall; InvalidRequest for an unknown direction."""
    side = (direction or "right").lower()
    if side not in _SIDES:
        msg = f'truncation_direction must be "left" or "right", got {side[:40]!r}'
        raise InvalidRequest(msg, param="truncation_direction")
    return {
        "truncate_prompt_tokens": None if truncate is False else -1,
        "truncation_side": side,
    }


def check_inputs(name: str, inputs: Sized) -> None:
    """Raise EmptyInput or TooManyInputs unless the number of inputs is within the limits."""
    if not inputs:
        msg = f"{name} is empty: give at least one text"
        raise EmptyInput(msg, param=name)
    if not isinstance(inputs, str) and len(inputs) > MAX_PROMPTS:
        msg = f"{name} has {len(inputs)} texts: at most {MAX_PROMPTS} are allowed"
        raise TooManyInputs(msg, param=name)


def _check_texts(inputs: Inputs) -> None:
    """Raise EmptyInput or TooManyInputs for no inputs, an empty input, or too many inputs."""
    if isinstance(inputs, str) or not inputs or not isinstance(inputs[0], int):
        check_inputs("inputs", inputs)
    if not all(each != "" and each != [] for each in inputs):
        msg = "inputs has an empty text: omit it"
        raise EmptyInput(msg, param="inputs")


def embed_call(request: TeiEmbedRequest, context: ModelContext) -> GenerateCall:
    """Return the GenerateCall of /embed; InvalidRequest for a field the model does not support."""
    _check_texts(request.inputs)
    check_dimensions(request.dimensions, context)
    return request.call(
        prompt=request.inputs,
        prompt_name=request.prompt_name,
        vectors="plain" if request.normalize is False else "",
    )


def embed_all_call(request: EmbedAllRequest) -> GenerateCall:
    """Return the GenerateCall of a request to /embed_all."""
    _check_texts(request.inputs)
    return request.call(prompt=request.inputs, prompt_name=request.prompt_name, vectors="tokens")


def embed_sparse_call(request: EmbedSparseRequest, context: ModelContext) -> GenerateCall:
    """Return the GenerateCall of /embed_sparse.

    Raises:
      InvalidRequest: the model has no sparse embeddings.
    """
    _check_texts(request.inputs)
    vectors = sparse_vectors(context)
    return request.call(prompt=request.inputs, prompt_name=request.prompt_name, vectors=vectors)


def similarity_call(request: SimilarityRequest) -> GenerateCall:
    """Return a GenerateCall that embeds the source sentence first, and then the other sentences."""
    asked, given = request.parameters or SimilarityParameters(), request.inputs
    check_inputs("sentences", given.sentences)
    fields = TeiFields(
        model=request.model,
        truncate=asked.truncate,
        truncation_direction=asked.truncation_direction,
        priority=request.priority,
        timeout=request.timeout,
    )
    texts = [given.source_sentence, *given.sentences]
    check_inputs("sentences", texts)
    return fields.call(prompt=texts, prompt_name=asked.prompt_name)


def tei_rerank_call(request: TeiRerankRequest) -> GenerateCall:
    """Return the GenerateCall of a request to /rerank in the TEI format."""
    check_inputs("query", request.query)
    check_inputs("texts", request.texts)
    pairs = [(request.query, text) for text in request.texts]
    return request.call(pairs=pairs, vectors="raw" if request.raw_scores else "")
