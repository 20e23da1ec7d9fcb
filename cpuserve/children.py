"""The command of a child process that runs Python."""

from __future__ import annotations

import sys


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `code` with this process's module path, in any directory.

    Python searches the working directory first, so a model's file json.py there would be imported
    instead of the standard module. The command therefore sets the path before it imports anything.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports skip other types
    end = len(path) + 1
    begin = f"import sys; sys.path[:] = sys.argv[1:{end}]; del sys.argv[1:{end}]\n"
    return [sys.executable, "-c", begin + code, *path, *arguments]
