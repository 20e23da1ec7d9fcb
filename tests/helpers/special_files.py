"""Things that another program may put in the place of a file: a pipe, a device, a link."""

from __future__ import annotations

import os
from pathlib import Path


def replace_with(path: Path, kind: str) -> Path:
    """Put a `kind` of thing in the place of a file, and return the new path of the file.

    kind: "fifo", "device" (a link to an endless one), "link" (to the file) or "large" (a TiB).
    """
    good = path.with_name("good")
    path.rename(good)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(good)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    return good
