"""Finds the stop tokens, including those that config.json does not list."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.tokenizer.directory import (
    PIECES,
    find_tokenizer,
    piece_ids,
    read_values,
    read_vocab,
    special_tokens,
)
from cpuserve.tokenizer.vocabulary import ENDS

# A model with both of these tokens uses the harmony format of OpenAI,
# where a response consists of several messages and <|end|> ends only one of them.
_HARMONY = frozenset({"<|return|>", "<|call|>"})


def end_ids(
    named: Iterable[int], tokenizer: Path, vocab: int, opened: GgufFile | None = None
) -> frozenset[int]:
    """Return the ids below `vocab` (the ids that the model can generate) that end a response.

    The result has the ids in the model's config (`named`), and the tokens in `tokenizer`
    (a directory or a GGUF file) that are its eos_token or have a text in ENDS.
    Only the necessary parts of the tokenizer are read.

    opened: the open GGUF file of the model, which is not opened again if it has the tokenizer
      (opening takes 10 ms).

    Raises:
        ModelError: `tokenizer` does not exist or is broken.
    """
    path = find_tokenizer(tokenizer)
    if path.is_dir():
        found = _in_directory(path)
    else:
        found = _in_gguf(opened if opened and opened.path == path else GgufFile(path))
    if found.keys() >= _HARMONY:
        found.pop("<|end|>", None)
    return frozenset(i for i in (*named, *found.values()) if i < vocab)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The needed part of a tokenizer.json; msgspec skips all other members (megabytes)."""

    added_tokens: list[_AddedToken] | None = None


def _in_directory(path: Path) -> dict[str, int]:
    """Return {text: id} of the end tokens in the tokenizer of a model directory."""
    file = path / "tokenizer.json"
    if file.exists():
        data = read_values(file, "tokenizer")
        try:
            added = msgspec.json.decode(data, type=_TokenizerFile).added_tokens or []
        except (msgspec.MsgspecError, ValueError) as error:
            msg = f"broken tokenizer in {file}: {error}"
            raise ModelError(msg) from error
        ids = {token.content: token.id for token in added if token.id >= 0}
    elif (path / "vocab.json").exists():
        vocab = read_vocab(path)
        ids = {text: i for text, i in vocab.items() if type(i) is int and i >= 0}
    elif (path / PIECES).exists():
        ids = piece_ids(path)
    else:
        return {}
    wanted = {*ENDS, special_tokens(path).get("eos_token")}
    return {text: i for text, i in ids.items() if text in wanted}


def _in_gguf(file: GgufFile) -> dict[str, int]:
    """Return {text: id} of the end tokens in the vocabulary of a GGUF file.

    The ids in keys such as tokenizer.ggml.eos_token_id are left out,
    because the model's config has these ids.
    """
    return file.positions("tokenizer.ggml.tokens", ENDS)
