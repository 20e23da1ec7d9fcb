"""Loads against a small server: pace, conversations, failures, and `cpuserve bench serve`."""

import asyncio
import json
import random
from statistics import fmean, pstdev

import pytest

from cpuserve.bench.driver import CHAT, LoadError, Target
from cpuserve.bench.noise import Noise
from cpuserve.bench.observe import Seen, observe, weight_reading, where
from cpuserve.bench.traffic import Pace, drive
from cpuserve.bench.workload import Turn
from cpuserve.cli import main as cli
from tests.bench.fake_openai import FakeOpenAI

ONE = [Turn([1, 2, 3], 2)]


def driven(fake, talks, pace=None, **more):
    with fake.running_at() as port:
        target = Target(
            f"http://127.0.0.1:{port}", "m", endpoint=more.pop("endpoint", "/v1/completions")
        )
        return asyncio.run(drive(target, talks, pace or Pace(), **{"warm_ups": 0, **more}))


def test_every_turn_sends_all_that_was_said():
    fake = FakeOpenAI()
    run = driven(fake, [[Turn([1, 2], 2), Turn([3], 1)]])
    assert [asked["prompt"] for asked in fake.asked] == [[1, 2], [1, 2, 900, 901, 3]]
    assert [t.tokens for t in run.timings] == [2, 1]
    assert [t.prompt_tokens for t in run.timings] == [2, 5]


def test_a_refused_request_is_counted_and_the_others_go_on():
    ended = []
    run = driven(
        FakeOpenAI(refuse={1}), [ONE] * 4, Pace(concurrency=1), each=lambda: ended.append(1)
    )
    assert (len(run.timings), len(run.errors), len(ended)) == (3, 1, 4)
    assert "HTTP 400" in run.errors[0]
    assert run.wall_s > 0


def test_the_concurrency_is_kept():
    fake = FakeOpenAI(wait_s=0.01)
    driven(fake, [ONE] * 9, Pace(concurrency=3))
    assert fake.most == 3


def test_warm_ups_come_before_and_do_not_count():
    fake = FakeOpenAI()
    run = driven(fake, [ONE] * 2, warm_ups=3, top_p=0.5)
    assert (len(fake.asked), len(run.timings)) == (5, 2)
    assert all(asked["top_p"] == 0.5 for asked in fake.asked)
    prompts = [asked["prompt"] for asked in fake.asked]
    assert prompts == [[3, 2, 1]] * 3 + [[1, 2, 3]] * 2  # the first one misses a prefix cache


def test_chat_gets_the_text_of_ids():
    fake = FakeOpenAI()
    run = driven(fake, [ONE], endpoint=CHAT)
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "1 2 3"}]
    assert run.tokens == 2
    with pytest.raises(LoadError, match="multi-turn"):
        driven(FakeOpenAI(), [[*ONE, *ONE]], endpoint=CHAT)


def test_the_server_says_what_it_has_read():
    run = driven(FakeOpenAI(), [ONE] * 3)
    assert (run.before, run.after) == (Seen(0.0, 1.5, 1e9), Seen(3000.0, 1.5, 1e9))
    assert weight_reading(run.before, run.after, 1e-3) == pytest.approx(3e-3)
    assert weight_reading(None, run.after, 1.0) == 0.0


def test_another_server_says_nothing():
    with FakeOpenAI(plain=True).running_at() as port:
        target = Target(f"http://127.0.0.1:{port}", "m")
        assert asyncio.run(observe(target)) is None
        assert asyncio.run(where(target)).host == ""


def test_gaps_have_the_rate_and_the_burstiness_asked():
    poisson = Pace(rate=10.0).gaps(4000, random.Random(0))
    assert fmean(poisson) == pytest.approx(0.1, rel=0.1)
    assert pstdev(poisson) == pytest.approx(0.1, rel=0.1)
    assert pstdev(Pace(10.0, burstiness=100.0).gaps(4000, random.Random(0))) < 0.02
    assert Pace().gaps(3, random.Random(0)) == [0.0] * 3


def command(port, *more):
    return ["bench", "serve", "--port", str(port), "--num-prompts", "4", "--random-input-len", "6",
            "--random-output-len", "3", "--seed", "5", *more]  # fmt: skip


def test_the_command_prints_records_and_saves_a_result(tmp_path, capsys):
    with FakeOpenAI(wait_s=0.001).running_at() as port:
        saving = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        more = ["--json", "--goodput", "ttft:60000", "e2e:60000", "--metadata", "run=1", *saving]
        assert cli.main(command(port, *more)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {line["metric"]: line for line in lines}
    assert {"ttft", "itl", "e2el", "output", "requests", "goodput", "driver_cpu"} <= set(found)
    assert (found["output"]["host"], found["output"]["isa"]) == ("A CPU", "avx2")
    assert found["output"]["fraction"] > 0
    assert found["goodput"]["median"] == found["requests"]["median"]
    assert found["ttft"]["parameters"]["input_len"] == 6
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["completed"], saved["failed"], saved["run"]) == (4, 0, "1")
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (24, 12)
    assert saved["request_goodput"] == saved["request_throughput"]
    assert 0 < saved["median_ttft_ms"] <= saved["p99_ttft_ms"]
    assert saved["output_lens"] == [3, 3, 3, 3]
    assert saved["records"][0]["commit"]


def test_the_command_prints_a_report(capsys):
    with FakeOpenAI(plain=True).running_at() as port:
        assert cli.main(command(port, "--metric-percentiles", "50,90")) == 0
    out = capsys.readouterr().out
    assert "4 completed, 0 failed" in out
    assert "p90" in out
    assert "inter-token latency" in out
    assert "roof" not in out


def test_failed_requests_are_an_exit_code(capsys):
    with FakeOpenAI(refuse={2}).running_at() as port:
        assert cli.main(command(port)) == 1
    out, err = capsys.readouterr()
    assert "3 completed, 1 failed" in out
    assert "a request failed: HTTP 400" in err


@pytest.mark.parametrize(
    ("more", "needle"),
    [
        (["--goodput", "speed:3"], "ttft:500"),
        (["--goodput", "ttft:x"], "ttft:500"),
        (["--metadata", "x"], "KEY=VALUE"),
        (["--percentile-metrics", "ttft,x"], "'x' is not one of"),
        (["--num-prompts", "0"], "0 is less than 1"),
        (["--request-rate", "-1"], "-1 is less than 0"),
        (["--metric-percentiles", "50,999"], "999 is more than 100"),
        (["--metric-percentiles", "50,nan"], "nan is less than 0"),
        (["--metric-percentiles", "-1"], "-1 is less than 0"),
        ([], "Start a server with"),
    ],
)
def test_a_wrong_command_is_one_line(capsys, more, needle):
    assert cli.main(command(9, *more)) == 2
    err = capsys.readouterr().err
    assert needle in err
    assert err.count("\n") == 1


def test_pictures_are_sent_before_the_prompt_of_a_chat_and_refused_elsewhere():
    fake, shown = FakeOpenAI(), (Noise(4, 5, 1), Noise(4, 5, 2))
    driven(fake, [[Turn("hi", 2, shown)]], endpoint=CHAT)
    (content,) = [asked["messages"][0]["content"] for asked in fake.asked]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in content[:2]] == [each.url for each in shown]
    with pytest.raises(LoadError, match="openai-chat"):
        driven(FakeOpenAI(), [[Turn([1, 2], 2, shown)]])
