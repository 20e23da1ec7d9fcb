"""All targets of the fuzzer by name: what each case of them is, is in the module of its bench."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.fuzz.dialects import HttpBench
from tests.fuzz.engine import EngineBench
from tests.fuzz.files import FILES, FileBench
from tests.fuzz.frames import FrameBench, UploadBench
from tests.fuzz.operations import by_target
from tests.fuzz.pieces import PiecesBench
from tests.fuzz.texts import CallBench, ModelfileBench, SealedBench, TemplateBench


class Bench(Protocol):
    """Where the cases of a target run; a case is a JSON value.

    most_bytes: the memory that this process may take. most_cpu_s: the CPU time of a case.
    """

    most_bytes: int
    most_cpu_s: float

    def draw(self, rng: random.Random) -> Any:
        """Return a random case."""

    def outcome(self, case: Any) -> str:
        """Return what a case comes to; an exception is a finding."""

    def close(self) -> None:
        """Free what the bench has."""


# Given a directory for their files, these make the bench of a target.
TARGETS: dict[str, Callable[[Path], Bench]] = {
    **{name: partial(FileBench, target) for name, target in FILES.items()},
    **{name: partial(lambda some, _: HttpBench(some), some) for name, some in by_target().items()},
    "calls": lambda _: CallBench(),
    "engine": lambda _: EngineBench(),
    "frames": lambda _: FrameBench(),
    "modelfiles": lambda _: ModelfileBench(),
    "pieces": PiecesBench,
    "sealed": lambda _: SealedBench(),
    "templates": lambda _: TemplateBench(),
    "uploads": lambda _: UploadBench(),
}
