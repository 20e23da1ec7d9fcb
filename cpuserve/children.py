"""The command of a child process that runs Python."""

from __future__ import annotations

import sys


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `code` with this process's module path, in any directory.

    Python puts the working directory first, where a file json.py of a model would run instead of
    the standard module. So nothing is imported before the path is set.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports skip other entries
    end = len(path) + 1
    begin = f"import sys; sys.path[:] = sys.argv[1:{end}]; del sys.argv[1:{end}]\n"
    return [sys.executable, "-c", begin + code, *path, *arguments]
