"""What every source of a tokenizer (tokenizer.json, vocab and merges, GGUF) boils down to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cpuserve.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# How a token's spelling becomes bytes: GPT-2's byte alphabet; SentencePiece's U+2581 for a space
# and <0xNN> for a byte; or the spelling itself.
Scheme = Literal["byte_level", "byte_fallback", "plain"]

# Special tokens that end a turn or a message in a chat format; a model that has one means it.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
)
# Ends of a document. Hugging Face models list them in generation_config.json; GGUF has no place.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded tokenizer and the facts around it; `special_tokens` maps "bos_token" to its text.

    add_bos: put bos_id before a text, as the core's own post-processor does not.
    """

    core: Core
    scheme: Scheme
    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    add_bos: bool = False
    strips_leading_space: bool = False


def guarded(what: str, build: Callable[[], Core]) -> Core:
    """build(), with every failure of the tokenizers library turned into a ModelError."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError, ModelError):
        raise
    except BaseException as error:
        # The library raises bare Exception, and a Rust panic is a BaseException. Its text quotes
        # the file, so what a terminal would act on is escaped.
        reason = "".join(
            c if c.isprintable() else repr(c)[1:-1] for c in " ".join(str(error).split())
        )
        msg = f"broken tokenizer in {what}: {reason[:300]}"
        raise ModelError(msg) from error


def special_ids_of(core: Core) -> frozenset[int]:
    """Ids of the added tokens that are left out of the text when special tokens are skipped."""
    added: dict[int, Any] = core.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


def end_ids(core: Core, special: frozenset[int], texts: Iterable[str]) -> list[int]:
    """Ids of those `texts` that are special tokens of this vocabulary."""
    ids = (core.token_to_id(text) for text in texts)
    return [i for i in ids if i is not None and i in special]
