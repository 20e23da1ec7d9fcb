"""LibraryCoder: encodes texts in this process, with the library tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.tokenizer.coder import Encoded, TokenSpan
from cpuserve.tokenizer.masks import PlainCore, new_nonces
from cpuserve.tokenizer.parts import Scheme
from cpuserve.tokenizer.unlocked import LONG_CHARS, encoded

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Core

# Normalizers that drop no characters.
# NFC shrinks a text to no less than a third of its bytes (Hangul).
_KEEPING = frozenset({"NFC", "NFD", "Prepend", "ByteLevel"})
_COMPOSED_BYTES = 3


class LibraryCoder:
    """A Coder with the Tokenizer object `core` of the library; scheme: see Parts."""

    waits = False

    def __init__(self, core: Core, scheme: Scheme) -> None:
        self._core = core
        self._scheme = scheme

    def added(self) -> Mapping[int, AddedToken]:
        """Return the added tokens by id."""
        tokens: Mapping[int, AddedToken] = self._core.get_added_tokens_decoder()
        return tokens

    def text_of(self, token_id: int) -> str | None:
        """Return the token as written in the vocabulary; None for an id without a token."""
        text: str | None = self._core.id_to_token(token_id)
        return text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary; None if there is none."""
        token_id: int | None = self._core.token_to_id(token)
        return token_id

    def encode(
        self, text: str | tuple[str, str], *, add_special_tokens: bool, unlocked: bool
    ) -> Encoded:
        """Return the tokens of a text, or of a pair of texts; see Coder."""
        # `encode` holds the GIL: a text of 400k characters stopped all streams for a second.
        if unlocked:
            return encoded(self._core, text, add_special_tokens=add_special_tokens)
        first, second = (text, None) if isinstance(text, str) else text
        tokens: Encoded = self._core.encode(first, second, add_special_tokens=add_special_tokens)
        return tokens

    def spans(
        self, text: str, *, add_special_tokens: bool, most: int | None
    ) -> list[TokenSpan] | None:
        """Return the tokens of a text with their places; None if there are more than `most`."""
        if len(text) <= LONG_CHARS:
            tokens = self._core.encode(text, add_special_tokens=add_special_tokens)
        else:
            tokens = encoded(self._core, text, add_special_tokens=add_special_tokens, places=True)
        if most is not None and len(tokens) > most:
            return None
        # The list of all offsets would be made in one call, which keeps the GIL.
        places = (tokens.token_to_chars(index) or (0, 0) for index in range(len(tokens)))
        parts = zip(tokens.ids, tokens.tokens, places, tokens.special_tokens_mask, strict=True)
        return [TokenSpan(i, name, *at, bool(special)) for i, name, at, special in parts]

    def ordinary(
        self, control: Mapping[str, int], nonces: Mapping[str, str] | None = None
    ) -> PlainCore:
        """Return an encoder that treats the texts of these control tokens as ordinary.

        nonces: the text of each control token; None = new ones.
        """
        return PlainCore(self._core, control, new_nonces(control) if nonces is None else nonces)

    def most_bytes(self) -> int | None:
        """Return the maximum number of UTF-8 bytes of text per token; None if there is none."""
        core = self._core
        added = core.get_added_tokens_decoder().values()
        if self._scheme == "plain" or any(token.lstrip or token.rstrip for token in added):
            return None
        by_bytes = self._scheme == "byte_level"
        if not _keeps_text(core) or not (by_bytes or getattr(core.model, "byte_fallback", False)):
            return None  # characters may be dropped, or many may become one unknown token
        # In GPT-2's alphabet a character is one byte; the text of added tokens is plain.
        spelled = core.get_vocab(with_added_tokens=True)
        if by_bytes:
            longest = max(map(len, spelled))
        else:
            longest = max(len(token.replace("\u2581", " ").encode()) for token in spelled)
        longest = max([longest, *(len(token.content.encode()) for token in added)])
        return longest * (1 if core.normalizer is None else _COMPOSED_BYTES)

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their texts."""
        ids: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        return ids

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        text: str = self._core.to_str()
        return text

    def close(self) -> None:
        """Do nothing: the vocabulary is freed with this object."""


def _keeps_text(core: Core) -> bool:
    """Return whether the normalizer drops no characters, apart from composing them (NFC)."""
    if core.normalizer is None:
        return True
    state = json.loads(core.normalizer.__getstate__())
    steps = state.get("normalizers", [state])
    return all(step.get("type") in _KEEPING or _grows(step) for step in steps)


def _grows(step: dict[str, Any]) -> bool:
    """Return whether a normalizer step replaces a text by one with at least as many bytes."""
    old = (step.get("pattern") or {}).get("String")
    new = step.get("content")
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return len(new.encode()) >= len(old.encode())
