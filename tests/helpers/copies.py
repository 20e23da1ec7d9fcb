"""Copies of checkpoints whose tensors a test changes."""

from __future__ import annotations

import tempfile
from pathlib import Path


def copy_without_tensors(path: Path) -> Path:
    """Return a new directory beside `path` with copies of its JSON files."""
    to = Path(tempfile.mkdtemp(dir=path.parent, prefix="copy-"))
    for file in path.iterdir():
        if file.suffix == ".json":
            (to / file.name).write_bytes(file.read_bytes())
    return to
