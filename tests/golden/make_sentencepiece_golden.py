"""Make tokenizer_sentencepiece.json: tiny vocabularies, and the ids that sentencepiece gives texts.

    python -m tests.golden.make_sentencepiece_golden [NUMBER_OF_STRINGS]

It needs `pip install sentencepiece` (0.2.3 made the file in the repository). The library trains
each model on the words and lines of make_tokenizer_golden.py and on tests/data/fidelity.txt, and
then encodes random strings. Pieces, scores and types are written as a GGUF file has them:
llama.cpp's converter writes the spaces of user-defined tokens as spaces. A control token in a text
stands for itself, and what follows it is encoded like the beginning of a text, as llama.cpp does
it; so do user-defined tokens of models that put a space in front.
"""

from __future__ import annotations

import base64
import io
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

from tests.golden.make_tokenizer_golden import ALPHABETS, CODE, EDGE, WORDS

SEED = 20261122
NUM_STRINGS = 300
FILE = Path(__file__).with_name("tokenizer_sentencepiece.json")
TEXT = Path(__file__).parents[1] / "data" / "fidelity.txt"
SPACE = "\u2581"
COMMON: dict[str, Any] = {
    "character_coverage": 0.98,
    "max_sentence_length": 100_000,
    "num_threads": 1,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
}
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
# A rule for each kind of change: one to one, one to several, several to one, one to nothing. The
# tokenizers library does not find several characters that a reader sees as several ("..."), nor a
# part of those that a reader sees as one (marks on a letter); models of languages rarely need it.
RULES = """\
FF21\t41
FF11\t31
FB01\t66 69
BD\t31 2044 32
65 301\tE9
200B\t
A0\t20
3000\t20
"""
_MARKS = re.compile("(?<!e)[\u0300-\u036f\u20d7]+|(?<=[\u0300-\u036f])[\u0300-\u036f\u20d7]+")
MODELS: dict[str, dict[str, Any]] = {
    # Llama 2, Mistral: a space in front, bytes for unknown characters.
    "llama": {
        "model_type": "bpe", "vocab_size": 900, "byte_fallback": True, **PLAIN,
        "split_digits": True, "allow_whitespace_only_pieces": True,
        "control_symbols": ["<|turn|>"],
    },
    # Gemma: no space in front; runs of spaces, newlines and tags are tokens of their own.
    "gemma": {
        "model_type": "bpe", "vocab_size": 900, "byte_fallback": True, **PLAIN,
        "split_digits": True, "add_dummy_prefix": False,
        "control_symbols": ["<start_of_turn>", "<end_of_turn>"],
        "user_defined_symbols": ["\n", "\n\n", SPACE * 2, SPACE * 3, SPACE * 4, "<table>"],
    },
    # No bytes: what has no piece is the unknown token.
    "unknown": {"model_type": "bpe", "vocab_size": 500, "byte_fallback": False, **PLAIN},
    # T5, XLM-R: Unigram, with rules of normalization and single spaces.
    "unigram": {
        "model_type": "unigram", "vocab_size": 500, "remove_extra_whitespaces": True,
        "user_defined_symbols": ["<extra_0>"],
    },
    "unigram_bytes": {
        "model_type": "unigram", "vocab_size": 700, "byte_fallback": True, **PLAIN,
    },
}  # fmt: skip


def main() -> None:
    """Train the models and write the file."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_STRINGS
    rng = random.Random(SEED)
    found = {name: _golden(name, options, rng, count) for name, options in MODELS.items()}
    head = {"made_by": f"sentencepiece {sentencepiece.__version__}", "seed": SEED}
    target = FILE if len(sys.argv) < 3 else Path(sys.argv[2])
    rows = ",\n".join(
        f'"{name}": {json.dumps(golden, ensure_ascii=True)}' for name, golden in found.items()
    )
    target.write_text(f'{json.dumps(head)[:-1]}, "models": {{\n{rows}\n}}}}\n')


def _golden(name: str, options: dict[str, Any], rng: random.Random, count: int) -> dict[str, Any]:
    options = {**COMMON, **options}
    model = io.BytesIO()
    lines = TEXT.read_text().splitlines() + WORDS * 3 + CODE * 3
    with tempfile.TemporaryDirectory() as folder:
        if name == "unigram":
            rules = Path(folder) / "rules.tsv"
            rules.write_text(RULES)
            options["normalization_rule_tsv"] = str(rules)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for line in lines if line.strip()),
            model_writer=model,
            minloglevel=2,
            **options,
        )
    made = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    special = ["<s>", "</s>", *options.get("control_symbols", [])]
    user = options.get("user_defined_symbols", [])
    prefix = options.get("add_dummy_prefix", True)
    found = [*special, *user] if prefix else special
    types = [_type(made, i, user) for i in range(len(made))]
    strings = [_string(rng, special, user) for _ in range(count)]
    if name == "unigram":
        strings = [_MARKS.sub("", text) for text in strings]
    return {
        "tokens": [_spelled(made, i, kind) for i, kind in enumerate(types)],
        "scores": [round(made.get_score(i), 6) for i in range(len(made))],
        "types": types,
        "space_prefix": prefix,
        "squeeze": options["remove_extra_whitespaces"],
        "charsmap": base64.b64encode(_charsmap(model.getvalue())).decode(),
        "strings": [[text, _ids(made, text, found)] for text in strings],
    }


def _spelled(made: Any, index: int, kind: int) -> str:
    piece: str = made.id_to_piece(index)
    return piece.replace(SPACE, " ") if kind == 4 else piece


def _type(made: Any, index: int, user: list[str]) -> int:
    """llama.cpp's token types, which have the numbers of sentencepiece's."""
    if made.is_unknown(index):
        return 2
    if made.is_control(index):
        return 3
    if made.is_byte(index):
        return 6
    return 4 if made.id_to_piece(index) in user else 5 if made.is_unused(index) else 1


def _charsmap(model: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    parsed = sentencepiece_model_pb2.ModelProto.FromString(model)
    data: bytes = parsed.normalizer_spec.precompiled_charsmap
    return data


def _string(rng: random.Random, special: list[str], user: list[str]) -> str:
    parts = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.random()
        if kind < 0.35:
            parts.append(rng.choice(WORDS))
        elif kind < 0.45:
            parts.append(rng.choice(CODE)[:60])
        elif kind < 0.6:
            parts.append(rng.choice(EDGE)[:40])
        elif kind < 0.7 and special + user:
            parts.append(rng.choice(special + user).replace(SPACE, " "))
        else:
            letters = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 9))))
        parts.append(rng.choice(["", "", " ", " ", "  ", "     ", "\n", "\n\n\n"]))
    return "".join(parts).replace("<unk>", "")


def _ids(made: Any, text: str, special: list[str]) -> list[int]:
    for token in special:
        before, found, after = text.partition(token)
        if found:
            rest = [made.piece_to_id(token), *_ids(made, after, special)]
            return [*_ids(made, before, special), *rest]
    found_ids: list[int] = made.encode(text) if text else []
    return found_ids


if __name__ == "__main__":
    main()
