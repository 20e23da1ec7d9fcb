"""Timeouts of requests and of the server, and progress while a long prompt is computed."""

import pytest

from cpuserve.engine.ipc import Output
from cpuserve.engine.streams import too_late
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api, error_of, events_of, speak

PATHS = ["/v1/chat/completions", "/v1/completions"]


def body(**fields):
    return {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("timeout", [0, -1, 1e9])
def test_a_timeout_that_is_none_is_refused(path, timeout):
    error = error_of(Api().post(path, **body(timeout=timeout)))
    assert (error["code"], error["param"]) == ("invalid_value", "timeout")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("longest", "asked", "want"),
    [(None, None, None), (None, 2.5, 2.5), (60.0, None, 60.0), (60.0, 5, 5.0), (60.0, 90, 60.0)],
)
def test_the_shorter_of_the_servers_and_the_requests_timeout_counts(path, longest, asked, want):
    api = Api(http=ClientLimits(longest_s=longest))
    assert api.post(path, **body(timeout=asked, n=2)).status_code == 200
    assert api.engine.wishes == [(want, False)] * 2


def late(engine, number, prompt, params):
    yield too_late(5.0)


def late_in_mid_stream(engine, number, prompt, params):
    yield Output(number, [70])
    yield too_late(5.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_too_late_gets_504_and_is_not_repeated(path, stream):
    api = Api(late)
    answer = api.post(path, **body(timeout=5, stream=stream))
    error = error_of(answer)
    assert (error["code"], error["type"]) == ("timeout", "DeadlineExceeded")
    assert error["param"] == "timeout"
    assert "5 s" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert api.context.backlog.requests == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_too_late_ends_with_an_error_event(path):
    events = events_of(Api(late_in_mid_stream).post(path, **body(timeout=5, stream=True)))
    assert events[-1]["error"]["code"] == "timeout"


def slowly(engine, number, prompt, params):
    for processed in (8, 16):
        yield Output(number, [], cached_tokens=4, scheduled=1.0, processed=processed)
    yield from speak(engine, number, prompt, params)


@pytest.mark.parametrize("path", PATHS)
def test_progress_is_streamed_to_those_who_want_it(path):
    api = Api(slowly)
    events = events_of(api.post(path, **body(stream=True, return_progress=True, max_tokens=64)))
    assert api.engine.wishes == [(None, True)]
    shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [s["processed"] for s in shown] == [8, 16]
    assert all(s["cache"] == 4 and s["time_ms"] >= 0 and s["total"] > 0 for s in shown)
    choices = [event["choices"][0] for event in events]
    assert all(choice["finish_reason"] is None for choice in choices[:2])
    assert all(choice.get("text", "") == "" for choice in choices[:2])
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    assert text == "Hello wörld \N{WAVING HAND SIGN}!"


@pytest.mark.parametrize("path", PATHS)
def test_progress_is_no_token_to_metrics_and_backlog(path):
    api = Api(slowly)
    api.post(path, **body(stream=True, return_progress=True, max_tokens=64))
    text = api.get("/metrics").text
    assert "time_to_first_token_seconds_count{" in text
    line = next(x for x in text.splitlines() if "time_to_first_token_seconds_count" in x)
    assert line.endswith((" 1", " 1.0"))
    assert api.context.backlog.requests == 0


def test_progress_is_not_asked_for_where_nobody_would_see_it():
    api = Api()
    api.chat(return_progress=True)
    api.chat(stream=True)
    assert api.engine.wishes == [(None, False)] * 2


def pausing(engine, number, prompt, params):
    yield Output(number, [], processed=8)
    yield 0.3
    yield Output(number, [70])
    yield 0.3
    yield Output(number, [71], "length")


def test_a_stream_that_falls_silent_sends_comments_between_its_events():
    api = Api(pausing, http=ClientLimits(silent_s=0.05))
    response = api.complete(stream=True, return_progress=True)
    assert len(events_of(response)) >= 3
    progress, first, last = response.text.split("data: ")[1:4]
    assert ": keep-alive\n\n" in progress
    assert ": keep-alive\n\n" in first
    assert ": keep-alive" not in last
