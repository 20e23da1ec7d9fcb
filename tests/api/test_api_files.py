"""Requests open no files: the event loop does not wait for a disk, or fail without descriptors."""

import sys

import pytest

from cpuserve.engine.ipc import Output
from tests.api.fakes import Api

CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"}
POSTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "hi", "model": "tiny"},
    "/api/show": {"model": "tiny"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [70]},
}
GETS = ["/v1/models", "/v1/models/tiny", "/version", "/api/version", "/api/tags", "/api/ps", "/"]

opened: list[str] = []
watching = False


def one_token(engine, number, prompt, params):
    yield Output(number, [70], "length")


def watch(event: str, args: tuple[object, ...]) -> None:
    if watching and event == "open":
        opened.append(str(args[0]))


sys.addaudithook(watch)


@pytest.mark.parametrize("path", [*POSTS, *GETS])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_opens_no_file(path, stream):
    global watching
    api = Api(one_token)

    def ask():
        if path in GETS:
            return api.get(path).status_code
        body = {**POSTS[path], "stream": stream} if path in list(POSTS)[:7] else POSTS[path]
        return api.post(path, **body).status_code

    assert ask() == 200  # the first one imports what it needs
    opened.clear()
    watching = True
    try:
        assert ask() == 200
    finally:
        watching = False
    assert opened == []
