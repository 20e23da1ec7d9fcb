"""Requests with different salts share no picture, and without salts they share as before."""

from __future__ import annotations

import base64

import pytest

from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.media.decoding.client import DECODER
from tests.api.fakes import create_app
from tests.api.sees import picture_api
from tests.helpers.drawn import data_url, document, png

ALICE, BOB, CAROL, DAVE = (f"secret-key-of-{name}" for name in ("alice", "bobby", "carol", "davey"))
FILE = f"alice {ALICE} cache=private\nbob {BOB} cache=private\ncarol {CAROL}\ndave {DAVE}\n"
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png())}}
PAGES = {"type": "file", "file": {"file_data": data_url(document(pages=2), "application/pdf")}}
MARKED = {
    "prompt_string": "<|im_start|>User: look<__media__><|im_end|>\nAssistant:",
    "multimodal_data": [base64.b64encode(png()).decode()],
}


def chats(part):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}


# Each kind of body that has a picture of its own way into the prompt.
BODIES = {
    "picture": chats(PICTURE),
    "pages": chats(PAGES),
    "llama.cpp": ("/completion", {"prompt": MARKED, "n_predict": 4}),
}


class Shares:
    """A model that reads pictures, and counts of what is decoded and encoded."""

    def __init__(self, monkeypatch, tmp_path):
        self.api = picture_api()
        path = tmp_path / "keys"
        path.write_text(FILE)
        path.chmod(0o600)
        self.api.state.callers = callers = KnownCallers((), str(path))
        self.api.app = create_app(self.api.state, callers=callers)
        self._jobs = 0
        decode = DECODER.decode

        def counted(*given, **more):
            self._jobs += 1
            return decode(*given, **more)

        monkeypatch.setattr(DECODER, "decode", counted)

    def new(self, key, path, body, **more):
        """Send a request; return how many jobs of the decoder and of the tower it needed."""
        before = self._jobs, len(self.api.engine.encoded)
        self.api._key = key
        assert self.api.post(path, **body, **more).status_code == 200
        return self._jobs - before[0], len(self.api.engine.encoded) - before[1]


@pytest.fixture
def shares(monkeypatch, tmp_path):
    return Shares(monkeypatch, tmp_path)


@pytest.mark.parametrize("kind", BODIES)
def test_private_callers_share_no_picture_and_others_do(shares, kind):
    path, body = BODIES[kind]
    whole = shares.new(CAROL, path, body)
    assert min(whole) > 0
    assert shares.new(DAVE, path, body) == (0, 0)
    for private in (ALICE, BOB):
        assert shares.new(private, path, body) == whole
        assert shares.new(private, path, body) == (0, 0)
    assert shares.new(CAROL, path, body) == (0, 0)


@pytest.mark.parametrize("kind", BODIES)
def test_a_salt_separates_pictures_and_equal_salts_share_them(shares, kind):
    path, body = BODIES[kind]
    whole = shares.new(CAROL, path, body)
    assert shares.new(CAROL, path, body, cache_salt="mine") == whole
    assert shares.new(DAVE, path, body, cache_salt="mine") == (0, 0)
    assert shares.new(DAVE, path, body, cache_salt="other") == whole
    # A private caller's salts are its own.
    assert shares.new(ALICE, path, body, cache_salt="mine") == whole
    assert shares.new(BOB, path, body, cache_salt="mine") == whole


def test_counting_tokens_shows_nobody_whether_another_has_sent_a_picture(shares):
    path, body = chats(PICTURE)
    counting = "/v1/chat/completions/input_tokens"
    shares.new(ALICE, path, body)
    # Each counts by itself: what counts keeps nothing, and finds nothing of a private caller.
    assert shares.new(BOB, counting, body) == (1, 0)
    assert shares.new(CAROL, counting, body) == (1, 0)
    assert shares.new(CAROL, counting, body) == (1, 0)
