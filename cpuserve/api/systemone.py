"""POST /v1/systemone: typed questions with probabilities of their options.

vLLM, llama-server and Ollama share this API of decision models.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import DECISIONS, with_refused
from cpuserve.api.vectors.route import Made, Table
from cpuserve.serving.calls.events import WholeResponse
from cpuserve.serving.decisions.questions import (
    MAX_QUESTIONS,
    Content,
    checked,
    content_text,
    questions_of,
)
from cpuserve.serving.decisions.results import LabelDiagnostics, Result, results_of
from cpuserve.serving.prompts.decision_prompts import decision_call

table = Table(words={"messages": "state", "n": "questions"})
router = table.router
_JSON = ("string", "number", "boolean", "object", "array", "null")
_CONTENT = {"anyOf": [{"type": kind} for kind in _JSON]}
# `questions` stays raw JSON, so that a repeated question name can be detected; this is its schema.
_QUESTIONS = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": MAX_QUESTIONS,
    "additionalProperties": {
        "type": "object",
        "properties": {
            "type": {"enum": ["choice", "score", "noul"]},
            "instructions": _CONTENT,
            "criteria": {"anyOf": [{"type": kind} for kind in ("object", "array", "null")]},
            "as_texts": {"type": "boolean"},
        },
        "required": ["type"],
        "additionalProperties": False,
    },
}


@with_refused(DECISIONS)
class SystemOneRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/systemone: questions about a state, each with a fixed set of options."""

    model: str | None = None
    state: Content
    questions: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_QUESTIONS)]
    instructions: Content | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Copy the raw questions: they point into the body, which is freed after decoding."""
        self.questions = self.questions.copy()


class DecisionUsage(msgspec.Struct):
    """The number of tokens of the state, which is counted once, and of all questions.

    output_tokens: one per question; if options are scored as texts, one per token distribution
    that the server has read.
    cached_tokens: how many input tokens were in the prefix cache before the request.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int


class SystemOneAnswer(msgspec.Struct):
    """The response of POST /v1/systemone. answers: the result of each question, by its id."""

    id: str
    object: str
    created: int
    model: str
    answers: dict[str, Result]
    usage: DecisionUsage
    diagnostics: dict[str, LabelDiagnostics]


@table.row("/v1/systemone", SystemOneRequest, SystemOneAnswer, "decision-", "state")
def decide(body: SystemOneRequest, request: RequestContext) -> Made:
    """Return the probability of each option of each question about a state."""
    questions = checked(questions_of(body.questions))
    call = decision_call(
        content_text(body.state).strip(),
        questions,
        instructions=content_text(body.instructions).strip(),
        chat_template_kwargs=body.chat_template_kwargs,
        model=body.model,
        cache_salt=body.cache_salt,
        priority=body.priority,
        timeout=body.timeout,
    )

    def value(response: WholeResponse) -> SystemOneAnswer:
        first = [(each.prompt.labels, each.logprobs[0]) for each in response.choices]
        found, diagnostics = results_of(questions, first)
        name, used = request.served.name, response.usage
        usage = DecisionUsage(used.prompt, used.completion, used.cached)
        kind = "structured_decision"
        return SystemOneAnswer(request.id, kind, request.created, name, found, usage, diagnostics)

    return call, value
