"""Cutting to a number of tokens keeps what the tokenizers library keeps."""

import pytest
from tokenizers import Tokenizer as Core
from tokenizers.processors import TemplateProcessing

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer import tokenizer as tokenizer_module
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.rerankers import reranker
from tests.helpers.tiny import tiny_model

SHORT, LONG = "a small text", "the quick brown fox jumps over the lazy dog and the small text"


@pytest.fixture(scope="module")
def path():
    return reranker("bert")


def cores(path, most):
    core = Core.from_file(str(path / "tokenizer.json"))
    core.enable_truncation(most, strategy="longest_first")
    return core


@pytest.mark.parametrize("most", [2, 3, 7, 8, 20, 500])
def test_a_text_keeps_its_beginning_and_the_special_tokens(path, most):
    expected = cores(path, most).encode(LONG).ids
    got = Tokenizer.load(path).encode(LONG, most=most)
    assert got == expected
    assert len(got) <= most


@pytest.mark.matrix
@pytest.mark.parametrize("most", [3, 4, 5, 9, 16, 17, 30, 31, 40, 500])
@pytest.mark.parametrize(
    "pair", [(SHORT, LONG), (LONG, SHORT), (LONG, LONG), (SHORT, SHORT), ("", LONG), (LONG, "")]
)
def test_of_a_pair_the_longer_text_is_cut_first(path, pair, most):
    expected = cores(path, most).encode(*pair)
    assert Tokenizer.load(path).encode_pair(*pair, most) == (expected.ids, expected.type_ids)


def test_fewer_tokens_than_the_special_ones_are_refused(path):
    with pytest.raises(InvalidRequest, match="are 2: keep at least as many") as raised:
        Tokenizer.load(path).encode(LONG, most=1)
    assert raised.value.param == "truncate_prompt_tokens"


def test_a_special_token_in_the_text_is_cut_like_others(tmp_path):
    core = Core.from_file(str(tiny_model("llama") / "tokenizer.json"))
    core.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    text = "<|im_end|>" * 9
    assert Tokenizer.load(tmp_path).encode(text, most=4) == [1, 2, 2, 2]
    assert Tokenizer.load(tmp_path).encode(text, False, most=4) == [2, 2, 2, 2]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("text", "reads_all"),
    [("".join(f"word{number}, " for number in range(20_000)), False), (" " * 200_000, None)],
)
def test_of_a_long_text_only_the_end_that_is_kept_is_tokenized(text, reads_all, left, monkeypatch):
    tokenizer, read = Tokenizer.load(tiny_model("llama")), []
    whole = tokenizer.encode(text)
    real = Tokenizer._encode

    def recorded(self, given, *args, **kwargs):
        read.append(len(given))
        return real(self, given, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "_encode", recorded)
    found = tokenizer.encode(text, False, most=500, left=left)
    assert found == (whole[-500:] if left else whole[:500])
    if reads_all is not None:
        assert max(read) < len(text) // 4


def test_a_text_of_long_tokens_is_tokenized_whole(monkeypatch):
    """Its beginning has too few tokens, so all of it is read."""
    tokenizer = Tokenizer.load(tiny_model("llama"))
    monkeypatch.setattr(tokenizer_module, "_CHARS_PER_TOKEN", 1)
    monkeypatch.setattr(tokenizer_module, "_MARGIN_TOKENS", 10_000)
    text = "the word " * 5000
    assert tokenizer.encode(text, most=300) == tokenizer.encode(text)[:300]


@pytest.mark.parametrize("text", [LONG, "é\N{WAVING HAND SIGN}<|im_end|> a" * 1000])
@pytest.mark.parametrize("special", [True, False])
def test_places_of_tokens_are_those_of_the_library(path, text, special):
    core = Core.from_file(str(path / "tokenizer.json"))
    expected = core.encode(text, add_special_tokens=special)
    found = Tokenizer.load(path).encode_spans(text, special)
    assert [(one.id, one.name, (one.start, one.stop)) for one in found] == [
        *zip(expected.ids, expected.tokens, expected.offsets, strict=True)
    ]
    assert Tokenizer.load(path).encode_spans(text, special, len(found)) == found
    assert Tokenizer.load(path).encode_spans(text, special, len(found) - 1) is None
