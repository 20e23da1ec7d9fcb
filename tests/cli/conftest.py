"""One parser of the command line for all tests: it takes a tenth of a second to make."""

from functools import cache

import pytest

from cpuserve.cli import main

build_parser = cache(main.build_parser)


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    monkeypatch.setattr(main, "build_parser", lambda *_: build_parser())
