"""Log-probabilities in the three shapes clients read: chat, legacy completions, prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.entrypoints.openai.protocol import (
    ChatLogprob,
    ChatLogprobs,
    LegacyLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.tokenizer.tokenizer import Tokenizer

# JSON has no -inf; this is what vLLM writes for "cannot be chosen".
_FLOOR = -9999.0


class TokenNames:
    """Token ids to the strings logprobs carry; `as_ids` writes "token_id:N" instead of text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._invisible = tokenizer.special_ids if skip_special_tokens else frozenset()

    def raw(self, token: int) -> bytes:
        """The UTF-8 bytes of the token, perhaps a part of a character."""
        return self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        """The token as text; a part of a character shows as U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self.raw(token).decode("utf-8", "replace")

    def visible(self, token: int) -> bytes:
        """The bytes the token adds to the text: none for a special token that is skipped."""
        return b"" if token in self._invisible else self.raw(token)


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it."""
    return logprob if logprob > _FLOOR else _FLOOR


def chat_logprobs(entries: Sequence[TokenLogprob], top: int, names: TokenNames) -> ChatLogprobs:
    """One entry per token with its `top` most likely alternatives."""
    return ChatLogprobs([_chat_entry(entry, top, names) for entry in entries])


def _chat_entry(entry: TokenLogprob, top: int, names: TokenNames) -> ChatLogprob:
    return ChatLogprob(
        names.name(entry.token),
        finite(entry.logprob),
        list(names.raw(entry.token)),
        [
            TopLogprob(names.name(token), finite(logprob), list(names.raw(token)))
            for token, logprob in entry.top[:top]
        ],
    )


class LegacyBuilder:
    """Builds the completions shape piece by piece; text_offset runs on over all pieces.

    A token's offset is the index in the text of the character it starts (or continues).
    """

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top
        self._chars = 0

    def piece(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> LegacyLogprobs:
        """The parallel lists of `tokens`; an entry is None where there is no prediction."""
        out = LegacyLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries, strict=True):
            out.tokens.append(self._names.name(token))
            out.text_offset.append(self._advance(token))
            out.token_logprobs.append(None if entry is None else finite(entry.logprob))
            out.top_logprobs.append(None if entry is None else self._alternatives(entry))
        return out

    def _advance(self, token: int) -> int:
        raw = self._names.visible(token)
        continues = bool(raw) and raw[0] & 0xC0 == 0x80
        offset = self._chars - 1 if continues and self._chars else self._chars
        self._chars += sum(byte & 0xC0 != 0x80 for byte in raw)
        return offset

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the chosen one, so up to top + 1 entries."""
        out: dict[str, float] = {}
        for token, logprob in [*entry.top[: self._top], (entry.token, entry.logprob)]:
            # Two ids may have one text; the likelier comes first and stays.
            out.setdefault(self._names.name(token), finite(logprob))
        return out


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, top: int | None, names: TokenNames
) -> PromptLogprobs | None:
    """vLLM's prompt_logprobs: per position {id: {logprob, rank, decoded_token}}, the first null."""
    if entries is None or top is None:
        return None
    return [None if entry is None else _prompt_entry(entry, top, names) for entry in entries]


def _prompt_entry(entry: TokenLogprob, top: int, names: TokenNames) -> dict[str, PromptLogprob]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
    return {
        str(token): PromptLogprob(finite(logprob), rank, names.name(token))
        for token, logprob, rank in [(entry.token, entry.logprob, entry.rank), *ranked]
    }
