"""The progress of a start, and the body of /health with status 503.

startup_server.py responds on the port until the engine process exists, and then the front end does.
Both servers use this module, so it must not import anything heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`done` of `total` bytes (0: unknown) of a stage: "download", "unpack", "load"."""

    stage: str = "starting"
    done: int = 0
    total: int = 0

    @classmethod
    def of(cls, stage: str, done: int, total: int) -> LoadProgress:
        """Convert a progress report, without the model's name, because /health is public."""
        return cls(stage.partition(" ")[0], done, total)

    def __str__(self) -> str:
        """Return a text such as "download 40 %"."""
        return f"{self.stage} {100 * self.done // self.total} %" if self.total else self.stage


def load_message(loading: LoadProgress) -> str:
    """Return the message that says why requests cannot be answered yet."""
    return f"The model is loading ({loading})"


def health_body(error: bytes, status: str, loading: LoadProgress | None = None) -> bytes:
    """Return the JSON body of /health with status code 503.

    error: the JSON {"error": ...} that the other routes return.
    status: "loading" (then with stage, done and total, in bytes), "draining" or "failed".
    """
    body: dict[str, Any] = {"status": status}
    if loading is not None:
        body |= {"stage": loading.stage, "done": loading.done, "total": loading.total}
    return msgspec.json.encode({**body, **msgspec.json.decode(error)})
