"""The markers of the items of one kind in prompts, and the tokens that take their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.serving.media.cache import MOST_FILES

if TYPE_CHECKING:
    from cpuserve.media.kinds import MarkerTexts
    from cpuserve.tokenizer.tokenizer import Tokenizer


class Expansion:
    """Writes and finds the markers of one kind for one model.

    marker: the id of the token that templates write for an item.
    placeholder: the id of the token for a row of the tower.
    """

    def __init__(self, texts: MarkerTexts, tokenizer: Tokenizer) -> None:
        """Raises ModelError if the tokenizer has no such marker."""
        self._texts = texts
        self._tokenizer = tokenizer
        self.marker = _token(tokenizer, texts.marker)
        self.placeholder = _token(tokenizer, texts.placeholder)
        self._ids_of: dict[str, list[int]] = {}

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts with which users write an item, the longest first."""
        texts = self._texts
        frame = texts.before + texts.after
        framed = (f"{texts.before}{texts.marker}{texts.after}",) if frame else ()
        return (*framed, texts.marker, *(() if texts.written is None else (texts.written,)))

    @property
    def framed(self) -> str:
        """The marker of an item with the texts that chat templates write around it."""
        return f"{self._texts.before}{self.spaced(self._texts.marker)}{self._texts.after}"

    def with_markers(self, text: str, count: int) -> str:
        """Return a rendered prompt with a marker in place of each `MarkerTexts.written`.

        count: the number of items. If the prompt has another number of these texts, a user may
          have written some, so it stays as it is.
        """
        template_text = self._texts.written
        if template_text is None or self.is_marked(text) or text.count(template_text) != count:
            return text
        return text.replace(template_text, self._texts.marker)

    def is_marked(self, text: str) -> bool:
        """Whether a rendered prompt has the marker of an item."""
        return self._texts.marker in text

    def marked(self, text: str, mark: str) -> str:
        """Return a rendered prompt with the marker of an item in place of each `mark`."""
        return text.replace(mark, self._texts.marker)

    def spaced(self, text: str) -> str:
        """Return a rendered prompt with the text that belongs around each marker of an item."""
        gap, marker = self._texts.gap, self._texts.marker
        return text.replace(marker, f"{gap}{marker}{gap}") if gap else text

    def spaced_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, with those of the text around each marker."""
        gap = self._tokenizer.encode(self._texts.gap, add_special_tokens=False)
        pieces = ((*gap, token, *gap) if token == self.marker else (token,) for token in ids)
        return [token for piece in pieces for token in piece]

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of the text of a layout."""
        ids = self._ids_of.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False, unlocked=True)
            if len(self._ids_of) > MOST_FILES:
                self._ids_of.clear()
            self._ids_of[text] = ids
        return ids

    def spans(self, ids: Sequence[int], begin: int) -> list[tuple[int, int]]:
        """Return (position, length) of each run of placeholders; begin: the position of ids[0]."""
        spans: list[tuple[int, int]] = []
        for position, token in enumerate(ids, begin):
            if token != self.placeholder:
                continue
            if spans and sum(spans[-1]) == position:
                spans[-1] = (spans[-1][0], spans[-1][1] + 1)
            else:
                spans.append((position, 1))
        return spans


def _token(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of the token with this text; ModelError if the text is not one token."""
    token = tokenizer.token_id(text)
    if token is None or not tokenizer.is_token(text):
        msg = f"the tokenizer has no token {text!r}"
        raise ModelError(msg)
    return token
