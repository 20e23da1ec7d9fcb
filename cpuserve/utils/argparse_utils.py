"""FlexibleArgumentParser: a parser of argparse that accepts underscores in flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts --max_model_len as well as --max-model-len."""

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse known arguments; see argparse."""
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_dashes(word) for word in words], namespace)


def _dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, found, value = word.partition("=")
    return name.replace("_", "-") + found + value
