"""Loads the tokenizer and the chat template in the metadata of a GGUF file.

`tokenizer.ggml.model` is the kind of the tokenizer: byte-level BPE ("gpt2"), BPE of SentencePiece
("llama"), Unigram ("t5"), WordPiece ("bert"), or one in the record of a family.
Keys that a file lacks have the defaults of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cpuserve.base.errors import ModelError
from cpuserve.base.log import get_logger
from cpuserve.base.registry import imported
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.models import FAMILIES, add_plugins
from cpuserve.tokenizer.charsmap import is_charsmap
from cpuserve.tokenizer.parts import Parts, Scheme, guarded, special_ids_of
from cpuserve.tokenizer.splits import PreTokenizer, pre_tokenizer, pre_tokenizers
from cpuserve.tokenizer.vocabulary import (
    Vocabulary,
    byte_level,
    sentencepiece,
    tried,
    unigram,
    word_piece,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

log = get_logger("tokenizer")
Build: TypeAlias = Callable[[GgufFile, Vocabulary, PreTokenizer], "Core"]


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A value of `tokenizer.ggml.model`.

    build: makes the tokenizer of a file from its vocabulary and its pre-tokenizer.
    ids: the token ids, by their names in GGUF, that apply if a file has none.
    add_bos, add_eos, add_sep: the flags that apply if a file has none.
    strips_space: whether decoding drops the space before a text that encoding puts there.
    pre: the `tokenizer.ggml.pre` that counts, whatever a file says; "" = what the file says.
    """

    scheme: Scheme
    build: Build
    ids: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    strips_space: bool = False
    pre: str = ""


# The name of each special token in GGUF (which spells "seperator" so), and in chat templates.
_SPECIAL = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "cls": "cls_token",
    "mask": "mask_token",
}


def gguf_parts(path: Path) -> Parts:
    """Return the tokenizer in a GGUF file; ModelError if its kind is unknown or it is broken."""
    # Import tokenizers before the vocabulary is read, because objects of this module are never
    # freed. If they were allocated after the vocabulary, its freed memory could not be returned.
    import_module("tokenizers")
    file = GgufFile(path)
    model, kind = _kind(file)
    vocab = _vocabulary(file, kind)
    pre = _pre_tokenizer(file, kind.pre)
    core = guarded(str(path), lambda: kind.build(file, vocab, pre))
    tokens = vocab.tokens
    bos, last = _added(file, kind, vocab, pre)
    between = _between(file, model, vocab) if last is not None else None
    guarded(str(path), lambda: _surround(core, tokens, (bos, last, between)))
    guarded(str(path), lambda: tried(core))
    return Parts(
        core=core,
        scheme="byte_fallback" if model == "gpt2" and pre.raw else kind.scheme,
        vocab_size=len(tokens),
        special_ids=special_ids_of(core),
        bos_id=vocab.ids.get("bos"),
        special_tokens={_SPECIAL[name]: tokens[i] for name, i in vocab.ids.items()},
        chat_template=_chat_template(file, "", ".default"),
        tool_template=_chat_template(file, ".tool_use"),
        strips_leading_space=vocab.space_prefix and kind.strips_space,
    )


def _kind(file: GgufFile) -> tuple[str, GgufTokenizer]:
    model = file.value("tokenizer.ggml.model")
    if isinstance(model, str) and model not in _KINDS and model not in FAMILIES.tokenizer.gguf:
        add_plugins()
    of_families = FAMILIES.tokenizer.gguf
    if isinstance(model, str) and model in of_families:
        return model, imported(of_families[model])
    if model not in _KINDS:
        msg = (
            f"GGUF {file.path}: tokenizer model {model!r:.60} is not supported; supported: "
            f"{', '.join([*_KINDS, *of_families])}. "
            "Use the model's Hugging Face directory as --tokenizer"
        )
        raise ModelError(msg)
    return model, _KINDS[model]


def _pre_tokenizer(file: GgufFile, forced: str) -> PreTokenizer:
    name = forced or file.value("tokenizer.ggml.pre")
    if name is None and file.value("tokenizer.ggml.model") == "gpt2":
        log.warning(
            "GGUF %s has no tokenizer.ggml.pre, as old files; texts are split by GPT-2's rules",
            file.path,
        )
    name = name or "default"
    rules = pre_tokenizer(name) if isinstance(name, str) else None
    if rules is not None:
        return rules
    if file.value("tokenizer.ggml.model") != "gpt2":
        return PreTokenizer()  # the other kinds of tokenizers do not use these rules
    msg = (
        f"GGUF {file.path}: tokenizer.ggml.pre {name!r:.60} is not supported; "
        f"supported: {', '.join(pre_tokenizers())}. Use the model's Hugging Face directory as "
        "--tokenizer"
    )
    raise ModelError(msg)


def _vocabulary(file: GgufFile, kind: GgufTokenizer) -> Vocabulary:
    tokens = _strings(file, "tokens")
    types = file.value("tokenizer.ggml.token_type")
    if types is None:
        types = [1] * len(tokens)
    _check_entries(file, "token_type", types, len(tokens), int)
    scores = file.value("tokenizer.ggml.scores")
    if scores is not None:
        _check_entries(file, "scores", scores, len(tokens), (int, float))
    ids = {}
    for name in _SPECIAL:
        value = file.value(f"tokenizer.ggml.{name}_token_id")
        value = kind.ids.get(name) if value is None else value
        if isinstance(value, int) and 0 <= value < len(tokens):
            ids[name] = value
    name = file.value("general.name")
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=scores,
        ids=ids,
        space_prefix=_flag(file, "add_space_prefix", absent=True),
        squeeze=_flag(file, "remove_extra_whitespaces", absent=False),
        strips_after_special=isinstance(name, str) and _is_phi3(name),
    )


def _is_phi3(name: str) -> bool:
    """Whether special tokens of this model swallow the spaces after them: no key says this."""
    return any(word in name.lower() for word in ("phi-3", "phi3"))


def _check_entries(file: GgufFile, name: str, value: Any, count: int, kinds: Any) -> None:
    if not isinstance(value, list) or len(value) != count:
        msg = f"GGUF {file.path}: tokenizer.ggml.{name} must have one entry for each token"
        raise ModelError(msg)
    if not all(isinstance(item, kinds) for item in value):
        msg = f"GGUF {file.path}: tokenizer.ggml.{name} must be a list of numbers"
        raise ModelError(msg)


def _strings(file: GgufFile, name: str) -> list[str]:
    value = file.value(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        what = "is missing" if value is None else "must be a list of strings"
        msg = f"GGUF {file.path}: tokenizer.ggml.{name} {what}; convert the model again"
        raise ModelError(msg)
    return value


def _flag(file: GgufFile, name: str, *, absent: bool) -> bool:
    value = file.value(f"tokenizer.ggml.{name}")
    return absent if value is None else bool(value)


def with_merges(file: GgufFile, vocab: Vocabulary, pre: PreTokenizer) -> Core:
    """Return the byte-level BPE with the merges of a file."""
    return byte_level(vocab, pre, _pairs(file))


def _word_pieces(file: GgufFile, vocab: Vocabulary, _pre: PreTokenizer) -> Core:
    lowercase = _flag(file, "normalizer.lowercase", absent=True)
    strip = _flag(file, "normalizer.strip_accents", absent=lowercase)
    return word_piece(vocab, lowercase=lowercase, strip_accents=strip)


def _scored_pieces(file: GgufFile, vocab: Vocabulary, _pre: PreTokenizer) -> Core:
    """Return the tokenizer of SentencePiece, which needs a score for each token."""
    model = file.value("tokenizer.ggml.model")
    if vocab.scores is None:
        msg = f"GGUF {file.path}: tokenizer.ggml.scores is missing; a {model!r} tokenizer needs it"
        raise ModelError(msg)
    return unigram(vocab, _charsmap(file)) if model == "t5" else sentencepiece(vocab)


def _pairs(file: GgufFile) -> list[tuple[str, str]]:
    """Return the two parts of each merge; a file has up to half a million merges."""
    found = []
    for merge in _strings(file, "merges"):
        left, _, right = merge.partition(" ")
        found.append((left, right) if left and right else _pair(file, merge))
    return found


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    """Return the two parts of a merge where the first part begins with a space.

    Raises:
        ModelError: the merge does not have two parts.
    """
    at = merge.find(" ", 1)
    left, right = merge[: max(at, 0)], merge[at + 1 :]
    if not (left and right):
        msg = f"GGUF {file.path}: tokenizer.ggml.merges holds {merge[:80]!r}, which is not a pair"
        raise ModelError(msg)
    return left, right


def _charsmap(file: GgufFile) -> bytes:
    """Return the normalization table of SentencePiece (size, trie, texts); b"" if there is none."""
    value = file.value("tokenizer.ggml.precompiled_charsmap")
    if value is None:
        return b""
    if isinstance(value, list) and all(type(v) is int and -128 <= v < 256 for v in value):
        data = bytes(v & 255 for v in value)
        if is_charsmap(data):
            return data
    msg = f"GGUF {file.path}: tokenizer.ggml.precompiled_charsmap is broken"
    raise ModelError(msg)


def _added(
    file: GgufFile, kind: GgufTokenizer, vocab: Vocabulary, pre: PreTokenizer
) -> tuple[int | None, int | None]:
    """Return (id before a text, id after it) for encoding with special tokens; None = no id."""
    ids = vocab.ids
    bos = pre.forces_bos or _flag(file, "add_bos_token", absent=kind.add_bos or pre.add_bos)
    eos = _flag(file, "add_eos_token", absent=kind.add_eos)
    sep = _flag(file, "add_sep_token", absent=kind.add_sep)
    first = ids.get("bos", ids.get("cls")) if bos else None
    last = ids.get("eos") if eos else None
    return first, ids.get("seperator") if sep and last is None else last


def _between(file: GgufFile, model: str, vocab: Vocabulary) -> int | None:
    """Return a second separator id between the texts of a pair, or None."""
    if model != "t5" or not _flag(file, "add_sep_token", absent=True):  # only XLM-RoBERTa has it
        return None
    return vocab.ids.get("seperator", vocab.ids.get("eos"))


def _surround(core: Core, tokens: list[str], ids: tuple[int | None, ...]) -> Core:
    """Make `core` add these ids to a text that is encoded with special tokens; return `core`.

    ids: the id before the first text, the id after each text,
    and a further id between the two texts of a pair; None: no id.
    """
    from tokenizers import processors

    given = dict(zip("FLS", ids, strict=True))
    names: list[dict[str, Any]] = [
        {"id": name, "ids": [i], "tokens": [tokens[i]]}
        for name, i in given.items()
        if i is not None
    ]
    if names:
        known = {name["id"] for name in names}
        core.post_processor = processors.TemplateProcessing(
            single=[part for part in ("F", "$A", "L") if part in known or part == "$A"],
            pair=[
                part
                for part in ("F", "$A", "L", "S", "$B:1", "L:1")
                if part.partition(":")[0] in {*known, "$A", "$B"}
            ],
            special_tokens=names,
        )
    return core


def _chat_template(file: GgufFile, *names: str) -> str | None:
    """Return the first of these chat templates that the file has, or None."""
    for name in names:
        template = file.value(f"tokenizer.chat_template{name}")
        if isinstance(template, str) and template:
            return template
    return None


_KINDS = {
    "gpt2": GgufTokenizer("byte_level", with_merges),
    "llama": GgufTokenizer(
        "byte_fallback",
        _scored_pieces,
        ids={"bos": 1, "eos": 2, "unknown": 0},
        add_bos=True,
        strips_space=True,
    ),
    "t5": GgufTokenizer(
        "byte_fallback",
        _scored_pieces,
        ids={"eos": 1, "unknown": 2, "padding": 0},
        add_eos=True,
        strips_space=True,
    ),
    "bert": GgufTokenizer(
        "plain",
        _word_pieces,
        ids={"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
        add_bos=True,
        add_sep=True,
    ),
}
