"""`cpuserve top` against a server."""

import io
import json
import signal
import urllib.request

import msgspec
import pytest
from rich.console import Console

from cpuserve.api.status.activity_body import Activity, ModelActivity, SequenceActivity
from cpuserve.bench.driver import Target
from cpuserve.cli import top
from cpuserve.cli.main import main
from cpuserve.platforms.cpu_times import CpuTimes
from cpuserve.testing import scripted

MODEL = ModelActivity(
    model="m", running=2, waiting=1, kv_usage=0.2, kv_bytes=1 << 30, prompt_tokens=1000,
    cached_tokens=50, output_tokens=100, busy_s=5.0, weight_bytes=4e9, roofline_bytes_per_s=2e10,
    sequences=[],
)  # fmt: skip


def sequence(number, state="generating", **times):
    known = {"arrived_s": 1.0, "scheduled_s": 2.0, "first_s": 3.0, "ended_s": None, **times}
    return SequenceActivity(
        number=number, state=state, prompt_tokens=7, cached_tokens=3, output_tokens=21, **known
    )


def activity(time, model=MODEL, cpus=((0, 0, 0),)):
    return Activity(object="activity", time=time, models=[model], cpus=[CpuTimes(*c) for c in cpus])


def drawn(before, now, *, encoding="utf-8"):
    """The lines of a view."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=120, highlight=False)
    console.print(top.view(console, "http://here", before, now))
    file.seek(0)
    return file.read().splitlines()


def row(lines, word):
    return next(line for line in lines if line.startswith(word)).split()


def test_rates_are_the_growth_between_two_reports():
    more = msgspec.structs.replace(
        MODEL, prompt_tokens=1400, cached_tokens=150, output_tokens=130, weight_bytes=2.4e10
    )
    lines = drawn(activity(10.0), activity(12.0, more))
    shown = "m 2 1 ██░░░░░░░░ 20 % 1.00 GiB 200 50 15 10.0 of 20.0 GB/s"
    assert row(lines, "m ") == shown.split()


def test_a_server_that_started_again_shows_no_rates_below_zero():
    new = msgspec.structs.replace(MODEL, prompt_tokens=0, output_tokens=0, weight_bytes=0.0)
    assert "-" not in " ".join(row(drawn(activity(10.0), activity(11.0, new)), "m "))


def test_cores_are_bars_or_characters_when_there_are_many():
    before = activity(1.0, cpus=[(0, 1.0, 1.0), (1, 0.0, 5.0)])
    now = activity(2.0, cpus=[(0, 1.75, 1.25), (1, 0.0, 6.0)])
    text = "\n".join(drawn(before, now))
    assert "CPU 0  ████████░░  75 %" in text
    assert "CPU 1  ░░░░░░░░░░   0 %" in text
    before = activity(1.0, cpus=[(i, 0.0, 0.0) for i in range(32)])
    now = activity(2.0, cpus=[(i, 1.0 * (i < 8), 1.0 * (i >= 8)) for i in range(32)])
    assert "█" * 8 + "▁" * 24 + " 32 CPUs, 25 % busy" in "\n".join(drawn(before, now))
    assert "#" * 8 + "." * 24 in "\n".join(drawn(before, now, encoding="ascii"))


def test_running_requests_come_before_ended_ones():
    some = [sequence(1, "stop", ended_s=5.0), sequence(2), sequence(3, "waiting", first_s=None)]
    lines = drawn(activity(1.0), activity(13.0, msgspec.structs.replace(MODEL, sequences=some)))
    rows = [line.split() for line in lines[-3:]]
    assert [each[:2] for each in rows] == [["2", "generating"], ["3", "waiting"], ["1", "stop"]]
    assert rows[0][-2:] == ["2.0", "12.0"]  # 20 tokens after the first in 10 s
    assert rows[2][-2:] == ["10.0", "4.0"]


@pytest.fixture
def server():
    with scripted("Hello.", model="my-model", strict=False) as server:
        yield server


def test_once_prints_one_view_without_colours(capsys, server):
    body = json.dumps({"model": "my-model", "messages": [{"role": "user", "content": "Hi"}]})
    asked = urllib.request.Request(
        f"{server.openai_url}/chat/completions", body.encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(asked).close()
    assert main(["top", "--url", server.openai_url, "--once", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == f"cpuserve top  {server.url}"
    assert row(lines, "my-model")[1:3] == ["0", "0"]
    assert lines[-1].split()[1] == "stop"


def test_a_server_that_goes_away_is_waited_for():
    console = Console(file=io.StringIO(), width=200)

    def text(shown):
        with console.capture() as got:
            console.print(shown)
        return got.get()

    with scripted(model="first", strict=False) as server:
        port = server.port
        views = top.views(console, Target(server.url, ""), 0.01)
        assert "first" in text(next(views))
    assert "waiting for the server" in text(next(views))
    with scripted(model="second", strict=False, port=port):
        assert "second" in text(next(views))


def test_ctrl_c_ends_it_without_an_error(capsys, monkeypatch, server):
    monkeypatch.setattr(top.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["top", "--url", server.url]) == 0
    assert "my-model" in capsys.readouterr().out


@pytest.mark.parametrize("code", [401, 404])
def test_a_server_that_refuses_is_one_line(capsys, code):
    options = {"api_key": "secret"} if code == 401 else {}
    with scripted(strict=False, **options) as server:
        url = server.url if code == 401 else f"{server.url}/nowhere"
        assert main(["top", "--url", url]) == 1
    error = capsys.readouterr().err
    assert f"HTTP {code}" in error
    assert error.count("\n") == 1


def test_once_does_not_wait_for_a_server(capsys):
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
