"""Large bodies and texts of one caller do not keep another's small request waiting."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cpuserve.api.batches.start import batch_service
from cpuserve.api.request import context
from cpuserve.api.request.body import FREE_BYTES, decode_request
from cpuserve.config.server import ServerOptions
from cpuserve.serving import threads
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import Api
from tests.api.test_api_background import front_end_of
from tests.helpers.patience import until, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

GREEDY, MODEST = "10.0.0.7", "10.0.0.8"
BODY = {"prompt": "word " * (1 << 15)}


def client_of(api: Api, address: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(api.app, client=(address, 5))
    headers = {"x-who": address}
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


async def together(api: Api, count: int, send: Callable[[httpx.AsyncClient], Any]) -> list[Any]:
    """Send `count` requests of the greedy caller, then one of the modest; return the responses."""
    async with client_of(api, GREEDY) as greedy, client_of(api, MODEST) as modest:
        return await asyncio.gather(*(send(greedy) for _ in range(count)), send(modest))


def test_a_large_text_is_tokenized_while_those_of_another_caller_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api, count, begun, real = Api(), 6, [], Tokenizer.encode

    def encode(self: Tokenizer, *given: Any, **more: Any) -> list[int]:
        begun.append(threads.WORKS_FOR.get())
        wait_until(lambda: MODEST in begun)
        return real(self, *given, **more)

    async def send(client: httpx.AsyncClient) -> None:
        if client.headers["x-who"] == MODEST:
            await until(lambda: threads._LARGE_TEXTS._places.waiting(GREEDY) == count - 2)
        assert (await client.post("/tokenize", json=BODY)).status_code == 200

    monkeypatch.setattr(Tokenizer, "encode", encode)
    asyncio.run(together(api, count, send))
    assert begun == [*[GREEDY] * 2, MODEST, *[GREEDY] * (count - 2)]


def test_large_bodies_are_decoded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()

    def decode(*given: Any) -> Any:
        names.add(threading.current_thread().name)
        return decode_request(*given)

    monkeypatch.setattr(context, "decode_request", decode)
    found = asyncio.run(together(Api(), 8, lambda client: client.post("/tokenize", json=BODY)))
    assert {each.status_code for each in found} == {200}
    assert names == {"cpuserve-decode_0"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
def test_bodies_are_read_one_piece_in_a_turn(path: str, tmp_path: Path) -> None:
    api, count, pieces = Api(), 20, 10
    api.state.batches = batch_service(api.state, ServerOptions(files_dir=str(tmp_path)))
    received: list[str] = []
    headers = {"content-type": "multipart/form-data; boundary=a"} if path == "/v1/files" else {}

    async def body() -> AsyncIterator[bytes]:
        yield b'--a\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(pieces):
            received.append(GREEDY)
            yield b" " * (FREE_BYTES + 1)

    async def send(client: httpx.AsyncClient) -> None:
        if client.headers["x-who"] == GREEDY:
            assert (await client.post(path, content=body(), headers=headers)).status_code == 400
            return
        body_of_one = {"prompt": [7], "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body_of_one)).status_code == 200
        received.append(MODEST)

    asyncio.run(together(api, count, send))
    api.state.batches.directory.close()
    assert received.count(GREEDY) == count * pieces
    assert received.index(MODEST) <= 1.5 * count


def test_the_event_loop_gets_the_lock_of_the_interpreter_soon(tmp_path: Path) -> None:
    before, seen = sys.getswitchinterval(), []

    async def main() -> None:
        _, front_end = front_end_of(tmp_path)

        async def on_ready(*_: object) -> None:
            seen.append(sys.getswitchinterval())
            front_end._on_signal(signal.SIGTERM)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            assert await front_end.run(listener, on_ready) == 0
        front_end.state.batches.directory.close()

    asyncio.run(main())
    assert seen == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == before
