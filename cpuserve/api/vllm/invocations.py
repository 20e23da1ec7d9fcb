"""POST /invocations: the route of SageMaker, which serves every kind of request."""

from __future__ import annotations

from fastapi import APIRouter

from cpuserve.api.openai.chat.router import create_chat_completion
from cpuserve.api.openai.completions.router import create_completion
from cpuserve.api.openai.embeddings.router import create_embeddings
from cpuserve.api.pooling.router import classify, pooling
from cpuserve.api.route import post_by_field
from cpuserve.api.scores.router import rerank, score

router = APIRouter()

post_by_field(
    router,
    "/invocations",
    {
        "messages": {"": create_chat_completion},
        "prompt": {"": create_completion},
        "documents": {"": rerank},
        "text_1": {"": score},
        "input": {"": create_embeddings, "classify": classify, "token_classify": pooling},
    },
    name="invocations",
    about="Serve a chat, a completion, embeddings, labels or scores: body and model decide.",
)
