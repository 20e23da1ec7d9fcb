"""The version of this installation."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Return the version that pip shows, or "0+source" for a checkout that is not installed."""
    try:
        return metadata.version("cpuserve")
    except metadata.PackageNotFoundError:
        return "0+source"
