"""Ids that guard texts are random, and only the responses to their owners show them."""

from __future__ import annotations

import asyncio
import logging
import re

import httpx
import pytest

from cpuserve.base.errors import EngineDead
from tests.api.fakes import speak
from tests.api.live import live
from tests.clients.test_batches import CHAT, data_of, line
from tests.helpers.patience import PATIENCE_S, in_loop, until

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
OPEN_METRICS = {"accept": "application/openmetrics-text"}
# What everyone can read on a server without keys, besides the objects with these ids.
SHOWN = ("/metrics", "/v1/activity", "/slots", "/load", "/v1/models", "/health", "/props")


def fails_in_background(engine, number, prompt, params):
    """Speak, unless three tokens are asked for."""
    if params.max_tokens == 3:
        yield EngineDead("it was killed")
    yield from speak(engine, number, prompt, params)


async def made(http):
    """Make one of each object that guards texts; return the ids by kind."""
    found = {}
    for kind, path, body in (
        ("response", "/v1/responses", {"input": "hi"}),
        ("background", "/v1/responses", {"input": "hi", "background": True}),
        ("failed", "/v1/responses", {"input": "hi", "background": True, "max_output_tokens": 3}),
        ("conversation", "/v1/conversations", {"items": [{"role": "user", "content": "hi"}]}),
        ("message", "/v1/messages", MESSAGES),
    ):
        answer = (await http.post(path, json=body)).json()
        found[kind] = answer["id"]
        for item in answer.get("output", ()):
            found[f"item of {kind}"] = item["id"]
    items = (await http.get(f"/v1/conversations/{found['conversation']}/items")).json()["data"]
    found["item of a conversation"] = items[0]["id"]
    files = {"file": data_of(line("1"))}
    sent = await http.post("/v1/files", files=files, data={"purpose": "batch"})
    found["file"] = sent.json()["id"]
    batch = {"input_file_id": found["file"], "endpoint": CHAT, "completion_window": "24h"}
    found["batch"] = (await http.post("/v1/batches", json=batch)).json()["id"]
    asked = {"requests": [{"custom_id": "1", "params": MESSAGES}]}
    found["message batch"] = (await http.post("/v1/messages/batches", json=asked)).json()["id"]
    return found


@in_loop
async def test_no_id_that_guards_texts_is_in_a_metric_a_log_line_or_a_report(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = {"files_dir": str(tmp_path / "files"), "access_log": "all"}
    async with live(fails_in_background, **options) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            ids = await made(http)
            for batch in server.state.batches._records:
                record = server.state.batches._records[batch]
                await until(lambda record=record: record.ended)
                ids[f"output of {batch}"] = record.output
            await until(lambda: server.engine.running == 0)
            shown = {path: (await http.get(path, headers=OPEN_METRICS)).text for path in SHOWN}
            refused = await http.get("/v1/responses/resp_other")
    assert "# {request_id=" in shown["/metrics"]
    shown["error"] = refused.text
    own = [record for record in caplog.records if record.name.startswith("cpuserve")]
    shown["log"] = "\n".join(record.getMessage() for record in own)
    assert "background response of request" in shown["log"]
    secrets = {kind: re.search(r"[0-9a-f]{32}", name) for kind, name in ids.items()}
    assert len(secrets) >= 11
    for kind, secret in secrets.items():
        assert secret is not None, (kind, ids[kind])
        places = [place for place, text in shown.items() if secret[0] in text]
        assert not places, (kind, places)
    # Items of a response have its random part; nothing else shares one.
    parts = {secret[0] for kind, secret in secrets.items() if not kind.startswith("item of resp")}
    assert len(parts) == len([kind for kind in secrets if not kind.startswith("item of resp")])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_cannot_choose_an_id_that_guards_texts(path):
    async def main():
        async with live() as server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                body = MESSAGES if path == "/v1/messages" else {"input": "hi"}
                answer = await http.post(path, json=body, headers={"x-request-id": "a" * 32})
                assert answer.headers["x-request-id"] == "a" * 32
                assert "a" * 32 not in answer.text

    asyncio.run(main())
