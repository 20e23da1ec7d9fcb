"""voyageai and mixedbread: vectors, their types, and ranks, with real models."""

import asyncio

import pytest
import voyageai
from mixedbread import AsyncMixedbread, Mixedbread

QUERY, DOCUMENTS = "a red fox", ["a fox", "a dog", "the fox is red"]


def at(kind, server):
    base = "" if kind in (Mixedbread, AsyncMixedbread) else "/v1"
    return kind(api_key="none", base_url=server.url + base)


def test_voyage_embeds(vectors):
    client = at(voyageai.Client, vectors)
    asked = {"model": vectors.embedder, "input_type": "document"}
    found = client.embed(DOCUMENTS, **asked)
    assert len(found.embeddings) == 3
    assert found.total_tokens > 3
    short = client.embed(DOCUMENTS, **asked, output_dimension=16, output_dtype="int8")
    assert [len(each) for each in short.embeddings] == [16] * 3
    assert all(isinstance(value, int) for value in short.embeddings[0])
    again = asyncio.run(at(voyageai.AsyncClient, vectors).embed(DOCUMENTS, **asked))
    assert again.embeddings == found.embeddings


def test_voyage_ranks(vectors):
    client = at(voyageai.Client, vectors)
    found = client.rerank(QUERY, DOCUMENTS, model=vectors.reranker, top_k=2)
    assert len(found.results) == 2
    assert found.results[0].relevance_score >= found.results[1].relevance_score
    assert found.results[0].document == DOCUMENTS[found.results[0].index]
    work = at(voyageai.AsyncClient, vectors).rerank(QUERY, DOCUMENTS, model=vectors.reranker)
    again = asyncio.run(work)
    assert [each.index for each in again.results][:2] == [each.index for each in found.results]


@pytest.mark.parametrize("normalized", [True, False])
def test_mixedbread_embeds(vectors, normalized):
    found = at(Mixedbread, vectors).embed(
        model=vectors.embedder, input=DOCUMENTS, normalized=normalized
    )
    length = sum(value * value for value in found.data[0].embedding) ** 0.5
    assert (abs(length - 1) < 1e-3) == normalized


def test_mixedbread_ranks(vectors):
    asked = {"model": vectors.reranker, "query": QUERY, "input": DOCUMENTS}
    found = at(Mixedbread, vectors).rerank(**asked, top_k=2, return_input=True)
    assert len(found.data) == 2
    assert found.data[0].input == DOCUMENTS[found.data[0].index]
    again = asyncio.run(at(AsyncMixedbread, vectors).rerank(**asked))
    assert [each.index for each in again.data][:2] == [each.index for each in found.data]
