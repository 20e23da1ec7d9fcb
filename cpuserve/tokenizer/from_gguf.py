"""Byte-level BPE tokenizers built from GGUF metadata alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.loader.gguf import GgufFile
from cpuserve.tokenizer.parts import (
    TEXT_ENDS,
    TURN_ENDS,
    Parts,
    end_ids,
    guarded,
    special_ids_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# llama.cpp's llama_token_type.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What `tokenizer.ggml.pre` stands for: how the original tokenizer.json splits text.

    split: regular expression of the pieces (None: GPT-2's own). digits: each digit apart first.
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


def gguf_parts(path: Path) -> Parts:
    """The tokenizer in a GGUF file; ModelError for a kind that is not byte-level BPE."""
    file = GgufFile(path)
    pre = _pre_tokenizer(file)
    tokens, types = _strings(file, "tokens"), file.value("tokenizer.ggml.token_type")
    if types is None:
        types = [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        msg = f"GGUF {path}: tokenizer.ggml.token_type must have one entry for each token"
        raise ModelError(msg)
    core = guarded(str(path), lambda: _build(file, pre, tokens, types))
    special = special_ids_of(core)
    ids = {name: _token_id(file, name, len(tokens)) for name in _SPECIAL}
    add_bos = file.value("tokenizer.ggml.add_bos_token")
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    ends += end_ids(core, special, TURN_ENDS + TEXT_ENDS)
    template = file.value("tokenizer.chat_template")
    return Parts(
        core=core,
        scheme="byte_level",
        vocab_size=len(tokens),
        special_ids=special,
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        special_tokens={
            _SPECIAL[name]: tokens[i] for name, i in ids.items() if i is not None and _SPECIAL[name]
        },
        chat_template=template if isinstance(template, str) and template else None,
        add_bos=pre.add_bos if add_bos is None else bool(add_bos),
    )


# GGUF's word for a special token, and what chat templates call it.
_SPECIAL = {
    "bos": "bos_token",
    "eos": "eos_token",
    "eot": "",
    "eom": "",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def _token_id(file: GgufFile, name: str, vocab: int) -> int | None:
    value = file.value(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < vocab else None


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    model = file.value("tokenizer.ggml.model")
    if model != "gpt2":
        msg = (
            f"GGUF {file.path}: tokenizer model {model!r} is not supported; supported: gpt2 "
            "(byte-level BPE). Use the model's Hugging Face directory instead"
        )
        raise ModelError(msg)
    name = file.value("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        msg = (
            f"GGUF {file.path}: tokenizer.ggml.pre {name!r} is not supported; "
            f"supported: {', '.join(PRE_TOKENIZERS)}"
        )
        raise ModelError(msg)
    return PRE_TOKENIZERS[name]


def _strings(file: GgufFile, name: str) -> list[str]:
    value = file.value(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        msg = f"GGUF {file.path}: tokenizer.ggml.{name} must be a list of strings"
        raise ModelError(msg)
    return value


def _build(file: GgufFile, pre: PreTokenizer, tokens: list[str], types: list[Any]) -> Core:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    # Added tokens are in the vocabulary too, so that each keeps the id its place gives it.
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    merges = [_pair(file, merge) for merge in _strings(file, "merges")]
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    core = Tokenizer(bpe)
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = splitter(pre)
    core.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [t for t, k in zip(tokens, types, strict=True) if k == kind and t]
        added = [AddedToken(t, special=special, normalized=False) for t in texts]
        core.add_special_tokens(added) if special else core.add_tokens(added)
    return core


def splitter(pre: PreTokenizer) -> Any:
    """The `tokenizers` pre-tokenizer for `pre`."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)
    if pre.split is not None:
        split = pre_tokenizers.Split(Regex(pre.split), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, byte_level])
    if pre.digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        msg = f"GGUF {file.path}: tokenizer.ggml.merges holds {merge[:80]!r}, which is no pair"
        raise ModelError(msg)
    return left, right
