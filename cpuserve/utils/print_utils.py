"""print_embeddings: print the first values of an embedding, as examples of vLLM do."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first 4 values of an embedding, and their number."""
    first = ", ".join(f"{value:.6g}" for value in embeds[:4])
    more = ", ..." if len(embeds) > 4 else ""
    sys.stdout.write(f"{prefix}: [{first}{more}] (size={len(embeds)})\n")
