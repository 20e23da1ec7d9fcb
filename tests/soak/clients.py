"""Clients of the soak: each function is one thing that a client does, drawn at random.

They speak all dialects, leave in the middle, send malformed bodies and uploads, ask for grammars,
call tools in loops and run batches. A client returns the statuses of its responses.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from cpuserve.engine.grammars.client import MAX_GRAMMARS
from tests.fuzz.dialects import drawn
from tests.fuzz.frames import UploadBench
from tests.fuzz.operations import operations
from tests.helpers.agent_sessions import words
from tests.helpers.patience import PATIENCE_S

TOOL = {
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
# A batch that has ended has one of these states.
ENDED = ("completed", "failed", "expired", "cancelled")
# What a soaked server may refuse: the operations that change the server are not for clients.
FUZZED = [each for each in operations() if each.target not in ("http-vllm", "http-other")]
# Many more grammars than the server keeps; but the tokenizer of the grammar process remembers words
# (driver.py: KNOWN_WORDS), and sees so many different ones in a warm-up.
NAMES = 8 * MAX_GRAMMARS
# The longest that a client waits for a text that would never end.
LONGEST_S = 20
UPLOAD = {"content-type": "multipart/form-data; boundary=bound"}


@dataclass(slots=True)
class Client:
    """A connection pool to the server, and the random numbers of one client."""

    http: httpx.AsyncClient
    rng: random.Random
    model: str

    def text(self, most: int = 200) -> str:
        """Return a text of random words."""
        return words(self.rng, self.rng.randint(1, most))

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a body with the name of the model."""
        return await self.http.post(path, json={"model": self.model, **body})


async def _dialects(client: Client) -> list[int]:
    """A request of a random dialect, streamed or whole."""
    said, stream, most = client.text(), client.rng.random() < 0.7, client.rng.randint(1, 24)
    hi = [{"role": "user", "content": said}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": hi, "max_tokens": most, "n": client.rng.randint(1, 2)},
        "/v1/completions": {"prompt": said, "max_tokens": most, "logprobs": 2},
        "/v1/responses": {"input": said, "max_output_tokens": max(16, most)},
        "/v1/messages": {"messages": hi, "max_tokens": most},
        "/api/chat": {"messages": hi, "options": {"num_predict": most, "temperature": 0}},
        "/api/generate": {"prompt": said, "options": {"num_predict": most}},
        "/completion": {
            "prompt": said, "n_predict": most, "n_probs": 1, "dry_multiplier": 0.5,
            "samplers": ["dry", "top_k", "infill", "temperature"],
        },
    }  # fmt: skip
    path = client.rng.choice([*asked])
    found = [(await client.post(path, **asked[path], stream=stream)).status_code]
    if path == "/v1/responses" and not stream:
        kept = await client.post(path, **asked[path])
        found.append(kept.status_code)
        if kept.status_code != 200:
            return found
        more = {"previous_response_id": kept.json()["id"], "input": "And?", "max_output_tokens": 16}
        found.append((await client.post(path, **more)).status_code)
    if client.rng.random() < 0.2:
        tgi = {"inputs": said, "parameters": {"max_new_tokens": most}}
        found.append((await client.http.post("/generate_stream", json=tgi)).status_code)
    return found


async def _leaves(client: Client) -> list[int]:
    """A stream whose client leaves after a random number of pieces, or before the first."""
    path, body = client.rng.choice(
        (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": client.text(900)}]}),
            ("/v1/completions", {"prompt": client.text(900), "n": 3}),
            ("/api/generate", {"prompt": client.text(900)}),
        )
    )
    body = {"model": client.model, **body, "max_tokens": 200, "stream": True}
    left = client.rng.randrange(5)
    try:
        async with asyncio.timeout(client.rng.random() if left == 0 else PATIENCE_S):
            async with client.http.stream("POST", path, json=body) as response:
                async for _ in response.aiter_raw():
                    left -= 1
                    if left <= 0:
                        break
                return [response.status_code]
    except TimeoutError:
        return [0]


async def _malformed(client: Client) -> list[int]:
    """A request of the fuzzer."""
    case = drawn(client.rng, FUZZED)
    headers = {"content-type": case["media"]} if case["media"] else {}
    body = case["body"].encode("utf-8", "surrogateescape")
    try:
        async with asyncio.timeout(LONGEST_S):
            url = case["path"]
            response = await client.http.request(case["method"], url, content=body, headers=headers)
    except TimeoutError:  # some requests are for long texts
        return [0]
    if case["method"] == "POST" and case["path"] == "/v1/files":
        await _deleted(client, response)
    return [response.status_code]


async def _deleted(client: Client, uploaded: httpx.Response) -> None:
    """Delete the file of an upload, so that there is room for those of batches."""
    if uploaded.status_code == 200:
        await client.http.delete(f"/v1/files/{uploaded.json()['id']}")


async def _bad_upload(client: Client) -> list[int]:
    """A malformed upload."""
    bench = UploadBench()
    data = bytes.fromhex(bench.draw(client.rng)["data"])
    bench.close()
    response = await client.http.post("/v1/files", content=data, headers=UPLOAD)
    await _deleted(client, response)
    return [response.status_code]


async def _grammar(client: Client) -> list[int]:
    """A text that fits a new grammar, or a grammar that is refused."""
    name = f"field{client.rng.randrange(NAMES)}"
    schema = {"type": "object", "properties": {name: {"enum": ["a", "b"]}}, "required": [name]}
    kind = client.rng.choice(
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema},
                }
            },
            {"structured_outputs": {"regex": f"{name}[0-9]{{1,8}}"}},
            {"structured_outputs": {"choice": [name, "b"]}},
            {"structured_outputs": {"regex": "(" * client.rng.randint(1, 99)}},
            {"response_format": {"type": "json_object"}},
        )
    )
    hi = [{"role": "user", "content": client.text()}]
    found = await client.post("/v1/chat/completions", messages=hi, max_tokens=32, **kind)
    return [found.status_code]


async def _agent(client: Client) -> list[int]:
    """A loop of tool calls: a conversation that grows, in the dialect of OpenAI or Anthropic."""
    own = client.rng.random() < 0.5
    schema = TOOL["parameters"]
    anthropic = {"name": TOOL["name"], "input_schema": schema}
    tool = anthropic if own else {"type": "function", "function": TOOL}
    messages: list[dict[str, Any]] = [{"role": "user", "content": client.text(400)}]
    found = []
    for _ in range(client.rng.randint(2, 4)):
        body: dict[str, Any] = {"messages": messages, "max_tokens": 60, "tools": [tool]}
        body["tool_choice"] = {"type": "any"} if own else "required"
        response = await client.post("/v1/messages" if own else "/v1/chat/completions", **body)
        found.append(response.status_code)
        if response.status_code != 200:
            break
        messages += _results(response.json(), client.text(100), own=own)
    return found


def _results(told: dict[str, Any], said: str, *, own: bool) -> list[dict[str, Any]]:
    """Return the turn of the model, and the results of its calls."""
    if own:
        used = [block["id"] for block in told["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each, "content": said} for each in used]
        results += [{"type": "text", "text": said}]
        return [
            {"role": "assistant", "content": told["content"] or "a"},
            {"role": "user", "content": results},
        ]
    message = told["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    turn = {"role": "assistant", "content": message["content"] or "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": said} for each in calls]
    return [turn, *results, {"role": "user", "content": said}]


async def _batch(client: Client) -> list[int]:
    """A batch of lines, of which one is wrong; its files are read and deleted."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": client.model,
                "prompt": client.text(),
                "max_tokens": 4 if number else -4,
            },
        }
        for number in range(4)
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    sent = {"purpose": (None, "batch"), "file": ("a.jsonl", data)}
    made = await client.http.post("/v1/files", files=sent)
    found = [made.status_code]
    if made.status_code != 200:
        return found
    files = [made.json()["id"]]
    asked = {"input_file_id": files[0], "endpoint": "/v1/completions", "completion_window": "24h"}
    begun = await client.http.post("/v1/batches", json=asked)
    found.append(begun.status_code)
    batch = begun.json()
    while begun.status_code == 200 and batch["status"] not in ENDED:
        await asyncio.sleep(0.1)
        batch = (await client.http.get(f"/v1/batches/{batch['id']}")).json()
    files += [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
    for each in files:
        found.append((await client.http.get(f"/v1/files/{each}/content")).status_code)
        found.append((await client.http.delete(f"/v1/files/{each}")).status_code)
    return found


async def _message_batch(client: Client) -> list[int]:
    """A batch of messages, of which one is wrong; its results are read, and it is deleted."""
    lines = [
        {
            "custom_id": str(number),
            "params": {
                "model": client.model,
                "messages": [{"role": "user", "content": client.text()}],
                "max_tokens": 4 if number else -4,
            },
        }
        for number in range(4)
    ]
    begun = await client.http.post("/v1/messages/batches", json={"requests": lines})
    found = [begun.status_code]
    if begun.status_code != 200:
        return found
    place = f"/v1/messages/batches/{begun.json()['id']}"
    while (await client.http.get(place)).json()["processing_status"] != "ended":
        await asyncio.sleep(0.1)
    found.append((await client.http.get(f"{place}/results")).status_code)
    found.append((await client.http.delete(place)).status_code)
    return found


async def _large(client: Client) -> list[int]:
    """A request that is as large as one of the fuzzer may become: many long texts."""
    hi = [{"role": "user", "content": client.text()}]
    path, body = client.rng.choice(
        (
            ("/v1/completions", {"prompt": client.text(), "n": 128, "logprobs": 5}),
            ("/v1/completions", {"prompt": [client.text(9)] * 70, "n": 2, "echo": True}),
            ("/v1/chat/completions", {"messages": hi, "n": 128}),
            (
                "/v1/chat/completions",
                {"messages": hi, "n": 128, "logprobs": True, "top_logprobs": 5},
            ),
        )
    )
    body = {**body, "max_tokens": 64, "stream": client.rng.random() < 0.5}
    try:
        async with asyncio.timeout(LONGEST_S):
            return [(await client.post(path, **body)).status_code]
    except TimeoutError:
        return [0]


async def _looks(client: Client) -> list[int]:
    """What a monitor reads."""
    paths = ("/health", "/metrics", "/v1/models", "/v1/cpu", "/v1/activity", "/slots", "/api/ps")
    return [(await client.http.get(path)).status_code for path in paths]


Doing = Callable[[Client], Awaitable[list[int]]]
# What clients do, and how often.
DOINGS: dict[Doing, int] = {
    _dialects: 8, _leaves: 4, _malformed: 8, _bad_upload: 1, _grammar: 3, _agent: 2, _batch: 1,
    _message_batch: 1, _looks: 1,
}  # fmt: skip
# How often they do each, until what the server keeps of it has reached its bound: more grammars
# than are cached, more batches and responses than are stored (driver.py: SMALL), and many others.
FILLS: dict[Doing, int] = {
    _dialects: 100, _leaves: 30, _malformed: 300, _bad_upload: 30,
    _grammar: 2 * MAX_GRAMMARS, _agent: 80, _batch: 60, _message_batch: 20, _looks: 5,
}  # fmt: skip
# Before a run that judges slopes: a heap keeps what its largest jobs have needed, and one of the
# fuzzer's that comes for the first time in the middle of the load would look like growth.
LARGE: dict[Doing, int] = {_large: 24}
