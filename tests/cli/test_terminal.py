"""Progress with and without a terminal, output that cannot be written, and the banner."""

import errno
import io
import os
import subprocess
import sys

import pytest

from cpuserve.base.errors import CpuserveError
from cpuserve.cli import banner, terminal
from tests.helpers.children import child_options


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_short_stage_says_nothing(clock, capsys):
    progress = terminal.ProgressBars()
    for done in range(5):
        progress("load", done, 4)
        clock[0] += 0.01
    assert capsys.readouterr().err == ""


def test_a_long_stage_is_told_every_few_seconds_and_at_its_end(clock, capsys):
    progress = terminal.ProgressBars()
    for done in range(101):
        progress("load", done << 20, 100 << 20)
        clock[0] += 0.1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("cpuserve: load: 21.00 MiB of 100.00 MiB (21 %)")
    assert lines[-1].endswith("(100 %)")
    assert len(lines) == 3  # at 2 s, 7 s and the end
    clock[0] += 9
    progress("load", 100 << 20, 100 << 20)
    assert capsys.readouterr().err == "", "the end is told once"


def test_a_stage_of_unknown_size_has_no_percentage(clock, capsys):
    progress = terminal.ProgressBars()
    progress("download", 0, 0)
    clock[0] += 9
    progress("download", 5, 0)
    assert capsys.readouterr().err == "cpuserve: download: 5 B\n"


def test_the_roofline_line_predicts_decode_rates_from_both_limits():
    measured = {
        "read_bytes_per_s": 50e9,
        "weight_bytes_per_token": 1e9,
        "dot_ops_per_s": {"bf16": 1.1e12, "int8": 2.2e12},
        "limits": [
            {"requests": 1, "tokens_per_s": 50.0, "by": "memory"},
            {"requests": 8, "tokens_per_s": 220.0, "by": "arithmetic"},
        ],
    }
    line = " ".join(banner.render_roofline(measured).split())
    assert "reads 50.0 GB/s" in line
    assert "bf16 dot 1100 GOP/s" in line
    assert "at most 50 tokens/s for one request, 220 for 8 (by arithmetic" in line


def test_an_executor_without_probes_says_not_measured():
    assert "not measured" in banner.render_roofline({})


def test_a_note_that_nobody_can_read_is_no_error(monkeypatch):
    class Closed:
        def isatty(self):
            return False

        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    terminal.note("lost")


class Screen(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_for_what_takes_long_and_is_left_clean(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", screen := Screen())
    progress = terminal.ProgressBars()
    progress("load", 0, 100)
    assert screen.getvalue() == "", "a bar for less would only flicker"
    clock[0] += 1
    progress("load", 50 << 20, 100 << 20)
    progress("pack", 0, 0)
    bars = progress._bars
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [
        ("load", 50 << 20, 100 << 20)
    ]
    clock[0] += 1
    progress("pack", 3, 0)
    assert [(task.description, task.total) for task in bars.tasks][1:] == [("pack", None)]
    progress.close()
    progress.close()
    assert not bars.live.is_started
    shown = screen.getvalue()
    assert shown.endswith("\x1b[2K"), "the line of the bar was not erased"
    assert "load" in shown
    assert "50.0/100.0 MiB" in shown


class Broken(io.StringIO):
    """A standard output that cannot be written."""

    def __init__(self, error, number=None):
        super().__init__()
        self.error, self.number = error, number

    def write(self, text):
        raise self.error

    def fileno(self):
        return self.number


def test_a_reader_that_has_gone_is_told_apart_from_a_disk_that_is_full(monkeypatch, tmp_path):
    with (tmp_path / "pipe").open("w") as file:
        monkeypatch.setattr("sys.stdout", Broken(BrokenPipeError(), file.fileno()))
        with pytest.raises(BrokenPipeError):
            terminal.say("x")
    with (tmp_path / "out").open("w") as file:
        out = Broken(OSError(errno.ENOSPC, "No space left on device"), file.fileno())
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(CpuserveError, match="cannot be written: No space left on device"):
            terminal.say("x")
        os.write(out.number, b"what the interpreter would write at its end")
    assert (tmp_path / "out").read_bytes() == b"", "later output went nowhere"


CLOSED = """
import os, sys
from cpuserve.cli.terminal import open_standard_streams
open_standard_streams()
with open({path!r}, "wb") as file:
    assert file.fileno() > 2, "a file took the number of a standard stream"
    print("lost")
    sys.stdout.flush()
    sys.stderr.write("lost")
    assert sys.stdin.read() == ""
"""


def test_closed_standard_streams_are_not_taken_by_the_next_file(tmp_path):
    path = tmp_path / "next"
    command = [sys.executable, "-c", CLOSED.replace("{path!r}", repr(str(path)))]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(shell, **child_options()).returncode == 0
    assert path.read_bytes() == b""


def test_characters_that_the_output_cannot_show_are_replaced():
    code = (
        "from cpuserve.cli.terminal import open_standard_streams, say\n"
        "open_standard_streams(); say('a \\N{WAVING HAND SIGN}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], **child_options(PYTHONIOENCODING="ascii"), capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"a ?\n"), done.stderr


def test_a_program_that_goes_on_without_a_reader_ends_well():
    code = (
        "import os, sys\n"
        "from cpuserve.cli.terminal import say\n"
        "read, write = os.pipe(); os.dup2(write, 1); os.close(read)\n"
        "try: say('nobody reads this')\n"
        "except BrokenPipeError: sys.stderr.write('told')"
    )
    options = child_options(PYTHONUNBUFFERED="")
    done = subprocess.run([sys.executable, "-c", code], **options, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"told")
