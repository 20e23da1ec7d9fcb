"""How byte-level tokenizers split text into pieces before they merge bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules of a `tokenizer.ggml.pre` value, which split text like the original tokenizer.json.

    split: regular expression of a piece (None: that of GPT-2). digits: first split off each digit.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(split=_QWEN2_SPLIT, nfc=True)
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def splitter(pre: PreTokenizer) -> Any:
    """The pre-tokenizer of the `tokenizers` library for `pre`."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)
    if pre.split is not None:
        split = pre_tokenizers.Split(Regex(pre.split), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, byte_level])
    if pre.digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level
