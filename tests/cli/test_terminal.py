"""Progress without a terminal, and the banner's lines."""

import pytest

from cpuserve.entrypoints import banner, terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock the test moves."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_short_stage_says_nothing(clock, capsys):
    progress = terminal.Progress()
    for done in range(5):
        progress("load", done, 4)
        clock[0] += 0.01
    assert capsys.readouterr().err == ""


def test_a_long_stage_is_told_every_few_seconds_and_at_its_end(clock, capsys):
    progress = terminal.Progress()
    for done in range(101):
        progress("load", done << 20, 100 << 20)
        clock[0] += 0.1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("cpuserve: load: 21.00 MiB of 100.00 MiB (21 %)")
    assert lines[-1].endswith("(100 %)")
    assert len(lines) == 3  # at 2 s, 7 s and the end


def test_a_stage_of_unknown_size_has_no_percentage(clock, capsys):
    progress = terminal.Progress()
    progress("download", 0, 0)
    clock[0] += 9
    progress("download", 5, 0)
    assert capsys.readouterr().err == "cpuserve: download: 5 B\n"


def test_the_roofline_line_predicts_decode_from_bytes_a_token():
    line = banner.render_roofline(
        {
            "read_bytes_per_s": 50e9,
            "weight_bytes_per_token": 1e9,
            "dot_ops_per_s": {"bf16": 1.1e12, "int8": 2.2e12},
        }
    )
    assert "reads 50.0 GB/s" in line
    assert "bf16 dot 1100 GOP/s" in line
    assert "at most 50 tokens/s" in line


def test_an_executor_without_probes_says_not_measured():
    assert "not measured" in banner.render_roofline({})


def test_a_note_that_nobody_can_read_is_no_error(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    terminal.note("lost")
