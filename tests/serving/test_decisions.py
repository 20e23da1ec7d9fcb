"""Questions, their labels, and the results that the labels' logprobs give."""

import math

import msgspec
import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.ipc import TokenLogprob
from cpuserve.serving.decisions.labels import LabelFinder, Labels, question_text
from cpuserve.serving.decisions.questions import (
    DecisionQuestion,
    checked,
    content_text,
    questions_from,
    questions_of,
)
from cpuserve.serving.decisions.results import decided
from cpuserve.serving.decisions.texts import PromptEnd
from tests.api.fakes import tokenizer

TAIL = "<|im_end|>\n<|im_start|>assistant\n"


class Words:
    """A tokenizer of words: each of `words` is a token, other characters are one token each."""

    def __init__(self, *words):
        self.words = sorted(words, key=len, reverse=True)
        self.ids = {}

    def encode_masked(self, text):
        ids = []
        while text:
            word = next((w for w in self.words if text.startswith(w)), text[0])
            ids.append(self.ids.setdefault(word, len(self.ids)))
            text = text[len(word) :]
        return ids


def asked(**question) -> DecisionQuestion:
    (found,) = checked(questions_from({"q": question}))
    return found


CHOICE = {"type": "choice", "criteria": {"billing": "pay", "security": None}}
SCORE = {"type": "score", "criteria": ["calm", {"level": "angry"}]}
NOUL = {"type": "noul", "instructions": "Is it urgent?"}


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"type": "choice"}, "a choice needs criteria"),
        ({"type": "choice", "criteria": {}}, "a choice needs criteria"),
        ({"type": "choice", "criteria": ["a"]}, "a choice needs criteria"),
        ({"type": "choice", "criteria": {str(i): None for i in range(27)}}, "it has 27 options"),
        ({"type": "choice", "criteria": {" ": None}}, "the name of an option is empty"),
        ({"type": "score", "criteria": {"0": "calm"}}, "no list of levels"),
        ({"type": "score", "criteria": ["calm"]}, "it has 1 levels"),
        ({"type": "score", "criteria": [str(i) for i in range(11)]}, "it has 11 levels"),
        ({"type": "score", "criteria": ["calm", "calm"]}, "two levels are equal"),
        ({"type": "score", "criteria": ["calm", None]}, "a level is empty"),
        ({"type": "noul", "criteria": {"yes": "it is"}}, '"true" and "false"'),
        ({"type": "noul", "criteria": ["yes", "no"]}, '"true" and "false"'),
        ({"type": "boolean"}, "boolean"),
        ({"type": "noul", "examples": []}, "examples"),
        ({"type": "noul", "instructions": None, "criteria": 5}, "criteria"),
        ("urgent?", "type, instructions, criteria and as_texts"),
    ],
)
def test_an_invalid_question_is_refused_with_its_fault(question, words):
    with pytest.raises(InvalidRequest, match=words) as raised:
        checked(questions_from({"q": question}))
    assert raised.value.param == "questions"


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ({}, "0 questions"),
        ({str(i): NOUL for i in range(10_000)}, "10000 questions"),
        ([], "object"),
    ],
)
def test_none_and_too_many_questions_are_refused(questions, words):
    with pytest.raises(InvalidRequest, match=words):
        questions_from(questions)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"q": {"type": "noul"}, "q": {"type": "noul"}}',
        b'{"q": {"type": "choice", "criteria": {"a": "one", "a": "two"}}}',
    ],
)
def test_a_name_that_occurs_twice_is_refused(raw):
    with pytest.raises(InvalidRequest, match="occurs twice"):
        questions_of(msgspec.Raw(raw))


@pytest.mark.parametrize("value", [b"[" * 100_000 + b"]" * 100_000, b"9" * 5000])
def test_json_that_python_cannot_read_is_refused(value):
    with pytest.raises(InvalidRequest, match="nested too deeply, or have a number"):
        questions_of(msgspec.Raw(b'{"q": ' + value + b"}"))


def test_an_object_that_is_no_json_is_refused():
    with pytest.raises(InvalidRequest, match="neither a text nor JSON"):
        content_text({"a": object()})


def test_an_empty_id_is_refused():
    with pytest.raises(InvalidRequest, match="an id is empty"):
        checked(questions_from({"": NOUL}))


def test_questions_show_their_labels():
    finder = LabelFinder(PromptEnd(Words("yes", "Yes", "no", "No", "A", "B", "0", "1"), TAIL))

    def text(**question):
        found = asked(**question)
        return question_text(found, finder.labels(found))

    assert text(**CHOICE, instructions="Which team?") == (
        "Which team?\nA. billing: pay\nB. security\nReply with A or B, and write nothing else."
    )
    assert text(**SCORE) == (
        '0. calm\n1. {"level": "angry"}\nReply with 0 or 1, and write nothing else.'
    )
    assert text(**NOUL) == "Is it urgent?\nReply with yes or no, and write nothing else."
    assert text(**NOUL, criteria={"true": "a deadline"}) == (
        "Is it urgent?\nyes: a deadline\nReply with yes or no, and write nothing else."
    )
    many = {"type": "choice", "criteria": dict.fromkeys("abcd")}
    assert text(**many).endswith("\nD. d\nReply with one of A to D, and write nothing else.")


def test_capital_spellings_count_if_they_are_tokens():
    both = Words("yes", "Yes", "no", "No")
    found = LabelFinder(PromptEnd(both, TAIL)).labels(asked(**NOUL))
    assert found.shown == ("yes", "no")
    assert found.ids == (
        (both.ids["yes"], both.ids["Yes"]),
        (both.ids["no"], both.ids["No"]),
    )
    assert found.flat == [both.ids[word] for word in ("yes", "Yes", "no", "No")]
    small = Words("yes", "no")
    assert LabelFinder(PromptEnd(small, TAIL)).labels(asked(**NOUL)).ids == (
        (small.ids["yes"],),
        (small.ids["no"],),
    )


def test_letters_stand_in_for_words_that_are_no_tokens():
    question = asked(**NOUL)
    found = LabelFinder(PromptEnd(tokenizer(), TAIL)).labels(question)
    assert found.shown == ("A", "B")
    assert "\nA. yes\nB. no\nReply with A or B" in question_text(question, found)


def test_a_label_may_need_a_space_before_it():
    """After "Bot:" this tokenizer joins the colon and a letter, but not the colon and " A"."""
    words = Words(":A", ":B", ":0", ":1", " A", " B")
    found = LabelFinder(PromptEnd(words, "\nBot:")).labels(asked(**CHOICE))
    assert found == Labels(("A", "B"), ((words.ids[" A"],), (words.ids[" B"],)))


def test_without_labels_the_question_is_refused_with_what_was_tried():
    joined = Words(*(":" + c for c in "ABab01yYnN"), ": ")
    with pytest.raises(InvalidRequest, match=r"A/B, 0/1\. Ask with fewer options") as raised:
        LabelFinder(PromptEnd(joined, "\nBot:")).labels(asked(**CHOICE))
    assert raised.value.param == "questions"


def test_labels_that_are_one_unknown_token_are_no_labels():
    class Unknown(Words):
        def encode_masked(self, text):
            return [0 if len(text) > len("." + TAIL) else 1] * len(text)

    with pytest.raises(InvalidRequest, match="one token of its own"):
        LabelFinder(PromptEnd(Unknown(), TAIL)).labels(asked(**CHOICE))


def row(*probabilities, token=0):
    """The most likely token, and labels 10, 11, ... with these probabilities over all tokens."""
    top = [(10 + i, math.log(p)) for i, p in enumerate(probabilities)]
    return TokenLogprob(token, -0.1, 1, top)


def test_a_choice_has_shares_of_the_labels_and_confidence_over_all_tokens():
    labels = Labels(("A", "B"), ((10,), (11,)))
    found, seen = decided(asked(**CHOICE), labels, [row(0.2, 0.6, token=11)])
    assert found.choice == "security"
    assert found.probabilities == pytest.approx({"billing": 0.25, "security": 0.75})
    assert found.confidence == pytest.approx(0.6)
    assert seen.label_mass == pytest.approx(0.8)
    assert seen.argmax_is_label


def test_a_score_is_the_expected_level_and_its_legend_is_what_was_sent():
    question = asked(type="score", criteria=["calm", {"level": "angry"}, "furious"])
    labels = Labels(("0", "1", "2"), ((10,), (11,), (12,)))
    found, seen = decided(question, labels, [row(0.1, 0.1, 0.2, token=7)])
    assert found.score == pytest.approx(0.25 + 2 * 0.5)
    assert found.legend == {"0": "calm", "1": {"level": "angry"}, "2": "furious"}
    assert found.probabilities == pytest.approx({"0": 0.25, "1": 0.25, "2": 0.5})
    assert found.confidence == pytest.approx(0.2)
    assert seen.label_mass == pytest.approx(0.4)
    assert not seen.argmax_is_label


def test_a_noul_adds_the_spellings_of_yes():
    labels = Labels(("yes", "no"), ((10, 11), (12, 13)))
    found, seen = decided(asked(**NOUL), labels, [row(0.1, 0.2, 0.06, 0.04)])
    assert found.noul == pytest.approx(0.75)
    assert found.probabilities == pytest.approx({"yes": 0.75, "no": 0.25})
    assert found.confidence == pytest.approx(0.3)
    assert seen.label_mass == pytest.approx(0.4)


def test_labels_far_below_all_other_tokens_still_have_shares():
    labels = Labels(("A", "B"), ((10,), (11,)))
    far = TokenLogprob(0, 0.0, 1, [(10, -900.0), (11, -900.0 + math.log(3))])
    found, seen = decided(asked(**CHOICE), labels, [far])
    assert found.probabilities == pytest.approx({"billing": 0.25, "security": 0.75})
    assert (found.confidence, seen.label_mass) == (0.0, 0.0)
