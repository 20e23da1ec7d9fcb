"""The version of this installation."""

from __future__ import annotations

from functools import cache


@cache  # the version is read from a file, and each response has a fingerprint that depends on it
def version() -> str:
    """Return the version that pip shows, or "0+source" for a checkout that is not installed."""
    from importlib import metadata  # takes 20 ms, and most commands do not need the version

    try:
        return metadata.version("cpuserve")
    except metadata.PackageNotFoundError:
        return "0+source"
