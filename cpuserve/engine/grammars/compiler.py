"""The grammar library (llguidance), imported only in the process for grammars.

A matcher holds the state of one answer: it is a copy of the compiled grammar, which takes 20 us.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt

from cpuserve.runtime.executor import mask_words
from cpuserve.sampling.structured import WHITE_SPACE
from cpuserve.tokenizer.tokenizer import Tokenizer

Mask = npt.NDArray[np.int32]

# What a mask may cost: 14,000 units of fuel take a millisecond, as do 20,000 items. The states of
# the lexer, at 1 to 2 KB, bound the memory of a grammar.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
MOST_CHARS = 600  # of a message
# What the library says where one of these limits ended it. Which limit comes first, its or that of
# CPU time, depends on the machine: the client reads the same first words.
LIMIT_MESSAGES = ("fuel", "too big", "too large", "Too many", "Unable to determine if regex is")

# The library knows which tokens match these, and asks first whether all of them may follow. The
# first is not among its own: with it, masks inside formats such as "email" take half the time.
SLICES = ["[a-zA-Z0-9]{1,16}", *llguidance.LLTokenizer.general_slices()]


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message says why."""


class Compiler:
    """Compiles grammars for one tokenizer, and fills masks.

    Raises:
        GrammarError: the library cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Path, vocab: int, eos_ids: Sequence[int]) -> None:
        loaded = Tokenizer.load(tokenizer)
        if not eos_ids:
            msg = "the model has no token that ends an answer, which a grammar needs"
            raise GrammarError(msg)
        self.words = mask_words(vocab)
        # The library (before 1.7) knows one end. It takes ends that are not special for text.
        special = [i for i in eos_ids if i in loaded.special_ids]
        self._end = (special or list(eos_ids))[0]
        self._knows_end = bool(special)
        self._more_ends = [i for i in eos_ids if i != self._end]
        try:
            self._tokenizer = llguidance.LLTokenizer(
                loaded.to_json(), n_vocab=vocab, eos_token=self._end, slices=SLICES
            )
        except Exception as error:  # the library raises ValueError and others
            msg = f"the grammar library cannot use this model's tokenizer: {error}"
            raise GrammarError(msg) from error

    def prepare(self, kind: str, text: str) -> str:
        """Return the library's form of a grammar; GrammarError if it is none."""
        make = llguidance.LLMatcher
        try:
            if kind == "json":
                options: Any = {"whitespace_pattern": WHITE_SPACE}
                return make.grammar_from_json_schema(text, overrides=options)
            if kind == "regex":
                return _from_regex(text)
            if kind == "choice":
                choices = msgspec.json.decode(text, type=list[str])
                return _from_regex("|".join(map(_literal, choices)))
            return llguidance.grammar_from("grammar", text)
        except ValueError as error:
            raise GrammarError(_short(str(error))) from error

    def compile(self, prepared: str) -> Any:
        """Return a matcher at the beginning of the grammar; GrammarError if it is invalid."""
        limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        matcher = llguidance.LLMatcher(self._tokenizer, prepared, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        return matcher

    def fill(self, matcher: Any, mask: Mask, stop_ids: Sequence[int]) -> bool:
        """Set the bits of the tokens that may follow; return whether the text is complete.

        stop_ids: further tokens that may end it.

        Raises:
            GrammarError: the mask would take too long, or no token can follow.
        """
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        self._set_ends(matcher, mask, stop_ids)
        if not mask.any():
            msg = "no token can follow the text so far"
            raise GrammarError(msg)
        return bool(matcher.is_stopped())

    def _set_ends(self, matcher: Any, mask: Mask, stop_ids: Sequence[int]) -> None:
        """Allow all ends where the text may end, and none of those of the model elsewhere."""
        if self._knows_end:
            can_end = bool(mask[self._end // 32] & _BITS[self._end % 32])
        else:
            can_end = matcher.is_accepting()
        if can_end:
            for i in (self._end, *self._more_ends, *stop_ids):
                mask[i // 32] |= _BITS[i % 32]
        else:
            for i in (self._end, *self._more_ends):
                mask[i // 32] &= ~_BITS[i % 32]


def take(matcher: Any, tokens: Sequence[int]) -> None:
    """Advance a matcher by tokens that its masks allowed; GrammarError if it cannot."""
    if tokens and not matcher.consume_tokens(list(tokens)):
        raise GrammarError(_short(matcher.get_error()))


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def _from_regex(text: str) -> str:
    """Return the grammar of a regular expression, in which \\d are the ten digits of ASCII."""
    body = llguidance.regex_to_lark(text, "d")
    return llguidance.LLMatcher.grammar_from_lark(f"start: /{body}/")


def _literal(text: str) -> str:
    """Return a regular expression for `text` itself."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


def _short(message: str) -> str:
    """Return the library's message on one line, without its remark on verbosity."""
    words = " ".join(message.replace("<non-verbose/>", "").split())
    if any(limit in words for limit in LIMIT_MESSAGES):
        words = f"it is too complex: {words}"
    return words if len(words) <= MOST_CHARS else words[:MOST_CHARS] + " ..."
