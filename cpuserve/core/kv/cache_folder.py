"""The folder inside the user's directory that holds the prefix cache, and nothing else.

Other programs may use the same directory. cpuserve therefore removes files only in a folder
that it has marked, and only files with names that it uses.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from cpuserve.errors import ConfigError
from cpuserve.fault_points import fault

FOLDER = "cpuserve-prefix-cache"
# A file with this name and first line excludes the folder from backups
# (https://bford.info/cachedir/).
MARK = "CACHEDIR.TAG"
MARK_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# The prefix cache of cpuserve. What is in this folder may be removed at any time.
"""
_BEING_MARKED = re.compile(r"\.mark-[0-9a-f]{16}\.tmp")


def claim(directory: Path) -> Path:
    """Return the cache's folder in `directory`; create and mark the folder if needed.

    Raises:
        ConfigError: the name of the folder belongs to a file, or to a folder of another program.
        OSError: the directory cannot be used.
    """
    folder = directory / FOLDER
    if folder.exists() and not folder.is_dir():
        raise _foreign(folder, "which is not a directory")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_marked(folder):
        return folder
    # Another process may be writing the mark at this moment.
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if not _BEING_MARKED.fullmatch(name)]
    if others and not is_marked(folder):
        raise _foreign(folder, f"which contains files of another program ({others[0]!r:.80})")
    temporary = folder / f".mark-{secrets.token_hex(8)}.tmp"
    fault("kv_folder.write")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(MARK_TEXT)
    temporary.replace(folder / MARK)
    return folder


def is_marked(folder: Path) -> bool:
    """Whether `claim` has created and marked `folder`."""
    try:
        fault("kv_folder.read")
        return (folder / MARK).read_bytes() == MARK_TEXT
    except OSError:
        return False


def _foreign(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the prefix cache cannot be kept in {folder}, {what}; set --prefix-cache-dir to another "
        "directory, or move that away"
    )
