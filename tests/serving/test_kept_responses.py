"""Kept responses: found after a restart, by their own caller and scope, and never damaged ones."""

import asyncio
import errno
import logging
import os
import shutil
import sys
import threading
import time

import msgspec
import pytest

from cpuserve.api.lifecycle.model_context import files_fingerprint
from cpuserve.api.lifecycle.model_context import kept_responses as kept_of
from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.core.kv.cache_folder import FOLDER
from cpuserve.serving.models import kept_responses
from cpuserve.serving.models.kept_responses import KeptResponses
from cpuserve.serving.models.recent_prompts import PromptShape, RecentPrompt, bytes_of, ids_of
from tests.helpers.fake_executor import fake_config
from tests.helpers.media_items import picture_item
from tests.helpers.patience import PATIENCE_S
from tests.helpers.special_files import replace_with

SCOPE = ("", 1.0, "")
BYTES = 1 << 20
SAID = (*range(9, 90),)
TEXT = "<user>What is <think>\ud800 in \U0010fffc?" * 3


@pytest.fixture(autouse=True)
def all_are_written(monkeypatch):
    """The end of a server waits for all responses, however long this machine takes."""
    monkeypatch.setattr(kept_responses, "_CLOSE_S", PATIENCE_S)


def made(text=TEXT, response=SAID, *, caller="me", scope=SCOPE, chat=True, **members):
    prompt = [ord(char) % 500 for char in text]
    ids = bytes_of([*prompt, *response])
    shape = PromptShape(chat=chat)
    return RecentPrompt(caller, scope, text, ids, shape, num_prompt=len(prompt), **members)


def opened(folder, model=b"model", most=BYTES):
    """What a server that has just started knows."""
    return KeptResponses(folder, model, most)


def put(kept, *records):
    async def run():
        for each in records:
            kept.put(each)
        await kept.close()

    asyncio.run(run())


def find(kept, text, caller="me", scope=SCOPE, digests=(), longer_than=0):
    return asyncio.run(kept.beginning(caller, scope, text, digests, longer_than))


def files(folder):
    return sorted((folder / FOLDER / "responses").glob("*.ids"))


def test_a_prompt_and_its_response_come_back_after_a_restart(tmp_path):
    picture = picture_item(b"d" * 32, [(3, 4), (9, 4)], [(2, 8)])
    said = made(opening="<think>", thinks=True, continues=True, media=[picture])
    put(opened(tmp_path), said)
    found = find(opened(tmp_path), f"{TEXT} more", digests=[b"d" * 32, b"e" * 32])
    names = ("caller", "scope", "text", "ids", "opening", "thinks", "continues", "num_prompt")
    assert [getattr(found, name) for name in names] == [getattr(said, name) for name in names]
    assert found.media == [picture]
    assert found.response == [*range(9, 90)]
    assert find(opened(tmp_path), f"{TEXT} more", digests=[b"e" * 32]) is None


def test_the_longest_beginning_of_a_text_is_found(tmp_path):
    put(opened(tmp_path), *(made(TEXT[:size], [size] * 80) for size in (20, 40, 60, 61)))
    kept = opened(tmp_path)
    assert find(kept, TEXT[:61]).response[0] == 60, "it must go on after that"
    assert find(kept, TEXT[:50] + "?" * 50).response[0] == 40
    assert find(kept, TEXT[:50], longer_than=40) is None
    assert find(kept, "?" + TEXT) is None


@pytest.mark.parametrize(
    ("caller", "scope"),
    [
        ("you", SCOPE),
        ("me", ("lora", 1.0, "")),
        ("me", ("", 0.5, "")),
        ("me", ("", 1.0, "my salt")),
        ("m", ("e", 1.0, "")),
    ],
)
def test_nobody_finds_the_response_of_another_caller_salt_or_adapter(caller, scope, tmp_path):
    put(opened(tmp_path), made())
    kept = opened(tmp_path)
    assert find(kept, f"{TEXT}!", caller, scope) is None
    put(kept, made(caller=caller, scope=scope, response=[7] * 80))
    assert find(opened(tmp_path), f"{TEXT}!", caller, scope).response == [7] * 80
    assert find(opened(tmp_path), f"{TEXT}!").response == [*range(9, 90)]


def test_another_model_finds_nothing_and_removes_nothing(tmp_path):
    put(opened(tmp_path), made())
    assert find(opened(tmp_path, model=b"other"), f"{TEXT}!") is None
    assert find(opened(tmp_path), f"{TEXT}!") is not None


def test_a_file_under_the_name_of_another_is_not_believed(tmp_path):
    put(opened(tmp_path), made(), made(caller="you", response=[7] * 80))
    one, other = files(tmp_path)
    shutil.copy(one, other)
    found = [find(opened(tmp_path), f"{TEXT}!", caller) for caller in ("me", "you")]
    assert sum(each is not None for each in found) == 1


def test_a_file_with_any_damage_costs_the_hit_and_nothing_else(tmp_path, caplog):
    put(opened(tmp_path), made())
    (path,) = files(tmp_path)
    good = path.read_bytes()
    cut = [good[:size] for size in (0, 5, 23, 24, len(good) - 1)] + [good + b"\0"]
    flipped = [bytes([*good[:at], good[at] ^ 1, *good[at + 1 :]]) for at in range(0, len(good), 7)]
    kept = opened(tmp_path)
    for bad in [*cut, *flipped]:
        path.write_bytes(bad)
        assert find(opened(tmp_path), f"{TEXT}!") is None
        assert not path.exists()
    caplog.clear()
    for _ in range(2):
        path.write_bytes(bad)
        kept._next_look = 0.0
        assert find(kept, f"{TEXT}!") is None
    (line,) = caplog.messages
    assert "is torn (incomplete) or damaged; it is removed" in line
    put(kept, made())
    assert find(kept, f"{TEXT}!") is not None, "it is written again"


def test_two_servers_find_the_responses_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_responses, "_LOOK_S", 0.0)
    one, two = opened(tmp_path), opened(tmp_path)
    put(one, made())
    assert find(two, f"{TEXT}!").response == [*range(9, 90)]
    put(two, made(TEXT + "!", [5] * 80), made(response=[6] * 80))
    assert find(one, TEXT + "!?").response == [5] * 80
    assert find(one, TEXT + "?").response == [6] * 80, "the last response is the one"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_costs_one_line_until_it_works_again(
    number, tmp_path, monkeypatch, caplog
):
    kept = opened(tmp_path)

    def fail(point, size=0):
        if point == "response.write":
            raise OSError(number, os.strerror(number))
        return size

    with monkeypatch.context() as patch:
        patch.setattr(kept_responses, "fault", fail)
        put(kept, made(), made("b" * 80))
    (line,) = caplog.messages
    assert os.strerror(number) in line
    assert caplog.records[0].exc_info is None
    assert [*(tmp_path / FOLDER / "responses").iterdir()] == []
    assert find(kept, f"{TEXT}!") is None
    put(kept, made())
    assert find(kept, f"{TEXT}!") is not None
    assert len(caplog.messages) == 1


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path, monkeypatch):
    put(opened(tmp_path), made())

    def fail(point, size=0):
        if point == "response.read":
            raise OSError(errno.EIO, "no")
        return size

    with monkeypatch.context() as patch:
        patch.setattr(kept_responses, "fault", fail)
        assert find(opened(tmp_path), f"{TEXT}!") is None
    assert find(opened(tmp_path), f"{TEXT}!") is not None


def test_an_emptied_directory_is_made_again_with_the_same_key(tmp_path):
    kept = opened(tmp_path)
    shutil.rmtree(tmp_path / FOLDER)
    put(kept, made())
    assert find(kept, f"{TEXT}!") is not None
    assert find(opened(tmp_path), f"{TEXT}!") is not None


def test_the_least_recently_used_files_are_removed_beyond_the_limits(tmp_path):
    records = [made(f"{number:03}" * 30) for number in range(40)]
    put(opened(tmp_path), *records[:4])
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (age + 1, age + 1))
    size = files(tmp_path)[0].stat().st_size
    assert find(opened(tmp_path), "000" * 30 + "!") is not None, "this uses the file"
    kept = opened(tmp_path, most=2 * size)
    assert len(files(tmp_path)) == 2
    assert find(kept, "000" * 30 + "!") is not None
    kept = opened(tmp_path, most=20 * size)
    put(kept, *records[4:])
    assert 20 <= len(files(tmp_path)) <= 22, "a sixteenth more is allowed"
    assert find(kept, "039" * 30 + "!") is not None


def test_the_number_of_files_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_responses, "MAX_FILES", 16)
    put(opened(tmp_path), *(made(f"{number:03}" * 30) for number in range(60)))
    assert 16 <= len(files(tmp_path)) <= 18


@pytest.mark.parametrize("much", ["files", "bytes"])
def test_one_caller_does_not_push_out_the_files_of_others(tmp_path, monkeypatch, much):
    put(opened(tmp_path), made(TEXT * 4, caller="modest"))
    size = files(tmp_path)[0].stat().st_size
    most = BYTES
    if much == "files":
        monkeypatch.setattr(kept_responses, "MAX_FILES", 16)
    else:
        most = 16 * size
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (age + 1, age + 1))
    scopes = [("", 1.0, f"salt {number}") for number in range(60)]
    text = TEXT * (1 if much == "files" else 4)
    put(opened(tmp_path, most=most), *(made(text, caller="greedy", scope=s) for s in scopes))
    assert 16 <= len(files(tmp_path)) <= 18
    assert find(opened(tmp_path), f"{TEXT * 4}!", "modest") is not None
    assert find(opened(tmp_path), f"{text}!", "greedy", scopes[-1]) is not None


def test_temporary_files_of_ended_servers_are_removed_and_those_of_others_stay(tmp_path):
    opened(tmp_path)
    folder = tmp_path / FOLDER / "responses"
    names = (".0123456789abcdef.tmp", ".0123456789abcde0.tmp", ".mine.tmp", "README")
    for name in names:
        (folder / name).write_bytes(b"x")
    for name in names[:1] + names[2:]:
        os.utime(folder / name, (1, 1))
    opened(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[1:])


def test_files_are_for_the_owner_alone_and_have_no_text(tmp_path):
    put(opened(tmp_path), made(caller="10.1.2.3", scope=("", 1.0, "a secret salt")))
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for text in (b"What is", b"10.1.2.3", b"secret"):
        assert text not in path.read_bytes() + path.name.encode()


def test_short_prompts_and_plain_completions_are_not_kept(tmp_path):
    put(opened(tmp_path), made("a" * 20, [1]), made(chat=False))
    assert files(tmp_path) == []


def test_responses_beyond_the_memory_for_them_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_responses, "MAX_WAITING_BYTES", 3 * made().num_bytes)
    kept = opened(tmp_path)
    put(kept, *(made(caller=str(number)) for number in range(5)))
    assert len(files(tmp_path)) == 3
    put(kept, made(caller="later"))
    assert len(files(tmp_path)) == 4, "the memory is free again"


def test_a_folder_of_another_program_is_refused(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "theirs").touch()
    with pytest.raises(ConfigError, match="files of another program"):
        opened(tmp_path)


def test_a_folder_is_listed_again_only_if_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_responses, "_LOOK_S", 0.0)
    put(opened(tmp_path), made())
    kept = opened(tmp_path)
    assert find(kept, f"{TEXT}!") is not None
    before = kept._index
    assert find(kept, "another") is None
    assert kept._index is before
    later = time.time() + 5
    os.utime(tmp_path / FOLDER / "responses", (later, later))
    assert find(kept, "another") is None
    assert kept._index is not before


def test_ids_of_any_size_come_back(tmp_path):
    ids = [0, 1, 255, 256, 2**31 - 1] * 20
    put(opened(tmp_path), made(response=ids))
    found = find(opened(tmp_path), f"{TEXT}!")
    assert ids_of(found.ids)[len(TEXT) :] == ids


def test_the_log_has_nothing_for_usual_work(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    put(opened(tmp_path), made())
    assert find(opened(tmp_path), f"{TEXT}!") is not None
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_another_tokenizer_at_the_same_place_finds_nothing(name, tmp_path):
    """Its tokens have other texts, so the model would read another conversation."""
    model, tokenizer, cache = (tmp_path / part for part in ("model", "tokenizer", "cache"))
    for folder in (model, tokenizer):
        folder.mkdir()
    (tokenizer / "vocab.json").write_text("{}")
    (tokenizer / name).write_text('{"one": 7}')
    config = fake_config(
        model_path=str(model),
        tokenizer_path=str(tokenizer),
        prefix_cache_dir=str(cache),
        prefix_cache_bytes=BYTES * 16,
    )
    before = files_fingerprint(config)
    put(kept_of(config), made())
    assert find(kept_of(config), f"{TEXT}!") is not None
    (tokenizer / name).write_text('{"one": 8, "more": 9}')
    assert find(kept_of(config), f"{TEXT}!") is None
    assert files_fingerprint(config) != before


def test_a_model_file_that_cannot_be_read_is_a_line_of_text(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    config = fake_config(
        model_path=str(tmp_path), tokenizer_path=str(tmp_path), prefix_cache_dir=str(tmp_path)
    )

    def fail(file, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    monkeypatch.setattr("cpuserve.engine.fingerprint.samples_of", fail)
    for reads in (kept_of, files_fingerprint):
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: Input/output"):
            reads(config)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files in folders")
@pytest.mark.parametrize("kind", ["fifo", "device", "large", "link"])
def test_what_is_no_file_of_the_cache_is_neither_waited_for_nor_read(kind, tmp_path):
    put(opened(tmp_path), made())
    (path,) = files(tmp_path)
    good = replace_with(path, kind)
    found = []
    kept = opened(tmp_path)
    reader = threading.Thread(target=lambda: found.append(find(kept, f"{TEXT}!")), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert found == [None]
    assert not os.path.lexists(path)
    assert good.exists()


def test_a_response_larger_than_the_limit_removes_no_others(tmp_path):
    small = [made(f"{number:03}" * 30) for number in range(4)]
    put(opened(tmp_path), *small)
    size = files(tmp_path)[0].stat().st_size
    before = files(tmp_path)
    put(opened(tmp_path, most=5 * size), made("a" * 2 * size))
    assert files(tmp_path) == before


def test_the_memory_of_waiting_responses_is_free_again_whatever_their_text_takes_by_then(tmp_path):
    kept, text = opened(tmp_path), "\u4e00\xe9" * 500

    async def run():
        kept.put(made(text))
        msgspec.json.encode(text)  # Python keeps the UTF-8 of a text beside it
        await kept.close()

    asyncio.run(run())
    assert kept._waiting_bytes == 0
