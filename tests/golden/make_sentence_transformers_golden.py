"""Make sentence_transformers.json: vectors and scores that sentence-transformers computes.

    python -m tests.golden.make_sentence_transformers_golden

It needs sentence-transformers in the environment, beside cpuserve. The models are those of
tests/helpers/sentence_stacks.py: the file has the vector of each text of EMBEDDERS, and the scores
of each pair of SCORERS, as `encode` and `predict` return them in fp32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.helpers.sentence_stacks import EMBEDDERS, PAIRS, SCORERS, TEXTS, digest, write_stack

TO = Path(__file__).with_name("sentence_transformers.json")


def main() -> int:
    """Write the file."""
    import sentence_transformers
    import torch
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer

    libraries = (sentence_transformers, transformers, torch, np)
    found = {
        "command": "python -m tests.golden.make_sentence_transformers_golden",
        "versions": {library.__name__: library.__version__ for library in libraries},
        "texts": TEXTS,
        "pairs": PAIRS,
        "weights": {},
        "vectors": {},
        "scores": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate((*EMBEDDERS, *SCORERS)):
            path = write_stack(name, Path(folder) / str(number))
            found["weights"][name] = digest(path)
            if name in EMBEDDERS:
                values = [SentenceTransformer(str(path)).encode([text])[0] for text in TEXTS]
            else:
                values = [CrossEncoder(str(path)).predict([pair])[0] for pair in PAIRS]
            kind = "vectors" if name in EMBEDDERS else "scores"
            found[kind][name] = [_rounded(value) for value in values]
    TO.write_text(json.dumps(found).replace("], ", "],\n") + "\n")
    return 0


def _rounded(value: object) -> object:
    return np.round(np.asarray(value, np.float64), 6).tolist()


if __name__ == "__main__":
    sys.exit(main())
