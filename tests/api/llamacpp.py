"""Helpers for tests of llama-server's API."""

import json


def llama_error_of(response):
    """Return the error of a response, after checking its format."""
    body = response.json()
    assert list(body) == ["error"], body
    error = body["error"]
    assert {"code", "message", "type"} <= error.keys()
    assert error["code"] == response.status_code
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


def llama_events_of(response):
    """Return the JSON of the events of a stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block]
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block[0] != ":"]
