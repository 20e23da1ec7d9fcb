"""The tokenizer of a model: encodes text, and returns the bytes and texts of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cpuserve.base.errors import InvalidRequest, ModelError, RequestError
from cpuserve.base.log import get_logger
from cpuserve.tokenizer.coder import TokenSpan
from cpuserve.tokenizer.cut import Cut, kept
from cpuserve.tokenizer.direct_coder import LibraryCoder
from cpuserve.tokenizer.directory import directory_parts, find_tokenizer, why_limited
from cpuserve.tokenizer.masks import Masks
from cpuserve.tokenizer.parts import byte_level_bytes, reason_of
from cpuserve.tokenizer.unlocked import LONG_CHARS

if TYPE_CHECKING:
    from cpuserve.tokenizer.coder import Coder, Encoded, Ordinary
    from cpuserve.tokenizer.parts import Parts

T = TypeVar("T")
# More characters than a token has on average in most texts; and how many tokens may depend on the
# text behind them.
_CHARS_PER_TOKEN, _MARGIN_TOKENS = 6, 1024

log = get_logger("tokenizer")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes text to ids and decodes ids to bytes and text.

    Ids that are not in the vocabulary (models pad their embeddings) have no bytes and no text.
    Thread-safe, because only a cache changes after loading.
    `unload` frees the vocabulary while the model sleeps, and the next use reads it again.
    """

    def __init__(self, parts: Parts, read: Callable[[], Parts] | None = None) -> None:
        """read: returns the same parts again; None = the vocabulary cannot be unloaded."""
        self._read = read
        self._loaded: Coder | None = coder_of(parts)
        self._ordinary: Ordinary | None = None
        self._facts = _facts(parts)
        self._scheme = parts.scheme
        self._add_bos = parts.add_bos
        self._bytes: dict[int, bytes] = {}
        self._byte_of = byte_level_bytes() if parts.scheme == "byte_level" else {}
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.special_ids = parts.special_ids
        self.special_tokens = parts.special_tokens
        self.chat_template = parts.chat_template
        self.tool_template = parts.tool_template
        self.strips_leading_space = parts.strips_leading_space
        self.prompts = parts.prompts

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load from a model directory (tokenizer.json, or vocab.json and merges.txt) or .gguf file.

        Raises ModelError if there is no tokenizer, or it is broken or of an unsupported kind.
        """
        path = find_tokenizer(Path(path))
        made = cls(_parts(path), lambda: _parts(path))
        if made.waits:  # later uses, on an event loop, must not wait
            with made.unloaded_on_error():
                _ = made._around, made.around_nothing
        return made

    @contextmanager
    def unloaded_on_error(self) -> Iterator[None]:
        """Free the vocabulary, and end its processes, if the block raises an error."""
        try:
            yield
        except BaseException:
            self.unload()
            raise

    @property
    def _coder(self) -> Coder:
        return self._loaded or self.load_again()

    @property
    def waits(self) -> bool:
        """Whether encoding waits for another process, so that it must not run on an event loop."""
        return self._coder.waits

    def unload(self) -> None:
        """Free the vocabulary, which has most of the memory of a tokenizer."""
        if self._read is not None and self._loaded is not None:
            self._loaded.close()
            self._loaded, self._ordinary, self._bytes = None, None, {}

    def load_again(self) -> Coder:
        """Read the vocabulary after `unload`.

        Raises:
            ModelError: the files cannot be read, or have changed.
        """
        if self._loaded is not None:
            return self._loaded
        assert self._read is not None
        parts = self._read()
        coder = coder_of(parts)
        if _facts(parts) != self._facts:
            coder.close()
            msg = "the files of the tokenizer have changed: start the server again"
            raise ModelError(msg)
        self._loaded = coder
        self.prepare_masks()
        return coder

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        unlocked: bool = False,
        most: int | None = None,
        left: bool = False,
    ) -> list[int]:
        """Return the token ids of `text`; the text of a special token becomes that token.

        add_special_tokens: add BOS and other special tokens as the model was trained.
        unlocked: release the GIL even for short texts; use it in threads other than the event loop.
        most: keep only this number of tokens, special tokens included,
          by cutting the end of the text.
        left: cut the start of the text instead of the end.

        Raises:
            InvalidRequest: the text is not valid Unicode (it has a lone surrogate).
                Or the library tokenizers fails on this text, for example if a regular expression
                in the model's tokenizer.json backtracks without end.
        """
        if (
            most is None
            or (found := self._encode_end(text, add_special_tokens, most, left)) is None
        ):
            found = self._encode(text, add_special_tokens, unlocked or len(text) > LONG_CHARS)
        ids: list[int] = found.ids
        bos = self.bos_id if add_special_tokens and self._add_bos else None
        if most is not None:
            ids = [ids[i] for i in kept(found.sequence_ids, most - (bos is not None), left=left)]
        return ids if bos is None else [bos, *ids]

    def _encode_end(
        self, text: str, add_special_tokens: bool, most: int, left: bool
    ) -> Encoded | None:
        """Return the tokens of the end of a long text that is kept; None if it is too short.

        To make lists of 8 million tokens, and then cut most of them, would keep the GIL for 200 ms.
        The tokens next to the cut may differ, so there must be _MARGIN_TOKENS that are not kept.
        """
        size = _CHARS_PER_TOKEN * (most + _MARGIN_TOKENS)
        if len(text) <= size:
            return None
        end = text[-size:] if left else text[:size]
        found = self._encode(end, add_special_tokens, unlocked=True)
        return found if len(found) >= most + _MARGIN_TOKENS else None

    @cached_property
    def masks(self) -> Masks:
        """The masks of control texts in messages.

        Raises:
            ModelError: the control tokens are too long or too many for an expression.
        """
        try:
            return Masks(self._coder.added())
        except ValueError as error:
            raise ModelError(str(error)) from None
        except (RecursionError, OverflowError, re.error):
            msg = "the control tokens of the tokenizer begin alike in too many ways to be searched"
            raise ModelError(msg) from None

    def prepare_masks(self) -> Ordinary:
        """Return the tokenizer of masked texts; making it takes 0.2 s for 6000 control tokens."""
        if self._ordinary is None:
            self._ordinary = self._coder.ordinary(self.masks.ids)
        return self._ordinary

    def encode_masked(
        self,
        text: str,
        add_special_tokens: bool = False,
        *,
        unlocked: bool = False,
        most: int | None = None,
        left: bool = False,
    ) -> list[int]:
        """Return the token ids of a text with masks (masks.py), which become ordinary tokens.

        For the arguments and errors see `encode`.
        """
        plain = self.prepare_masks()
        given = self.masks.with_nonces(text, plain.nonces)
        if given is None:
            return self.encode(text, add_special_tokens, unlocked=unlocked, most=most, left=left)
        ids = _guarded(given, lambda: plain.encode(given))
        before, after = self._around if add_special_tokens else ([], [])
        if most is not None:
            ids = Cut(max(0, most - len(before) - len(after)), left).apply(ids)
        return [*before, *ids, *after]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` puts before and behind each text."""
        whole, alone = self.encode("a"), self.encode("a", add_special_tokens=False)
        if not alone or alone[0] not in whole:  # the tokenizer drops the text
            return [], []
        at = whole.index(alone[0])
        return whole[:at], whole[at + len(alone) :]

    @cached_property
    def around_nothing(self) -> list[int]:
        """The tokens of an empty text: the special tokens around every text."""
        return self.encode("")

    def is_token(self, text: str) -> bool:
        """Return whether texts with this one have one token for it.

        A tokenizer that waits is not asked: the answer is True for its added tokens only.
        """
        if self.waits:
            return any(token.content == text for token in self._coder.added().values())
        return self.encode(text, add_special_tokens=False) == [self.token_id(text)]

    def encode_pair(
        self, first: str, second: str, most: int | None = None, *, left: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return (token ids, type of each token) of two texts, with the special tokens around them.

        most: keep only this number of tokens: cut the end of the longer text, then of both texts.
        left: cut the starts of the texts instead of their ends.

        Raises:
            InvalidRequest: see `encode`.
        """
        size = len(first) + len(second)
        found = self._encode((first, second), True, size > LONG_CHARS)
        if most is None:
            return found.ids, found.type_ids
        some = kept(found.sequence_ids, most, left=left)
        return [found.ids[i] for i in some], [found.type_ids[i] for i in some]

    def encode_spans(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[TokenSpan] | None:
        """Return the tokens of `text`, each with its place in the text.

        most: the maximum number of tokens; None is returned if there are more.

        Raises:
            InvalidRequest: see `encode`.
        """

        spans = _guarded(
            text,
            lambda: self._coder.spans(text, add_special_tokens=add_special_tokens, most=most),
        )
        if spans is None:
            return None
        if not (add_special_tokens and self._add_bos) or self.bos_id is None:
            return spans
        return [TokenSpan(self.bos_id, self.token_text(self.bos_id), 0, 0, True), *spans]

    def _encode(
        self, text: str | tuple[str, str], add_special_tokens: bool, unlocked: bool
    ) -> Encoded:
        coder = self._coder
        return _guarded(
            text if isinstance(text, str) else "".join(text),
            lambda: coder.encode(text, add_special_tokens=add_special_tokens, unlocked=unlocked),
        )

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """The maximum number of UTF-8 bytes of text per token; None if there is no maximum."""
        return self._coder.most_bytes()

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        from cpuserve.tokenizer.detokenize import Detokenizer

        whole = Detokenizer(self, (), skip_special_tokens)
        return whole.push(ids) + whole.flush()

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, for other libraries."""
        return self._coder.to_json()

    def token_text(self, token_id: int) -> str:
        """Return the token as written in the vocabulary ("Ġthe"); "" for an id without a token."""
        if not 0 <= token_id < 2**31:
            return ""
        return self._coder.text_of(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary; None if there is no such token."""
        return self._coder.id_of(token)

    @property
    def before_text(self) -> list[int]:
        """The special tokens that `encode` puts before each text, such as BOS."""
        return self._around[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes, maybe a part of a character; b"" for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._to_bytes(self.token_text(token_id))
            if found:
                self._bytes[token_id] = found
        return found

    def texts(self, vocab: int) -> list[bytes]:
        """Return the bytes of the tokens 0 to vocab - 1; see `token_bytes`."""
        return [self._to_bytes(self.token_text(token)) for token in range(vocab)]

    def _to_bytes(self, token: str) -> bytes:
        if self._scheme == "byte_level":
            try:
                return bytes([self._byte_of[c] for c in token])
            except KeyError:
                # An added token with characters outside the byte alphabet is plain text.
                return token.encode()
        if self._scheme == "byte_fallback":
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()
        return token.encode()


def named_prompt(prompts: Mapping[str, str], name: str | None) -> str:
    """Return the prompt with this name; None: the default prompt, or "" if there is none.

    Raises:
        InvalidRequest: the model has no prompt of this name.
    """
    if name is None:
        return prompts.get("", "")
    if not name or name not in prompts:
        known = ", ".join(key for key in prompts if key)
        msg = f"prompt_name {name[:40]!r}: this model has {known or 'no prompts'}"
        raise InvalidRequest(msg, role="prompt_name")
    return prompts[name]


def _facts(parts: Parts) -> Parts:
    """Return the properties of a tokenizer without its vocabulary."""
    nothing: Any = None
    return replace(parts, core=nothing)


def _parts(path: Path) -> Parts:
    """Return the tokenizer of a directory or of a GGUF file; for errors see Tokenizer.load."""
    if not path.is_dir():
        from cpuserve.tokenizer.from_gguf import gguf_parts

        return gguf_parts(path)
    why = why_limited(path)
    if why is None:
        return directory_parts(path)
    log.info("%s: texts are encoded in a process with limits: %s", path, why)
    from cpuserve.tokenizer.limited.client import limited_parts

    return limited_parts(path, why)


def coder_of(parts: Parts) -> Coder:
    core: Any = parts.core
    return core if hasattr(core, "waits") else LibraryCoder(core, parts.scheme)


def _guarded(text: str, encode: Callable[[], T]) -> T:
    """Return encode(), which tokenizes `text`; see Tokenizer.encode for the errors."""
    try:
        return encode()
    except (UnicodeError, TypeError) as error:
        raise _not_unicode(text) from error
    except (KeyboardInterrupt, SystemExit, MemoryError, RequestError):
        raise
    except BaseException as error:  # a panic in Rust is a BaseException
        msg = f"the model's tokenizer failed on this text: {reason_of(error)}"
        raise InvalidRequest(msg) from error


def _not_unicode(text: str) -> InvalidRequest:
    found = re.search("[\ud800-\udfff]", text)
    where = f" at character {found.start()}" if found else ""
    return InvalidRequest(f"the text has a lone surrogate{where}, which is not valid Unicode")
