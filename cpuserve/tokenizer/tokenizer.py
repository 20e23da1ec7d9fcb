"""The tokenizer of one model: ids, bytes and texts of tokens, and which of them end a turn."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.loader.load import find_model

if TYPE_CHECKING:
    from cpuserve.tokenizer.parts import Parts

LONG_CHARS = 4096  # below, a call takes less than handing it to another thread is worth

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes text and gives each id its bytes.

    An id the vocabulary does not have (models pad theirs) has no bytes and no text. Thread-safe:
    nothing but a cache changes after loading.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._bytes: dict[int, bytes] = {}
        self._byte_of = _byte_level_bytes() if parts.scheme == "byte_level" else {}
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.special_ids = parts.special_ids
        self.special_tokens = parts.special_tokens
        self.chat_template = parts.chat_template
        self.strips_leading_space = parts.strips_leading_space

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a model directory (tokenizer.json, or vocab.json and merges.txt) or a .gguf file.

        ModelError if there is none, or it is broken or of an unsupported kind.
        """
        path = find_model(Path(path))
        if path.is_dir():
            from cpuserve.tokenizer.directory import directory_parts

            return cls(directory_parts(path))
        from cpuserve.tokenizer.from_gguf import gguf_parts

        return cls(gguf_parts(path))

    def encode(
        self, text: str, add_special_tokens: bool = True, *, unlocked: bool = False
    ) -> list[int]:
        """Token ids of `text`; the text of a special token becomes that token.

        add_special_tokens: put BOS in front if the model was trained so. unlocked: without Python's
        lock also if the text is short, for another thread than the event loop's. InvalidRequest for
        a text that is no valid Unicode (a lone surrogate).
        """
        try:
            ids = self._encode(text, add_special_tokens, unlocked or len(text) > LONG_CHARS)
        except (UnicodeError, TypeError) as error:
            raise _not_unicode(text) from error
        if add_special_tokens and self._parts.add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def _encode(self, text: str, add_special_tokens: bool, unlocked: bool) -> list[int]:
        # `encode` keeps the GIL, which stopped all streams for a second over 400k characters.
        if unlocked:
            found = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            found = self._core.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        from cpuserve.tokenizer.detokenize import Detokenizer

        whole = Detokenizer(self, (), skip_special_tokens)
        return whole.push(ids) + whole.flush()

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it ("Ġthe"); "" for an id without a token."""
        if not 0 <= token_id < 2**31:
            return ""
        return self._core.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for, maybe part of a character; b"" without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._to_bytes(self.token_text(token_id))
            if found:
                self._bytes[token_id] = found
        return found

    def _to_bytes(self, token: str) -> bytes:
        if self._parts.scheme == "byte_level":
            try:
                return bytes([self._byte_of[c] for c in token])
            except KeyError:
                # An added token whose text is not in the byte alphabet stands for itself.
                return token.encode()
        if self._parts.scheme == "byte_fallback":
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()
        return token.encode()


def _not_unicode(text: str) -> InvalidRequest:
    found = re.search("[\ud800-\udfff]", text)
    where = f" at character {found.start()}" if found else ""
    return InvalidRequest(f"the text holds a lone surrogate{where}, which no UTF-8 can spell")


@lru_cache(maxsize=1)
def _byte_level_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    Source: Radford et al. 2019, encoder.py bytes_to_unicode.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    others = [b for b in range(256) if b not in set(plain)]
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table
