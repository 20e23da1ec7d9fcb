"""The log: one dated line for each record, whatever the text in it."""

import io
import logging
import re
import sys

import pytest

from cpuserve.log import OneLine, is_record


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
