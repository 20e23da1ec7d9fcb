"""How the pre-tokenizers of GGUF files cut texts, compared with what llama.cpp cuts them into."""

import json
import re
from pathlib import Path

import pytest

from cpuserve.tokenizer.splits import PreTokenizer, pre_tokenizers, splitter
from tests.golden.make_pre_tokenizer_golden import DIFFERENT, TEXTS
from tests.helpers.depth import deep_but

GOLDEN = Path(__file__).parents[1] / "golden" / "pre_tokenizers.json"
PIECES = json.loads(GOLDEN.read_text())
PRE_TOKENIZERS = pre_tokenizers()


def cut(name, text):
    return [piece for piece, _ in splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PIECES)
def test_texts_are_cut_as_in_the_golden_file(name):
    found = [cut(name, text) for text in TEXTS]
    assert [pieces for pieces in found if pieces in PIECES[name]] == PIECES[name]


def test_the_golden_file_has_all_rules_and_nearly_all_texts():
    rules = {pre for pre in PRE_TOKENIZERS.values() if not pre.raw}
    rules -= {PRE_TOKENIZERS[name] for name in (*FROM_THE_END, *NEWER)}
    assert {PRE_TOKENIZERS[name] for name in PIECES} == rules
    for name, pieces in PIECES.items():
        assert len(pieces) >= len(TEXTS) - (0 if name not in DIFFERENT else 10) - 1, name


# Rules that cut numbers from their end. The library that made the golden file has them in C++, or
# with an expression that takes quadratic time.
FROM_THE_END = ("afmoe", "cohere2moe", "superbpe")
# Rules that the library that made the golden file does not have yet.
NEWER = ("spark2_5", "k2-horizon")
NUMBERS = [
    *(
        f"{'1234567890123'[:n]}{after}"
        for n in range(1, 14)
        for after in ("", " x", "x", ".5", "_")
    ),
    *(
        "a1234",
        "1,234,5678",
        "12345é 12345",
        "\uff11\uff12\uff13\uff14 1234\n12345\n",
        "$1234.5678",
    ),
]


def test_afmoe_cuts_the_digits_of_a_number_from_its_end():
    for text in NUMBERS:
        expected = []
        for part in re.findall(r"\d+|\D+", text):
            first = len(part) % 3 or 3
            groups = [part[:first], *(part[i : i + 3] for i in range(first, len(part), 3))]
            expected += groups if part[0].isdigit() else []
        found = [piece for piece in pieces_of("afmoe", text) if piece[0].isdigit()]
        assert found == expected, text


@pytest.mark.parametrize("text", deep_but(TEXTS[::10], [*NUMBERS, *TEXTS]))
def test_cohere_cuts_as_its_original_expression(text):
    *_, words = PRE_TOKENIZERS["cohere2moe"].splits
    original = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", words))
    whole = splitter(original).pre_tokenize_str(text)
    assert splitter(PRE_TOKENIZERS["cohere2moe"]).pre_tokenize_str(text) == whole


@pytest.mark.parametrize(
    "text", deep_but(TEXTS[::10], [*NUMBERS, *TEXTS, "½12345 12½ 1½234 ½1234567½ Ⅷ1234"])
)
def test_superbpe_cuts_as_its_original_expressions(text):
    original = PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))
    whole = splitter(original).pre_tokenize_str(text)
    assert splitter(PRE_TOKENIZERS["superbpe"]).pre_tokenize_str(text) == whole


def test_afmoe_cuts_scripts_and_words():
    found = pieces_of("afmoe", "漢字かな Abc.def 안녕!x")
    assert found == ["漢字かな", " Abc", ".def", " ", "안녕", "!x"]


def pieces_of(name, text):
    """The pieces as they are in the text."""
    found = splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)
    return [text[first:end] for _, (first, end) in found]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("default", "don't!", ["don", "'t", "!"]),
        ("deepseek-llm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("falcon", "1234 x!", ["123", "4", "Ġx", "!"]),
        ("falcon", "ü", ["Ã", "¼"]),
        ("kimi-k2", "Abc漢字Def ABCdef", ["Abc", "æ¼¢åŃĹ", "Def", "ĠABCdef"]),
        ("tekken", "HTTPServer's 12", ["HTTPServer", "'s", "Ġ", "1", "2"]),
        ("gpt-4o", "HTTPServer's 1234", ["HTTPServer's", "Ġ", "123", "4"]),
        ("youtu", "camelCase", ["camel", "Case"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("superbpe", "to be 1234", ["toĠbeĠ", "1", "234"]),
        ("spark2_5", "a 1234.\n\n漢字b", ["a", "Ġ", *"1234", ".", "Ċ", "Ċ", "æ¼¢åŃĹ", "b"]),
        ("k2-horizon", "क्\u200dष 1234's", ["à¤ķà¥įâĢįà¤·", "Ġ", "123", "4", "'s"]),
    ],
)
def test_rules_that_differ_from_llama_cpp_are_those_of_the_original(name, text, pieces):
    assert cut(name, text) == pieces


@pytest.mark.parametrize("name", deep_but([*PRE_TOKENIZERS][::4], PRE_TOKENIZERS))
def test_no_rule_drops_a_character_or_takes_forever(name):
    text = "".join(TEXTS) + " \n" * 2000 + "1" * 4000 + "Aa" * 2000 + "e\u0301" * 2000 + "!" * 4000
    joined = "".join(cut(name, text))
    if PRE_TOKENIZERS[name].raw:
        assert joined == text
    else:
        assert len(joined) == len(text.encode())


def test_families_have_the_rules_of_their_tokenizers():
    for names in (
        "llama-bpe llama3 lfm2", "qwen2 deepseek-r1-qwen", "deepseek-v3 joyai-llm",
        "gpt-4o llama4", "smollm starcoder refact exaone", "gpt-2 phi-2 jais granite-docling",
        "glm4 glm5", "mpt olmo modern-bert",
    ):  # fmt: skip
        assert len({PRE_TOKENIZERS[name] for name in names.split()}) == 1
    adds_bos = {name for name, pre in PRE_TOKENIZERS.items() if pre.add_bos}
    assert adds_bos >= {"llama-bpe", "tekken", "gemma4"}
    assert not adds_bos & {"qwen2", "gpt-2", "chatglm-bpe", "deepseek-v3"}
    composes = {name for name, pre in PRE_TOKENIZERS.items() if pre.nfc}
    assert composes == {
        "qwen2", "deepseek-r1-qwen", "qwen35", "command-r", "mpt", "olmo", "modern-bert",
    }  # fmt: skip
