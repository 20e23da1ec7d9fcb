"""Masks: characters that stand for texts of control tokens while a chat template is rendered.

A control token, such as <|im_end|>, ends a turn or begins one of another role. A message may have
its text (a control text): a user wrote it, or a tool read it from a file. After rendering, nothing
would tell it from the control texts of the template. So each control text in a message becomes
a mask before rendering. A mask is one private-use character, which templates copy like a letter.
`Tokenizer.encode_masked` makes control tokens of the control texts in the rendered prompt,
which only the template can have written, and ordinary tokens of the masked texts.

A message may have private-use characters of its own, such as icons. `mask` puts ESCAPE before them.

A template may join texts of a message, such as its parts: "<|im_" and "end|>". So `mask` puts BREAK
behind a text that ends with the beginning of a control text. `encode_masked` drops BREAK.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from cpuserve.tokenizer.unlocked import encoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

    from cpuserve.tokenizer.coder import Added

# The private use area of plane 16. Fonts with icons mostly use the areas of lower planes.
_FIRST, _LAST = 0x100000, 0x10FFFB
BREAK, ESCAPE = "\U0010fffc", "\U0010fffd"
_PRIVATE = f"[{chr(_FIRST)}-{ESCAPE}]"
_HAS_PRIVATE = re.compile(_PRIVATE)
# How many random characters replace a control text for `PlainCore`: clients cannot guess them.
_NONCE_CHARS = 4
# Of the expression with all control texts, which takes a second to compile for a million.
MAX_CONTROL_CHARS = 1 << 21
# A regular expression does not release the GIL, so longer texts are searched in pieces.
_PIECE_CHARS = 1 << 16
# Tokens of markup that models read in ordinary texts: tags of HTML, which Gemma's vocabulary has.
_HTML = re.compile(
    r"</?(?:[abipsuq]|h[1-6]|hr|br|em|th|td|tr|li|ol|ul|dl|dt|dd|sub|sup|del|ins|pre|div|kbd|var|"
    r"img|nav|main|span|code|cite|body|head|html|link|meta|form|table|thead|tbody|tfoot|title|small|"
    r"strong|button|header|footer|script|style|section|article|caption|details|summary|blockquote)>"
)
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|<[|\uff5c].*[|\uff5c]>", re.DOTALL)
# Invisible: breaks a control text in a prompt that is returned as text.
_JOINER = "\u2060"


def _is_word(char: str) -> bool:
    return char.isalnum() or char.isspace()


def is_control(token: Added) -> bool:
    """Return whether an added token structures prompts and responses, instead of being a word.

    Special tokens do, and others that look like a tag, such as <tool_call> in Qwen's vocabulary.
    Runs of spaces, words and tags of HTML are tokens of ordinary texts.
    """
    text: str = token.content
    if not text.strip("\u2581 \t\r\n"):
        return False
    return token.special or (_TAG.fullmatch(text) is not None and not _HTML.fullmatch(text))


class Masks:
    """Masks the control texts of one tokenizer. Thread-safe.

    A marker of a later kind, such as an image in a prompt, can be a further mask.
    """

    def __init__(self, added: Mapping[int, Added]) -> None:
        """added: the added tokens of a tokenizer, by id."""
        control = {token.content: i for i, token in sorted(added.items()) if is_control(token)}
        listed = list(control)[: _LAST - _FIRST + 1]
        self.ids: Mapping[str, int] = {text: control[text] for text in listed}
        if (size := sum(map(len, listed))) > MAX_CONTROL_CHARS:
            msg = (
                f"the control tokens of the tokenizer have {size} characters together; at most "
                f"{MAX_CONTROL_CHARS} are accepted"
            )
            raise ValueError(msg)
        self._masks = {text: chr(_FIRST + at) for at, text in enumerate(listed)}
        self._texts = {mask: text for text, mask in self._masks.items()}
        branches = [_any_of(listed)] if listed else []
        self._given = re.compile("|".join([*branches, _PRIVATE]))
        self._masked = re.compile("|".join([f"{ESCAPE}{_PRIVATE}", *branches, _PRIVATE]))
        self._longest = max(map(len, [*listed, ESCAPE * 2]))
        # A word or white space is no beginning of markup, and templates trim or compare texts.
        self._begin = frozenset(text[0] for text in listed if not _is_word(text[0]))
        self._sorted = sorted(listed)

    @property
    def texts(self) -> Collection[str]:
        """The texts of all control tokens."""
        return self.ids.keys()

    def mask(self, text: str, but: Collection[str] = ()) -> str:
        """Return `text` with a mask in place of each control text; but: texts that stay."""
        parts: list[str] = []
        done = 0
        breaks = len(but) < len(self.ids)  # else all control texts stay
        for match in self._matches(self._given, text):
            found = match[0]
            parts.append(text[done : match.start()])
            if found not in but:
                found = self._masks.get(found) or ESCAPE + found
            elif breaks and self._begins(text, done, match.start()):  # templates cut out thoughts
                parts.append(BREAK)
            parts.append(found)
            done = match.end()
        parts.append(text[done:])
        if breaks and self._begins(text, done, len(text)):
            parts.append(BREAK)
        return "".join(parts)

    def _begins(self, text: str, start: int, stop: int) -> bool:
        """Return whether text[start:stop] ends with the beginning of a control text."""
        tail = text[max(start, stop - self._longest + 1) : stop]
        if self._begin.isdisjoint(tail):
            return False
        for at, char in enumerate(tail):
            if char in self._begin:
                given = tail[at:]
                after = bisect_right(self._sorted, given)
                if after < len(self._sorted) and self._sorted[after].startswith(given):
                    return True
        return False

    def mask_all(self, value: Any, but: Collection[str] = ()) -> Any:
        """Return a JSON value with all texts and keys masked; but: texts that stay.

        Values of other types stay as they are. Raises RecursionError if a value with control texts
        nests too deeply.
        """
        return self._copied(value, but) if self._is_in(value) else value

    def _is_in(self, value: Any) -> bool:
        """Return whether a text or a key of a JSON value has something to mask."""
        left = [value]
        while left:
            each = left.pop()
            if isinstance(each, str):
                if self._begins(each, 0, len(each)):
                    return True
                if next(self._matches(self._given, each), None) is not None:
                    return True
            elif isinstance(each, Mapping):
                left += each.keys()
                left += each.values()
            elif isinstance(each, Sequence) and not isinstance(each, bytes | bytearray):
                left += each
        return False

    def _copied(self, value: Any, but: Collection[str]) -> Any:
        if isinstance(value, str):
            return self.mask(value, but)
        if isinstance(value, Mapping):
            return {self._copied(k, but): self._copied(v, but) for k, v in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self._copied(each, but) for each in value]
        return value

    def unmask(self, text: str) -> str:
        """Return a masked text as it was before, with its control texts."""
        if _HAS_PRIVATE.search(text) is None:
            return text
        return self._in_masked(text, lambda found: found)

    def broken(self, text: str) -> str:
        """Return a masked text with an invisible character in each masked control text.

        So these texts stay ordinary if a client sends the result back as a prompt. The character
        is also where BREAK is, behind the beginning of a control text.
        """
        if _HAS_PRIVATE.search(text) is None:
            return text
        return self._in_masked(text, lambda found: found, joiner=_JOINER)

    def mask_decoded(self, ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of a response: control tokens as their texts, and the rest masked.

        decode: returns the text of token ids.
        """
        control = frozenset(self.ids.values())
        parts = groupby(ids, key=control.__contains__)
        texts = ((special, decode(list(own))) for special, own in parts)
        return "".join(text if special else self.mask(text) for special, text in texts)

    def with_nonces(self, text: str, nonces: Mapping[str, str]) -> str | None:
        """Return a masked text with its own control texts, and nonces for those of the template.

        The result is None if nothing is masked.
        """
        if _HAS_PRIVATE.search(text) is None:
            return None
        # A template may have private-use characters itself: they stay as they are.
        return self._in_masked(text, lambda found: nonces.get(found, found))

    def _in_masked(self, text: str, control: Callable[[str], str], joiner: str = "") -> str:
        """Return a masked text without masks; control: replaces a control text that is not masked.

        joiner: a text after the first character of each control text that was masked.
        """

        def plain(found: str) -> str:
            if found == BREAK:
                return joiner
            if len(found) == 2 and found[0] == ESCAPE:
                return found[1:]
            own = self._texts.get(found)
            return control(found) if own is None else own[:1] + joiner + own[1:]

        return self._replaced(self._masked, text, plain)

    def _replaced(self, pattern: re.Pattern[str], text: str, replace: Callable[[str], str]) -> str:
        """Return `text` after replace(found) of each match of `pattern`."""
        parts: list[str] = []
        done = 0
        for match in self._matches(pattern, text):
            parts += [text[done : match.start()], replace(match[0])]
            done = match.end()
        return "".join([*parts, text[done:]]) if parts else text

    def _matches(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """Return the matches of `pattern`; other threads can run between the pieces of a text."""
        done = 0
        for start in range(0, len(text), _PIECE_CHARS):
            stop = start + _PIECE_CHARS
            for match in pattern.finditer(text, max(start, done), stop + self._longest):
                if match.start() >= stop:
                    break
                done = match.end()
                yield match


def new_nonces(control: Iterable[str]) -> dict[str, str]:
    """Return a random text for each control token."""
    random = SystemRandom()
    return {
        text: "".join(chr(random.randint(_FIRST, _LAST)) for _ in range(_NONCE_CHARS))
        for text in control
    }


class PlainCore:
    """The tokenizer with other texts for its control tokens, so that theirs are ordinary.

    nonces: the random text of each control token. It shares the vocabulary of `core`.
    """

    def __init__(self, core: Core, control: Mapping[str, int], nonces: Mapping[str, str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._core = plain = Tokenizer(core.model)
        if core.normalizer is not None:
            plain.normalizer = core.normalizer
        if core.pre_tokenizer is not None:
            plain.pre_tokenizer = core.pre_tokenizer
        self.nonces = nonces
        tokens, real = [], {}
        for token_id, token in sorted(core.get_added_tokens_decoder().items()):
            text: str = token.content
            if text in control:
                flags = {k: getattr(token, k) for k in ("lstrip", "rstrip", "single_word")}
                token = AddedToken(nonces[text], normalized=False, **flags)
            tokens.append(token)
            real[token.content] = token_id
        plain.add_tokens(tokens)
        self._ids = {plain.token_to_id(text): token_id for text, token_id in real.items()}
        self._control = frozenset(control.values()) - self._ids.keys()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with nonces in place of control tokens."""
        found = encoded(self._core, text, add_special_tokens=False)
        ids: list[int] = found.ids
        if not self._control.isdisjoint(ids):  # a Unigram model may find them in its vocabulary
            ids = [part for i in ids for part in self._parts(i)]
        return [self._ids.get(i, i) for i in ids]

    def _parts(self, token_id: int) -> list[int]:
        """Return the tokens of the text of a control token, or the token if it is another one."""
        if token_id not in self._control:
            return [token_id]
        text, model = self._core.model.id_to_token(token_id), self._core.model
        found = [
            token.id for half in (text[:1], text[1:]) if half for token in model.tokenize(half)
        ]
        return [part for i in found if i != token_id for part in self._parts(i)]


def _any_of(texts: Collection[str]) -> str:
    """Return a regular expression that matches the longest of these texts at a place.

    Texts with an equal beginning share it, because a vocabulary may have thousands of them.
    """
    if set(texts) == {""}:
        return ""
    groups = groupby(sorted(filter(None, texts)), key=lambda text: text[0])
    branches = []
    for _, group in groups:
        own = list(group)
        begin = commonprefix(own)
        rest = _any_of([text[len(begin) :] for text in own])
        branches.append(re.escape(begin) + rest)
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
