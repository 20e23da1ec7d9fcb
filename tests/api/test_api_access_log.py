"""--access-log: the line of each request, which no client can forge and no flood can hide."""

import asyncio
import io
import json
import logging
import random
import re
import time

import pytest

from cpuserve.api.http.access_log import AccessLog
from cpuserve.api.http.records import Records
from cpuserve.api.http.server import make_server
from cpuserve.base.log import Limited, OneLine
from cpuserve.base.waits import CAUSES
from cpuserve.config.server import ServerOptions
from cpuserve.engine.ipc import Output
from tests.api.fakes import Api
from tests.api.live import live
from tests.api.test_api_request_log import GENERATING, LINE, SECRET
from tests.helpers.depth import deep_but

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) ")


@pytest.fixture
def written():
    """written() returns the lines since its last call, as they are on standard error."""
    stream, logger = io.StringIO(), logging.getLogger("cpuserve.requests")
    handler = Limited(stream)
    handler.setFormatter(OneLine())
    level = logger.level
    logger.setLevel("INFO")
    logger.addHandler(handler)

    def lines():
        found = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        assert SECRET not in found, "the prompt is in the log"
        assert not found or found.endswith("\n")
        return found.split("\n")[:-1]

    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def read(line):
    """Return the facts of a line in text; it must be one from its beginning to its end."""
    stamp = STAMP.match(line)
    assert stamp, line
    found = LINE.fullmatch(line, stamp.end())
    assert found, line
    return found


def tokens_of(path, body):
    """Return the tokens of the prompt and of the response, as the response tells them."""
    if path.startswith("/api/"):
        return body["prompt_eval_count"], body["eval_count"]
    usage = body["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("path", GENERATING)
def test_a_response_is_one_line_with_its_tokens(written, path):
    body = {**GENERATING[path], "stream": False}
    answer = Api(records=Records(AccessLog("all"))).post(path, **body)
    (line,) = written()
    found = read(line)
    assert (found["path"], found["outcome"]) == (path, "200")
    assert (int(found["prompt"]), int(found["done"])) == tokens_of(path, answer.json())
    answer = Api(records=Records(AccessLog("all", as_json=True))).post(path, **body)
    (line,) = written()
    told = json.loads(line)
    assert (told["route"], told["status"], told["outcome"]) == (path, 200, "200")
    assert (told["prompt_tokens"], told["completion_tokens"]) == tokens_of(path, answer.json())
    assert 0 <= told["queue_s"] <= told["first_token_s"] <= told["total_s"]
    assert told["wait_s"] == pytest.approx(sum(told["waits"].values()))
    assert set(told["waits"]) <= set(CAUSES)
    assert told["end"] in (["stop"], ["length"])
    assert told["model"] == "tiny"
    assert told["id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", GENERATING)
def test_a_stream_is_one_line(written, path):
    body = {**GENERATING[path], "stream": True}
    assert Api(records=Records(AccessLog("all"))).post(path, **body).status_code == 200
    (line,) = written()
    assert int(read(line)["done"]) > 0


def after_waits(engine, number, prompt, params):
    """Yield a token that waited for others and for a picture, as the scheduler says it."""
    scheduled = time.monotonic() + 3.0
    queued, held = {"slots": 2.0, "share": 0.5}, {"media": 1.25}
    yield Output(number, [5], "length", scheduled=scheduled, queued=queued, held=held)


def test_a_line_and_timings_say_for_what_a_request_waited(written):
    told, text = {}, ""
    for as_json in (True, False):
        api = Api(after_waits, records=Records(AccessLog("all", as_json=as_json)))
        body = api.complete(max_tokens=1, timings_per_token=True).json()
        (line,) = written()
        told, text = (json.loads(line), text) if as_json else (told, line)
    waits = told["waits"]
    assert {name: waits[name] for name in ("slots", "share", "media")} == {
        "slots": 2.0, "share": 0.5, "media": 1.25,
    }  # fmt: skip
    engine = sum(waits[name] for name in ("step", "slots", "share"))
    assert engine == pytest.approx(told["queue_s"]), "the rest is the way to the engine"
    assert told["wait_s"] == pytest.approx(sum(waits.values()))
    assert list(waits) == [name for name in CAUSES if name in waits]
    found = read(text)["waits"].split(" + ")
    assert found[0] == "slots 2.000 s"
    assert {"share 0.500 s", "media 1.250 s"} <= set(found)
    timed = body["timings"]["waits_ms"]
    assert (timed["slots"], timed["share"], timed["media"]) == (2000.0, 500.0, 1250.0)


def in_pairs(engine, number, prompt, params):
    """Yield tokens as steps with drafts do: two in each step but the first, an accepted draft."""
    yield Output(number, [5])
    yield Output(number, [6, 7], drafts=3)
    yield Output(number, [8, 9], "length", drafts=1)


@pytest.mark.parametrize("has_drafts", [True, False])
def test_a_line_has_the_drafts_that_the_model_accepted(written, has_drafts):
    for as_json in (False, True):
        api = Api(in_pairs, records=Records(AccessLog("all", as_json=as_json)))
        api.context.metrics.drafts = has_drafts
        api.complete(max_tokens=5)
    text, told = written()
    assert read(text)["accepted"] == ("2" if has_drafts else None)
    assert json.loads(told)["accepted_tokens"] == (2 if has_drafts else None)


def test_usage_and_timings_have_the_drafts():
    api = Api(in_pairs)
    body = api.complete(max_tokens=5, timings_per_token=True).json()
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 2
    assert details["rejected_prediction_tokens"] == 2
    assert (body["timings"]["draft_n"], body["timings"]["draft_n_accepted"]) == (4, 2)
    told = Api().complete(max_tokens=5, timings_per_token=True).json()
    assert set(told["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}
    assert "draft_n" not in told["timings"]


def test_a_beam_search_has_times_and_an_end(written):
    api = Api(records=Records(AccessLog("all", as_json=True)))
    assert api.complete(use_beam_search=True, n=2, max_tokens=2).status_code == 200
    told = json.loads(*written())
    assert 0 <= told["queue_s"] <= told["first_token_s"] <= told["total_s"]
    assert told["end"] == ["length"]


def test_a_line_of_questions_that_share_a_beginning_says_why_they_ended(written):
    api = Api(records=Records(AccessLog("all", as_json=True)))
    prompt = list(range(40))
    assert api.complete(prompt=[[*prompt, 1], [*prompt, 2]], max_tokens=2).status_code == 200
    told = json.loads(*written())
    assert told["end"] == ["length"]
    assert told["completion_tokens"] == 4


def test_which_requests_have_a_line(written):
    paths = {"/health": 200, "/metrics": 200, "/v1/models": 200, "/nowhere": 404}
    for which, expected in {"errors": ["/nowhere"], "all": [*paths], "off": []}.items():
        api = Api(records=Records(AccessLog(which)))
        for path, status in paths.items():
            assert api.get(path).status_code == status
        assert [read(line)["path"] for line in written()] == expected


def test_lines_about_all_requests_do_not_depend_on_the_level(written):
    logging.getLogger("cpuserve.requests").setLevel("ERROR")
    Api(records=Records(AccessLog("all"))).get("/health")
    assert len(written()) == 1


def test_a_request_has_one_line_at_level_debug():
    for which, has_another in {"errors": True, "off": True, "all": False}.items():
        options = ServerOptions(log_level="debug", access_log=which)
        assert make_server(None, options).config.access_log == has_another


PIECES = (
    "\n", "\r\n", "\u2028", "\x1b[2K", "\u202e", "'", '"', "\\", ": 200, 1 + 2 tokens, 0.001 s",
    "request a from key-1: GET /health: 200, 0.001 s", "{", '","status":500,"x":"', " ", "%0a", "é",
    "2026-01-01 00:00:00 INFO ", "\x00", "a" * 300,
)  # fmt: skip


def hostile(seed):
    rng = random.Random(seed)
    return "".join(rng.choices(PIECES, k=rng.randint(1, 5)))


async def answer(app, method, path, headers, body=b""):
    """Send a request with any bytes in its head, which clients in Python would refuse to send."""
    scope = {
        "type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": path,
        "raw_path": path.encode("utf-8", "replace"), "query_string": b"", "headers": headers,
        "client": ("10.0.0.7", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    events = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        return events.pop() if events else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize("count", deep_but([200], [200, 2_000]))
@pytest.mark.parametrize("as_json", [False, True])
def test_hostile_ids_names_and_paths_forge_no_line(written, as_json, count):
    app = Api(records=Records(AccessLog("all", as_json=as_json))).app

    async def main():
        for seed in range(count):
            text = hostile(seed)
            named = b"application/json"
            head = [(b"content-type", named), (b"x-request-id", text.encode()), (b"host", b"a")]
            model = json.dumps({"model": text, "prompt": "a"}).encode()
            path = "/v1/completions" if seed % 2 else f"/{text}"
            status = await answer(app, "POST", path, head, model if seed % 2 else b"{}")
            (line,) = written()
            if not as_json:
                assert read(line)["outcome"].startswith(str(status)), line
                continue
            told = json.loads(line)
            assert line.isascii()
            assert told["status"] == status
            assert re.fullmatch(r"[\w.:-]+", told["id"])

    asyncio.run(main())


@pytest.mark.parametrize("count", deep_but([500], [500, 5_000]))
def test_no_line_is_left_out(written, count):
    app = Api(records=Records(AccessLog("all", as_json=True))).app
    head = [(b"content-type", b"application/json"), (b"host", b"a")]

    async def one(number):
        body = json.dumps({"prompt": [7] * (1 + number % 5), "max_tokens": 2}).encode()
        named = [*head, (b"x-request-id", str(number).encode())]
        return await answer(app, "POST", "/v1/completions", named, body)

    async def main():
        for begin in range(0, count, 100):
            await asyncio.gather(*map(one, range(begin, begin + 100)))

    asyncio.run(main())
    told = {found["id"]: found for found in map(json.loads, written())}
    assert len(told) == count
    for number in range(count):
        assert told[str(number)]["status"] == 200
        assert told[str(number)]["prompt_tokens"] == 1 + number % 5
        assert told[str(number)]["completion_tokens"] == 2


FORWARDED = (
    b"GET /nowhere HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    b"x-forwarded-for: 203.0.113.7, 10.2.3.4\r\n\r\n"
)


@pytest.mark.parametrize(
    ("proxies", "client"),
    [
        (("127.0.0.1",), "10.2.3.4"),
        (("127.0.0.0/8", "10.0.0.0/8"), "203.0.113.7"),
        (("*",), "203.0.113.7"),
        (("192.0.2.1",), "127.0.0.1"),
    ],
)
def test_the_client_is_the_last_address_that_no_believed_proxy_has(proxies, client, written):
    async def ask():
        async with live(forwarded_allow_ips=proxies) as server:
            await server.send(FORWARDED)

    asyncio.run(ask())
    (line,) = written()
    assert f" from {client}: GET /nowhere" in line
