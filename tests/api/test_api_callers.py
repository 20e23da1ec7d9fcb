"""Who sends a request is found once, and used by queues, metrics and the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from cpuserve.base.errors import TooManyRequests
from cpuserve.metrics.server import MAX_CALLERS
from cpuserve.serving.models.limits import ClientLimits
from cpuserve.serving.threads import WORKS_FOR, loop_turn
from tests.api.fakes import Api

KEYS = ("secret-one", "secret-two")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def ask(api: Api, key: str | None = None, header: str = "authorization", **fields: Any) -> Any:
    headers = {} if key is None else {header: f"Bearer {key}" if header[0] == "a" else key}
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return api.request("POST", "/v1/chat/completions", json=body, headers=headers)


def from_address(api: Api, address: str, **fields: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(api.app, client=(address, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": "hi"}], **fields}
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(run())


def test_a_request_does_not_wait_for_all_that_another_caller_has_sent_before_it():
    """The event loop works on one request at a time, in the turns of the callers."""
    api, count = Api(), 50

    async def ask_from(address: str) -> None:
        transport = httpx.ASGITransport(api.app, client=(address, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": [7], "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    async def main() -> None:
        addresses = ["10.0.0.7"] * count + ["10.0.0.8"]
        tasks = [asyncio.create_task(ask_from(address)) for address in addresses]
        await asyncio.gather(*tasks)

    asyncio.run(main())
    callers = [params.caller for _, params in api.engine.asked]
    assert len(callers) == count + 1
    assert callers.index("10.0.0.8") <= 2


def test_turns_of_the_event_loop_are_shared_by_work_and_pass_requests_that_end() -> None:
    order: list[str] = []

    async def work(caller: str, size: float) -> None:
        WORKS_FOR.set(caller)
        await loop_turn(size)
        order.append(caller)

    async def main() -> None:
        first = asyncio.create_task(work("first", 1))
        tasks = [asyncio.create_task(work("large", 9)) for _ in range(3)]
        ended = asyncio.create_task(work("ended", 0))
        tasks += [asyncio.create_task(work("small", 3)) for _ in range(4)]
        await first
        ended.cancel()
        await asyncio.gather(*tasks)
        await work("later", 1)

    for _ in range(2):  # each event loop has turns of its own
        order.clear()
        asyncio.run(main())
        small_first = ["large", "small", "small", "small", "large", "small", "large"]
        assert order == ["first", *small_first, "later"]


def caller_lines(api: Api) -> dict[tuple[str, str], float]:
    found = {}
    for line in api.get("/metrics").text.splitlines():
        if line.startswith("cpuserve:caller_"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            caller = labels.partition('caller="')[2].partition('"')[0]
            found[name.removeprefix("cpuserve:caller_"), caller] = float(value)
    return found


def test_a_key_is_known_by_its_place_among_the_keys():
    api = Api(api_keys=KEYS, public_metrics=True)
    ask(api, KEYS[1])
    ask(api, KEYS[0], header="x-api-key")
    ask(api, KEYS[1], response_format=SCHEMA)
    assert [params.caller for _, params in api.engine.asked] == ["key-2", "key-1", "key-2"]
    lines = caller_lines(api)
    assert lines["requests_total", "key-2"] == 2
    assert lines["requests_total", "key-1"] == 1
    assert lines["prompt_tokens_total", "key-1"] == len(api.engine.asked[1][0])
    assert lines["generation_tokens_total", "key-1"] > 0
    assert not any(key in api.get("/metrics").text for key in KEYS)


def test_without_keys_the_address_is_the_caller():
    api = Api()
    from_address(api, "10.0.0.7")
    from_address(api, "fe80::1")
    assert [params.caller for _, params in api.engine.asked] == ["10.0.0.7", "fe80::1"]


def test_the_callers_in_metrics_are_bounded():
    api = Api()
    for i in range(MAX_CALLERS + 3):
        sequence = api.context.metrics.start(1, 1, 1, f"10.0.0.{i}")
        api.context.metrics.finish(sequence, "stop")
    lines = caller_lines(api)
    assert lines["requests_total", "other"] == 3
    assert len(lines) == 3 * (MAX_CALLERS + 1)


def test_the_log_says_who_sent_a_request_that_failed(caplog):
    api = Api(api_keys=KEYS)
    with caplog.at_level(logging.INFO, logger="cpuserve"):
        ask(api, KEYS[1], temperature=-1)
        ask(api, "wrong")
    lines = [record.getMessage() for record in caplog.records]
    assert any(" from key-2: POST /v1/chat/completions: 400" in line for line in lines), lines
    assert any(" from 127.0.0.1: POST /v1/chat/completions: 401" in line for line in lines), lines
    assert not any("secret" in line for line in lines)


def test_a_full_queue_of_one_address_admits_another():
    limits = ClientLimits(max_queued_requests=4, max_sequences=4)
    api = Api(http=limits)
    backlog = api.context.backlog
    for _ in range(4):
        backlog.enter(10, "10.0.0.1")
    api.context.active_sequences = 4
    assert from_address(api, "10.0.0.1").status_code == 429
    assert from_address(api, "10.0.0.2").status_code == 200
    with pytest.raises(TooManyRequests):
        backlog.check(caller="10.0.0.1")
