"""Options for child processes, so that they import the same modules from any directory."""

import os
import sys
from pathlib import Path
from typing import Any

import tests


def child_options(**environment: str) -> dict[str, Any]:
    """Arguments of subprocess.Popen for a Python child that finds the cpuserve under test.

    The child starts in the checkout, not in the current directory: `-c` and `-m` put the directory
    of the start first in sys.path.
    """
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    # Under pytest, `tests` is a package in a directory without the checkout (tests/conftest.py).
    file = Path(tests.__file__ or Path(__file__).parent)
    return {
        "cwd": file.parents[1],
        "env": {**os.environ, "PYTHONPATH": path, **environment},
    }
