"""POST /embed, /embed_all, /embed_sparse, /predict, /similarity, and /rerank as in TEI."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post
from cpuserve.api.vectors.tei.errors import CUT, TEI
from cpuserve.api.vectors.tei.predict import (
    Predictions,
    PredictRequest,
    PredictWriter,
    predict_call,
)
from cpuserve.api.vectors.tei.schema import (
    EmbedAllRequest,
    Embeddings,
    EmbedSparseRequest,
    SimilarityRequest,
    SparseEmbeddings,
    TeiEmbedRequest,
    TeiRerankRequest,
    TextRank,
    TokenEmbeddings,
    embed_all_call,
    embed_call,
    embed_sparse_call,
    similarity_call,
    tei_rerank_call,
)
from cpuserve.api.vectors.tei.writer import (
    EmbedAllWriter,
    EmbedSparseWriter,
    SimilarityWriter,
    TeiEmbedWriter,
    TeiRerankWriter,
)
from cpuserve.config.engine import EMBEDDINGS

router = APIRouter()
_post = partial(post, router, dialect=TEI)


@_post(
    "/embed",
    poolings=EMBEDDINGS,
    schema=TeiEmbedRequest,
    response=Embeddings,
    id_prefix="embed-",
    words=lambda _: {"prompt": "inputs", **CUT},
)
async def tei_embed(received: RequestContext, asked: TeiEmbedRequest) -> Response:
    """Return the embedding of each text."""
    return await generate(
        received, asked, lambda asked: embed_call(asked, received.context), TeiEmbedWriter
    )


@_post(
    "/embed_all",
    poolings=EMBEDDINGS,
    schema=EmbedAllRequest,
    response=TokenEmbeddings,
    id_prefix="embed-",
    words=lambda _: {"prompt": "inputs", **CUT},
)
async def embed_all(received: RequestContext, asked: EmbedAllRequest) -> Response:
    """Return an embedding for each token of each text."""
    return await generate(received, asked, embed_all_call, EmbedAllWriter)


@_post(
    "/embed_sparse",
    poolings=("splade", "first"),
    schema=EmbedSparseRequest,
    response=SparseEmbeddings,
    id_prefix="embed-",
    words=lambda _: {"prompt": "inputs", **CUT},
)
async def embed_sparse(received: RequestContext, asked: EmbedSparseRequest) -> Response:
    """Return the sparse embedding of each text: the weights of its tokens."""
    return await generate(
        received, asked, lambda asked: embed_sparse_call(asked, received.context), EmbedSparseWriter
    )


@_post(
    "/similarity",
    poolings=EMBEDDINGS,
    schema=SimilarityRequest,
    response=list[float],
    id_prefix="similarity-",
    words=lambda _: {"prompt": "sentences", **CUT},
)
async def similarity(received: RequestContext, asked: SimilarityRequest) -> Response:
    """Return the cosine similarity of each sentence to the source sentence."""
    return await generate(received, asked, similarity_call, SimilarityWriter)


@_post(
    "/predict",
    poolings=("classify", "rank"),
    schema=PredictRequest,
    response=Predictions,
    id_prefix="predict-",
    words=lambda _: {"prompt": "inputs", **CUT},
)
async def predict(received: RequestContext, asked: PredictRequest) -> Response:
    """Return the class labels of each text or pair of texts."""
    return await generate(
        received, asked, lambda asked: predict_call(asked, received.context), PredictWriter
    )


@_post(
    schema=TeiRerankRequest,
    poolings=("rank",),
    response=list[TextRank],
    id_prefix="rerank-",
    words=lambda _: {"prompt": "texts", **CUT},
)
async def tei_rerank(received: RequestContext, asked: TeiRerankRequest) -> Response:
    """Rank texts by their relevance for a query."""
    return await generate(received, asked, tei_rerank_call, TeiRerankWriter)
