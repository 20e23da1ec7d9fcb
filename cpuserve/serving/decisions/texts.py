"""Options as texts: the logprob of an option is the logprob of its text of several tokens.

The logprob of a text is the sum of the logprobs of its tokens after the question. The texts
of a question form a tree of tokens. Each inner node is a prompt, and its labels are the tokens
that may follow there. Texts that begin with the same tokens share the distributions of these nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.decisions.questions import BEFORE

if TYPE_CHECKING:
    from cpuserve.serving.decisions.questions import DecisionQuestion
    from cpuserve.tokenizer.tokenizer import Tokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OptionTexts:
    """The tokens of the text of each option of a question."""

    ids: tuple[Ids, ...]

    @property
    def nodes(self) -> dict[Ids, list[int]]:
        """{beginning of a text: the tokens that follow it in some text}; the first key is ()."""
        found: dict[Ids, list[int]] = {}
        for ids in self.ids:
            for at, token in enumerate(ids):
                following = found.setdefault(ids[:at], [])
                if token not in following:
                    following.append(token)
        return found

    def logprobs(self, rows: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
        """Return the logprob of each text.

        rows: the tokens that follow each node, with their logprobs, in the order of the nodes.
        """
        of_nodes = dict(zip(self.nodes, map(dict, rows), strict=True))
        return [sum(self._tokens(ids, of_nodes)) for ids in self.ids]

    @staticmethod
    def _tokens(ids: Ids, of_nodes: dict[Ids, dict[int, float]]) -> Iterator[float]:
        return (of_nodes[ids[:at]][token] for at, token in enumerate(ids))


class PromptEnd:
    """The end of the prompts of questions: the text between a question and the response."""

    def __init__(self, tokenizer: Tokenizer, tail: str) -> None:
        """tail: the text after the question, with masks (tokenizer/masks.py)."""
        self._tokenizer = tokenizer
        self._text = BEFORE + tail
        self._ids = self.ids_of(self._text)

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of a masked text on its own."""
        return self._tokenizer.encode_masked(text)

    def ids_after(self, text: str) -> list[int]:
        """Return the tokens that `text` adds to the prompt; [] if earlier tokens would change."""
        whole, num = self.ids_of(self._text + text), len(self._ids)
        return whole[num:] if whole[:num] == self._ids else []


def option_texts(end: PromptEnd, question: DecisionQuestion) -> OptionTexts:
    """Return the tokens of each option's text at the end of a prompt.

    Raises:
      InvalidRequest: the texts of two options have the same tokens.
    """
    # If a text would change the last token of the prompt, it is tokenized on its own.
    names = (option.name.strip() for option in question.options)
    found = [tuple(end.ids_after(name) or end.ids_of(name)) for name in names]
    if not all(found) or len(set(found)) < len(found):
        msg = f"question {question.id[:60]!r}: two options have the same text: rename one of them"
        raise InvalidRequest(msg, param="questions")
    return OptionTexts(tuple(found))


def text_question(question: DecisionQuestion) -> str:
    """Return the text of a question with its options, which follows the state in the prompt."""
    lines = [question.instructions] if question.instructions else []
    for option in question.options:
        described = f": {option.description}" if option.description else ""
        lines.append(f"- {option.name.strip()}{described}")
    lines.append(f"Reply with one of these options, and write nothing else{BEFORE}")
    return "\n".join(lines)
