"""Files tokenizer.json that take much time or memory, and plain ones like published ones."""

import base64
import json
import shutil
import struct
from array import array

from cpuserve.tokenizer.parts import byte_level_bytes

SPACE = "\u2581"
BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}  # fmt: skip
ALPHABET = {char: i for i, char in enumerate(byte_level_bytes())}


def bpe(**members):
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": ALPHABET, "merges": [], **members,
    }  # fmt: skip


def word_level(**members):
    return {"type": "WordLevel", "vocab": {"hi": 0, "[UNK]": 1}, "unk_token": "[UNK]", **members}


def word_piece(**members):
    return {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "x": 1, "##x": 2, "hi": 3},
        **members,
    }  # fmt: skip


def unigram(pieces, **members):
    listed = [["<unk>", 0.0], *([piece, -float(i + 1)] for i, piece in enumerate(pieces))]
    return {"type": "Unigram", "unk_id": 0, "vocab": listed, "byte_fallback": False, **members}


def tokenizer(**members):
    """A byte-level tokenizer.json of 256 tokens, with these members."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": BYTE_LEVEL, "post_processor": None,
        "decoder": BYTE_LEVEL, "model": bpe(), **members,
    }  # fmt: skip


def normalizers(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def pre_tokenizers(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def replace(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def replace_matches(expression, new):
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": new}


def split(expression, behavior="Isolated"):
    return {
        "type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": False,
    }  # fmt: skip


def split_text(text):
    step = split("", "MergedWithPrevious")
    return {**step, "pattern": {"String": text}}


def template(pieces, ids=1, texts=1, text="a"):
    """A post-processor that puts `pieces` special tokens of `ids` ids before a text."""
    token, text = text, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * pieces + [text] * texts,
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [1] * ids, "tokens": [token] * ids}},
    }


def processors(*steps):
    return {"type": "Sequence", "processors": list(steps)}


def added(number, content, *, special=False, **flags):
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **usual, **flags}


def charsmap(key, replacement):
    """A table of SentencePiece that replaces one character of one byte."""
    units = array("I", [0] * 1024)
    units[0] = 256 << 10
    node = 256 ^ ord(key)
    leaf = node ^ 512
    units[node] = 512 << 10 | 1 << 8 | ord(key)
    units[leaf] = 1 << 31
    data = units.tobytes()
    whole = struct.pack("<I", len(data)) + data + replacement.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(whole).decode()}


def nested(step, members, kind, depth):
    for _ in range(depth):
        step = {"type": kind, members: [step]}
    return step


TENFOLD = [replace("x", "x" * 10)] * 9
SEARCHES = r"(?:x|xx){17}(?:x|xx){0,5}y"  # millions of tries at each place of LONG
LONG = "x" * 1000 + "zy"
META = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel"}

# Each: the members of a tokenizer.json, a text for it, and what happens.
#   refused   it is not loaded: one line says why
#   stopped   the text is refused, and other texts are encoded
#   served    the text is encoded, in a process with limits
#   plain     the text is encoded, in this process: the member has no effect, or little
HOSTILE = {
    "nine replacements": ({"normalizer": normalizers(*TENFOLD)}, "x" * 40, "stopped"),
    "nine replacements of a": (
        {"normalizer": normalizers(*[replace("a", "a" * 10)] * 9)}, "hi", "refused",
    ),
    "replacements in a Sequence in a Sequence": (
        {"normalizer": normalizers(normalizers(*TENFOLD))}, "x" * 40, "stopped",
    ),
    "one long replacement": ({"normalizer": replace("x", "y" * 10**6)}, "x" * 2000, "stopped"),
    "a replacement at each place": (
        {"normalizer": normalizers(*[replace_matches("(?=x)", "x" * 9)] * 8)}, "x" * 40, "stopped",
    ),
    "a text of 30 MB before each text": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 30_000_000}}, "hi", "refused",
    ),
    "bytes of bytes": ({"normalizer": normalizers(*[BYTES] * 30)}, "hi \u00e9", "refused"),
    "more bytes of bytes": (
        {"pre_tokenizer": pre_tokenizers(*[BYTE_LEVEL] * 30)}, "hi \u00e9", "refused",
    ),
    "a table that makes 1 MB of a character": (
        {"normalizer": charsmap("x", "y" * 10**6)}, "x" * 2000, "stopped",
    ),
    "a replacement that searches for long": (
        {"normalizer": replace_matches(SEARCHES, "z")}, LONG, "stopped",
    ),
    "an expression that searches for long": (
        {"pre_tokenizer": pre_tokenizers(split(SEARCHES), BYTE_LEVEL)}, LONG, "stopped",
    ),
    "such an expression in a Sequence": (
        {"pre_tokenizer": pre_tokenizers(pre_tokenizers(split(SEARCHES)), BYTE_LEVEL)},
        *(LONG, "stopped"),
    ),
    "an expression that the library gives up": (
        {"pre_tokenizer": pre_tokenizers(split(r"(x+x+)+y"), BYTE_LEVEL)}, "x" * 200, "stopped",
    ),
    "an expression that looks ahead": (
        {"pre_tokenizer": pre_tokenizers(split(r"(?=(\d{3})+(?!\d))"), BYTE_LEVEL)},
        *("1" * 100_000, "stopped"),
    ),
    "an expression that looks back": (
        {"pre_tokenizer": pre_tokenizers(split(r"\s+$"), BYTE_LEVEL)},
        *(" " * 100_000 + "x", "stopped"),
    ),
    "an unknown expression": (
        {"pre_tokenizer": pre_tokenizers(split(r"\p{L}+|\p{N}+x?"), BYTE_LEVEL)}, "hi 12", "served",
    ),
    "20,000 special tokens of 20,000 ids": (
        {"post_processor": template(20_000, ids=20_000)}, "hi", "refused",
    ),
    "20,000 special tokens": ({"post_processor": template(20_000)}, "hi", "served"),
    "64 special tokens of 30 MB": (
        {"post_processor": template(60, text="x" * 30_000_000)}, "hi", "refused",
    ),
    "a separator of 10 MB": (
        {
            "post_processor": {
                "type": "BertProcessing", "sep": ["x" * 10**7, 1], "cls": ["a", 2],
            },
        },
        *("hi", "served"),
    ),
    "a text 32 times, eight times": (
        {"post_processor": processors(*[template(0, texts=32)] * 8)}, "hi", "refused",
    ),
    "words of any length": (
        {
            "model": word_piece(max_input_chars_per_word=10**9),
            "pre_tokenizer": {"type": "WhitespaceSplit"},
        },
        *("x" * 20_000, "stopped"),
    ),
    "a prefix of 10 MB": (
        {
            "model": word_piece(continuing_subword_prefix="#" * 10**7),
            "pre_tokenizer": {"type": "WhitespaceSplit"},
        },
        *("xy " * 3_000, "stopped"),
    ),
    "a suffix of 10 MB": (
        {"model": bpe(end_of_word_suffix="#" * 10**7)}, "hi", "served",
    ),
    "an unknown token of 10 MB": (
        {
            "model": word_level(vocab={"hi": 0, "u" * 10**7: 1}, unk_token="u" * 10**7),
            "pre_tokenizer": {"type": "WhitespaceSplit"},
        },
        *("y " * 1000, "refused"),
    ),
    "a token of 10 MB": ({"model": bpe(vocab={**ALPHABET, "u" * 10**7: 256})}, "hi", "refused"),
    "a piece of 10 MB": (
        {"model": unigram(["hi", "x" * 10**7]), "pre_tokenizer": None}, "hi", "refused",
    ),
    "pieces of each length": (
        {"model": unigram(["x" * n for n in range(1, 1000)]), "pre_tokenizer": None},
        *("x" * 30_000, "stopped"),
    ),
    "an added token of 10 MB": ({"added_tokens": [added(256, "u" * 10**7)]}, "hi", "refused"),
    "200,000 added tokens": (
        {"added_tokens": [added(256 + i, f"<{i}>") for i in range(200_000)]}, "hi<7>", "served",
    ),
    "dropout": ({"model": bpe(dropout=0.5)}, "hi", "served"),
    "an unknown kind of model": ({"model": {"type": "Other", "vocab": {}}}, "hi", "refused"),
    "no object": ({"model": 1}, "hi", "refused"),
    "a Sequence 300 deep": (
        {"normalizer": nested(replace("x", "y"), "normalizers", "Sequence", 300)}, "hi", "refused",
    ),
    "merges of other tokens": ({"model": bpe(merges=["qq ww"] * 100_000)}, "hi", "refused"),
    "a piece of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "hi", "refused",
    ),
    "padding to 10^9": (
        {
            "padding": {
                "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
            },
            "truncation": {
                "direction": "Right", "max_length": 10**9, "strategy": "LongestFirst", "stride": 7,
            },
        },
        *("hi", "plain"),
    ),
    "decoders that replace": (
        {"decoder": {"type": "Sequence", "decoders": [replace("x", "x" * 10)] * 9}},
        *("x" * 40, "plain"),
    ),
    "the highest id": ({"model": bpe(vocab={**ALPHABET, "hi": 2**32 - 1})}, "hi", "plain"),
}  # fmt: skip

_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_GAPS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PLAIN_BYTES = {**BYTE_LEVEL, "use_regex": False}
_U, _L = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_U}*{_L}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_U}+{_L}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BEGIN = {**template(1), "pair": template(1)["single"]}
# The members that matter of published files.
PLAIN = {
    "SmolLM2": {
        "pre_tokenizer": pre_tokenizers({"type": "Digits", "individual_digits": True}, BYTE_LEVEL),
    },
    "Llama 3": {
        "pre_tokenizer": pre_tokenizers(split(rf"{_GPT4}|\p{{N}}{{1,3}}{_GAPS}"), _PLAIN_BYTES),
        "post_processor": processors(BYTE_LEVEL, _BEGIN),
        "model": bpe(ignore_merges=True),
    },
    "Qwen": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": pre_tokenizers(split(rf"{_GPT4}|\p{{N}}{_GAPS}"), _PLAIN_BYTES),
        "post_processor": BYTE_LEVEL,
    },
    "Gemma": {
        "normalizer": replace(" ", SPACE),
        "pre_tokenizer": split_text(" "),
        "post_processor": _BEGIN,
        "model": bpe(byte_fallback=True, fuse_unk=True, unk_token="!"),
    },
    "Llama 2": {
        "normalizer": normalizers({"type": "Prepend", "prepend": SPACE}, replace(" ", SPACE)),
        "pre_tokenizer": None,
        "post_processor": _BEGIN,
        "model": bpe(byte_fallback=True, fuse_unk=True, unk_token="!"),
    },
    "gpt-oss": {"pre_tokenizer": pre_tokenizers(split(_O200K), _PLAIN_BYTES)},
    "GPT-2, whose model has no type": {
        "model": {key: value for key, value in bpe().items() if key != "type"},
    },
    "BERT": {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": None, "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template(1),
        "model": word_piece(),
    },
    "RoBERTa": {
        "added_tokens": [added(256, "<mask>", special=True, lstrip=True)],
        "post_processor": {
            "type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True,
            "add_prefix_space": False,
        },
    },
    "T5": {
        "normalizer": normalizers(charsmap("x", "xx"), replace_matches(" {2,}", SPACE)),
        "pre_tokenizer": META,
        "post_processor": template(1),
        "model": unigram(["hi", SPACE, "x"]),
    },
}  # fmt: skip


def written(folder, members):
    """Write a tokenizer.json with these members to a new directory, and return the directory."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(**members)), encoding="utf-8")
    return folder


def with_limited_tokenizer(model, folder):
    """Copy a model to a new directory with a tokenizer.json that is not plain; return its path."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    steps = [step for step in (whole["normalizer"], *TENFOLD) if step is not None]
    steps = [replace("\u0001", "\u0001" * 10) if step in TENFOLD else step for step in steps]
    whole["normalizer"] = normalizers(*steps)
    path.write_text(json.dumps(whole), encoding="utf-8")
    return str(folder)
