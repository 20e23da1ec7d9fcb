"""Prompts for fill-in-the-middle: the model writes the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.tokenizer.tokenizer import Tokenizer

# For each model family: the tokens before the prefix, the suffix, the middle,
# the name of a repository and the name of a file ("" or missing = none).
# All families but Mistral's write the prefix first.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "", "<|file_separator|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<reponame>", "<filename>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
_MISTRAL = ("[PREFIX]", "[SUFFIX]")


class InfillTokens(NamedTuple):
    """The token ids that mark the parts of a fill-in-the-middle prompt.

    middle: None = the suffix comes first, and the model writes after the prefix.
    repository, file: the tokens before the name of a repository and of a file;
      None = the model has none.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens | None:
        """Return the fill-in-the-middle tokens of a model; None = it has no such tokens."""
        partial = None
        for names in _FAMILIES:
            ids = [tokenizer.token_id(name) if name else None for name in names]
            prefix, suffix, middle, *more = ids
            if prefix is None or suffix is None or middle is None:
                continue
            if None not in more:
                return cls(prefix, suffix, middle, *more)
            partial = partial or cls(prefix, suffix, middle, *more)
        prefix, suffix = map(tokenizer.token_id, _MISTRAL)
        if partial is None and prefix is not None and suffix is not None:
            return cls(prefix, suffix, None)
        return partial


def infill_tokens(tokenizer: Tokenizer, role: str = "suffix") -> InfillTokens:
    """Return the tokens of a model that can fill in; role: the field that asks for it.

    Raises:
        InvalidRequest: the model has no such tokens.
    """
    found = InfillTokens.of(tokenizer)
    if found is None:
        msg = (
            f"{role} is not possible with this model, because its tokenizer has no tokens for "
            "fill-in-the-middle: omit it, or use a code model"
        )
        raise InvalidRequest(msg, role=role)
    return found


def infill_prompt(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    prefix: Sequence[int],
    suffix: Sequence[int],
    before: Sequence[int] = (),
) -> list[int]:
    """Return the prompt after which the model writes the text between `prefix` and `suffix`.

    The prompt begins with the tokens that the model's tokenizer puts before each text.

    prefix, suffix: token ids without special tokens.
    before: tokens of other files.
    """
    first = tokenizer.before_text
    if tokens.middle is None:
        return [*first, *before, tokens.suffix, *suffix, tokens.prefix, *prefix]
    return [*first, *before, tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]
