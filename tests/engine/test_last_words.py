"""The line of stderr that says why a process has ended, and lines that do not."""

import logging
import sys

import pytest

from cpuserve.base.log import OneLine
from cpuserve.engine.liveness import LastWords


def record(text, level=logging.WARNING, error=None):
    made = logging.LogRecord("cpuserve.x", level, "x.py", 1, text, (), error)
    return OneLine().format(made).splitlines()


def words(*lines, end=0.5):
    heard = LastWords()
    for i, line in enumerate(lines):
        heard.hear(line + "\n", i / 1000)
    return heard.at(end)


def failure():
    try:
        raise ValueError("the cause of nothing\nreally")
    except ValueError:
        return sys.exc_info()


@pytest.mark.parametrize("level", [10, 20, 30, 40, 50])
def test_a_record_of_any_level_is_no_cause(level):
    assert words(*record("the directory cannot be used", level)) == ""
    assert words("why", *record("two\nlines", level)) == "why"


def test_a_traceback_in_the_log_is_no_cause():
    assert words(*record("a step failed", 40, failure())) == ""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["libgomp: Thread creation failed"], "libgomp: Thread creation failed"),
        (["", "why", "  ", ""], "why"),
        (["Traceback (most recent call last):", '  File "x"', "KeyError: 1"], "KeyError: 1"),
        (
            ["Fatal Python error: Segmentation fault", "", "Thread 0x1:", "Extension modules: a"],
            "Fatal Python error: Segmentation fault",
        ),
        (["free(): invalid pointer", "Fatal Python error: Aborted"], "free(): invalid pointer"),
        (["Fatal Python error: Aborted"], "Fatal Python error: Aborted"),
    ],
    ids=["library", "blank lines", "traceback", "crash", "abort with a reason", "abort"],
)
def test_what_the_process_says_just_before_its_end_is_the_cause(lines, told):
    assert words(*lines) == told
    assert words(*lines, end=60.0) == "", "long before its end"


def test_an_old_line_and_an_old_report_of_a_child_do_not_hide_the_cause():
    heard = LastWords()
    heard.hear("an old line\n", 0.0)
    heard.hear("Fatal Python error: Aborted\n", 100.0)
    assert heard.at(100.0) == "Fatal Python error: Aborted"
    heard.hear("the cause\n", 200.0)
    assert heard.at(200.1) == "the cause"
