"""Limits of callers: exact to one request, on every route, in the words of each dialect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from datetime import datetime

import httpx
import msgspec
import pytest

from cpuserve.api.callers.key_file import read_key_file
from cpuserve.api.dialects import dialect_of
from tests.api.fakes import Api, speak, tokenizer
from tests.api.live import live, post
from tests.api.post_routes import ROUTES, RUNS, answers, prepare
from tests.clients.test_batches import CHAT, data_of, ended, line, results_of
from tests.helpers.patience import until

KEY = "secret-key-of-alice"
OTHER = "secret-key-of-bobby"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, now=1000.5):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def keys(tmp_path):
    """Return a function that writes a file with the limits of alice, and returns its path."""

    def write(limits, more=""):
        path = tmp_path / "keys"
        path.write_text(f"alice {KEY} {limits}\nbob {OTHER}\n{more}")
        path.chmod(0o600)
        return str(path)

    return write


def api_of(path, script=speak, **more):
    made = Api(script, key_file=path, key=KEY, clock=Clock(), **more)
    return made, made.state.callers.of_owner("caller-alice").use


def gather(api, count, path=CHAT, body=None):
    """Send `count` requests together, and return their responses."""

    async def main():
        asked = (api._request("POST", path, json=body or HI) for _ in range(count))
        return await asyncio.gather(*asked)

    return asyncio.run(main())


def test_requests_that_arrive_together_are_exact_to_one(keys):
    api, use = api_of(keys("rpm=7"))
    for turn in range(2):
        statuses = [response.status_code for response in gather(api, 60)]
        assert (statuses.count(200), statuses.count(429)) == (7, 53), turn
        assert (use.running, use.requests.total()) == (0, 7)
        use.clock.now += 61


def test_bodies_that_arrive_late_do_not_let_more_requests_in(keys):
    """The request is counted when its headers have arrived, not when it has been read."""

    async def main():
        async with live(api_key_file=keys("rpm=5 parallel=4")) as server:
            server.state.callers.of_owner("caller-alice").use.requests._clock = Clock()
            key = b"\r\nx-api-key: %b\r\n" % KEY.encode()
            head = post(CHAT, HI, close=True).replace(b"\r\n", key, 1)
            connections = []
            for _ in range(12):
                reader, writer = await server.open()
                writer.write(head[:-20])
                connections.append((reader, writer))
            use = server.state.callers.of_owner("caller-alice").use
            await until(lambda: use.running == 4)
            for _, writer in connections:
                writer.write(head[-20:])
            said = await asyncio.gather(*(reader.read() for reader, _ in connections))
            statuses = [int(each.split(b" ")[1]) for each in said]
            assert (statuses.count(200), statuses.count(429)) == (4, 8)
            assert (use.running, use.requests.total()) == (0, 4)

    asyncio.run(main())


def test_requests_at_the_same_time_are_exact_to_one_and_end_with_their_streams(keys):
    held = asyncio.Event()

    def slow(*asked):
        yield held
        yield from speak(*asked)

    async def main():
        async with live(slow, api_key_file=keys("parallel=3")) as server:
            use = server.state.callers.of_owner("caller-alice").use
            url, headers = f"http://127.0.0.1:{server.port}", {"x-api-key": KEY}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                running = [
                    asyncio.create_task(http.post(CHAT, json={**HI, "stream": bool(i % 2)}))
                    for i in range(3)
                ]
                await until(lambda: server.engine.running == 3)
                refused = await http.post(CHAT, json=HI)
                assert refused.status_code == 429
                assert "3 requests at the same time" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
                # GET reads, and needs no place; another caller has its own.
                assert (await http.get("/v1/models")).status_code == 200
                assert use.running == 3
                running[0].cancel()  # a client that disconnects gives its place back
                await until(lambda: use.running == 2)
                again = asyncio.create_task(http.post(CHAT, json=HI))
                await until(lambda: server.engine.running == 3)
                held.set()
                for task in (*running[1:], again):
                    assert (await task).status_code == 200
                await until(lambda: use.running == 0)

    asyncio.run(main())


def every_change(app):
    """Yield (method, path) for each route that is no GET, and for no route."""
    for route in app.state.routes:
        for method in sorted((getattr(route, "methods", None) or set()) - {"GET", "HEAD"}):
            yield method, re.sub(r"\{[^}]*\}", "1", route.path)
    yield from (("POST", "/nowhere"), ("PUT", "/v1/models"), ("PATCH", "/"))


def test_every_route_refuses_in_its_dialect_and_says_when_to_return(keys):
    api, use = api_of(keys("rpm=3 tpm=50"), admin_routes=True)
    for _ in range(3):
        use.requests.add(1)
    use.tokens.add(20)
    use.clock.now += 20
    seen = set()
    for method, path in every_change(api.app):
        for dialect_header in ({}, {"anthropic-version": "2023-06-01"}):
            response = api.request(method, path, json={}, headers=dialect_header)
            assert response.status_code == 429, (method, path)
            assert response.headers["retry-after"] == "41"
            dialect = dialect_of(path, {name.encode() for name in dialect_header})
            seen.add(dialect)
            msgspec.json.decode(response.content, type=dialect.body)
            assert "Caller alice has reached its limit of 3 requests a minute" in response.text
            assert "try again in 41 s" in response.text
            check_headers(response.headers, dialect.limits.all(), 3, 0, 50, 30)
    assert len(seen) >= 5
    assert not api.engine.asked
    assert use.requests.total() == 3
    # What reads is not counted, and what needs no key has no limits.
    for path in ("/v1/models", "/health", "/metrics", "/props"):
        response = api.get(path)
        assert response.status_code == 200
        assert not any("ratelimit" in name for name in response.headers)


def check_headers(headers, expected, requests, requests_left, tokens, tokens_left):
    """Check all headers about limits; expected: their names, in the order of LimitHeaders.all."""
    assert sorted(name for name in headers if "ratelimit" in name) == sorted(expected)
    found = [headers[name] for name in expected]
    assert found[:2] == [str(requests), str(requests_left)]
    assert found[3:5] == [str(tokens), str(tokens_left)]
    if expected[0].startswith("x-"):
        assert (found[2], found[5]) == ("41s", "41s")
    else:
        for when in (found[2], found[5]):
            left = datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp() - time.time()
            assert -120 < left <= 42


def test_the_first_request_after_the_time_in_the_header_is_served(keys):
    api, use = api_of(keys("rpm=1"))
    assert api.chat().status_code == 200
    refused = api.chat()
    assert refused.status_code == 429
    use.clock.now += int(refused.headers["retry-after"])
    response = api.chat()
    assert response.status_code == 200
    assert response.headers["x-ratelimit-limit-requests"] == "1"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.headers["x-ratelimit-reset-requests"] == "1m1s"
    assert "x-ratelimit-limit-tokens" not in response.headers
    stream = api.chat(stream=True)
    assert stream.status_code == 429


@pytest.mark.parametrize("path", RUNS)
def test_tokens_are_limited_on_every_route_that_runs_a_model(keys, path):
    body, pooling, _ = ROUTES[path]
    api, use = api_of(keys("tpm=40"), answers)
    prepare(api.context, pooling)
    use.tokens.add(40)
    refused = api.post(path, model="tiny", **body)
    assert refused.status_code == 429, refused.text
    assert "Caller alice has reached its limit of 40 tokens a minute" in refused.text
    assert int(refused.headers["retry-after"]) == 61
    assert not api.engine.asked
    use.clock.now += 61
    assert api.post(path, model="tiny", **body).status_code == 200
    # All prompts are new, and the scripted engine caches none.
    prompts = sum(len(prompt) for prompt, _ in api.engine.asked)
    assert use.tokens.total() >= prompts > 0
    assert (use.reserved, use.running) == (0, 0)


def test_tokens_count_prompts_without_cached_ones_and_generated_ones(keys):
    def cached(engine, number, prompt, params):
        for output in speak(engine, number, prompt, params):
            output.cached_tokens = 5
            yield output

    api, use = api_of(keys("tpm=10k"), cached)
    for stream in (False, True):
        before = use.tokens.total()
        usage = api.chat().json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 5
        used = usage["prompt_tokens"] - 5 + usage["completion_tokens"]
        assert use.tokens.total() - before == used
        response = api.chat(stream=stream)
        assert use.tokens.total() - before == 2 * used
        left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert left <= 10_000 - before - used
    before = use.tokens.total()
    usage = api.complete(["a long prompt", "another one"], n=3, max_tokens=4).json()["usage"]
    expected = usage["prompt_tokens"] - 2 * 5 + usage["completion_tokens"]
    assert use.tokens.total() - before == expected


def test_requests_with_tokens_that_arrive_together_are_exact_to_one(keys):
    """A request may use 24 tokens, so the fifth is the last that starts while some are left."""
    prompt = len(tokenizer().encode("hi"))
    most = 24 - prompt
    api, use = api_of(keys("tpm=100"))
    found = gather(api, 40, "/v1/completions", {"prompt": "hi", "max_tokens": most})
    assert [response.status_code for response in found].count(200) >= 5
    # They end one by one here, and give back what they did not use.
    assert use.tokens.total() <= 100 + 24
    assert use.reserved == 0
    held = asyncio.Event()

    def slow(*asked):
        yield held
        yield from speak(*asked)

    async def main():
        async with live(slow, api_key_file=keys("tpm=100")) as server:
            url, headers = f"http://127.0.0.1:{server.port}", {"x-api-key": KEY}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                body = {"prompt": "hi", "max_tokens": most}
                asked = [
                    asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(30)
                ]
                await until(lambda: sum(task.done() for task in asked) == 25)
                refused = [task.result() for task in asked if task.done()]
                assert {response.status_code for response in refused} == {429}
                assert "running requests have reserved 120" in refused[0].text
                assert refused[0].headers["x-ratelimit-remaining-tokens"] == "0"
                assert server.engine.running == 5
                held.set()
                statuses = [(await task).status_code for task in asked]
                assert statuses.count(200) == 5

    asyncio.run(main())


def test_a_prompt_whose_client_leaves_counts(keys):
    def never(*_):
        yield asyncio.Event()

    async def main():
        async with live(never, api_key_file=keys("tpm=1000")) as server:
            use = server.state.callers.of_owner("caller-alice").use
            url, headers = f"http://127.0.0.1:{server.port}", {"x-api-key": KEY}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                gone = asyncio.create_task(http.post(CHAT, json=HI))
                await until(lambda: server.engine.running == 1)
                assert use.tokens.total() == 0
                assert use.reserved > 0
                gone.cancel()
                await until(lambda: use.running == 0)
                (prompt, _) = server.engine.asked[0]
                assert (use.tokens.total(), use.reserved) == (len(prompt), 0)

    asyncio.run(main())


def test_a_large_body_is_refused_in_a_response_that_the_client_can_read(keys):
    async def main():
        async with live(api_key_file=keys("rpm=1")) as server:
            server.state.callers.of_owner("caller-alice").use.requests.add(1)
            url, headers = f"http://127.0.0.1:{server.port}", {"x-api-key": KEY}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                body = {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
                for _ in range(3):
                    response = await http.post("/v1/messages", json={**body, "max_tokens": 5})
                    assert response.status_code == 429
                    assert response.json()["error"]["type"] == "rate_limit_error"

    asyncio.run(main())


def test_lines_of_batches_wait_for_the_limits_of_their_caller(keys, tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.api.batches.line_runner._LONGEST_WAIT_S", 0.01)

    async def main():
        options = {
            "files_dir": str(tmp_path / "files"),
            "api_key_file": keys("rpm=1000 parallel=2"),
        }
        async with live(**options) as server:
            use, clock = server.state.callers.of_owner("caller-alice").use, Clock()
            use.requests._clock = clock
            async with openai_client(server) as client:
                sent = await client.files.create(
                    file=data_of(*(line(str(i)) for i in range(9))), purpose="batch"
                )
                server.state.callers.load(read_key_file(keys("rpm=6 parallel=2")))
                batch = await client.batches.create(
                    input_file_id=sent.id, endpoint=CHAT, completion_window="24h"
                )
                # The upload, the creation and four lines are six requests.
                done = server.state.batches
                await until(lambda: len(server.engine.asked) == 4)
                counts = done.find("caller-alice", batch.id).batch.request_counts
                await until(lambda: counts.completed == 4)
                assert {params.caller for _, params in server.engine.asked} == {"alice"}
                assert use.requests.total() == 6
                clock.now += 61
                batch = await ended(client, batch)
                assert (batch.request_counts.completed, batch.request_counts.failed) == (9, 0)
                assert len(await results_of(client, batch.output_file_id)) == 9
                assert use.running == 0

    asyncio.run(main())


def openai_client(server, key=KEY):
    import openai

    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.AsyncOpenAI(base_url=url, max_retries=0, api_key=key)


async def files_of(place, key, **options):
    """Return the ids of the files that `key` sees on a server with these options."""
    async with live(files_dir=place, **options) as server, openai_client(server, key) as client:
        return [found.id async for found in client.files.list()]


def test_files_of_a_key_belong_to_the_name_that_it_gets(keys, tmp_path):
    async def main():
        place, new_key = str(tmp_path / "files"), "secret-key-that-is-new"
        options = {"files_dir": place, "api_key": (KEY, OTHER)}
        async with live(**options) as server, openai_client(server) as client:
            first = await client.files.create(file=data_of("{}"), purpose="batch")
        path = keys("")
        assert await files_of(place, KEY, api_key_file=path) == [first.id]
        assert await files_of(place, OTHER, api_key_file=path) == []
        (tmp_path / "keys").write_text(f"alice {new_key}\nbob {KEY}\n")
        assert await files_of(place, new_key, api_key_file=path) == [first.id]
        assert await files_of(place, KEY, api_key_file=path) == []

    asyncio.run(main())


def test_a_removed_key_gets_401_and_its_running_request_ends_as_usual(keys, tmp_path):
    held = asyncio.Event()

    def slow(*asked):
        yield held
        yield from speak(*asked)

    async def main():
        async with live(slow, api_key_file=keys("parallel=1")) as server:
            url, headers = f"http://127.0.0.1:{server.port}", {"x-api-key": KEY}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                running = asyncio.create_task(http.post(CHAT, json={**HI, "stream": True}))
                await until(lambda: server.engine.running == 1)
                path = tmp_path / "keys"
                path.write_text(f"bob {OTHER}\n")
                server.state.callers.load(read_key_file(str(path)))
                assert (await http.post(CHAT, json=HI)).status_code == 401
                held.set()
                response = await running
                assert response.status_code == 200
                assert response.text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_the_priority_of_a_caller_is_the_lowest_that_its_requests_may_have(keys):
    api, _ = api_of(keys("priority=5"))
    refused = api.chat(priority=4)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "priority must be at least 5 for caller alice" in refused.text
    for asked, expected in ((None, 5), (5, 5), (9, 9)):
        assert api.chat(**({} if asked is None else {"priority": asked})).status_code == 200
        assert api.engine.priorities[-1] == expected


def test_a_private_cache_has_a_salt_that_nobody_else_can_send(keys):
    api, _ = api_of(keys("cache=private", f"carl {KEY}-of-carl cache=private\n"))
    salts = {}
    for key in (KEY, OTHER, f"{KEY}-of-carl"):
        api._key = key
        for salt in (None, "mine"):
            more = {} if salt is None else {"cache_salt": salt}
            assert api.chat(**more).status_code == 200
            salts[key, salt] = api.engine.asked[-1][1].cache_salt
    assert (salts[OTHER, None], salts[OTHER, "mine"]) == (None, "mine")
    assert len(set(salts.values())) == 6
    api._key = OTHER
    for known in {*salts.values()} - {None, "mine"}:
        assert len(known) == 64
        assert api.chat(cache_salt=known).status_code == 200  # a guess; who knows it was told
    api._key = KEY
    api.chat()
    assert api.engine.asked[-1][1].cache_salt == salts[KEY, None]
    assert api.chat(cache_salt="").status_code == 400
    assert api.chat(cache_salt="a@b").status_code == 400


def test_logs_and_metrics_have_names_and_never_keys(keys, caplog):
    api, use = api_of(keys("rpm=2"))
    with caplog.at_level(logging.DEBUG):
        api.chat()
        api.chat(temperature=-1)
        api.chat()
        api._key = f"{KEY}-wrong"
        api.chat()
    lines = [record.getMessage() for record in caplog.records]
    assert any(" from alice: POST /v1/chat/completions" in each and "400" in each for each in lines)
    assert any(" from alice: POST /v1/chat/completions" in each and "429" in each for each in lines)
    api._key = OTHER
    metrics = api.get("/metrics").text
    line = 'cpuserve:caller_requests_total{caller="alice",engine="0",model_name="tiny"} 1.0'
    assert line in metrics.splitlines()
    shown = "\n".join([*lines, metrics, repr(use), repr(api.state)])
    assert "secret-key" not in shown


def test_refusals_are_counted_by_caller_and_limit(keys):
    api, use = api_of(keys("rpm=5 tpm=40"))
    assert api.chat().status_code == 200
    use.tokens.add(40)
    assert [api.chat().status_code for _ in range(5)] == [429] * 5
    assert api.post("/v1/messages", **HI, max_tokens=5).status_code == 429
    lines = api.get("/metrics").text.splitlines()
    assert 'cpuserve:caller_refused_total{caller="alice",limit="tokens"} 4.0' in lines
    assert 'cpuserve:caller_refused_total{caller="alice",limit="requests"} 2.0' in lines


def test_callers_of_flags_and_addresses_have_no_limits():
    api = Api(api_keys=("k",), key="k")
    assert api.chat().status_code == 200
    assert not any("ratelimit" in name for name in api.chat().headers)
    assert not any("ratelimit" in name for name in Api().chat().headers)
    assert json.loads(Api().chat().text)["usage"]["prompt_tokens"] > 0


def test_a_browser_page_may_read_the_headers_about_limits(keys):
    from cpuserve.api.app import Cors

    api, _ = api_of(keys("rpm=5"), cors=Cors(("https://a.example",)))
    response = api.request("POST", CHAT, json=HI, headers={"origin": "https://a.example"})
    exposed = response.headers["access-control-expose-headers"].split(", ")
    for name in (
        "x-ratelimit-remaining-requests",
        "anthropic-ratelimit-tokens-reset",
        "retry-after",
    ):
        assert name in exposed
