"""The text and prompts that fidelity is measured on, and how a reference of them is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[1] / "data" / "fidelity.txt"
REFERENCE = Path(__file__).parents[1] / "golden" / "fidelity_smollm2.json"
GEMMA3 = REFERENCE.with_name("fidelity_gemma3.json")
GEMMA3_PASSAGES = 12  # of 2,000 tokens; a token of this model takes twice the time of SmolLM2
NUM_GREEDY = 16

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "The three primary colors are",
    "To make a good cup of tea, first",
    "Q: How many legs does a spider have?\nA:",
    "In 1969, Neil Armstrong",
    "The opposite of hot is",
    "for (int i = 0; i < 10; i++) {",
)


def passages() -> list[str]:
    """The passages of the text, in order."""
    return TEXT.read_text(encoding="utf-8").rstrip("\n").split("\n\n\n")


def fingerprint(ids: Sequence[int]) -> str:
    """A short name for a list of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def reference(path: Path = REFERENCE) -> dict[str, Any]:
    """What make_reference.py wrote."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded
