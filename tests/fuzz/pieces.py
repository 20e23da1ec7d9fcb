"""Target: directories with a changed tokenizer.model, which load or are refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

from cpuserve.base.errors import ModelError, RequestError
from cpuserve.tokenizer.ends import end_ids
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.fuzz.edits import Edit, apply, draw
from tests.fuzz.texts import line
from tests.tokenizer.test_pieces import GOLDEN, message

KINDS = ("llama", "unigram", "unigram_bytes")
FILE = "pieces.gguf"  # edits change a binary file by this name byte by byte


class PiecesBench:
    """A case is a kind of model, and edits of its file."""

    most_bytes, most_cpu_s = 1 << 30, 20.0

    def __init__(self, directory: Path) -> None:
        """directory: where the files of the cases are."""
        models = json.loads(GOLDEN.read_text())["models"]
        self._files = {kind: message(models[kind], kind) for kind in KINDS}
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def draw(self, rng: random.Random) -> tuple[str, list[Edit]]:
        """Return a random case."""
        kind = rng.choice(KINDS)
        return kind, draw(rng, {FILE: self._files[kind]})

    def outcome(self, case: tuple[str, list[Edit]]) -> str:
        """Return "loaded", or the line that says why the file or a text is refused."""
        kind, edits = case
        data = apply([(FILE, *edit[1:]) for edit in edits], FILE, self._files[kind])
        (self._directory / "tokenizer.model").write_bytes(data)
        try:
            end_ids([2], self._directory, 900)
            tokenizer = Tokenizer.load(self._directory)
            ids = tokenizer.encode("The dog\u00e9 \u6f22 <s>\n", add_special_tokens=True)
            assert all(0 <= i < tokenizer.vocab_size for i in ids), ids
            tokenizer.decode(ids)
        except ModelError as error:
            said = str(error).replace(str(self._directory), "")
            assert "\n" not in said, said
            assert len(said) <= 2000, said[:200]
            return f"ModelError: {said}"
        except RequestError as error:
            return line(error)
        return "loaded"

    def close(self) -> None:
        """Nothing runs."""
