"""`cpuserve run-batch`: the requests of a file, the order of results, files that cannot run."""

import asyncio
import io
import json
import os
from types import SimpleNamespace

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.api.app import create_app
from cpuserve.api.batches.line_runner import count_lines, count_results, run_file
from cpuserve.api.request.state import ServerState
from cpuserve.base.errors import ConfigError, EngineDead, StartupError
from cpuserve.cli import main as cli
from cpuserve.cli.run_batch import _Output, _run_lines
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.registry import ModelRegistry
from tests.api.fakes import FakeEngine, make_context, speak
from tests.helpers.tiny import tiny_model

SMALL = ("--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "64")
COMPLETE = "/v1/completions"
LONGEST = 10_000


def line(name, url=COMPLETE, **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def run(*lines, script=speak, most=4):
    """Run lines with a scripted engine; return their results."""
    results = []
    data = io.BytesIO("\n".join(lines).encode())

    async def main():
        app = create_app(ServerState(ModelRegistry(make_context(FakeEngine(script)))))
        await run_file(app, data, lambda *found: results.append(found), longest=LONGEST, most=most)

    asyncio.run(main())
    return [(json.loads(text), succeeded) for text, succeeded in results]


def test_the_results_have_the_order_of_the_lines():
    ended = []

    def script(engine, number, prompt, params):
        if params.max_tokens == 1:
            yield 0.05  # the first lines end last
        ended.append(params.max_tokens)
        yield Output(number, [70], "length")

    lines = [line(str(i), prompt="hi", max_tokens=1 if i < 2 else 9) for i in range(8)]
    results = run(*lines, script=script)
    assert ended[0] == 9, "a later line did not overtake"
    assert [result["custom_id"] for result, _ in results] == [str(i) for i in range(8)]


def test_lines_of_several_endpoints_run_and_a_broken_one_fails_alone():
    messages = [{"role": "user", "content": "hi"}]
    results = run(
        line("chat", "/v1/chat/completions", messages=messages),
        "{broken",
        "",
        line("text", prompt="hi"),
        line("bad", prompt="hi", temperature=-1),
        line("other", "/v1/models"),
        line("stream", prompt="hi", stream=True),
    )
    assert [(r["custom_id"], ok) for r, ok in results] == [
        ("chat", True), (None, False), ("text", True), ("bad", False), ("other", False),
        ("stream", False),
    ]  # fmt: skip
    bad = {result["custom_id"]: result for result, _ in results}
    assert bad["bad"]["response"]["status_code"] == 400
    assert bad["other"]["error"]["code"] == "invalid_url"
    assert bad["stream"]["error"]["param"] == "body.stream"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\n\n", "has no lines"),
        (f"{line('a')}\n{line('a')}".encode(), "line 2: custom_id 'a' is also in line 1"),
    ],
)
def test_a_file_that_cannot_run_says_why(data, reason):
    with pytest.raises(ConfigError, match=reason):
        count_lines(io.BytesIO(data), LONGEST)


def test_a_file_may_have_more_lines_than_a_batch_of_the_server(monkeypatch):
    monkeypatch.setattr("cpuserve.api.batches.lines.MOST_LINES", 2)
    lines = "\n".join(line(str(i)) for i in range(5)).encode()
    assert count_lines(io.BytesIO(lines), LONGEST) == 5


def test_the_command_writes_what_llm_generates(tmp_path, capsys):
    model = str(tiny_model("llama", dtype="bfloat16"))
    prompts = ["over the dog", "a fox", "jumps"]
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(text, model="tiny", prompt=text, **fields) for text in prompts]
    source.write_text("\n".join([*lines, line("gone", model="other", prompt="x")]))
    argv = ["run-batch", "-i", str(source), "-o", str(target), "--model", model]
    assert cli.main([*argv, "--served-model-name", "tiny", *SMALL]) == 0
    assert "4 of 4 lines have ended, 1 of them with errors" in capsys.readouterr().err
    results = [json.loads(each) for each in target.read_text().splitlines()]
    assert [each["custom_id"] for each in results] == [*prompts, "gone"]
    assert results[3]["response"]["status_code"] == 404
    texts = [each["response"]["body"]["choices"][0]["text"] for each in results[:3]]
    with LLM(model=model, kv_cache_memory="16MiB", max_num_batched_tokens=64) as llm:
        wanted = llm.generate(prompts, SamplingParams(**fields))
    assert texts == [each.outputs[0].text for each in wanted]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["-i", "gone", "-o", "out"], "-i gone: there is no such file"),
        (["-i", "pipe", "-o", "out"], "-i pipe: it is not a file, and its lines are read twice"),
        (["-i", "https://host/in", "-o", "out"], "local files only"),
        (["-i", "in", "-o", "s3://host/out"], "local files only"),
        (["-i", "in", "-o", "in"], "is the input file"),
        (["-i", "in"], "-o"),
        (["-i", "in", "-o", "no/out"], "-o no/out cannot be written: No such file or directory"),
        (["-i", "in", "-o", "."], "-o . cannot be written: Is a directory"),
        (["-i", "in", "-o", "out", "--enable-metrics"], "/v1/batches"),
    ],
)
def test_a_command_that_cannot_run_is_one_line(tmp_path, monkeypatch, capsys, argv, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text(line("a", prompt="x"))
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["run-batch", *argv]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def whole_run(tmp_path, monkeypatch):
    """Run a batch of three lines with a tiny model; return a function that runs it again."""
    monkeypatch.chdir(tmp_path)
    names = ["a", "b", "c"]
    fields = {"max_tokens": 4, "temperature": 0}
    lines = [line(name, model="tiny", prompt=name, **fields) for name in names]
    (tmp_path / "in").write_text("\n".join(lines))
    model = ["--model", str(tiny_model("llama")), "--served-model-name", "tiny", *SMALL]

    def run_again(*more, out="out"):
        return cli.main(["run-batch", "-i", "in", "-o", out, *model, *more])

    return run_again


def test_a_second_run_keeps_the_results_and_goes_on_if_asked(tmp_path, monkeypatch, capsys):
    run_again, out = whole_run(tmp_path, monkeypatch), tmp_path / "out"
    assert run_again() == 0
    first = out.read_bytes()
    assert first.count(b"\n") == 3
    capsys.readouterr()
    assert run_again() == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "-o out has the results of an earlier run" in err) == (1, True)
    assert out.read_bytes() == first
    # A run that was killed left one result, and a part of the next.
    begun = first[: first.index(b"\n") + 20]
    out.write_bytes(begun)
    assert run_again("--resume") == 0
    results = [json.loads(each) for each in out.read_bytes().splitlines()]
    assert [each["custom_id"] for each in results] == ["a", "b", "c"]
    assert out.read_bytes().startswith(begun[:-19])
    wanted = [json.loads(each)["response"]["body"]["choices"] for each in first.splitlines()]
    assert [each["response"]["body"]["choices"] for each in results] == wanted
    assert "3 of 3 lines have ended" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_one_line(tmp_path, monkeypatch, capsys):
    assert whole_run(tmp_path, monkeypatch)(out="/dev/full") == 2
    err = capsys.readouterr().err
    assert "-o /dev/full cannot be written: No space left on device" in err
    assert "Traceback" not in err
    assert err.strip().count("\n") == 0


def results_of(*names):
    return b"".join(
        b'{"id":"batch_req_offline_%d","custom_id":"%s","response":null,"error":null}\n'
        % (number, name.encode())
        for number, name in enumerate(names, 1)
    )


@pytest.mark.parametrize("end", [b"", b'{"id":"batch_req_off', b"\x00\x00"])
def test_results_of_an_earlier_run_are_counted_and_a_torn_one_is_cut(end):
    source = io.BytesIO("\n".join(line(name, prompt="x") for name in "abc").encode())
    out = io.BytesIO(results_of("a", "b") + end)
    assert count_results(source, out, LONGEST) == 2
    assert out.getvalue() == results_of("a", "b")


@pytest.mark.parametrize(
    "known",
    [
        results_of("a", "x"),
        results_of("a", "b", "c", "d"),
        b"text\n",
        b"[" * 5000 + b"\n",
        b"\xff\n",
    ],
)
def test_results_of_other_lines_are_not_continued(known):
    source = io.BytesIO("\n".join(line(name, prompt="x") for name in "abc").encode())
    with pytest.raises(ConfigError, match="choose another output file"):
        count_results(source, io.BytesIO(known), LONGEST)


def test_a_run_ends_when_its_engine_ends_for_good(tmp_path):
    """Lines wait for a restart, which must not be for ever where none comes."""

    def script(engine, number, prompt, params):
        yield EngineDead("it was killed")

    async def main():
        context = make_context(FakeEngine(script))
        died = asyncio.Event()
        front_end = SimpleNamespace(
            state=ServerState(ModelRegistry(context)), context=context, wait_ended=died.wait
        )
        lines = io.BytesIO(line("a", prompt="x").encode())
        with _Output(tmp_path / "out") as output:
            output.begin(lines, LONGEST)
            asyncio.get_running_loop().call_soon(died.set)
            with pytest.raises(StartupError):
                await _run_lines(front_end, lines, output, LONGEST, 0)
        assert not (tmp_path / "out").exists()

    asyncio.run(main())
