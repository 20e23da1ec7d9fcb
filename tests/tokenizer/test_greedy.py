"""The tokenizers of RWKV: the longest token at each place, from a vocabulary file or GGUF."""

import json
import random

import gguf
import pytest

from cpuserve.base.errors import ModelError
from cpuserve.models.rwkv.tokenizer import END_TEXT
from cpuserve.tokenizer.greedy import longest_match, read_vocabulary, unescaped
from cpuserve.tokenizer.tokenizer import Tokenizer


def random_vocabulary(seed, count=3000):
    """{token: id}: all bytes, and sequences of few different bytes, so that many share beginnings.

    Some are not UTF-8.
    """
    rng = random.Random(seed)
    alphabet = [*"ab \n'\\é漢".encode(), 0, 0xFF]
    tokens = {bytes([byte]) for byte in range(256)}
    while len(tokens) < count:
        tokens.add(bytes(rng.choice(alphabet) for _ in range(rng.randrange(2, 9))))
    tokens |= {b" " * n for n in (40, 128)} | {bytes([b, 255]) for b in range(256)}
    return {token: i for i, token in enumerate(sorted(tokens), 1)}


def greedy(tokens, data):
    """The rule itself: ids of the longest tokens from the left."""
    ids, at, longest = [], 0, max(map(len, tokens))
    while at < len(data):
        end = next(e for e in range(min(len(data), at + longest), at, -1) if data[at:e] in tokens)
        ids.append(tokens[data[at:end]])
        at = end
    return ids


def random_text(rng):
    parts = ["ab", "a'b\\", "é漢", "漢漢é", " " * 50, "\n\n", "\0", "😀", "zq"]
    return "".join(rng.choice(parts)[rng.randrange(2) :] for _ in range(rng.randrange(40)))


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_cut_as_the_rule_says(seed):
    tokens = random_vocabulary(seed)
    core, rng = longest_match(tokens, {}), random.Random(seed)
    for _ in range(300):
        text = random_text(rng) + chr(rng.randrange(1, 0xD800))
        assert core.encode(text).ids == greedy(tokens, text.encode())
        assert core.decode(core.encode(text).ids) == text


def write_vocabulary(folder, tokens, settings=None):
    lines = []
    for token, i in tokens.items():
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{i} {literal} {len(token)}\n")
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines), encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_directory_with_a_published_vocabulary_has_its_tokenizer(tmp_path):
    tokens = random_vocabulary(7)
    entries = {"0": {"content": "<end>"}, "9": {"content": "no token"}, "4000": {"content": "<x>"}}
    write_vocabulary(tmp_path, tokens, {"eos_token": "\n\n", "added_tokens_decoder": entries})
    tokenizer = Tokenizer.load(tmp_path)
    text = "aab é漢\n\n  'b"
    ids = greedy(tokens, text.encode())
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<end>a<x>") == [0, *greedy(tokens, b"a"), 4000]
    assert tokenizer.encode("no token") == greedy(tokens, b"no token")  # 9 has bytes of its own


def test_id_0_is_the_text_of_published_templates_without_settings(tmp_path):
    tokens = random_vocabulary(8)
    write_vocabulary(tmp_path, tokens)
    assert Tokenizer.load(tmp_path).encode(f"{END_TEXT}ab")[0] == 0


def test_a_gguf_file_has_the_tokens_as_python_writes_them(tmp_path):
    tokens = random_vocabulary(9)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tokenizer_model("rwkv")
    texts = ["<s>", *(repr(token)[2:-1] for token in tokens), "[PAD]"]
    writer.add_token_list(texts)
    writer.add_token_types([3, *[1] * len(tokens), 5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer, rng = Tokenizer.load(tmp_path / "m.gguf"), random.Random(9)
    for _ in range(100):
        text = random_text(rng)
        assert tokenizer.encode(text) == greedy(tokens, text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<s>a") == [0, *greedy(tokens, b"a")]
    assert tokenizer.vocab_size == len(tokens) + 2


@pytest.mark.parametrize("token", [bytes(range(256)), b"\\x41", "'\"é漢".encode(), b"\\"])
def test_escapes_are_undone(token):
    assert unescaped(repr(token)[2:-1]) == token


@pytest.mark.parametrize("text", ["\\", "a\\q", "\\x4", "\\xzz"])
def test_broken_escapes_are_refused(text):
    with pytest.raises(ValueError, match=r"escape|invalid literal"):
        unescaped(text)


@pytest.mark.parametrize(
    "line",
    ["1 'a' 2", "x 'a' 1", "1 a 1", "1 'a'", "1 [1] 1", "1 '' 0", "1 __import__('os') 1", "5"],
)
def test_broken_lines_of_a_vocabulary_are_refused(line):
    with pytest.raises(ValueError, match='line 2 is not "id literal length"'):
        read_vocabulary(["1 'b' 1", line])


def test_a_vocabulary_without_all_bytes_or_with_a_long_token_is_refused(tmp_path):
    tokens = random_vocabulary(3)
    write_vocabulary(tmp_path, {t: i for t, i in tokens.items() if t != b"q"})
    with pytest.raises(ModelError, match="1 bytes have no token, such as 113"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="1 ids belong to several tokens, such as 7"):
        longest_match({**tokens, b"qqqq": 7}, {})
    with pytest.raises(ValueError, match="1 ids belong to several tokens, such as 9"):
        longest_match(tokens, {"<end>": 9})
    with pytest.raises(ValueError, match="tokens of up to 256 bytes"):
        longest_match({**tokens, b"a" * 257: 9999}, {})
    assert longest_match({**tokens, b"a" * 256: 9999}, {}).encode("a" * 300).ids[0] == 9999
    many = {b"%0256d" % i: i for i in range(1 << 14)}
    with pytest.raises(ValueError, match="at most 4194304 bytes together"):
        longest_match({**tokens, **many}, {})
