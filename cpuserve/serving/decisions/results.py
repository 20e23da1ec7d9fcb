"""Turns the logprobs of labels into the results of the questions of a decision.

A question asks the model to choose an option. A label is the letter, digit or word that the
model would write for an option, so the probability of an option follows from its labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.decisions.labels import Labels
    from cpuserve.serving.decisions.questions import DecisionQuestion


class ChoiceResult(msgspec.Struct, tag_field="type", tag="choice"):
    """The most likely option, and the probability of each option.

    confidence: the probability of the most likely option over the whole vocabulary.
    """

    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreResult(msgspec.Struct, tag_field="type", tag="score"):
    """The expected level (0 is the first one), and the probability of each level by its number.

    legend: the levels of the score as the request has them.
    confidence: as in ChoiceResult.
    """

    score: float
    legend: dict[str, Any]
    probabilities: dict[str, float]
    confidence: float


class NoulResult(msgspec.Struct, tag_field="type", tag="noul"):
    """The probability of yes; confidence: as in ChoiceResult."""

    noul: float
    probabilities: dict[str, float]
    confidence: float


Result = ChoiceResult | ScoreResult | NoulResult


class LabelDiagnostics(msgspec.Struct):
    """Whether the model would have written a label.

    label_mass: the probability of all labels over the whole vocabulary;
      if options are scored as texts, the probability of all texts.
    argmax_is_label: whether the most likely token is a label; if options are scored as texts,
      whether a text begins with this token.
    """

    label_mass: float
    argmax_is_label: bool


def results_of(
    questions: Sequence[DecisionQuestion], prompts: Sequence[tuple[Labels | None, TokenLogprob]]
) -> tuple[dict[str, Result], dict[str, LabelDiagnostics]]:
    """Return the result and the diagnostics of each question by its id.

    prompts: the labels and the first token of each prompt, in the order of the questions.
    A question has one prompt; if its options are texts, one for each node of their tree.
    """
    results: dict[str, Result] = {}
    diagnostics: dict[str, LabelDiagnostics] = {}
    begin = 0
    for question in questions:
        labels = prompts[begin][0]
        assert labels is not None, "the prompt of a question has labels"
        end = begin + (1 if labels.texts is None else len(labels.texts.nodes))
        rows = [row for _, row in prompts[begin:end]]
        results[question.id], diagnostics[question.id] = decided(question, labels, rows)
        begin = end
    assert begin == len(prompts), "each prompt belongs to a question"
    return results, diagnostics


def decided(
    question: DecisionQuestion, labels: Labels, rows: Sequence[TokenLogprob]
) -> tuple[Result, LabelDiagnostics]:
    """Return the result of a question.

    rows: the most likely token, with the logprob of each id of labels.flat as its alternatives;
    if options are texts, a row for each node of the tree of texts (OptionTexts).
    """
    first = rows[0]
    if labels.texts is None:
        logprobs = iter(logprob for _, logprob in first.top)
        of_options = [[next(logprobs) for _ in ids] for ids in labels.ids]
    else:
        of_options = [[each] for each in labels.texts.logprobs([row.top for row in rows])]
    shares = probabilities(of_options)
    best = max(range(len(shares)), key=shares.__getitem__)
    over_all = [math.fsum(map(math.exp, some)) for some in of_options]
    seen = LabelDiagnostics(min(math.fsum(over_all), 1.0), first.token in labels.flat)
    return _result(question, shares, best, min(over_all[best], 1.0)), seen


def _result(
    question: DecisionQuestion, shares: list[float], best: int, confidence: float
) -> Result:
    numbers = [str(index) for index in range(len(shares))]
    match question.kind:
        case "choice":
            names = [option.name for option in question.options]
            named = dict(zip(names, shares, strict=True))
            return ChoiceResult(names[best], named, confidence)
        case "score":
            score = math.fsum(level * share for level, share in enumerate(shares))
            sent = [option.sent for option in question.options]
            legend = dict(zip(numbers, sent, strict=True))
            shared = dict(zip(numbers, shares, strict=True))
            return ScoreResult(score, legend, shared, confidence)
        case "noul":
            yes, no = shares
            return NoulResult(yes, {"yes": yes, "no": no}, confidence)


def probabilities(logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Return the probability of each option: a softmax over all labels, summed for each option."""
    most = max(max(some) for some in logprobs)
    weights = [math.fsum(math.exp(logprob - most) for logprob in some) for some in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
