"""A registry that fails once turns no test of CI into a skip, and so into a failure."""

import os
import tempfile

import pytest

from tests.helpers import downloads, npm
from tests.helpers.downloads import TRIES, tried


class Registry:
    """Refuses the first downloads."""

    def __init__(self, failures):
        self.asked, self.failures = 0, failures

    def fetch(self):
        self.asked += 1
        if self.asked <= self.failures:
            raise OSError
        return self.asked


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)


@pytest.fixture
def ci(monkeypatch):
    monkeypatch.setenv("CI_HAS_EVERYTHING", "1")


def test_in_ci_a_download_that_fails_is_tried_again(ci):
    assert tried(Registry(TRIES - 1).fetch, OSError) == TRIES
    never = Registry(TRIES)
    with pytest.raises(OSError):  # noqa: PT011
        tried(never.fetch, OSError)
    assert never.asked == TRIES


def test_elsewhere_a_machine_without_a_network_does_not_wait(monkeypatch):
    monkeypatch.delenv("CI_HAS_EVERYTHING", raising=False)
    never = Registry(1)
    with pytest.raises(OSError):  # noqa: PT011
        tried(never.fetch, OSError)
    assert never.asked == 1


def test_packages_of_npm_are_asked_for_again(ci, monkeypatch, tmp_path):
    script = tmp_path / "npm"
    script.write_text("#!/bin/sh\nmkdir once 2>/dev/null && exit 1\ntouch all\n")
    script.chmod(0o755)
    (tmp_path / "node").symlink_to(script)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = npm.npm_folder("a@1")
    assert {path.name for path in folder.iterdir()} >= {"once", "all", "installed"}
