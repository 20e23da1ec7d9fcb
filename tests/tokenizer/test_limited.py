"""A tokenizer.json that may take much time or memory is used in processes with limits."""

import asyncio
import json
import resource
import threading
import time
from contextlib import contextmanager

import pytest

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.limited.child import address_space
from cpuserve.limited.server import ForkServer
from cpuserve.tokenizer.directory import why_limited
from cpuserve.tokenizer.ends import end_ids
from cpuserve.tokenizer.limited import client
from cpuserve.tokenizer.load import load_tokenizer
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import make_context
from tests.helpers.depth import deep_but
from tests.helpers.hostile_tokenizers import (
    ALPHABET,
    HOSTILE,
    PLAIN,
    added,
    tokenizer,
    written,
)

FEW = ("nine replacements", "a token of 10 MB", "an unknown expression", "padding to 10^9",
       "no object")  # fmt: skip
MEMORY = 1 << 30  # this process may grow by so much: each hostile text takes more


@contextmanager
def bounded_memory():
    """Let allocations fail in this process before the machine has no memory left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", deep_but(FEW, HOSTILE))
def test_a_hostile_tokenizer_stops_within_its_limits(name, tmp_path):
    members, text, outcome = HOSTILE[name]
    folder = written(tmp_path / "model", members)
    with bounded_memory():
        if outcome == "refused":
            with pytest.raises(ModelError) as refused:
                Tokenizer.load(folder)
            assert "\n" not in str(refused.value)
            assert str(folder) in str(refused.value)
        else:
            loaded = Tokenizer.load(folder)
            loaded.prepare_masks()
            assert loaded.waits == (outcome != "plain")
            if outcome == "stopped":
                with pytest.raises(InvalidRequest, match="tokenizer"):
                    loaded.encode(text)
                assert loaded.encode("hi", add_special_tokens=False)
            else:
                assert loaded.encode(text)


def test_a_text_that_takes_too_much_says_so_and_what_to_do(tmp_path):
    members, text, _ = HOSTILE["nine replacements"]
    loaded = Tokenizer.load(written(tmp_path / "model", members))
    with pytest.raises(InvalidRequest, match=r"memory for a text of 40 .*Replace.*--tokenizer"):
        loaded.encode(text)


@pytest.mark.deep
def test_an_expression_that_searches_for_long_stops_no_other_thread(tmp_path):
    members, text, _ = HOSTILE["an expression that searches for long"]
    loaded = Tokenizer.load(written(tmp_path / "model", members))
    errors, ticks = [], 0

    def encode():
        try:
            loaded.encode(text)
        except InvalidRequest as error:
            errors.append(str(error))

    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        time.sleep(0.01)
        ticks += 1
    assert ticks > 20  # the search takes its two seconds of CPU time meanwhile
    assert "takes more than 2" in errors[0]


@pytest.mark.parametrize("name", PLAIN)
def test_tokenizers_in_the_form_of_published_ones_are_plain(name, tmp_path):
    assert why_limited(written(tmp_path / "model", PLAIN[name])) is None


def test_a_limited_tokenizer_encodes_as_a_plain_one(tmp_path):
    special = [{"id": 256, "content": "<|end|>", "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False}]  # fmt: skip
    plain = Tokenizer.load(written(tmp_path / "plain", {"added_tokens": special}))
    never = {"type": "Replace", "pattern": {"String": "\x01"}, "content": "\x01\x01"}
    members = {"added_tokens": special, "normalizer": never}
    limited = Tokenizer.load(written(tmp_path / "limited", members))
    assert (plain.waits, limited.waits) == (False, True)
    text = "hi there <|end|> \u00e9\U0001f600"
    masked = plain.masks.mask(text) + "<|end|>"
    for made in (plain, limited):
        made.prepare_masks()
    for use in (
        lambda t: t.encode(text),
        lambda t: t.encode(text, most=3, left=True),
        lambda t: t.encode_masked(masked),
        lambda t: t.encode_pair("one", "two", 4),
        lambda t: t.encode_spans(text),
        lambda t: t.encode_spans(text, most=2),
        lambda t: t.decode(t.encode(text)),
        lambda t: (t.vocab_size, t.special_ids, t.bos_id, t.token_id("h"), t.token_id("hh")),
        lambda t: t.texts(300),
        lambda t: t.before_text,
    ):
        assert use(limited) == use(plain)
    assert '"Replace"' in limited.to_json()


def test_a_lone_surrogate_is_refused_as_by_a_plain_tokenizer(tmp_path):
    limited = Tokenizer.load(written(tmp_path / "model", HOSTILE["an unknown expression"][0]))
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        limited.encode("a\ud800")
    assert limited.encode("a")


def test_an_unloaded_limited_tokenizer_is_loaded_again(tmp_path):
    limited = Tokenizer.load(written(tmp_path / "model", HOSTILE["an unknown expression"][0]))
    ids = limited.encode("hi 12")
    limited.unload()
    assert limited.encode("hi 12") == ids


def test_a_process_that_was_killed_is_started_again(tmp_path):
    limited = Tokenizer.load(written(tmp_path / "model", HOSTILE["an unknown expression"][0]))
    ids = limited.encode("hi 12")
    server = limited._coder._processes.server
    server.close()
    assert limited.encode("hi 12") == ids
    assert limited._coder._processes.server is not server


def test_a_model_that_is_unloaded_leaves_no_process_of_its_tokenizer(tmp_path):
    limited = Tokenizer.load(written(tmp_path / "model", HOSTILE["an unknown expression"][0]))
    server = limited._coder._processes.server
    context = make_context()
    context.tokenizer = limited
    asyncio.run(context.close())
    assert not server.alive


def test_a_model_that_does_not_start_leaves_no_process_of_its_tokenizer(tmp_path, monkeypatch):
    started = []

    def start(*args):
        started.append(ForkServer(*args))
        return started[-1]

    monkeypatch.setattr(client, "ForkServer", start)
    members = {
        "searched for long": {"added_tokens": [
            added(256 + i, f"<{i:01000}>", special=True) for i in range(2100)
        ]},
        "broken": HOSTILE["no object"][0],
    }  # fmt: skip
    errors = []  # their tracebacks have the tokenizer, as those of failed loads
    for name, member in members.items():
        with pytest.raises(ModelError) as refused:
            load_tokenizer(str(written(tmp_path / name, member)), "{{ messages }}")
        errors.append(refused.value)
    assert [server.alive for server in started] == [False, False]


def test_a_file_of_200_mb_is_not_read(tmp_path):
    folder = written(tmp_path / "model", {})
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(200_000_001)
    with pytest.raises(ModelError, match="200000001 bytes; at most"):
        Tokenizer.load(folder)


def _with_values(folder):
    text = json.dumps(tokenizer(normalizer={"type": "NFC", "x": "@"}))
    (folder / "tokenizer.json").write_text(text.replace('"@"', f"[{'[],' * 5_000_000}0]"))


def _with_merges(folder):
    text = json.dumps(tokenizer())
    merges = f'"merges": [{"[0]," * 3_000_000}0]'
    (folder / "tokenizer.json").write_text(text.replace('"merges": []', merges))


def _with_vocab(folder):
    (folder / "vocab.json").write_text("{" + '"":0,' * 4_300_000 + '"a":0}')
    (folder / "merges.txt").write_text("")


def _with_lines_of_merges(folder):
    (folder / "vocab.json").write_text(json.dumps(ALPHABET))
    (folder / "merges.txt").write_text("a b\n" * 3_000_000)


def _with_ranks(folder):
    (folder / "tiktoken.model").write_text("YQ== 1\n" * 3_000_000)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}')


def _with_world(folder):
    (folder / "rwkv_vocab_v1.txt").write_text("1 'a' 1\n" * 3_000_000)


@pytest.mark.parametrize(
    "write",
    [_with_values, _with_merges, _with_vocab, _with_lines_of_merges, _with_ranks, _with_world],
)
def test_files_of_too_many_values_are_not_read(write, tmp_path):
    write(tmp_path)
    with pytest.raises(ModelError, match=r"has \d+ (values|lines); at most"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("write", [_with_values, _with_vocab])
def test_end_tokens_are_not_read_from_files_of_too_many_values(write, tmp_path):
    write(tmp_path)
    with pytest.raises(ModelError, match=r"has \d+ values; at most"):
        end_ids((), tmp_path, 512)


def test_long_tokens_are_refused_as_responses_consist_of_them(tmp_path):
    vocab = {**ALPHABET, "u" * 1025: 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ModelError, match="tokens of up to 1025 characters; at most"):
        Tokenizer.load(tmp_path)


def test_control_tokens_that_take_long_to_search_are_refused(tmp_path):
    many = [added(256 + i, f"<{i:01000}>", special=True) for i in range(2100)]
    folder = written(tmp_path / "model", {"added_tokens": many})
    assert "the added tokens together" in why_limited(folder)
    loaded = Tokenizer.load(folder)
    with pytest.raises(ModelError, match=r"have \d+ characters together; at most"):
        loaded.prepare_masks()


def test_the_members_of_the_table_are_what_the_library_reads(tmp_path):
    from tokenizers import Tokenizer as Core

    for name, members in PLAIN.items():
        folder = written(tmp_path / name, members)
        assert Core.from_file(str(folder / "tokenizer.json")).encode("hi").ids, name
    assert tokenizer()["model"]["vocab"]
