"""Paths that several dialects share: a body field and the model select the endpoint."""

from __future__ import annotations

from fastapi import APIRouter

from cpuserve.api.errors.unknown_route import NO_AUDIO, NO_IMAGES
from cpuserve.api.openai.chat.router import create_chat_completion
from cpuserve.api.openai.completions.router import create_completion
from cpuserve.api.route import ByPooling, post_by_field
from cpuserve.api.tgi.router import tgi_inference
from cpuserve.api.vectors.openai import create_embeddings
from cpuserve.api.vectors.pooling import classify, pooling
from cpuserve.api.vectors.scores import rerank, score
from cpuserve.api.vectors.tei.embed import embed_sparse, similarity, tei_embed, tei_rerank
from cpuserve.api.vectors.tei.predict import predict
from cpuserve.api.vectors.tei.token_labels import token_labels
from cpuserve.api.vectors.tei.tokens import tei_tokenize
from cpuserve.api.vllm.tokens import tokenize

router = APIRouter()
_TEI: dict[str, ByPooling] = {
    "texts": {"": tei_rerank},
    "inputs.source_sentence": {"": similarity},
    "inputs": {
        "": tei_embed,
        "none": tgi_inference,
        "classify": predict,
        "rank": predict,
        "splade": embed_sparse,
        "token_classify": token_labels,
    },
}

# Clients of TEI, TGI and Hugging Face send requests of all tasks to this path.
post_by_field(
    router,
    "/",
    _TEI,
    name="inference",
    refused={"audio/": NO_AUDIO, "image/": NO_IMAGES},
    about="Serve texts in the format of TGI, or embeddings, labels or scores in that of TEI.",
)
# SageMaker sends requests of every kind to this path.
post_by_field(
    router,
    "/invocations",
    {
        "messages": {"": create_chat_completion},
        "prompt": {"": create_completion},
        "queries": {"": score},
        "documents": {"": rerank},
        "text_1": {"": score},
        "data_1": {"": score},
        "input": {
            "": create_embeddings,
            "classify": classify,
            "rank": classify,
            "token_classify": pooling,
            "splade": pooling,
        },
        **_TEI,
    },
    name="invocations",
    about="Serve a chat, a completion, embeddings, labels or scores: body and model decide.",
)
post_by_field(
    router,
    "/rerank",
    {"texts": {"": tei_rerank}},
    name="rerank_any",
    about="Order documents by how well they match a query, in the format of TEI, or of others.",
    otherwise=rerank,
)
post_by_field(
    router,
    "/tokenize",
    {"inputs": {"": tei_tokenize}},
    name="tokenize_any",
    about="Return the tokens of texts in the format of TEI, or the token ids of a prompt.",
    otherwise=tokenize,
)
