"""Labels: the tokens that stand for the options of a question, and how the question shows them.

A label must be one token where the response begins: a decision is the distribution of that token.
Which labels are single tokens depends on the tokenizer and on the end of the chat prompt.
Each type of question therefore has several sets of labels, and the first set that fits is used.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.decisions.questions import BEFORE

if TYPE_CHECKING:
    from cpuserve.serving.decisions.questions import DecisionQuestion
    from cpuserve.serving.decisions.texts import OptionTexts, PromptEnd

# The spellings of the label of each option of a question; the prompt shows the first spelling.
Spellings = tuple[tuple[str, ...], ...]

_LETTERS: Spellings = tuple((letter,) for letter in string.ascii_uppercase)
_DIGITS: Spellings = tuple((digit,) for digit in string.digits)
# Models that are asked for "yes" often write "Yes", so both spellings count.
_WORDS: tuple[Spellings, ...] = (
    (("yes", "Yes"), ("no", "No")),
    (("yes",), ("no",)),
    (("Yes",), ("No",)),
)
_SETS: dict[str, tuple[Spellings, ...]] = {
    "choice": (_LETTERS, _DIGITS),
    "score": (_DIGITS, _LETTERS),
    "noul": (*_WORDS, _LETTERS, _DIGITS),
}
# The end of a question repeats its labels. If there are more than this number of labels,
# it repeats only the first and the last one ("one of A to F").
_MOST_LISTED = 3


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a question's options: their texts in the prompt, and the token ids of each.

    texts: if options are scored as texts, the texts that these labels are tokens of;
      None = each option has a label.
    """

    shown: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    texts: OptionTexts | None = None

    @property
    def flat(self) -> list[int]:
        """The ids of all spellings of all labels, in the order of the options."""
        return [number for ids in self.ids for number in ids]


class LabelFinder:
    """Finds labels for questions at the end of prompts."""

    def __init__(self, end: PromptEnd) -> None:
        self._end = end
        self._ids: dict[str, int | None] = {}
        self._found: dict[tuple[str, int], Labels] = {}

    def labels(self, question: DecisionQuestion) -> Labels:
        """Return the labels of a question; InvalidRequest if no set fits this tokenizer."""
        key = question.kind, len(question.options)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._find(question)
        return found

    def _find(self, question: DecisionQuestion) -> Labels:
        count = len(question.options)
        sets = [each[:count] for each in _SETS[question.kind] if len(each) >= count]
        for spellings in sets:
            for space in ("", " "):  # after some prompts, a word begins with a space
                ids = [self._ids_of(space, texts) for texts in spellings]
                all_ids = [number for texts in ids for number in texts]
                if len(set(all_ids)) == sum(map(len, spellings)):
                    return Labels(tuple(texts[0] for texts in spellings), tuple(ids))
        tried = ", ".join("/".join(texts[0] for texts in each) for each in sets)
        msg = (
            f"question {question.id[:60]!r}: this model has no labels for its {count} options, "
            "because each label must be one token of its own after the chat prompt. These were "
            f"tried: {tried}. Ask with fewer options, or use a model with another tokenizer"
        )
        raise InvalidRequest(msg, param="questions")

    def _ids_of(self, space: str, texts: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of the spellings that are one token each."""
        found = (self._id(space + text) for text in texts)
        return tuple(number for number in found if number is not None)

    def _id(self, label: str) -> int | None:
        """Return the token that `label` adds to the prompt; None if it is not one token."""
        if label not in self._ids:
            ids = self._end.ids_after(label)
            self._ids[label] = ids[0] if len(ids) == 1 else None
        return self._ids[label]


def question_text(question: DecisionQuestion, labels: Labels) -> str:
    """Return the text of a question with its labels, which follows the state in the prompt."""
    lines = [question.instructions] if question.instructions else []
    for option, label in zip(question.options, labels.shown, strict=True):
        if question.kind == "noul" and option.name == label.lower():  # avoids "Yes: yes"
            lines += [f"{label}: {option.description}"] if option.description else []
        else:
            described = f": {option.description}" if option.description else ""
            lines.append(f"{label}. {option.name}{described}")
    lines.append(f"Reply with {_listed(labels.shown)}, and write nothing else{BEFORE}")
    return "\n".join(lines)


def _listed(labels: Sequence[str]) -> str:
    if len(labels) > _MOST_LISTED:
        return f"one of {labels[0]} to {labels[-1]}"
    return " or ".join(labels)
