"""Logging: one logger tree "cpuserve" on stderr, set up once by the process's entry point."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(message)s"
TIME = "%H:%M:%S"


def get_logger(room: str) -> logging.Logger:
    """The logger of a room ("engine", "api"); silent until `configure` ran, except for warnings."""
    return logging.getLogger(f"cpuserve.{room}")


def configure(level: str = "info") -> None:
    """Send the "cpuserve" tree to stderr from `level` ("debug", "info", "warning", "error") up."""
    root = logging.getLogger("cpuserve")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, TIME))
        root.addHandler(handler)
