"""Requests to Anthropic's messages, and the content of the responses."""

import json

from tests.api.fakes import named_events_of

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FORM = {"type": "json_schema", "schema": WEATHER["input_schema"]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def ask(api, messages=HI, max_tokens=64, path="/v1/messages", **fields):
    return api.post(path, model="tiny", messages=messages, max_tokens=max_tokens, **fields)


def events_of(response):
    """The (event, data) of a stream."""
    return [(body["type"], body) for body in named_events_of(response)]


def folded(events):
    """The message that the events of a stream make together, as Anthropic's clients build it."""
    message, parts = None, []
    for name, body in events:
        if name == "message_start":
            assert message is None
            message = body["message"]
            assert (message["content"], message["stop_reason"]) == ([], None)
        elif name == "content_block_start":
            assert body["index"] == len(message["content"]) == len(parts)
            message["content"].append(body["content_block"])
            parts.append("")
        elif name == "content_block_delta":
            assert body["index"] == len(parts) - 1
            delta = body["delta"]
            is_text = delta["type"] == "text_delta"
            parts[-1] += delta["text"] if is_text else delta["partial_json"]
        elif name == "content_block_stop":
            block = message["content"][body["index"]]
            key = "text" if block["type"] == "text" else "input"
            block[key] = parts[-1] if key == "text" else json.loads(parts[-1] or "{}")
        elif name == "message_delta":
            message |= body["delta"]
            message["usage"] |= body["usage"]
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    return message


PLAIN = {"type": "text", "media_type": "text/plain", "data": "Grass is\ngreen."}
DOCUMENT = {"type": "document", "source": PLAIN, "title": "Grass", "context": "A school book.",
            "citations": {"enabled": True}, "cache_control": {"type": "ephemeral"}}  # fmt: skip
FOUND = {"type": "search_result", "source": "https://sky.example", "title": "Sky",
         "content": [{"type": "text", "text": "It is"},
                     {"type": "text", "text": "blue."}]}  # fmt: skip


def use(number):
    return {"type": "tool_use", "id": number, "name": "weather", "input": {"city": "Paris"}}


def error_of(response):
    body = response.json()
    assert list(body) == ["type", "error", "request_id"], body
    assert body["request_id"] == response.headers["request-id"]
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return body["error"]
