"""Compiles grammars with the library llguidance; imported only in the grammar process.

A matcher has the state of one text. It is a copy of the compiled grammar, which takes 20 us.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt

from cpuserve.engine.grammars.gbnf import is_gbnf, lark_of
from cpuserve.engine.grammars.input_grammars import with_inputs
from cpuserve.engine.grammars.json_masks import Digits, LineBreaks, Tails
from cpuserve.engine.grammars.messages import Row
from cpuserve.engine.grammars.schema_facts import SchemaError
from cpuserve.engine.grammars.schemas import TYPES, convert
from cpuserve.runtime.executor import mask_words
from cpuserve.sampling.grammar_marks import (
    FORM_BEGINS,
    IF_POSSIBLE,
    OF_FUNCTION,
    OF_GRAMMAR,
    OTHER_TOKENS,
    PARAMETERS_OF,
    RAW_TEXT,
    WHITE_SPACE,
)
from cpuserve.sampling.structured import CALLS, JSON, OPEN_JSON, WITH_CALLS
from cpuserve.tokenizer.tokenizer import Tokenizer

# For each of these patterns, llguidance knows in advance which tokens match. It first checks
# whether all tokens of a pattern may follow, and tries single tokens only if not. The first three
# patterns are not in llguidance's own list: they cover digits in numbers, and letters in formats.
SLICES = [
    "[1-9][0-9]*",
    "[a-zA-Z][a-zA-Z0-9]{0,15}",
    "[a-zA-Z0-9]{1,16}",
    *llguidance.LLTokenizer.general_slices(),
]
# A tokenizer may put a space before a text, or change its first character. So the text is also
# tried after this character, which no token contains together with another character.
_BEFORE = "\x02"


class GrammarTokens:
    """The attributes of a tokenizer that llguidance reads (those of its TokenizerWrapper)."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = tokenizer.texts(vocab)
        self.special_token_ids = sorted(i for i in tokenizer.masks.ids.values() if i < vocab)
        self.known: Any = None  # the LLTokenizer of this vocabulary
        self._tokens, self._plain = tokenizer, tokenizer.prepare_masks()

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text in UTF-8, none of them special."""
        ids = self._encoded(text.decode())
        if self._bytes(ids) == text:
            return ids
        ids = self._encoded(_BEFORE + text.decode())
        begun = b""
        while ids and _BEFORE.encode() not in begun:
            begun += self._bytes([ids.pop(0)])
        if self._bytes(ids) == text:
            return ids
        # The normalizer changes the text, so the model would not write it in these tokens.
        found: list[int] = self.known.greedy_tokenize(text.decode()) if self.known else []
        return found

    def _encoded(self, text: str) -> list[int]:
        return self._plain.encode(text) if text else []

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(map(self._tokens.token_bytes, ids))


def ll_tokenizer(tokenizer: Tokenizer, vocab: int, end: int) -> Any:
    """Return the LLTokenizer of llguidance; vocab: the number of ids; end: the end token.

    Raises ValueError and other errors of llguidance if it cannot use the vocabulary.
    """
    words = GrammarTokens(tokenizer, vocab, end)
    wrapped = llguidance.TokenizerWrapper(words)
    words.known = llguidance.LLTokenizer(wrapped, n_vocab=vocab, eos_token=end, slices=SLICES)
    wrapped.tokens = words.tokens = []  # llguidance has copied them
    return words.known


Mask = npt.NDArray[np.int32]

# Limits of the work for one bitmask: a millisecond is 14,000 units of lexer fuel, or 20,000 items
# of the parser. The number of lexer states (1 to 2 KB each) limits the memory of a grammar.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "max_items_in_row": 50_000,
    "verbose_errors": False,
}
MOST_CHARS = 600  # the most characters of an error message
# Words in the messages of llguidance when it has reached one of these limits. On another machine
# the same grammar may reach the limit of CPU time first, so both errors begin alike for clients.
LIMIT_MESSAGES = ("fuel", "too big", "too large", "Too many", "Unable to determine if regex is")

_AT_LINE = re.compile(r"at (\d+)\(\d+\): ([^\n]*)")
_IN_SCHEMA = re.compile(
    r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?=\s+\d+ \| |\Z)", re.DOTALL
)
# The message of llguidance when no token can follow.
_NOTHING_FOLLOWS = "NoExtensionBias"
# A rule with a JSON schema in a Lark grammar of tool calls. Each such rule has its own line.
_JSON_RULE = re.compile(r"(\w+: %json )(.*)")
# A string literal in a Lark grammar, except after "=": the suffix of a rule must be a literal.
_LITERAL = re.compile(r'(?<!=)"(?:[^"\\]|\\.)*"')

# A rule in a Lark grammar of tool calls that ends at the first place where the suffix is.
_SUFFIXED = re.compile(r'(\w+)\[suffix=("(?:[^"\\]|\\.)*")\]: (.*)')

# Up to this number of rows, one thread is as fast as several threads.
FEW_ROWS = 3
MAX_THREADS = 16


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message says why."""


class Compiler:
    """Compiles grammars for one tokenizer, and fills bitmasks.

    threads: how many threads fill the bitmasks of several requests.

    Raises:
        GrammarError: llguidance cannot use the tokenizer.
    """

    def __init__(
        self, tokenizer: Path, vocab: int, eos_ids: Sequence[int], threads: int = 1
    ) -> None:
        loaded = Tokenizer.load(tokenizer)
        if not eos_ids:
            msg = "the model has no token that ends an answer, which a grammar needs"
            raise GrammarError(msg)
        self.words = mask_words(vocab)
        # llguidance before 1.7 supports only one end-of-sequence token.
        # llguidance treats an end token as text if it is no control token.
        control = frozenset(loaded.masks.ids.values())
        special = [i for i in eos_ids if i in control]
        self._end = (special or list(eos_ids))[0]
        self._knows_end = bool(special)
        self._more_ends = [i for i in eos_ids if i != self._end]
        self._threads = min(threads, MAX_THREADS)
        self._executor: Any = None  # the threads of llguidance, created for the first large batch
        try:
            self._tokenizer = ll_tokenizer(loaded, vocab, self._end)
        except Exception as error:  # llguidance raises ValueError and other classes
            msg = f"the grammar library cannot use this model's tokenizer: {error}"
            raise GrammarError(msg) from error
        self.tails = Tails(loaded.token_bytes)
        self._breaks = LineBreaks(loaded.token_bytes, vocab)
        texts = map(loaded.token_text, range(vocab))
        self._digits = Digits(texts, vocab, [self._end, *self._more_ends])
        self._special = {text: i for text, i in loaded.masks.ids.items() if i < vocab}

    def prepare(self, kind: str, text: str) -> str:
        """Return a grammar in llguidance's format; GrammarError if it is not valid.

        kind: such as "regex" or "choice". text: the regex, a JSON list of choices and so on.
        """
        make = llguidance.LLMatcher
        try:
            if kind in (JSON, OPEN_JSON):
                options: Any = {"whitespace_pattern": WHITE_SPACE}
                schema = convert(text, closed=kind == JSON)
                return make.grammar_from_json_schema(schema, overrides=options)
            if kind == "regex":
                return _from_regex(text)
            if kind == "choice":
                choices = msgspec.json.decode(text, type=list[str])
                return _from_regex("|".join(map(_literal, choices)))
            if kind == CALLS:
                return llguidance.grammar_from("grammar", self._with_tokens(text))
            if kind == WITH_CALLS:
                return self._with_calls(*msgspec.json.decode(text, type=tuple[str, str, str]))
            return make.grammar_from_lark(lark_of(text) if is_gbnf(text) else text)
        except (SchemaError, ValueError) as error:
            raise GrammarError(_short(str(error))) from error
        except RecursionError as error:
            msg = "it is too complex: it nests too deeply"
            raise GrammarError(msg) from error

    def _with_calls(self, kind: str, text: str, calls: str) -> str:
        """Return the grammar of texts that match a structured output or are tool calls."""
        form = self.prepare(kind, text)
        # The grammar is compiled without tool calls first, so that its error messages do not depend
        # on tools. Filling one bitmask finds grammars that no text matches.
        self.fill(self.compile(form), np.zeros(self.words, np.int32), ())
        begin = _begin_of_form(calls)
        calls = self._with_tokens(calls)
        self.compile(calls)  # compiled alone: an error then refers to its function
        if kind in (JSON, OPEN_JSON):
            (grammar,) = json.loads(form)["grammars"]
        else:
            grammar = {"lark_grammar": form}
        parts = [
            {"lark_grammar": with_special(f"start: {begin} @form | @calls", self._special)},
            {**grammar, "name": "form"},
            {"lark_grammar": calls, "name": "calls"},
        ]
        return json.dumps({"grammars": parts})

    def _with_tokens(self, calls: str) -> str:
        """Return a grammar of tool calls with schemas and special tokens for llguidance."""
        calls = with_other_tokens(with_special(calls, self._special), self._special)
        return with_schemas(with_special_ends(with_inputs(calls), self._special))

    def compile(self, prepared: str) -> Any:
        """Return a matcher at the beginning of the grammar; GrammarError if it is invalid."""
        matcher = self._matcher(prepared)
        while matcher.is_error():
            message = matcher.get_error()
            looser = _loosened(prepared, message)
            if looser is None:
                raise GrammarError(_short(_of_function(prepared, message) or message))
            prepared = looser
            matcher = self._matcher(prepared)
        return matcher

    def _matcher(self, prepared: str) -> Any:
        limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        return llguidance.LLMatcher(self._tokenizer, prepared, log_level=0, limits=limits)

    def fill(self, matcher: Any, mask: Mask, stop_ids: Sequence[int]) -> bool:
        """Set the bits of the tokens that may follow; return whether the text is complete.

        stop_ids: ids of further tokens that may end the text.

        Raises:
            GrammarError: the bitmask would take too long, or no token can follow.
        """
        self.compute(mask.reshape(1, -1), [(matcher, 0)], 1)
        return self.finish(matcher, mask, stop_ids)

    def compute(self, masks: Mask, rows: list[tuple[Any, int]], grammars: int) -> None:
        """Fill masks[row] for each (matcher, row); `finish` must follow for each of them.

        grammars: the number of different grammars. `rows` is sorted by grammar:
        the matchers of one grammar share an automaton, which only one thread at a time can use.
        """
        address, stride = masks.ctypes.data, masks.strides[0]
        if len(rows) > FEW_ROWS and grammars > 1 and self._has_threads():
            self._executor.unsafe_compute_mask_ptr(rows, address, stride, len(masks))
            return
        for matcher, row in rows:
            matcher.unsafe_compute_mask_ptr(address + row * stride, stride)

    def _has_threads(self) -> bool:
        if self._executor is None and self._threads > 1:
            try:
                self._executor = llguidance.LLExecutor(self._threads)
            except ValueError:  # the system refuses to start more threads
                self._threads = 1
        return self._executor is not None

    def finish(
        self,
        matcher: Any,
        mask: Mask,
        stop_ids: Sequence[int],
        tail: bytes | None = None,
        is_whole: bool = False,
    ) -> bool:
        """Complete a bitmask from `compute`, and return the same as `fill`.

        tail: the end of a text with JSON values, from `tails`; None = the text has none.
        is_whole: whether the whole text is one JSON value.
        """
        if matcher.is_error():  # check this first: after an error, the bitmask allows no token
            raise GrammarError(_short(matcher.get_error()))
        if not self._set_ends(matcher, mask, stop_ids) and not mask.any():
            msg = "no token can follow the text so far"
            raise GrammarError(msg)
        if tail is not None:
            self._digits.bound(tail, mask)
            if is_whole:
                self._breaks.bound(tail, mask)
        return bool(matcher.is_stopped())

    def ends(self, token: int, stop_ids: Sequence[int]) -> bool:
        """Whether a token ends a text; stop_ids: ids of further tokens that do."""
        return token == self._end or token in self._more_ends or token in stop_ids

    def _set_ends(self, matcher: Any, mask: Mask, stop_ids: Sequence[int]) -> bool:
        """Allow all stop tokens if the text may end here; if not, forbid the model's stop tokens.

        Returns False if the bitmask may have no token left.
        """
        if self._knows_end:
            can_end = bool(mask[self._end // 32] & _BITS[self._end % 32])
        else:
            can_end = matcher.is_accepting()
        if can_end:
            for i in (self._end, *self._more_ends, *stop_ids):
                mask[i // 32] |= _BITS[i % 32]
            return True
        # If llguidance knows the end token, the bitmask forbids this token already (can_end).
        ends = self._more_ends if self._knows_end else (self._end, *self._more_ends)
        for i in ends:
            mask[i // 32] &= ~_BITS[i % 32]
        return not ends


def _begin_of_form(calls: str) -> str:
    """Return the Lark expression of the text before a structured output (FORM_BEGINS)."""
    first = calls.partition("\n")[0]
    return first.removeprefix(FORM_BEGINS) if first.startswith(FORM_BEGINS) else ""


def is_json(kind: str, text: str) -> bool:
    """Whether texts that match a grammar (StructuredOutputs.key) contain JSON values."""
    if kind == WITH_CALLS:
        kind = msgspec.json.decode(text, type=tuple[str, str, str])[0]
    return kind in (JSON, OPEN_JSON, CALLS)


@dataclass(slots=True)
class Matcher:
    """The matcher of a request.

    tail: the end of its text; None = it has no JSON. is_whole: whether the text is one JSON value.
    taken: the tokens of its text.
    """

    matcher: Any
    stop_ids: list[int]
    tail: bytes | None
    is_whole: bool
    taken: list[int] = field(default_factory=list)


@dataclass(slots=True)
class MatchedText:
    """A text with a Row to fill, and its matcher.

    place: the bitmask that is filled next.
    tail: the end of the text with its draft tokens (Matcher.tail).
    proposed: the draft tokens of the row that may still follow.
    jumped, drafts, only: see Guessed.
    """

    row: Row
    of: Matcher
    place: int = 0
    tail: bytes | None = None
    proposed: list[int] = field(default_factory=list)
    jumped: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    only: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place, self.tail, self.proposed = self.row.mask, self.of.tail, self.row.drafts

    @property
    def next_draft(self) -> int:
        """The next proposed token, -1 = none."""
        return self.proposed[0] if self.proposed else -1

    def pass_by(self, token: int) -> None:
        """Drop the proposed tokens, up to one that is `token`, or all if the next is another."""
        self.proposed = self.proposed[1:] if self.next_draft == token else []

    def cut(self, first: int) -> None:
        """Drop the draft tokens without a complete bitmask; `first` is the one before them."""
        del self.drafts[self.place - first - 1 :], self.only[self.place - first - 1 :]


def take(matcher: Any, tokens: Sequence[int]) -> None:
    """Advance a matcher by tokens that its bitmasks allowed; raise GrammarError if it cannot."""
    if tokens and not matcher.consume_tokens(list(tokens)):
        raise GrammarError(_short(matcher.get_error()))


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def _of_function(prepared: str, message: str) -> str | None:
    """Return the error with the name of a function if its schema or grammar is wrong; else None.

    The message of llguidance would quote a line of a grammar that no client has written.
    """
    lines, at = prepared.split("\n"), _AT_LINE.match(message)
    if at is not None and int(at[1]) <= len(lines):
        _, marker, name = lines[int(at[1]) - 1].rpartition(f" // {OF_GRAMMAR}")
        if marker:
            return f"{OF_GRAMMAR}{name}: {at[2]}"
    found = _IN_SCHEMA.match(message)
    if found is None or int(found[1]) > len(lines):
        return None
    _, marker, name = lines[int(found[1]) - 1].rpartition(PARAMETERS_OF)
    return f"{OF_FUNCTION}{name}: {found[2]}" if marker else None


def _loosened(prepared: str, message: str) -> str | None:
    """Return a grammar where a schema that caused an error is replaced by its type alone.

    Returns None if no such schema may be replaced (IF_POSSIBLE). If the error refers to no schema,
    for example because the grammar is too complex, all schemas are replaced.
    """
    lines, found = prepared.split("\n"), _IN_SCHEMA.match(message)
    chosen = range(len(lines)) if found is None else range(int(found[1]) - 1, int(found[1]))
    for i in chosen:
        rule, schema, comment = _parts(lines[i])
        if comment.startswith(IF_POSSIBLE):
            lines[i] = f"{rule}{json.dumps(_any_of_type(schema))}"
    looser = "\n".join(lines)
    return looser if looser != prepared else None


def _parts(line: str) -> tuple[str, dict[str, Any], str]:
    """Return (the start of a rule with a schema, the schema, the comment after it) of a line.

    The start is "" if the line has no such rule.
    """
    found = _JSON_RULE.match(line)
    if found is None:
        return "", {}, ""
    schema, end = json.JSONDecoder().raw_decode(found[2])
    return found[1], schema, found[2][end:]


def _any_of_type(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with only the type of `schema`, and the options of llguidance.

    A type that JSON Schema does not have, such as "dict", is left out.
    """
    kept = {key: value for key, value in schema.items() if key in ("type", "x-guidance")}
    types = kept.get("type")
    if not all(name in TYPES for name in (types if isinstance(types, list) else [types])):
        kept.pop("type", None)
    return kept


def with_schemas(grammar: str) -> str:
    """Return a Lark grammar of tool calls, with its schemas converted to keywords of llguidance."""

    def converted(line: str) -> str:
        rule, schema, comment = _parts(line)
        if not rule:
            return line
        options = {key: schema.pop(key) for key in ("x-guidance",) if key in schema}
        _, of, name = comment.partition(PARAMETERS_OF)
        try:
            kept = convert(json.dumps(schema)) | options
        except (SchemaError, RecursionError) as error:
            if comment.startswith(IF_POSSIBLE):
                return f"{rule}{json.dumps(_any_of_type(schema) | options)}"
            if isinstance(error, RecursionError):
                raise
            msg = f"{OF_FUNCTION}{name}: {error}" if of else str(error)
            raise SchemaError(msg) from error
        return f"{rule}{json.dumps(kept)}{comment}"

    return "\n".join(map(converted, grammar.split("\n")))


def with_special(grammar: str, special: Mapping[str, int]) -> str:
    """Return a Lark grammar where special tokens match if literals contain their texts.

    special: the ids of special tokens, by their texts. llguidance matches a literal with other
    tokens only, even if the literal is the text of a special token.
    """
    if not special:
        return grammar
    inside = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})")

    def spelled(found: re.Match[str]) -> str:
        parts = [part for part in inside.split(json.loads(found[0])) if part]
        if not any(part in special for part in parts):
            return found[0]
        texts = (
            f"( {json.dumps(part)} | <[{special[part]}]> )" if part in special else json.dumps(part)
            for part in parts
        )
        return f"( {' '.join(texts)} )"

    return "\n".join(
        line
        if any(mark in line for mark in ("%json", RAW_TEXT, ": /"))
        else _LITERAL.sub(spelled, line)
        for line in grammar.split("\n")
    )


def with_special_ends(grammar: str, special: Mapping[str, int]) -> str:
    """Return a Lark grammar where texts up to a suffix may end with a special token in it.

    The text of a special token is no suffix for llguidance if the model writes the token itself.
    """
    if not special:
        return grammar
    return "\n".join(_with_special_end(line, special) for line in grammar.split("\n"))


def _with_special_end(line: str, special: Mapping[str, int]) -> str:
    found = _SUFFIXED.match(line)
    if found is None:
        return line
    name, suffix, body = found[1], json.loads(found[2]), found[3]
    inside = [(at, -len(text), text) for text in special if (at := suffix.find(text)) >= 0]
    if not inside:
        return line
    at, _, text = min(inside)
    more = suffix[at + len(text) :]
    token = f"<[{special[text]}]> {json.dumps(more) if more else ''}"
    return "\n".join([
        f"{name}: {name}_text | {name}_inside? {token}",
        f"{name}_text[suffix={found[2]}]: {body}",
        f"{name}_inside: {body}",
    ])  # fmt: skip


def with_other_tokens(grammar: str, special: Mapping[str, int]) -> str:
    """Return a Lark grammar where rules with the mark OTHER_TOKENS match special tokens.

    Of the special tokens, only the one with the text after the mark does not match.
    """

    def completed(line: str) -> str:
        rule, marker, text = line.partition(OTHER_TOKENS)
        ids = sorted(i for of, i in special.items() if of != text)
        return f"{rule} | <[{','.join(map(str, ids))}]>" if marker and ids else line

    return "\n".join(map(completed, grammar.split("\n")))


def _from_regex(text: str) -> str:
    """Return the grammar of a regex; \\d and \\w match ASCII only, as in JSON Schema."""
    body = llguidance.regex_to_lark(text, "dw")
    return llguidance.LLMatcher.grammar_from_lark(f"start: /{body}/")


def _literal(text: str) -> str:
    """Return a regex that matches `text`, without \\< and \\>, which match the ends of a word."""
    return re.sub(r"([!-/:;=?@\[-`{-~])", r"\\\1", text)


def _short(message: str) -> str:
    """Return the message of llguidance on one line, without its remark on verbosity."""
    words = " ".join(message.replace("<non-verbose/>", "").split())
    if words == _NOTHING_FOLLOWS:
        words = "no finite text matches it"
    if words.startswith("panic"):  # the rest has lines of the library's source
        words = "it is too complex for the grammar library"
    elif any(limit in words for limit in LIMIT_MESSAGES):
        words = f"it is too complex: {words}"
    return words if len(words) <= MOST_CHARS else words[:MOST_CHARS] + " ..."
