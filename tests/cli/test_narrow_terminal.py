"""A terminal of 80 columns: words are whole, lines fit, and errors say what to do."""

import argparse
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import msgspec
import pytest
from rich.console import Console

from cpuserve.bench.driver import Timing
from cpuserve.bench.results import Report, markdown
from cpuserve.bench.schema import Where, record
from cpuserve.bench.traffic import Pace, Run
from cpuserve.cli import bench
from cpuserve.cli.bench_drawing import records_view, report_view
from cpuserve.cli.main import main
from cpuserve.cli.terminal import columns, folded
from cpuserve.cli.top import view
from tests.cli.test_top import MODEL, activity, sequence
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny import tiny_model

WIDTH = 80
NOWHERE = "http://127.0.0.1:9"
WHERE = Where(host="h", isa="avx512_bf16", threads=2, model="smollm2:135m")


def lines_of(made):
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(made(console))
    return console.file.getvalue().splitlines()


def on_terminal(*arguments, **environment):
    """Run a command on a terminal of 80 x 24; return its exit code, and the lines it wrote."""
    main_end, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    options = child_options()
    options["env"] = {**(options.get("env") or os.environ), "TERM": "xterm", "NO_COLOR": "1",
                      **environment}  # fmt: skip
    command = [sys.executable, "-m", "cpuserve", *arguments]
    child = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, **options)
    os.close(other)
    data = b""
    while select.select([main_end], [], [], PATIENCE_S)[0]:
        try:
            piece = os.read(main_end, 1 << 16)
        except OSError:  # the command has ended
            break
        if not piece:
            break
        data += piece
    os.close(main_end)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", data.decode())
    return child.wait(PATIENCE_S), text.replace("\r", "").splitlines()


def whole_words(lines, text):
    """Whether lines of at most 80 columns have the words of a text, none of them cut."""
    assert max(map(len, lines)) <= WIDTH
    return " ".join(text.split()) in " ".join(" ".join(lines).split())


def test_a_text_is_folded_between_words_and_only_for_a_terminal():
    text = "note " + "word " * 40 + "https://example.com/" + "x" * 90
    shown = folded(text, WIDTH, "    ").splitlines()
    assert max(map(len, shown[:-1])) < WIDTH
    assert all(line.startswith("    ") for line in shown[1:])
    assert " ".join(" ".join(shown).split()) == text
    assert folded(text, None) == text
    assert columns(io.StringIO()) is None


@pytest.mark.parametrize("name", ["m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_top_cuts_no_word(name):
    model = msgspec.structs.replace(MODEL, model=name, sequences=[sequence(n) for n in range(12)])
    before, now = activity(1.0, model), activity(2.0, model)
    lines = lines_of(lambda console: view(console, "http://127.0.0.1:8000", before, now))
    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= WIDTH
    for head in ("MODEL", "RUN", "WAIT", "KV CACHE", "PROMPT/s", "CACHED/s", "OUTPUT/s",
                 "BANDWIDTH"):  # fmt: skip
        assert head in text
    assert len(lines) <= 24


TIMINGS = [Timing(0.0, [first, first + 1.0], [1, 1], prompt_tokens=3) for first in (0.1, 0.9)]
REPORT = Report(Run(TIMINGS, wall_s=2.0), WHERE, Pace())
RECORDS = [
    record("prefill", "tokens/s", [1234.5, 1300.25], WHERE, better="more", roofs=[2e3, 2e3],
           of="the dot-product rate of all threads", parameters={"length": length})
    for length in (16, 4096)
]  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [lambda console: report_view(console, REPORT), lambda console: records_view(console, RECORDS)],
    ids=["serve", "records"],
)
def test_bench_cuts_no_word(made):
    lines = lines_of(made)
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in "\n".join(lines)
    wanted = ("duration", "requests") if "report" in str(made.__code__.co_names) else ("METRIC",)
    assert all(word in "\n".join(lines) for word in wanted)


def test_bench_ends_with_a_markdown_table(capsys):
    lines = markdown(REPORT).splitlines()
    assert lines[0].startswith("smollm2:135m, avx512_bf16, 2 threads, cpuserve ")
    assert lines[1:4] == ["", "|  | mean | p50 | p95 | p99 |", "| :-- | --: | --: | --: | --: |"]
    assert max(map(len, lines)) <= WIDTH
    assert "| output, tokens/s | 2 |  |  |  |" in lines
    assert "| time to first token, ms | 500.0 | 500.0 | 860.0 | 892.0 |" in lines
    assert len({line.count("|") for line in lines[2:]}) == 1
    bench.show(RECORDS, argparse.Namespace(json=False))
    last = capsys.readouterr().out.splitlines()[-4:]
    assert last[1] == "| :-- | --: | --: | --: | --: |"
    assert last[2].startswith("| prefill (length 16), tokens/s | 1267 | ")
    assert len({line.count("|") for line in last}) == 1


@pytest.mark.parametrize(
    "words", [["ps"], ["stop", "m"], ["top", "--once"], ["chat", "--message", "hi"]], ids=" ".join
)
def test_without_a_server_commands_say_how_to_get_one(capsys, words):
    assert main([*words, "--url", NOWHERE]) == 1
    error = capsys.readouterr().err
    assert f"no answer from {NOWHERE}: Connection refused. Start one with `cpuserve serve`" in error
    assert "Errno" not in error
    assert error.count("\n") == 1


def test_a_name_with_several_addresses_is_refused_in_the_same_words(capsys):
    assert main(["ps", "--url", "http://localhost:9"]) == 1
    error = capsys.readouterr().err
    assert "no answer from http://localhost:9: Connection refused." in error


def test_errors_doctor_and_config_fit_the_terminal():
    code, lines = on_terminal("ps", "--url", NOWHERE)
    assert code == 1
    assert whole_words(lines, "Start one with `cpuserve serve`, or set --url")
    code, lines = on_terminal("doctor", "--no-roofline")
    assert code == 0
    assert whole_words(lines, "+ joins the CPUs of one core")
    code, lines = on_terminal("config", str(tiny_model("llama")), CPUSERVE_KEEP_ALIVE="5m")
    assert code == 0
    assert whole_words(lines, "none: everyone who can connect may use the server (default)")
    assert whole_words(lines, "keep_alive 300")
