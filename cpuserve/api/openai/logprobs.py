"""Convert logprobs to three API formats: chat, legacy completions, and prompt_logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.openai.schema import (
    ChatLogprob,
    ChatLogprobs,
    LegacyLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.calls.call import Prompt
    from cpuserve.tokenizer.tokenizer import Tokenizer

# JSON has no -inf, so vLLM and this server send -9999 for tokens with probability 0.
_FLOOR = -9999.0


class TokenNames:
    """Maps token ids to the strings in logprobs; `as_ids`: use "token_id:N" instead of the text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._invisible = tokenizer.special_ids if skip_special_tokens else frozenset()

    def raw(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be only a part of a character."""
        return self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        """Return the token as text; an incomplete UTF-8 character becomes U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self.raw(token).decode("utf-8", "replace")

    def visible(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text: none for a skipped special token."""
        return b"" if token in self._invisible else self.raw(token)


def _num_chars(utf8: bytes) -> int:
    """Return the number of UTF-8 characters that begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in utf8)


def finite(logprob: float) -> float:
    """Return `logprob`, or -9999 in place of lower values such as -inf."""
    return logprob if logprob > _FLOOR else _FLOOR


def chat_logprobs(entries: Sequence[TokenLogprob], top: int, names: TokenNames) -> ChatLogprobs:
    """Return the chat format: one entry per token with its `top` most likely alternatives."""
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
    """Builds legacy completion logprobs in pieces; text_offset continues from piece to piece.

    The offset of a token is the index of the character in the text that it begins or continues.
    """

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top
        self._chars = 0

    def piece(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> LegacyLogprobs:
        """Return the parallel lists for `tokens`; a token with the entry None has no logprobs."""
        return self._piece(tokens, entries, self._names.visible)

    def prompt(
        self, prompt: Prompt, entries: Sequence[TokenLogprob | None], strips_space: bool
    ) -> LegacyLogprobs:
        """Return the parallel lists for an echoed prompt, which must be the first piece.

        strips_space: whether the tokenizer puts a space before a text and drops it when decoding.
        Tokens before the text, such as this space or a beginning-of-text token, have offset 0.
        """
        if prompt.text is None:
            spelled = b"".join(map(self._names.visible, prompt.ids))
            self._chars = -1 if strips_space and spelled.startswith(b" ") else 0
            return self._piece(prompt.ids, entries, self._names.visible)
        # A prompt that was sent as text is echoed unchanged, including its special tokens.
        spelled = b"".join(map(self._names.raw, prompt.ids))
        self._chars = len(prompt.text) - _num_chars(spelled)
        return self._piece(prompt.ids, entries, self._names.raw)

    def _piece(
        self,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        spell: Callable[[int], bytes],
    ) -> LegacyLogprobs:
        out = LegacyLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries, strict=True):
            out.tokens.append(self._names.name(token))
            out.text_offset.append(self._advance(spell(token)))
            out.token_logprobs.append(None if entry is None else finite(entry.logprob))
            out.top_logprobs.append(None if entry is None else self._alternatives(entry))
        return out

    def _advance(self, raw: bytes) -> int:
        continues = bool(raw) and raw[0] & 0xC0 == 0x80
        offset = self._chars - continues
        self._chars += _num_chars(raw)
        return max(offset, 0)

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the `top` most likely tokens and the chosen token, up to top + 1 entries."""
        out: dict[str, float] = {}
        chosen = self._names.name(entry.token)
        for token, logprob in [*entry.top[: self._top], (entry.token, entry.logprob)]:
            name = self._names.name(token)
            # Several ids may have the same text, such as parts of characters. The chosen token,
            # or else the most likely one, keeps the text; further ids become "token_id:N".
            if token != entry.token and (name == chosen or name in out):
                name = f"token_id:{token}"
            out.setdefault(name, finite(logprob))
        return out


def joined(first: LegacyLogprobs, second: LegacyLogprobs) -> LegacyLogprobs:
    """Return each list of `first`, followed by the same list of `second`."""
    return LegacyLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, top: int | None, names: TokenNames
) -> PromptLogprobs | None:
    """Return the vLLM format: a {token id: PromptLogprob} per position; the first is None."""
    if entries is None or top is None:
        return None
    return [None if entry is None else _prompt_entry(entry, top, names) for entry in entries]


def _prompt_entry(entry: TokenLogprob, top: int, names: TokenNames) -> dict[str, PromptLogprob]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
    return {
        str(token): PromptLogprob(finite(logprob), rank, names.name(token))
        for token, logprob, rank in [(entry.token, entry.logprob, entry.rank), *ranked]
    }
