"""Logging: the logger "cpuserve" and its children write to stderr once `configure` has run."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(message)s"
TIME = "%H:%M:%S"
LEVELS = ("debug", "info", "warning", "error")


def get_logger(component: str) -> logging.Logger:
    """Return the logger of a component ("engine", "api"); until `configure`, warnings only."""
    return logging.getLogger(f"cpuserve.{component}")


def configure(level: str = "info") -> None:
    """Write messages of at least `level` ("debug", "info", "warning", "error") to stderr."""
    root = logging.getLogger("cpuserve")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, TIME))
        root.addHandler(handler)


def level() -> str:
    """Return the level that `configure` set in this process; "info" if it has not run."""
    number = logging.getLogger("cpuserve").level or logging.INFO
    return next((name for name in LEVELS if number <= getattr(logging, name.upper())), LEVELS[-1])
