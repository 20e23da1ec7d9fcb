"""Many clients and little memory: a real engine process with a tiny model, over HTTP."""

import asyncio
import json
import random
import socket
import struct
import time
from urllib.parse import urlsplit

import pytest

from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model


def words(seed, count):
    choose = random.Random(seed)
    return [choose.randrange(3, 380) for _ in range(count)]


def request(body):
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(data) + data


async def leave_at(phase, port, number):
    """Run a client that disconnects after `phase` events (None: while its request waits)."""
    choose = random.Random(number)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream = phase is not None or choose.random() < 0.5
    body = {"prompt": words(number, 300), "max_tokens": 100, "ignore_eos": True, "stream": stream}
    writer.write(request({**body, "n": choose.choice([1, 1, 3]), "temperature": 1.0}))
    await writer.drain()
    if phase is None:
        await asyncio.sleep(choose.choice([0.0, 0.01, 0.1, 0.5]))
    for _ in range(phase or 0):
        if b"[DONE]" in await reader.readuntil(b"\n\n"):
            break
    if choose.random() < 0.5:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.deep  # 3 s
def test_two_hundred_clients_that_leave_at_any_phase_leave_nothing_behind():
    phases = [None, None, 1, 3, 20, 90, 10_000]
    with running_server(tiny_model("llama"), "--max-num-seqs", "8") as server:
        url = urlsplit(server.url)

        async def crowd():
            leaving = [leave_at(phases[i % len(phases)], url.port, i) for i in range(200)]
            await asyncio.wait_for(asyncio.gather(*leaving), PATIENCE_S)

        asyncio.run(crowd())
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(
            lambda: not any(server.metric(name) for name in gauges),
            lambda: str({name: server.metric(name) for name in gauges}),
        )
        steps = server.metric("iteration_tokens_total_count")
        time.sleep(0.5)
        assert server.metric("iteration_tokens_total_count") == steps, (
            "it still computes for clients that left"
        )
        answer = server.post("/v1/completions", prompt=words(0, 9), max_tokens=3, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 3


def answers(server, prompts):
    """Return the token ids of the answers to all prompts, which are sent in one request."""
    body = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    choices = server.post("/v1/completions", prompt=prompts, return_token_ids=True, **body)
    return [choice["token_ids"] for choice in choices["choices"]]


@pytest.mark.deep  # 7 s
def test_a_pool_of_sixteen_blocks_serves_64_long_requests_as_an_ample_one_does():
    prompts = [words(i, 150) for i in range(64)]
    with running_server(tiny_model("llama")) as server:
        want = answers(server, prompts)
        assert server.metric("num_preemptions_total") == 0
    # 16 blocks of 32 tokens; every sequence needs ten of them at its end.
    with running_server(tiny_model("llama"), "--kv-cache-memory-bytes", str(16 << 14)) as server:
        got = answers(server, prompts)
        assert server.metric("num_preemptions_total") > 0
        assert server.metric("kv_cache_usage_perc") == 0
    assert got == want
    assert all(len(ids) == 150 for ids in got)


@pytest.mark.deep  # 3 s
def test_a_prompt_is_found_again_after_a_restart_with_a_cache_directory(tmp_path):
    options = ("--prefix-cache-dir", str(tmp_path / "prefixes"), "--prefix-cache-size", "64MiB")
    body = {"prompt": words(1, 300), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    texts = []
    for cached in (0, 288):
        with running_server(tiny_model("llama"), *options) as server:
            answer = server.post("/v1/completions", **body)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
