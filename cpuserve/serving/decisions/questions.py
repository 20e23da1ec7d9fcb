"""The questions of a decision: their types, options and limits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cpuserve.base.errors import InvalidRequest

Kind = Literal["choice", "score", "noul"]
# A text, or JSON that is written into the prompt as text.
Content = str | int | float | bool | list[Any] | dict[str, Any]

MAX_QUESTIONS = 1024
MAX_OPTIONS = 26  # options of a choice, because its labels are letters
MAX_TEXTS = 256  # options of a choice that are scored as texts
LEAST_LEVELS, MAX_LEVELS = 2, 10  # levels of a score, because its labels are digits
# The last character of a question, which comes before the end of the user's turn.
BEFORE = "."
# Error messages quote at most this number of characters of an id or a name.
_SHOWN_CHARS = 60
# JSON with more bytes is written step by step.
_LONG_BYTES = 1 << 20


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """A question about the state, as in the System One API.

    criteria: {name: description or null} of a choice; the ordered list of levels of a score,
      the lowest first; descriptions of {"true", "false"}, or nothing, for a noul (yes or no).
    as_texts: the options have no labels, and are scored by the probabilities of their texts.
    """

    type: Kind
    instructions: Content | None = None
    criteria: dict[str, Any] | list[Any] | None = None
    as_texts: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its name, its description ("" = missing), and the option as it was sent."""

    name: str
    description: str
    sent: Any


@dataclass(frozen=True, slots=True)
class DecisionQuestion:
    """A question that has been checked."""

    id: str
    kind: Kind
    instructions: str
    options: tuple[Option, ...]
    as_texts: bool = False


@dataclass(frozen=True, slots=True)
class Decisions:
    """The questions of a call. mark: the text in the call's messages that a question replaces."""

    questions: Sequence[DecisionQuestion]
    mark: str


def content_text(content: Content | None) -> str:
    """Return a text unchanged and None as "", and anything else as JSON in one line.

    Raises:
      InvalidRequest: JSON cannot represent `content`. Only a call from Python can cause this.
    """
    if content is None or isinstance(content, str):
        return content or ""
    try:
        encoder = json.JSONEncoder(ensure_ascii=False)
        # The encoder in C keeps the GIL to the end, 0.2 s for 4 million numbers.
        if len(msgspec.json.encode(content)) <= _LONG_BYTES:
            return encoder.encode(content)
        return "".join(encoder.iterencode(content))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"a state or a part of a question is neither a text nor JSON: {error}"
        raise InvalidRequest(msg) from None


def questions_from(questions: Any) -> dict[str, Question]:
    """Return questions of plain Python objects; InvalidRequest if one has a wrong type."""
    _check_count(questions)
    try:
        return msgspec.convert(questions, dict[str, Question])
    except msgspec.ValidationError as error:
        msg = f"questions: {error}. A question has type, instructions, criteria and as_texts"
        raise InvalidRequest(msg, param="questions") from None


def questions_of(raw: msgspec.Raw) -> dict[str, Question]:
    """Return the questions in JSON; InvalidRequest as questions_from, or for a repeated name.

    A JSON object may repeat a name. A decoder keeps only one of its values,
    so a question or an option would be lost without an error.
    """
    try:
        found = json.loads(bytes(raw), object_pairs_hook=_unique)
    except (RecursionError, ValueError):
        msg = "questions are nested too deeply, or have a number of thousands of digits: send texts"
        raise InvalidRequest(msg, param="questions") from None
    return questions_from(found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        msg = f"questions: the name {_shown(twice)} occurs twice in one object: rename one of them"
        raise InvalidRequest(msg, param="questions")
    return found


def _check_count(questions: Any) -> None:
    if not isinstance(questions, Mapping):
        msg = "questions must be an object that has a question for each id"
        raise InvalidRequest(msg, param="questions")
    if not 0 < len(questions) <= MAX_QUESTIONS:
        msg = (
            f"questions has {len(questions)} questions: send 1 to {MAX_QUESTIONS}, and further "
            "ones in another request, which finds the state in the prefix cache"
        )
        raise InvalidRequest(msg, param="questions")


def checked(questions: Mapping[str, Question]) -> list[DecisionQuestion]:
    """Return the questions in their order; InvalidRequest for the first one that is invalid."""
    if "" in questions:
        msg = "questions: an id is empty: give each question a name"
        raise InvalidRequest(msg, param="questions")
    return [
        DecisionQuestion(
            name,
            question.type,
            content_text(question.instructions).strip(),
            _OPTIONS[question.type](_Criteria(name, question.criteria, question.as_texts)),
            question.as_texts,
        )
        for name, question in questions.items()
    ]


@dataclass(frozen=True, slots=True)
class _Criteria:
    id: str
    given: dict[str, Any] | list[Any] | None
    as_texts: bool

    def invalid(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"question {_shown(self.id)}: {what}", param="questions")


def _choice(criteria: _Criteria) -> tuple[Option, ...]:
    given = criteria.given
    if not isinstance(given, dict) or not given:
        what = "a choice needs criteria: an object {name of an option: description or null}"
        raise criteria.invalid(what)
    if criteria.as_texts and len(given) > MAX_TEXTS:
        what = f"it has {len(given)} options, and at most {MAX_TEXTS} are scored as texts"
        raise criteria.invalid(what)
    if not criteria.as_texts and len(given) > MAX_OPTIONS:
        what = (
            f"it has {len(given)} options, and a choice has at most {MAX_OPTIONS}, one for each "
            "letter: ask in two rounds, first for a group of options, or with as_texts"
        )
        raise criteria.invalid(what)
    if not all(map(str.strip, given)):
        what = "the name of an option is empty: give each option a name"
        raise criteria.invalid(what)
    return tuple(Option(name, content_text(text), text) for name, text in given.items())


def _score(criteria: _Criteria) -> tuple[Option, ...]:
    given = criteria.given
    if not isinstance(given, list) or not LEAST_LEVELS <= len(given) <= MAX_LEVELS:
        have = f"{len(given)} levels" if isinstance(given, list) else "no list of levels"
        what = (
            f"it has {have}, and a score needs criteria: a list of {LEAST_LEVELS} to {MAX_LEVELS} "
            "levels, the lowest first"
        )
        raise criteria.invalid(what)
    texts = [content_text(level).strip() for level in given]
    if not all(texts):
        what = "a level is empty: describe each level"
        raise criteria.invalid(what)
    if len(set(texts)) < len(texts):
        what = "two levels are equal: describe each level in other words"
        raise criteria.invalid(what)
    return tuple(Option(text, "", level) for text, level in zip(texts, given, strict=True))


def _noul(criteria: _Criteria) -> tuple[Option, ...]:
    given = {} if criteria.given is None else criteria.given
    if not isinstance(given, dict) or not given.keys() <= {"true", "false"}:
        what = 'criteria of a noul may only describe "true" and "false": omit them, or send these'
        raise criteria.invalid(what)
    texts = given.get("true"), given.get("false")
    return tuple(
        Option(name, content_text(text), text)
        for name, text in zip(("yes", "no"), texts, strict=True)
    )


_OPTIONS = {"choice": _choice, "score": _score, "noul": _noul}


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "...")
