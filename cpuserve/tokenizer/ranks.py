"""Tokenizers of tiktoken: BPE where a pair is merged if its bytes are a token of low rank."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cpuserve.tokenizer.parts import byte_level_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

    from cpuserve.tokenizer.splits import PreTokenizer

# The longest known token has 128 bytes. All cuts of a token are tried, so lengths are limited.
MAX_TOKEN_BYTES = 512
MAX_TOKENS = 1 << 20
MAX_VOCABULARY_BYTES = 1 << 24
RESERVED = 256  # control tokens after the tokens of the file; settings name some of them


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Return the ids of tokens by their bytes; data: lines with a token in base64 and its id.

    Raises:
        ValueError: a line has another form, a byte is missing, the ids are not the numbers from 0
            on, or there are too many tokens, or too long ones.
    """
    ranks: dict[bytes, int] = {}
    for line in data.splitlines():
        if line:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
    if sum(map(len, ranks)) > MAX_VOCABULARY_BYTES:
        msg = f"its tokens have more than {MAX_VOCABULARY_BYTES} bytes together"
        raise ValueError(msg)
    if len(ranks) > MAX_TOKENS or max(map(len, ranks), default=0) > MAX_TOKEN_BYTES:
        msg = f"there may be {MAX_TOKENS} tokens of up to {MAX_TOKEN_BYTES} bytes"
        raise ValueError(msg)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        msg = f"{len(missing)} bytes have no token, such as {missing[0]}"
        raise ValueError(msg)
    if sorted(ranks.values()) != [*range(len(ranks))]:
        msg = f"the ids of {len(ranks)} tokens are not 0 to {len(ranks) - 1}"
        raise ValueError(msg)
    return ranks


def by_rank(
    ranks: Mapping[bytes, int], named: Mapping[int, tuple[str, bool]], pre: PreTokenizer
) -> Core:
    """Return the tokenizer that merges the pair with the lowest rank, again and again.

    ranks: the ids of the tokens by their bytes.
    named: the texts of control tokens by their ids, and whether they are special. The other
      reserved tokens have the texts of the code of published models.
    pre: how texts are split before.

    Raises ValueError if a control token has the id or the text of another token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from cpuserve.tokenizer.splits import splitter

    letters = {byte: char for char, byte in byte_level_bytes().items()}
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {texts[token]: rank for token, rank in ranks.items()}
    first = len(ranks)
    control = {i: (f"<|reserved_token_{i}|>", True) for i in range(first, first + RESERVED)}
    for i, entry in named.items():
        if not first <= i <= first + 2 * RESERVED:
            msg = f"the token {entry[0]!r:.40} has the id {i}, which is no id of a control token"
            raise ValueError(msg)
        control[i] = entry
    every = {**vocab, **{text: i for i, (text, _) in control.items()}}
    if len(every) != len(vocab) + len(control):
        msg = "two tokens have the same text"
        raise ValueError(msg)
    core = Tokenizer(models.BPE(vocab=every, merges=_merges(ranks, texts), ignore_merges=True))
    core.pre_tokenizer = splitter(pre)
    core.decoder = decoders.ByteLevel()
    for _, (text, special) in sorted(control.items()):
        core.add_tokens([AddedToken(text, special=special, normalized=False)])
    return core


def _merges(ranks: Mapping[bytes, int], texts: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are a token together, tokens of low rank first."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks)
        found += [
            (texts[left], texts[right])
            for left, right in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    return found


def control_tokens(settings: Mapping[str, object]) -> Iterable[tuple[int, tuple[str, bool]]]:
    """Yield the id, the text and whether it is special, for each token that the settings list."""
    listed = settings.get("added_tokens_decoder")
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(content, str) and content and key.isdecimal():
            yield int(key), (content, entry.get("special") is not False)
