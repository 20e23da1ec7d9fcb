"""The load generator against a small HTTP server that splits its answers at arbitrary bytes."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from cpuserve.bench.driver import (
    LoadError,
    Target,
    complete,
    fetch,
    first_model,
    run_closed,
    run_open,
)


def event(data):
    return f"data: {json.dumps(data)}\n\n".encode()


def tokens(count, ids=True):
    text = {"text": "x", "finish_reason": None}
    return event({"choices": [{**text, "token_ids": list(range(count))} if ids else text]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
DONE = b"data: [DONE]\n\n"


def chunked(parts):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def plain(status, body):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ask(answer, call):
    """Run call(target) against a server that always sends `answer`; (result, requests seen)."""
    seen = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [li for li in head.split(b"\r\n") if li.lower().startswith(b"content-length")]
        body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
        seen.append((head, body))
        writer.write(answer)
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await call(Target(f"http://127.0.0.1:{port}", "m", "key"))

    return asyncio.run(main()), seen


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_they_are_cut(size):
    stream = tokens(1) + b": waiting\n\n" + tokens(2) + tokens(1) + USAGE + DONE
    parts = [stream[i : i + size] for i in range(0, len(stream), size)]
    timing, seen = ask(chunked(parts), lambda t: complete(t, [1, 2, 3], 4))
    assert (timing.counts, timing.tokens, timing.prompt_tokens) == ([1, 2, 1], 4, 3)
    assert timing.ids == [0, 0, 1, 0]
    assert timing.started <= timing.stamps[0] <= timing.stamps[-1]
    head, body = seen[0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1")
    assert b"Authorization: Bearer key" in head
    assert json.loads(body)["prompt"] == [1, 2, 3]
    assert json.loads(body)["ignore_eos"] is True


def test_without_token_ids_the_usage_counts_what_was_held_back():
    parts = [tokens(1, ids=False), tokens(1, ids=False), USAGE, DONE]
    timing, _ = ask(chunked(parts), lambda t: complete(t, "hi", 4))
    assert timing.counts == [1, 3]


def test_tpot_leaves_the_first_token_out():
    timing, _ = ask(chunked([tokens(1), tokens(1), DONE]), lambda t: complete(t, "hi", 2))
    timing.stamps = [5.0, 6.0, 9.0]
    timing.counts = [1, 1, 3]
    timing.started = 4.0
    assert (timing.ttft, timing.e2e, timing.tpot, timing.itl) == (1.0, 5.0, 1.0, [1.0, 3.0])
    timing.counts = [1, 3, 5]
    assert timing.decode_rate == 2.0


def test_tokens_that_come_at_once_have_no_rate():
    timing, _ = ask(chunked([tokens(2), DONE]), lambda t: complete(t, "hi", 2))
    with pytest.raises(LoadError, match="ask for more output tokens"):
        _ = timing.decode_rate


@pytest.mark.parametrize(
    ("answer", "needle"),
    [
        (plain("400 Bad Request", b'{"error": "why"}'), "HTTP 400.*why"),
        (chunked([event({"error": {"message": "boom"}}), DONE]), "boom"),
        (chunked([DONE]), "without a token"),
        (b"", "no answer"),
    ],
)
def test_a_refused_or_broken_request_is_an_error(answer, needle):
    with pytest.raises(LoadError, match=needle):
        ask(answer, lambda t: complete(t, "hi", 2))


def test_the_first_model_is_asked_with_the_key():
    body = b'{"object": "list", "data": [{"id": "a", "object": "model"}, {"id": "b"}]}'
    target, seen = ask(plain("200 OK", body), lambda t: first_model(t.url, "key"))
    assert (target.model, target.api_key) == ("a", "key")
    assert b"Authorization: Bearer key" in seen[0][0]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("401 Unauthorized", b'{"error": "who are you"}'),
        ("200 OK", b'{"data": []}'),
        ("200 OK", b"{}"),
        ("200 OK", b"hello"),
    ],
)
def test_a_server_that_does_not_name_its_models_is_an_error(status, body):
    with pytest.raises(LoadError, match=f"HTTP {status[:3]} from /v1/models: ") as error:
        ask(plain(status, body), lambda t: first_model(t.url))
    assert body.decode() in str(error.value)


def test_nobody_listening_is_an_error():
    with pytest.raises(LoadError, match="no answer"):
        asyncio.run(complete(Target("http://127.0.0.1:9", "m"), "hi", 1))


def test_fetch_reads_bodies_with_a_length():
    got, _ = ask(plain("200 OK", b"fine"), lambda t: fetch(t, "/health"))
    assert got == (200, b"fine")


def test_a_body_may_end_with_the_connection():
    stream = b"HTTP/1.1 200 OK\r\n\r\n" + tokens(1) + tokens(1) + DONE
    timing, _ = ask(stream, lambda t: complete(t, "hi", 2))
    assert timing.counts == [1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata",
    ],
)
def test_an_answer_that_is_cut_off_is_an_error(answer):
    with pytest.raises(LoadError, match="no answer"):
        ask(answer, lambda t: fetch(t, "/health"))


def test_chat_deltas_are_tokens_and_ids_count_before_text():
    deltas = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"content": "x"}},
        {"delta": {"reasoning_content": "y"}},
        {"delta": {"content": "z"}, "token_ids": [1, 2]},
    ]
    parts = [event({"choices": [delta]}) for delta in deltas]
    timing, seen = ask(
        chunked([*parts, DONE]),
        lambda t: complete(replace(t, endpoint="/v1/chat/completions"), "hi", 4),
    )
    assert timing.counts == [1, 1, 2]
    assert json.loads(seen[0][1])["messages"] == [{"role": "user", "content": "hi"}]


def test_an_event_that_is_no_json_is_an_error():
    with pytest.raises(LoadError, match="an event that cannot be parsed"):
        ask(chunked([b"data: {x}\n\n"]), lambda t: complete(t, "hi", 2))


def test_closed_load_keeps_its_concurrency():
    running, most = 0, 0

    async def job(i):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return i

    results, wall = asyncio.run(run_closed([partial(job, i) for i in range(10)], 3))
    assert (results, most) == (list(range(10)), 3)
    assert wall > 0


def test_open_load_starts_jobs_whatever_became_of_the_others():
    async def main():
        release = asyncio.Event()

        async def waits():
            await release.wait()
            return "first"

        async def frees():
            release.set()
            return "second"

        return await run_open([waits, frees], [0.0, 0.0])

    assert asyncio.run(main())[0] == ["first", "second"]
