"""POST /embed, /embed_all, /embed_sparse, /similarity, and /rerank as in TEI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.request.fields import TEI_FIELDS, with_refused
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.route import Made, Table
from cpuserve.api.vectors.tei.errors import CUT, TEI, EmptyInput
from cpuserve.api.vectors.tei.fields import TeiFields, check_inputs
from cpuserve.config.engine import EMBEDDINGS
from cpuserve.serving.calls.events import WholeResponse
from cpuserve.serving.vectors.classes import rows_of
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened
from cpuserve.serving.vectors.pooling_tasks import sparse_vectors, token_weights
from cpuserve.serving.vectors.similarity import cosines

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext

table = Table(TEI, CUT)
router = table.router
# The inputs of a request: a text, token ids, or a list of texts or of token ids.
Inputs = str | list[str | int | list[int]]


class _EmbedFields(TeiFields, kw_only=True):
    """The request fields of endpoints that embed texts.

    prompt_name: the name of a prompt of the checkpoint, which is put before each text.
    """

    inputs: Inputs
    prompt_name: str | None = None


@with_refused(TEI_FIELDS)
class TeiEmbedRequest(_EmbedFields, kw_only=True):
    """The body of POST /embed.

    normalize: false = embeddings are not scaled to length 1.
    dimensions: the number of leading values of each embedding that are returned.
    """

    normalize: bool | None = None
    dimensions: int | None = None


@with_refused(TEI_FIELDS)
class EmbedAllRequest(_EmbedFields, kw_only=True):
    """The body of POST /embed_all, which returns an embedding per token."""


@with_refused(TEI_FIELDS)
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


# The pooling types of models with sparse embeddings.
_SPARSE = ("splade", "first")
# The types of response bodies, which are plain lists.
Embeddings = list[list[float]]
TokenEmbeddings = list[list[list[float]]]
SparseEmbeddings = list[list[SparseValue]]


def _check_texts(inputs: Inputs) -> None:
    """Raise EmptyInput or TooManyInputs for no inputs, an empty input, or too many inputs."""
    if isinstance(inputs, str) or not inputs or not isinstance(inputs[0], int):
        check_inputs("inputs", inputs)
    if not all(each != "" and each != [] for each in inputs):
        msg = "inputs has an empty text: omit it"
        raise EmptyInput(msg, param="inputs")


@table.row("/embed", TeiEmbedRequest, Embeddings, "embed-", "inputs", EMBEDDINGS)
def tei_embed(body: TeiEmbedRequest, request: RequestContext) -> Made:
    """Return the embedding of each text."""
    _check_texts(body.inputs)
    check_dimensions(body.dimensions, request.context)
    unit = body.normalize is not False
    call = body.call(prompt=body.inputs, vectors="" if unit else "plain")
    return call, lambda response: in_parts(
        shortened(choice.values, body.dimensions, unit=unit).tolist() for choice in response.choices
    )


@table.row("/embed_all", EmbedAllRequest, TokenEmbeddings, "embed-", "inputs", EMBEDDINGS)
def embed_all(body: EmbedAllRequest, _request: RequestContext) -> Made:
    """Return an embedding for each token of each text."""
    _check_texts(body.inputs)
    call = body.call(prompt=body.inputs, vectors="tokens")
    return call, lambda response: in_parts(
        in_parts(rows_of(choice.values, len(choice.prompt.ids))) for choice in response.choices
    )


@table.row("/embed_sparse", EmbedSparseRequest, SparseEmbeddings, "embed-", "inputs", _SPARSE)
def embed_sparse(body: EmbedSparseRequest, request: RequestContext) -> Made:
    """Return the sparse embedding of each text: the weights of its tokens."""
    context = request.context
    _check_texts(body.inputs)
    call = body.call(prompt=body.inputs, vectors=sparse_vectors(context))

    def value(response: WholeResponse) -> object:
        found = (token_weights(c.values, c.prompt.ids, context) for c in response.choices)
        return in_parts([SparseValue(*item) for item in each.items()] for each in found)

    return call, value


@table.row("/similarity", SimilarityRequest, list[float], "similarity-", "sentences", EMBEDDINGS)
def similarity(body: SimilarityRequest, _request: RequestContext) -> Made:
    """Return the cosine similarity of each sentence to the source sentence."""
    given, parameters = body.inputs, body.parameters or SimilarityParameters()
    check_inputs("sentences", given.sentences)
    fields = TeiFields(
        model=body.model,
        truncate=parameters.truncate,
        truncation_direction=parameters.truncation_direction,
        priority=body.priority,
        timeout=body.timeout,
    )
    texts = [given.source_sentence, *given.sentences]
    check_inputs("sentences", texts)
    call = fields.call(prompt=texts, prompt_name=parameters.prompt_name)
    pairs = [(0, index) for index in range(1, len(texts))]
    return call, lambda response: cosines([choice.vector for choice in response.choices], pairs)


@table.row("", TeiRerankRequest, list[TextRank], "rerank-", "texts", ("rank",))
def tei_rerank(body: TeiRerankRequest, _request: RequestContext) -> Made:
    """Rank texts by their relevance for a query."""
    check_inputs("query", body.query)
    check_inputs("texts", body.texts)
    pairs = [(body.query, text) for text in body.texts]
    call = body.call(pairs=pairs, vectors="raw" if body.raw_scores else "")

    def value(response: WholeResponse) -> list[TextRank]:
        scores = [choice.values[0] for choice in response.choices]
        shown = body.texts if body.return_text else [None] * len(scores)
        ranks = [TextRank(index, score, shown[index]) for index, score in enumerate(scores)]
        return sorted(ranks, key=lambda rank: -rank.score)  # equal scores keep their order

    return call, value
