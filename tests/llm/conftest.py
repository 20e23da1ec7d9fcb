"""Fixtures of the tests of whole engines."""

import pytest

from cpuserve.loader import packed_files
from cpuserve.runtime import packed_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The directory of the files with packed weights, in a cache directory of this test.

    The rate of the disk, for a line of the log, is that of one read of each thread.
    """
    monkeypatch.setattr(packed_cache, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(packed_files, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(packed_files, "FREE_BYTES", 0)
    monkeypatch.setattr(packed_cache, "PROBE_S", 0)
    return tmp_path / packed_cache.FOLDER
