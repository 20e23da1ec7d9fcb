"""The common result of loading a tokenizer from tokenizer.json, vocab and merges, or GGUF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cpuserve.base.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

Built = TypeVar("Built")
MAX_TOKENS = 1 << 21  # the vocabulary of XLM-V has about 1 << 20
MAX_TOKEN_CHARS = 1024  # each place of an unknown token has its text, and responses have it
# How the text of a token becomes bytes:
#   byte_level      the alphabet of GPT-2, a character for each byte
#   byte_fallback   SentencePiece, where U+2581 is a space and <0xNN> a byte
#   plain           UTF-8
Scheme = Literal["byte_level", "byte_fallback", "plain"]


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded tokenizer and its properties; `special_tokens` maps "bos_token" etc. to its text.

    tool_template: the chat template for requests with tools, if the model has a separate one.
    add_bos: whether to put bos_id before a text, because the post-processor of `core` does not.
    prompts: {name: a text that a request can put before a text to be embedded};
      prompts[""] is the default.
    """

    core: Core
    scheme: Scheme
    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    tool_template: str | None = None
    add_bos: bool = False
    strips_leading_space: bool = False
    prompts: dict[str, str] = field(default_factory=dict)


def guarded(what: str, build: Callable[[], Built]) -> Built:
    """Return the result of build(); every error of the tokenizers library becomes a ModelError."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError, ModelError):
        raise
    except BaseException as error:
        # The library tokenizers raises bare Exception, and a Rust panic is a BaseException.
        msg = f"broken tokenizer in {what}: {reason_of(error)}"
        raise ModelError(msg) from error


def reason_of(error: BaseException) -> str:
    """Return the error's message on one line; it may quote a file, so it is escaped."""
    words = " ".join(str(error).split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)[:300]


def check_vocabulary(core: Core) -> None:
    """Raise ValueError if a tokenizer has too many tokens, or one with too long a text.

    Responses consist of these texts, and each process has a copy of them.
    """
    texts: dict[str, int] = core.get_vocab(with_added_tokens=True)
    longest = max(map(len, texts), default=0)
    if len(texts) > MAX_TOKENS or longest > MAX_TOKEN_CHARS:
        msg = (
            f"it has {len(texts)} tokens of up to {longest} characters; at most {MAX_TOKENS} of "
            f"{MAX_TOKEN_CHARS} are accepted"
        )
        raise ValueError(msg)


def special_ids_of(core: Core) -> frozenset[int]:
    """Return the ids of the added tokens that skip_special_tokens removes from the text."""
    added: dict[int, Any] = core.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


@lru_cache(maxsize=1)
def byte_level_bytes() -> dict[str, int]:
    """Return {character: byte} of GPT-2's alphabet.

    The character of a printable Latin-1 byte has the same number.
    The other bytes have the characters from U+0100 on.

    Source: Radford et al. 2019, encoder.py bytes_to_unicode.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    others = [b for b in range(256) if b not in set(plain)]
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table
