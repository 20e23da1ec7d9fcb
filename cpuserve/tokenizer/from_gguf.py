"""Builds byte-level BPE tokenizers from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.loader.gguf import GgufFile
from cpuserve.tokenizer.ends import ENDS
from cpuserve.tokenizer.parts import Parts, guarded, special_ids_of
from cpuserve.tokenizer.splits import PRE_TOKENIZERS, PreTokenizer, splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# llama.cpp's llama_token_type.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


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
    ids = {name: _token_id(file, name, len(tokens)) for name in _SPECIAL}
    add_bos = file.value("tokenizer.ggml.add_bos_token")
    template = file.value("tokenizer.chat_template")
    return Parts(
        core=core,
        scheme="byte_level",
        vocab_size=len(tokens),
        special_ids=special_ids_of(core),
        bos_id=ids["bos"],
        special_tokens={_SPECIAL[name]: tokens[i] for name, i in ids.items() if i is not None},
        chat_template=template if isinstance(template, str) and template else None,
        add_bos=pre.add_bos if add_bos is None else bool(add_bos),
    )


# Name of a special token in GGUF, and in chat templates.
_SPECIAL = {
    "bos": "bos_token",
    "eos": "eos_token",
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

    # The vocabulary includes added tokens, so that each keeps its id, the position in the list.
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    merges = [_pair(file, merge) for merge in _strings(file, "merges")]
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    core = Tokenizer(bpe)
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = splitter(pre)
    core.decoder = decoders.ByteLevel()
    # Some converters mark end-of-turn tokens as user-defined or ordinary: correct the type.
    kinds = [
        CONTROL if t in ENDS and k != UNUSED else k for t, k in zip(tokens, types, strict=True)
    ]
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [t for t, k in zip(tokens, kinds, strict=True) if k == kind and t]
        added = [AddedToken(t, special=special, normalized=False) for t in texts]
        core.add_special_tokens(added) if special else core.add_tokens(added)
    return core


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        msg = f"GGUF {file.path}: tokenizer.ggml.merges holds {merge[:80]!r}, which is not a pair"
        raise ModelError(msg)
    return left, right
