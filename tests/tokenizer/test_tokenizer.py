"""Tokenizers from GGUF metadata and model directories, compared with reference ids."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.splits import pre_tokenizers, splitter
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers import gguf_file as make
from tests.helpers.children import child_options
from tests.helpers.gguf_file import ARRAY, BOOL, I32, STRING, U32
from tests.helpers.served import default_model
from tests.helpers.tiny import tiny_model

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_smollm2.json"


@pytest.fixture(scope="module")
def smollm():
    """The default model's tokenizer."""
    return Tokenizer.load(default_model())


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


def test_golden_file_is_complete(golden):
    assert len(golden["strings"]) >= 1000
    assert len(golden["chats"]) >= 10
    assert len({s["text"] for s in golden["strings"]}) == len(golden["strings"])
    assert golden["differ_without_digits_or_gaps"] == []


@pytest.mark.network
def test_smollm2_ids_equal_the_reference(smollm, golden):
    wrong = [s["text"] for s in golden["strings"] if smollm.encode(s["text"]) != s["ids"]]
    assert wrong == []


@pytest.mark.network
def test_smollm2_chats_equal_the_reference(smollm, golden):
    template = ChatTemplate(smollm.chat_template, smollm, parses_messages=True)
    for chat in golden["chats"]:
        prompt = template.render(chat["messages"])
        assert prompt == chat["prompt"]
        assert smollm.encode_masked(prompt) == chat["ids"]


@pytest.mark.network
def test_smollm2_text_survives_a_round_trip(smollm, golden):
    gaps = set(golden["gaps"])
    for index, case in enumerate(golden["strings"]):
        if index not in gaps:
            assert smollm.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.network
def test_long_texts_have_the_ids_of_their_lines(smollm):
    line = "A line, with 12 numbers and Größe 漢字 <|im_end|> in it.\n"
    for count in (1, 80, 4000):
        assert smollm.encode(line * count, add_special_tokens=False) == count * smollm.encode(line)
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm.encode(line * 100 + "\ud800")


@pytest.mark.network
def test_python_threads_run_while_a_long_text_is_encoded(smollm):
    for _ in range(10):  # a busy machine may let this thread wait for as long as a text takes
        encoding = threading.Thread(target=smollm.encode, args=("hello world " * 40_000,))
        encoding.start()
        turns = 0
        while encoding.is_alive():
            turns += 1
            time.sleep(0.001)
        if turns >= 10:
            break
    assert turns >= 10


@pytest.mark.network
def test_smollm2_special_tokens(smollm):
    assert (smollm.vocab_size, smollm.bos_id) == (49152, 1)
    assert smollm.special_ids == set(range(17))
    assert smollm.encode("a") == smollm.encode("a", add_special_tokens=False)


def byte_alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


SPECIALS = ["<|begin_of_text|>", "<|eot_id|>", "<tool>", "[PAD5]"]


def bpe_gguf(path, pre="smollm", merges=("h i", "Ġ a", "1 2", "e Ì", "a Ì"), **changes):
    """A byte-level BPE of all bytes, a few merges, and one special token of each type."""
    tokens = byte_alphabet()
    merges = [m for m in merges if all(part in tokens for part in m.split(" "))]
    tokens += [m.replace(" ", "") for m in merges]
    types = [1] * len(tokens) + [3, 3, 4, 5]
    tokens += SPECIALS
    values = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": (U32, tokens.index("<|begin_of_text|>")),
        "tokenizer.ggml.eos_token_id": (U32, 2**31),
        **changes,
    }
    path.write_bytes(make.gguf([(k, *v) for k, v in values.items() if v is not None]))
    return path, tokens


def loaded(tmp_path, **kwargs):
    path, tokens = bpe_gguf(tmp_path / "t.gguf", **kwargs)
    return Tokenizer.load(path), tokens


def texts(tokenizer, text):
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


# Pieces that the original tokenizer.json of each family gives (Ġ is a space, Ċ a newline).
PIECES = {
    "gpt-2": ["a", "12345", "Ġb", "'s", "Ġ", "Ġc", "Ċ", "Ċ", "x", "!?'", "S"],
    "smollm": ["a", "1", "2", "3", "4", "5", "Ġb", "'s", "Ġ", "Ġc", "Ċ", "Ċ", "x", "!?'", "S"],
    "llama-bpe": ["a", "123", "45", "Ġb", "'s", "Ġ", "Ġc", "ĊĊ", "x", "!?'", "S"],
    "qwen2": ["a", "1", "2", "3", "4", "5", "Ġb", "'s", "Ġ", "Ġc", "ĊĊ", "x", "!?'", "S"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_pieces_are_those_of_the_original(pre):
    cut = splitter(pre_tokenizers()[pre]).pre_tokenize_str("a12345 b's  c\n\nx!?'S")
    assert [piece for piece, _ in cut] == PIECES[pre]


def test_contractions_ignore_case_in_llama3_and_not_in_gpt2():
    def cut(pre):
        return [p for p, _ in splitter(pre_tokenizers()[pre]).pre_tokenize_str("I'LL")]

    assert cut("llama-bpe") == ["I", "'LL"]
    assert cut("gpt-2") == ["I", "'", "LL"]


def test_smollm_never_merges_digits_and_gpt2_does(tmp_path):
    assert texts(loaded(tmp_path, pre="smollm")[0], "hi 12") == ["hi", "Ġ", "1", "2"]
    assert texts(loaded(tmp_path, pre="gpt-2")[0], "12") == ["12"]


def test_qwen2_composes_characters_and_smollm_does_not(tmp_path):
    decomposed, composed = "e\u0301", "\u00e9"
    qwen, _ = loaded(tmp_path, pre="qwen2")
    assert qwen.encode(decomposed) == qwen.encode(composed)
    smollm, _ = loaded(tmp_path, pre="smollm")
    assert smollm.encode(decomposed) != smollm.encode(composed)
    assert smollm.decode(smollm.encode(decomposed)) == decomposed


def test_llama3_takes_whole_words_before_merges(tmp_path):
    """ignore_merges: a piece that is a token is that token, even if no merge leads to it."""
    tokens = [*byte_alphabet(), "hello"]
    values = {
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": None,
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.bos_token_id": None,
    }
    values["tokenizer.ggml.tokens"] = (ARRAY, (STRING, [*tokens, "ab"]))
    assert texts(loaded(tmp_path, pre="llama-bpe", **values)[0], "hello") == ["hello"]
    assert texts(loaded(tmp_path, pre="qwen2", **values)[0], "hello") == list("hello")


def test_bos_goes_in_front_when_the_model_wants_it(tmp_path):
    llama, tokens = loaded(tmp_path, pre="llama-bpe")
    bos = tokens.index("<|begin_of_text|>")
    assert llama.encode("hi")[0] == bos
    assert llama.encode("hi", add_special_tokens=False)[0] != bos
    add = {"tokenizer.ggml.add_bos_token": (BOOL, 0)}
    assert loaded(tmp_path, pre="llama-bpe", **add)[0].encode("hi")[0] != bos
    add = {"tokenizer.ggml.add_bos_token": (BOOL, 1)}
    assert loaded(tmp_path, pre="smollm", **add)[0].encode("hi")[0] == bos


def test_token_types_decide_what_is_special(tmp_path):
    tokenizer, tokens = loaded(tmp_path)
    eot, tool, pad = (tokens.index(t) for t in SPECIALS[1:])
    assert tokenizer.special_ids == {tokens.index(SPECIALS[0]), eot}
    ids = tokenizer.encode("hi<tool><|eot_id|>hi")
    assert [tool, eot] == ids[1:3]
    assert tokenizer.decode(ids) == "hi<tool>hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<tool><|eot_id|>hi"
    # An unused token only pads the vocabulary, so its text is tokenized as ordinary text.
    assert pad not in tokenizer.encode("[PAD5]")
    assert tokenizer.token_bytes(pad) == b""


def test_ids_without_a_token_are_nothing(tmp_path):
    tokenizer, tokens = loaded(tmp_path)
    for token_id in (len(tokens), 10**6, 2**31, 2**63, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
    assert tokenizer.decode([tokens.index("hi"), 10**6, tokens.index("hi")]) == "hihi"


def test_token_bytes_are_the_bytes(tmp_path):
    tokenizer, tokens = loaded(tmp_path)
    assert tokenizer.token_bytes(tokens.index("Ġa")) == b" a"
    every = b"".join(tokenizer.token_bytes(i) for i in range(256))
    assert sorted(every) == list(range(256))


def test_lone_surrogate_is_the_clients_error(tmp_path):
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        loaded(tmp_path)[0].encode("a\ud800")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"tokenizer.ggml.model": (STRING, "plamo2")},
            "model 'plamo2' is not supported; supported: gpt2",
        ),
        ({"tokenizer.ggml.model": (STRING, "rwkv")}, "ends in a broken escape"),
        ({"tokenizer.ggml.model": (STRING, "llama")}, "scores is missing; a 'llama' tokenizer"),
        ({"tokenizer.ggml.model": None}, "model None"),
        ({"tokenizer.ggml.pre": (STRING, "other")}, "'other' is not supported; supported: default"),
        ({"tokenizer.ggml.pre": (U32, 7)}, "pre 7 is not supported; supported: default"),
        ({"tokenizer.ggml.tokens": (U32, 1)}, "tokens must be a list of strings"),
        ({"tokenizer.ggml.tokens": (ARRAY, (STRING, ["a"]))}, "token_type must have one entry"),
        ({"tokenizer.ggml.merges": (ARRAY, (STRING, ["ab"]))}, "'ab', which is not a pair"),
        ({"tokenizer.ggml.merges": (ARRAY, (STRING, ["zz yy"]))}, "broken tokenizer"),
        ({"tokenizer.ggml.merges": None}, "merges is missing; convert the model again"),
        ({"tokenizer.ggml.merges": (U32, 1)}, "merges must be a list of strings"),
    ],
)
def test_unsupported_or_broken_gguf_tokenizer_is_named(tmp_path, change, reason):
    path, _ = bpe_gguf(tmp_path / "t.gguf", **change)
    with pytest.raises(ModelError, match=reason):
        Tokenizer.load(path)


def test_directory_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(tiny_model("llama"))
    text = "Hello, wörld 123 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def write_json(path, value):
    path.write_text(json.dumps(value))


def opt_like(path):
    """vocab.json and merges.txt with BOS </s>, as facebook/opt-125m has them."""
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2}
    vocab.update({c: i + 3 for i, c in enumerate(byte_alphabet())})
    vocab["hi"] = len(vocab)
    write_json(path / "vocab.json", vocab)
    (path / "merges.txt").write_text("#version: 0.2\nh i\n")
    token = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True}
    settings = {"add_bos_token": True, "bos_token": token, "eos_token": token}
    write_json(path / "tokenizer_config.json", settings)
    write_json(path / "config.json", {"eos_token_id": 2})
    return vocab


def test_vocab_and_merges_like_opt(tmp_path):
    vocab = opt_like(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hi hi") == [2, vocab["hi"], vocab["Ġ"], vocab["hi"]]
    assert tokenizer.decode(tokenizer.encode("hi hi")) == "hi hi"
    assert (tokenizer.bos_id, tokenizer.chat_template) == (2, None)


def test_opt_like_ids_equal_transformers(tmp_path):
    import transformers

    opt_like(tmp_path)
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path, add_bos_token=True)
    ours = Tokenizer.load(tmp_path)
    for text in ("hi there", "  two  spaces\n", "naïve 123 😀", "</s>hi"):
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == wanted


def test_chat_template_sources(tmp_path):
    opt_like(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    named += [{"name": "default", "template": "second"}, {"name": ["default"], "template": "x"}, 1]
    write_json(tmp_path / "tokenizer_config.json", {**settings, "chat_template": named})
    assert Tokenizer.load(tmp_path).chat_template == "D"
    assert Tokenizer.load(tmp_path).tool_template == "T"
    write_json(tmp_path / "tokenizer_config.json", {**settings, "chat_template": "S"})
    assert Tokenizer.load(tmp_path).chat_template == "S"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).chat_template == "J"
    assert Tokenizer.load(tmp_path).tool_template is None


def test_templates_are_read_where_transformers_saves_them(tmp_path):
    import transformers

    opt_like(tmp_path)
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    theirs.chat_template = {"default": "D", "tool_use": "T", "rag": "R"}
    path = tmp_path / "saved"
    theirs.save_pretrained(path)
    assert (path / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
    opt_like(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    old = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old"}]
    write_json(path / "tokenizer_config.json", {**settings, "chat_template": old})
    again = transformers.GPT2Tokenizer.from_pretrained(path)
    assert again.chat_template == theirs.chat_template
    ours = Tokenizer.load(path)
    assert (ours.chat_template, ours.tool_template) == ("D", "T")
    (path / "chat_template.jinja").unlink()
    ours = Tokenizer.load(path)
    assert (ours.chat_template, ours.tool_template) == ("old", "T")


@pytest.mark.parametrize("kind", [1, 4], ids=["ordinary", "user-defined"])
def test_the_end_of_a_turn_is_a_special_token_whatever_a_gguf_calls_it(tmp_path, kind):
    _, tokens = bpe_gguf(tmp_path / "t.gguf")
    types = [kind if t == "<|eot_id|>" else 4 if t == "<tool>" else 1 for t in tokens]
    types = {"tokenizer.ggml.token_type": (ARRAY, (I32, types))}
    tokenizer, _ = loaded(tmp_path, **types)
    eot = tokens.index("<|eot_id|>")
    assert tokenizer.special_ids == {eot}
    assert tokenizer.encode("hi<|eot_id|>", add_special_tokens=False)[-1] == eot
    assert tokenizer.decode([tokens.index("hi"), eot]) == "hi"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "Evil"}}', "\x00"])
def test_broken_tokenizer_json_is_refused(tmp_path, text):
    write_json(tmp_path / "config.json", {})
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="broken tokenizer"):
        Tokenizer.load(tmp_path)


def test_no_tokenizer_is_said(tmp_path):
    write_json(tmp_path / "config.json", {})
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_loading_imports_neither_numpy_nor_torch_nor_jinja(tmp_path):
    import subprocess
    import sys

    path, _ = bpe_gguf(tmp_path / "t.gguf")
    code = (
        "import sys, pathlib; from cpuserve.tokenizer.tokenizer import Tokenizer;"
        "Tokenizer.load(pathlib.Path(sys.argv[1]));"
        "print([m for m in ('numpy', 'torch', 'transformers', 'jinja2') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_without_a_pre_tokenizer_is_split_as_gpt2_with_a_warning(tmp_path, monkeypatch):
    from cpuserve.tokenizer import from_gguf

    said = []
    monkeypatch.setattr(from_gguf.log, "warning", lambda text, *values: said.append(text % values))
    tokenizer, _ = loaded(tmp_path, **{"tokenizer.ggml.pre": None})
    assert texts(tokenizer, "hi 12") == ["hi", "Ġ", "12"]
    assert len(said) == 1
    assert "has no tokenizer.ggml.pre" in said[0]


def test_the_files_of_a_tokenizer_come_before_a_gguf_file_beside_them(tmp_path):
    vocab = opt_like(tmp_path)
    bpe_gguf(tmp_path / "t.gguf")
    assert Tokenizer.load(tmp_path).vocab_size == len(vocab)
    (tmp_path / "merges.txt").unlink()
    assert Tokenizer.load(tmp_path).vocab_size > len(vocab)


def test_an_unloaded_vocabulary_is_read_again():
    made = Tokenizer.load(tiny_model("llama"))
    text = "a b c, d"
    ids, spelled = made.encode(text), made.texts(made.vocab_size)
    assert [made.token_bytes(i) for i in ids]
    for use in (made.load_again, lambda: made.encode(text)):
        made.unload()
        assert made._loaded is None
        assert made.special_tokens, "facts stay known"
        use()
        assert made._loaded is not None
        assert made.encode(text) == ids
        assert made.decode(ids) == text
        assert made.texts(made.vocab_size) == spelled


def test_a_vocabulary_that_has_changed_is_not_read_again(tmp_path):
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    made = Tokenizer.load(tmp_path / "model")
    made.unload()
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "hi"}))
    with pytest.raises(ModelError, match="have changed"):
        made.load_again()
