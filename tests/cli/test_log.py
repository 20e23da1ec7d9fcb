"""The log: one dated line for each record, whatever the text in it."""

import io
import logging
import re
import sys
import time

import pytest

from cpuserve.base.log import Line, OneLine, is_record

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def logged(message, *args, error=False):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(OneLine())
    logger = logging.Logger("cpuserve.test")
    logger.addHandler(handler)
    try:
        raise ValueError(*args)
    except ValueError:
        logger.warning(message, *args, exc_info=sys.exc_info() if error else None)
    return out.getvalue()


def test_a_record_has_a_date():
    text = logged("hello")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING hello\n", text)
    assert is_record(text)


BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"]
FORGED = "2026-01-01 00:00:00 ERROR the password is wrong"


@pytest.mark.parametrize("character", BREAKS, ids=ascii)
@pytest.mark.parametrize("error", [False, True], ids=["message", "traceback"])
def test_no_text_can_forge_a_record(character, error):
    lines = logged("path %s", f"x{character}{FORGED}", error=error).splitlines()
    assert [is_record(line) for line in lines] == [True] + [False] * (len(lines) - 1)
    assert all(line.startswith("  ") for line in lines[1:])
    assert error or len(lines) == 1


@pytest.mark.parametrize(
    "character", ["\x1b", "\x00", "\x07", "\x9b", "\u202e", "\u2066"], ids=ascii
)
def test_nothing_reaches_the_terminal_that_controls_it(character):
    for error in (False, True):
        assert character not in logged("path %s", f"x{character}[31m", error=error)


def test_a_line_has_the_form_of_a_record_and_fits_other_formats():
    out = io.StringIO()
    handler, logger = logging.StreamHandler(out), logging.Logger("cpuserve.test", "INFO")
    logger.addHandler(handler)
    parts = "%(name)s %(levelname)s %(levelno)d %(message)s %(asctime)s %(created)f %(msecs)d"
    more = "%(filename)s %(module)s %(funcName)s %(lineno)d %(process)d %(thread)d %(threadName)s"
    for form in (OneLine(), logging.Formatter(f"{parts} {more} %(processName)s %(pathname)s")):
        handler.setFormatter(form)
        logger.handle(Line(logger.name, logging.INFO, f"100 %s{FORGED}\n{FORGED}"))
    line, other, _, end = out.getvalue().split("\n")
    assert re.fullmatch(rf"{STAMP} INFO 100 %s{FORGED}\\n{FORGED}", line)
    assert re.fullmatch(rf"cpuserve.test INFO 20 100 %s{FORGED}", other)
    assert is_record(line)
    assert end == ""


def test_the_time_of_a_line_is_that_of_its_record():
    form, found = OneLine(), []
    for created in (100.2, 100.9, 101.0, 100.5):
        line = Line("cpuserve.test", logging.INFO, "x")
        line.created = created
        found.append(form.format(line))
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (100, 101)]
    assert found == [f"{stamps[n]} INFO x" for n in (0, 0, 1, 0)]
