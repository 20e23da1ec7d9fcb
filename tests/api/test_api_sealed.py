"""Sealed thoughts and summaries: one limit on all of a request, and expanded in a thread."""

import errno
import os
import threading

import pytest

from cpuserve.api.lifecycle import front_end
from cpuserve.api.lifecycle.front_end import _seal
from cpuserve.api.request import sealed_texts
from cpuserve.api.request.sealed import Seal
from cpuserve.base import fault_points
from cpuserve.core.kv.cache_folder import FOLDER
from cpuserve.serving.models.limits import ClientLimits
from tests.api import fakes
from tests.api.fakes import Api, error_of, speak
from tests.helpers.fake_executor import fake_config

HI = {"role": "user", "content": "hi"}
LIMITS = ClientLimits(max_body_bytes=40_000, max_held_bytes=60_000)


def compaction(api, texts):
    items = [{"type": "compaction", "encrypted_content": text} for text in texts]
    return api.post("/v1/responses", input=[HI, *items, HI], store=False)


def reasoning(api, texts):
    items = [{"type": "reasoning", "summary": [], "encrypted_content": text} for text in texts]
    said = {"role": "assistant", "content": "hm"}
    return api.post("/v1/responses", input=[HI, *items, said, HI], store=False)


def counted(api, texts):
    items = [{"type": "compaction", "encrypted_content": text} for text in texts]
    return api.post("/v1/responses/input_tokens", input=[HI, *items, HI])


def compacted(api, texts):
    items = [{"type": "compaction", "encrypted_content": text} for text in texts]
    return api.post("/v1/responses/compact", input=[HI, *items, HI])


def signature(api, texts):
    content = [{"type": "thinking", "thinking": "", "signature": text} for text in texts]
    said = {"role": "assistant", "content": [*content, {"type": "text", "text": "hm"}]}
    return api.post("/v1/messages", messages=[HI, said, HI], max_tokens=5)


def counted_messages(api, texts):
    content = [{"type": "redacted_thinking", "signature": text} for text in texts]
    said = {"role": "assistant", "content": [*content, {"type": "text", "text": "hm"}]}
    return api.post("/v1/messages/count_tokens", messages=[HI, said, HI])


FORMS = (compaction, reasoning, counted, compacted, signature, counted_messages)
every_form = pytest.mark.parametrize("ask", FORMS)


@pytest.fixture(autouse=True)
def longer_context(monkeypatch):
    """The question for the summary of a compaction is longer than the context of other tests."""
    monkeypatch.setattr(fakes, "MAX_LEN", 1024)


@pytest.fixture
def expanded(monkeypatch):
    """The names of the threads that expand a sealed text."""
    where, real = [], sealed_texts.thought_of

    def recorded(packed):
        where.append(threading.current_thread())
        return real(packed)

    monkeypatch.setattr(sealed_texts, "thought_of", recorded)
    return where


@every_form
def test_texts_that_are_too_large_together_are_refused_unexpanded(ask, expanded):
    api = Api(http=LIMITS)
    text = api.state.seal.sealed("a" * 5000)
    response = ask(api, [text] * 9)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert "45000 bytes" in message
    assert "40000 bytes" in message
    assert expanded == []
    assert api.state.bodies.held == 0
    assert api.alive()


@every_form
def test_texts_are_expanded_in_a_thread_in_reserved_memory(ask, expanded, monkeypatch):
    api, held = Api(http=LIMITS), []
    real = sealed_texts.thought_of

    def recorded(packed):
        held.append(api.state.bodies.held)
        return real(packed)

    monkeypatch.setattr(sealed_texts, "thought_of", recorded)
    response = ask(api, [api.state.seal.sealed("a b c"), api.state.seal.sealed("d")])
    assert response.status_code == 200, response.text
    assert held == [6, 6]
    assert len(expanded) == 2
    assert threading.main_thread() not in expanded
    assert api.state.bodies.held == 0


@every_form
def test_what_another_server_sealed_is_never_expanded(ask, expanded):
    api = Api(http=LIMITS)
    response = ask(api, [Seal().sealed("a" * 50_000)])
    assert response.status_code == 200, response.text
    assert expanded == []


def test_the_model_reads_the_opened_summary():
    """That it reads opened thoughts shows test_api_thoughts.py, where a template has them."""
    prompts = []

    def script(engine, number, prompt, params):
        prompts.append(prompt)
        yield from speak(engine, number, prompt, params)

    api = Api(script)
    assert compaction(api, [api.state.seal.sealed("remarkable")]).status_code == 200
    assert "remarkable" in api.context.get_tokenizer().decode(prompts[0])


def test_a_stored_thought_stays_sealed_in_the_store():
    api = Api()
    text = api.state.seal.sealed("remarkable")
    item = {"type": "reasoning", "summary": [], "encrypted_content": text}
    said = {"role": "assistant", "content": "hm"}
    made = api.post("/v1/responses", input=[HI, item, said, HI]).json()
    items = api.get(f"/v1/responses/{made['id']}/input_items").json()["data"]
    assert "remarkable" not in str(items)
    again = api.post("/v1/responses", input="more", previous_response_id=made["id"])
    assert again.status_code == 200


def test_the_error_names_the_field():
    api = Api(http=LIMITS)
    text = api.state.seal.sealed("a" * 5000)
    assert error_of(compaction(api, [text] * 9))["param"] == "input"
    body = signature(api, [text] * 9).json()
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("messages has sealed thoughts")


def test_replicas_with_one_directory_open_what_each_other_sealed(tmp_path, monkeypatch):
    """The key is beside the seed of the prefix cache, else in the cache directory."""
    monkeypatch.setattr(front_end, "cache_dir", lambda: tmp_path / "cache")
    shared = fake_config(prefix_cache_dir=str(tmp_path / "shared"))
    text = _seal(shared).sealed("Hm.")
    assert _seal(shared).packed(text) is not None
    alone = _seal(fake_config())
    assert alone.packed(text) is None
    assert Seal.kept_in(tmp_path / "cache") == alone


def test_a_server_whose_prefix_cache_cannot_be_kept_has_a_seal_with_a_new_key(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    unusable = fake_config(prefix_cache_dir=str(tmp_path / "file" / "prefixes"))
    with caplog.at_level("INFO", "cpuserve"):
        seal = _seal(unusable)
    assert seal.packed(seal.sealed("Hm.")) is not None
    assert "cannot be kept" in caplog.text

    def fail(_point, _size):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(fault_points, "_hook", fail)
    assert _seal(fake_config(prefix_cache_dir=str(tmp_path / "p"))) != seal
    folder = tmp_path / "p" / FOLDER
    assert list(folder.iterdir()) == [], "files without the mark belong to another program"
