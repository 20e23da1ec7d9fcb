"""Tokenizers of SentencePiece's kinds in GGUF metadata, compared with the ids of sentencepiece."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.parts import part_names
from cpuserve.loader.load import read_config
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers import gguf_file as make
from tests.helpers.gguf_file import ARRAY, BOOL, F32, I32, STRING, U32

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_sentencepiece.json"
U8 = 0


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())["models"]


def write(path, model, **changes):
    """A GGUF file with the vocabulary of a golden model."""
    unigram = "unigram" in changes.pop("name")
    values = {
        "tokenizer.ggml.model": (STRING, "t5" if unigram else "llama"),
        "tokenizer.ggml.pre": (STRING, "default"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, model["tokens"])),
        "tokenizer.ggml.token_type": (ARRAY, (I32, model["types"])),
        "tokenizer.ggml.scores": (ARRAY, (F32, model["scores"])),
        "tokenizer.ggml.unknown_token_id": (U32, 0),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.add_space_prefix": (BOOL, model["space_prefix"]),
        "tokenizer.ggml.remove_extra_whitespaces": (BOOL, model["squeeze"]),
    }
    if charsmap := list(base64.b64decode(model["charsmap"])):
        values["tokenizer.ggml.precompiled_charsmap"] = (ARRAY, (U8, charsmap))
    values.update(changes)
    path.write_bytes(make.gguf([(k, *v) for k, v in values.items() if v is not None]))
    return path


def loaded(tmp_path, golden, name, **changes):
    return Tokenizer.load(write(tmp_path / "t.gguf", golden[name], name=name, **changes))


NAMES = ["llama", "gemma", "unknown", "unigram", "unigram_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_those_of_sentencepiece(tmp_path, golden, name):
    tokenizer = loaded(tmp_path, golden, name)
    assert len(golden[name]["strings"]) >= 300
    wrong = [
        (text, ids)
        for text, ids in golden[name]["strings"]
        if tokenizer.encode(text, add_special_tokens=False) != ids
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram_bytes"])
def test_text_survives_a_round_trip(tmp_path, golden, name):
    tokenizer = loaded(tmp_path, golden, name)
    for text, ids in golden[name]["strings"]:
        if "<" not in text:  # special tokens start a text anew, so a space comes in front again
            assert tokenizer.decode(ids) == text


def test_the_beginning_and_the_end_of_a_text(tmp_path, golden):
    """BOS for SentencePiece's BPE and EOS for Unigram, unless the file says otherwise."""
    wanted = {("llama", ()): (1, None), ("unigram_bytes", ()): (None, 2)}
    yes, no = (BOOL, 1), (BOOL, 0)
    wanted["llama", (("add_bos_token", no),)] = (None, None)
    wanted["llama", (("add_eos_token", yes),)] = (1, 2)
    wanted["llama", (("add_bos_token", no), ("add_sep_token", yes))] = (None, 3)
    wanted["unigram_bytes", (("add_bos_token", yes), ("add_eos_token", no))] = (1, None)
    for (name, keys), (first, last) in wanted.items():
        changes = {f"tokenizer.ggml.{key}": value for key, value in keys}
        changes["tokenizer.ggml.seperator_token_id"] = (U32, 3)
        tokenizer = loaded(tmp_path, golden, name, **changes)
        for text in ("", "the dog"):
            plain = tokenizer.encode(text, add_special_tokens=False)
            around = [first] if first is not None else []
            behind = [last] if last is not None else []
            assert tokenizer.encode(text) == [*around, *plain, *behind], (name, keys)


def test_ids_that_a_file_leaves_out_are_those_of_llama(tmp_path, golden):
    missing = dict.fromkeys(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown"))
    tokenizer = loaded(tmp_path, golden, "llama", **missing)
    assert tokenizer.bos_id == 1
    assert tokenizer.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip


def test_special_tokens_and_bytes(tmp_path, golden):
    tokenizer = loaded(tmp_path, golden, "llama")
    tokens = golden["llama"]["tokens"]
    turn = tokens.index("<|turn|>")
    assert tokenizer.special_ids == {0, 1, 2, turn}
    ids = tokenizer.encode("a<|turn|>b", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|turn|> b"
    assert tokenizer.token_bytes(tokens.index("<0x0A>")) == b"\n"
    assert tokenizer.token_bytes(tokens.index("▁the")) == b" the"
    # Every byte has a token, so a character outside the vocabulary is its bytes.
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("ꙮ")[2:]] == [
        b"\xea",
        b"\x99",
        b"\xae",
    ]
    assert tokenizer.most_bytes_per_token is not None


def test_phi3_swallows_spaces_behind_special_tokens(tmp_path, golden):
    plain = loaded(tmp_path, golden, "llama").encode("<|turn|>dog", add_special_tokens=False)
    phi = loaded(tmp_path, golden, "llama", **{"general.name": (STRING, "Phi-3 mini")})
    assert phi.encode("<|turn|>\n  dog", add_special_tokens=False) == plain
    spaced = phi.encode("<s>  dog", add_special_tokens=False)
    assert spaced == [1, *loaded(tmp_path, golden, "llama").encode("  dog")[1:]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": (ARRAY, (F32, [0.0]))}, "scores must have one entry for each token"),
        ({"token_type": (ARRAY, (I32, [1]))}, "token_type must have one entry for each token"),
        ({"tokens": (ARRAY, (I32, [1]))}, "tokens must be a list of strings"),
        ({"precompiled_charsmap": (ARRAY, (U8, [1, 2, 3]))}, "precompiled_charsmap is broken"),
        ({"precompiled_charsmap": (STRING, "x")}, "precompiled_charsmap is broken"),
        ({"precompiled_charsmap": (ARRAY, (U8, [255] * 16))}, "precompiled_charsmap is broken"),
        ({"precompiled_charsmap": (ARRAY, (U8, [8, *[0] * 12]))}, "broken tokenizer in"),
    ],
)
def test_broken_vocabularies_are_refused_in_one_line(tmp_path, golden, change, reason):
    changes = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ModelError, match=reason) as caught:
        loaded(tmp_path, golden, "unigram", **changes)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_useless_scores_neither_hang_nor_crash(tmp_path, golden, name, bad):
    scores = (ARRAY, (F32, [bad] * len(golden[name]["tokens"])))
    path = write(tmp_path / "t.gguf", golden[name], name=name, **{"tokenizer.ggml.scores": scores})
    message = "loaded"
    try:
        assert Tokenizer.load(path).encode("the dog") != []
    except ModelError as error:
        message = str(error)
    assert message.isprintable()


def bert(tmp_path, **changes):
    """WordPiece as llama.cpp's converter writes it: U+2581 marks the beginnings of words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["▁hello", "▁,", "▁wor", "ld", "▁caf", "e", "▁漢", "▁a"]
    values = {
        "tokenizer.ggml.model": (STRING, "bert"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, special + words)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3] * 5 + [1] * len(words))),
        "tokenizer.ggml.padding_token_id": (U32, 0),
        "tokenizer.ggml.unknown_token_id": (U32, 1),
        "tokenizer.ggml.bos_token_id": (U32, 2),
        "tokenizer.ggml.seperator_token_id": (U32, 3),
        **changes,
    }
    path = tmp_path / "bert.gguf"
    path.write_bytes(make.gguf([(k, *v) for k, v in values.items()]))
    return Tokenizer.load(path)


def test_word_pieces_of_bert(tmp_path):
    tokenizer = bert(tmp_path)
    ids = tokenizer.encode("Hello, WORLD 漢漢 café zzz[MASK]")
    assert [tokenizer.token_text(i) for i in ids] == [
        "[CLS]", "hello", ",", "wor", "##ld", "漢", "漢", "caf", "##e", "[UNK]", "[MASK]", "[SEP]",
    ]  # fmt: skip
    assert tokenizer.encode("a", add_special_tokens=False) == [12]


def test_pairs_have_the_separators_and_types_of_bert(tmp_path):
    ids, types = bert(tmp_path).encode_pair("hello", "a, world")
    assert ids == [2, 5, 3, 12, 6, 7, 8, 3]
    assert types == [0, 0, 0, 1, 1, 1, 1, 1]


def test_pairs_have_the_separators_of_xlm_roberta(tmp_path, golden):
    added = {f"tokenizer.ggml.add_{name}_token": (BOOL, 1) for name in ("bos", "eos", "sep")}
    tokenizer = loaded(tmp_path, golden, "unigram", **added)
    first, second = (tokenizer.encode(text, False) for text in ("the dog", "a fox"))
    ids, _ = tokenizer.encode_pair("the dog", "a fox")
    assert ids == [1, *first, 2, 2, *second, 2]  # <s> A </s></s> B </s>
    added["tokenizer.ggml.add_sep_token"] = (BOOL, 0)
    one = loaded(tmp_path, golden, "unigram", **added)
    assert one.encode_pair("the dog", "a fox")[0] == [1, *first, 2, *second, 2]


def test_cased_bert_keeps_case_and_accents(tmp_path):
    cased = bert(tmp_path, **{"tokenizer.ggml.normalizer.lowercase": (BOOL, 0)})
    assert cased.encode("Hello hello café")[1:-1] == [1, 5, 1]


def test_gemma4_merges_characters_and_spells_others_as_bytes(tmp_path):
    space = "▁"
    letters = [*"abc", space, "\n", "é"]
    special = ["<unk>", "<bos>", "<turn|>"]
    tokens = [*special, *letters, f"{space}a", "ab", "\n\n", f"{space}ab"]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    values = {
        "tokenizer.ggml.model": (STRING, "gemma4"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (
            ARRAY,
            (I32, [3] * 3 + [1] * (len(tokens) - 259) + [6] * 256),
        ),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b", f"{space} ab", f"{space} a", "\n \n"])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.add_bos_token": (BOOL, 0),  # which gemma 4 files say by mistake
    }
    path = tmp_path / "g.gguf"
    path.write_bytes(make.gguf([(k, *v) for k, v in values.items()]))
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("ab ab\n\n\ncé😀<turn|>")
    assert [tokenizer.token_text(i) for i in ids] == [
        "<bos>", "ab", f"{space}ab", "\n\n", "\n", "c", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>",
        "<turn|>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "ab ab\n\n\ncé😀"


def test_chat_templates_with_names(tmp_path, golden):
    names = {"tokenizer.chat_templates": (ARRAY, (STRING, ["default", "tool_use"]))}
    names["tokenizer.chat_template.tool_use"] = (STRING, "T")
    assert loaded(tmp_path, golden, "unknown", **names).chat_template is None
    names["tokenizer.chat_template.default"] = (STRING, "D")
    assert loaded(tmp_path, golden, "unknown", **names).chat_template == "D"
    names["tokenizer.chat_template"] = (STRING, "P")
    tokenizer = loaded(tmp_path, golden, "unknown", **names)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("P", "T")


def test_the_config_names_the_ends_of_a_llama_vocabulary(tmp_path, golden):
    """Several ends, and those of llama.cpp where the file names none."""
    values = {k: (kind, item) for k, kind, item in make.tiny_values()}
    values["tokenizer.ggml.model"] = (STRING, "llama")
    path = tmp_path / "m.gguf"

    def config(**changes):
        made = [(k, *v) for k, v in {**values, **changes}.items()]
        path.write_bytes(make.gguf(made, make.tiny_tensors(np.random.default_rng(0))))
        return read_config(path)

    assert (config()["bos_token_id"], config()["eos_token_id"]) == (1, 2)
    both = {"tokenizer.ggml.eos_token_id": (U32, 4), "tokenizer.ggml.eot_token_id": (U32, 6)}
    assert config(**both)["eos_token_id"] == [4, 6]


SMALL = {
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁ab", "▁a", "ab"],
    "scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -0.1, -0.2],
    "types": [2, 3, 3] + [6] * 256 + [1] * 5,
    "space_prefix": True,
    "squeeze": True,
    "charsmap": "",
}  # fmt: skip


@pytest.mark.deep
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["llama", "unigram"]),
    at=st.floats(0, 1, exclude_max=True),
    data=st.binary(min_size=1, max_size=8),
)
def test_changed_bytes_raise_model_error_or_nothing(tmp_path, name, at, data):
    path = write(tmp_path / "t.gguf", SMALL, name=name)
    whole = bytearray(path.read_bytes())
    start = int(at * len(whole))
    whole[start : start + len(data)] = data
    path.write_bytes(bytes(whole))
    message = "read"
    try:
        Tokenizer.load(path).decode(Tokenizer.load(path).encode("ab é ab"))
    except ModelError as error:
        message = str(error)
    assert message.isprintable()


def test_a_piece_that_would_take_minutes_is_refused(tmp_path):
    long = {**SMALL, "tokens": [*SMALL["tokens"][:-1], "ab" * 300]}
    path = write(tmp_path / "t.gguf", long, name="llama")
    with pytest.raises(ModelError, match="a token has 600 characters"):
        Tokenizer.load(path)


def test_any_part_of_a_model_gives_the_tokenizer_of_the_first(tmp_path):
    names = part_names("m-00001-of-00002.gguf")
    write(tmp_path / names[0], SMALL, name="llama")
    (tmp_path / names[1]).write_bytes(make.gguf([("split.no", U32, 1), ("split.count", U32, 2)]))
    for path in (tmp_path / names[0], tmp_path / names[1], tmp_path):
        assert Tokenizer.load(path).encode("ab", add_special_tokens=False) == [262, 261]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_a_text_may_be_cut_before_a_special_token(tmp_path, golden, name, space):
    """serving/prompts/known_tokens.py encodes the end of a prompt alone."""
    tokenizer = loaded(tmp_path, golden, name)
    special = tokenizer.token_text(min(tokenizer.special_ids - {0, 1}))
    before, after = f"The user asks{space}", f"{special}{space}And the answer is this.{special} Yes"
    cut = [tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
    assert tokenizer.encode(before + after, add_special_tokens=False) == [*cut[0], *cut[1]]
