"""Tokenizers made of the tokens of a file, with their types and scores: each kind by its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve.tokenizer.charsmap import spreads
from cpuserve.tokenizer.greedy import longest_match, unescaped
from cpuserve.tokenizer.parts import MAX_TOKEN_CHARS
from cpuserve.tokenizer.splits import PreTokenizer, splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# Tokens that end a turn, a message or a text in common chat formats. The config.json of a fine-tune
# often lacks the end token of its chat format, and a GGUF file may lack the key.
ENDS = frozenset({
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<turn|>",
    "<EOT>",
    "[EOT]",
    "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
# The types of tokens, in files of SentencePiece and in GGUF files (llama_token_type in llama.cpp).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what SentencePiece writes for a space
# _merges tries every cut of every piece, and a Unigram model has a node for every character that
# pieces begin with, so this limit on characters bounds the time and the memory.
# The longest piece of Llama 2 has 16 characters, the longest piece of Gemma 31.
MAX_PIECE = 512
MAX_PIECES_CHARS = 1 << 24  # of all pieces, which the same time and memory depends on
# Spaces at the ends of a text; without (?<! ), each rest of a run of spaces would be searched.
_AT_ENDS = r"\A +|(?<! ) +\z"
_PLAIN_PHI3 = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file, each with a type and a score; `ids` maps "bos" etc. to token ids.

    space_prefix: whether encoding puts a space before a text.
    squeeze: whether encoding replaces several spaces by one.
    strips_after_special: whether special tokens swallow the spaces after them.
    charsmap, merges: of a tokenizer.model (pieces.py): its table of characters, and whether it is
      a BPE and no Unigram model.
    prefix_once: whether a text after a special token gets no such space, and a text that begins
      with a space no second one.
    """

    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    ids: dict[str, int]
    space_prefix: bool = False
    squeeze: bool = False
    strips_after_special: bool = False
    charsmap: bytes = b""
    merges: bool = True
    prefix_once: bool = False

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

    _check_tokens(vocab)
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


def tried(core: Core) -> Core:
    """Return `core` after a test encoding: only this detects a broken normalization table."""
    core.encode("a \u00e9\uff21\u6f22\U0001f600")
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
    _set_spaces(core, vocab, vocab.charsmap)
    _add_tokens(core, vocab)
    return core


def unigram(vocab: Vocabulary, charsmap: bytes) -> Core:
    """Return the Unigram model of SentencePiece, which maximizes the sum of the pieces' scores."""
    from tokenizers import Tokenizer, models

    _check_lengths(vocab)
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
    _set_spaces(core, vocab, charsmap)
    _add_tokens(core, vocab)
    return core


def word_piece(vocab: Vocabulary, *, lowercase: bool, strip_accents: bool) -> Core:
    """Return WordPiece of BERT. GGUF marks first pieces of words (U+2581), BERT the others (##)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    _check_tokens(vocab)
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


def longest_tokens(vocab: Vocabulary) -> Core:
    """Return a tokenizer by the longest match: ordinary tokens are bytes with Python's escapes."""
    kinds = list(zip(vocab.tokens, vocab.types, strict=True))
    tokens = {unescaped(text): i for i, (text, kind) in enumerate(kinds) if kind == NORMAL}
    texts = {text: i for i, (text, kind) in enumerate(kinds) if kind not in (NORMAL, UNUSED)}
    core = longest_match(tokens, texts)
    _add_tokens(core, vocab)
    return core


def _merges(vocab: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of pieces that together are a piece, in order of its score, highest first.

    SentencePiece has no list of merges: any such pair may be merged.
    Control, byte and user-defined tokens take no part in merges, because they are found in a text
    before. User-defined runs of spaces do, because there they are written as plain spaces.
    """
    scores = vocab.scores or []
    _check_lengths(vocab)
    kinds = zip(vocab.tokens, vocab.types, strict=True)
    ids = {
        text: i
        for i, (text, kind) in enumerate(kinds)
        if kind == NORMAL or (kind == USER_DEFINED and len(text) > 1 and not text.strip(SPACE))
    }
    ordered = sorted(ids, key=lambda text: (-scores[ids[text]], ids[text]))
    found = []
    for text in ordered:
        for cut in range(1, len(text)):
            left = text[:cut]
            if left in ids and text[cut:] in ids:
                found.append((left, text[cut:]))
    return found


def _check_lengths(vocab: Vocabulary) -> None:
    sizes = [len(text) for text in vocab.tokens]
    if max(sizes) > MAX_PIECE or sum(sizes) > MAX_PIECES_CHARS:
        msg = (
            f"a token has {max(sizes)} characters, all have {sum(sizes)}; SentencePiece's have at "
            f"most {MAX_PIECE} and {MAX_PIECES_CHARS}"
        )
        raise ValueError(msg)


def _check_tokens(vocab: Vocabulary) -> None:
    longest = max(map(len, vocab.tokens))
    if longest > MAX_TOKEN_CHARS:
        msg = f"a token has {longest} characters; at most {MAX_TOKEN_CHARS} are accepted"
        raise ValueError(msg)


def _set_spaces(core: Core, vocab: Vocabulary, charsmap: bytes) -> None:
    """Give `core` the table of characters and the rules for spaces of SentencePiece."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if charsmap and spreads(charsmap):
        msg = "its precompiled_charsmap makes texts much longer, or is broken"
        raise ValueError(msg)
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if vocab.squeeze:
        steps += [normalizers.Replace(Regex(p), s) for p, s in ((_AT_ENDS, ""), (" {2,}", " "))]
    if vocab.space_prefix and vocab.prefix_once:
        core.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE)] if vocab.space_prefix else []
        steps.append(normalizers.Replace(" ", SPACE))
    core.normalizer = normalizers.Sequence(steps)
    core.decoder = _spaces_decoder(strip=vocab.space_prefix)


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
