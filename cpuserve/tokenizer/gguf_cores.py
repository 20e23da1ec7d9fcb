"""Builds tokenizers of the `tokenizers` library from vocabularies in GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve.tokenizer.ends import ENDS
from cpuserve.tokenizer.splits import PreTokenizer, splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# The types of tokens in GGUF files (llama_token_type in llama.cpp).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what SentencePiece writes for a space
# _merges tries every cut of every piece, so this limit on characters bounds its time.
# The longest piece of Llama 2 has 16 characters, the longest piece of Gemma 31.
MAX_PIECE = 512
_PLAIN_PHI3 = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file, each with a type and a score; `ids` maps "bos" etc. to token ids.

    space_prefix: whether encoding puts a space before a text.
    squeeze: whether encoding replaces several spaces by one.
    strips_after_special: whether special tokens swallow the spaces after them.
    """

    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    ids: dict[str, int]
    space_prefix: bool = False
    squeeze: bool = False
    strips_after_special: bool = False

    def numbered(self) -> dict[str, int]:
        """Return {text: id} of all tokens that are not marked as unused."""
        if UNUSED not in self.types:
            return dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        found = zip(self.tokens, self.types, strict=True)
        return {text: i for i, (text, kind) in enumerate(found) if kind != UNUSED}


def byte_level(vocab: Vocabulary, pre: PreTokenizer, merges: list[tuple[str, str]]) -> Core:
    """Return BPE over bytes (in GPT-2's alphabet) or, with pre.raw, over characters.

    With pre.raw, characters that are not in the vocabulary are encoded as bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    # The vocabulary includes added tokens, so that each keeps its id, the position in the list.
    bpe = models.BPE(
        vocab=vocab.numbered(),
        merges=merges,
        ignore_merges=pre.ignore_merges,
        byte_fallback=pre.raw,
    )
    core = Tokenizer(bpe)
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    if pre.raw:
        core.normalizer = normalizers.Replace(" ", SPACE)
    core.pre_tokenizer = splitter(pre)
    core.decoder = _spaces_decoder(strip=False) if pre.raw else decoders.ByteLevel()
    _add_tokens(core, vocab)
    return core


def sentencepiece(vocab: Vocabulary) -> Core:
    """Return the BPE of SentencePiece; each merge makes the piece with the highest score."""
    from tokenizers import Tokenizer, models

    numbered = vocab.numbered()
    unknown = vocab.ids.get("unknown")
    bpe = models.BPE(
        vocab=numbered,
        merges=_merges(vocab),
        unk_token=None if unknown is None else vocab.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    core = Tokenizer(bpe)
    core.normalizer = _spaces(vocab, b"")
    core.decoder = _spaces_decoder(strip=vocab.space_prefix)
    _add_tokens(core, vocab)
    return core


def unigram(vocab: Vocabulary, charsmap: bytes) -> Core:
    """Return the Unigram model of SentencePiece, which maximizes the sum of the pieces' scores."""
    from tokenizers import Tokenizer, models

    pieces = list(zip(vocab.tokens, vocab.scores or (), strict=True))
    used = [score for score, kind in zip(vocab.scores or (), vocab.types, strict=True)
            if kind == NORMAL]  # fmt: skip
    # Tokens of other types are found in a text before the Unigram model runs.
    # These tokens get the worst score, so that the model does not choose them itself.
    worst = min(used, default=0.0)
    pieces = [
        (text, score if kind in (NORMAL, USER_DEFINED) else worst)
        for (text, score), kind in zip(pieces, vocab.types, strict=True)
    ]
    fallback = BYTE in vocab.types
    core = Tokenizer(
        models.Unigram(pieces, unk_id=vocab.ids.get("unknown"), byte_fallback=fallback)
    )
    core.normalizer = _spaces(vocab, charsmap)
    core.decoder = _spaces_decoder(strip=vocab.space_prefix)
    _add_tokens(core, vocab)
    return core


def word_piece(vocab: Vocabulary, *, lowercase: bool, strip_accents: bool) -> Core:
    """Return WordPiece of BERT. GGUF marks first pieces of words (U+2581), BERT the others (##)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    texts = [
        text if kind != NORMAL else text[1:] if text.startswith(SPACE) else f"##{text}"
        for text, kind in zip(vocab.tokens, vocab.types, strict=True)
    ]
    unknown = vocab.tokens[vocab.ids["unknown"]] if "unknown" in vocab.ids else "[UNK]"
    core = Tokenizer(models.WordPiece({t: i for i, t in enumerate(texts)}, unk_token=unknown))
    core.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    _add_tokens(core, vocab)
    return core


def _merges(vocab: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of pieces that together are a piece, in order of its score, highest first.

    SentencePiece has no list of merges: any such pair may be merged.
    Control, byte and user-defined tokens take no part in merges.
    """
    scores = vocab.scores or []
    longest = max(map(len, vocab.tokens))
    if longest > MAX_PIECE:
        msg = f"a token has {longest} characters; SentencePiece's have at most {MAX_PIECE}"
        raise ValueError(msg)
    kinds = zip(vocab.tokens, vocab.types, strict=True)
    ids = {text: i for i, (text, kind) in enumerate(kinds) if kind == NORMAL}
    ordered = sorted(ids, key=lambda text: (-scores[ids[text]], ids[text]))
    found = []
    for text in ordered:
        for cut in range(1, len(text)):
            left = text[:cut]
            if left in ids and text[cut:] in ids:
                found.append((left, text[cut:]))
    return found


def _spaces(vocab: Vocabulary, charsmap: bytes) -> Any:
    """Return the normalizer of SentencePiece: its table of characters, and its rules for spaces."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if vocab.squeeze:
        steps += [normalizers.Replace(Regex(p), s) for p, s in ((r"\A +| +\z", ""), (" {2,}", " "))]
    steps += [normalizers.Prepend(SPACE)] if vocab.space_prefix else []
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _spaces_decoder(*, strip: bool) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _add_tokens(core: Core, vocab: Vocabulary) -> None:
    """Add the special and user-defined tokens, which `core` finds before it splits a text."""
    from tokenizers import AddedToken

    # Some converters mark end-of-turn tokens as user-defined or ordinary: correct the type.
    listed = [
        (text, CONTROL if text in ENDS and kind != UNUSED else kind)
        for text, kind in zip(vocab.tokens, vocab.types, strict=True)
        if (kind != NORMAL or text in ENDS) and text
    ]
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(
                text,
                special=special,
                normalized=False,
                rstrip=vocab.strips_after_special and text not in _PLAIN_PHI3,
            )
            for text, kind in listed
            if kind in kinds
        ]
        core.add_special_tokens(added) if special else core.add_tokens(added)
