"""The tokenizers of Kimi: tiktoken's, from the file of its ranks.

Source: tokenization_kimi and tokenization_moonshot of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.tokenizer.directory import read_lines
from cpuserve.tokenizer.parts import guarded
from cpuserve.tokenizer.ranks import by_rank, control_tokens, read_ranks
from cpuserve.tokenizer.splits import GAPS, LOWER, NOT_CASED, SIGNS, UPPER, PreTokenizer, cased

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

_NOT_HAN = r"&&[^\p{Han}]"
_WORDS = cased(f"{NOT_CASED}?", f"[{UPPER}{_NOT_HAN}]", f"[{LOWER}{_NOT_HAN}]")
SPLITS = PreTokenizer((rf"\p{{Han}}+|{_WORDS}|\p{{N}}{{1,3}}|{SIGNS}|{GAPS}",))


def read_tokenizer(path: Path, settings: Mapping[str, Any]) -> Core:
    """Return the tokenizer of a file of tiktoken, which does not say how texts are split."""
    if settings.get("tokenizer_class") != "TikTokenTokenizer":
        msg = (
            f"{path} is of no Kimi: tokenizer_config.json says tokenizer_class "
            f"{settings.get('tokenizer_class')!r:.60}, and only TikTokenTokenizer is known to "
            "split texts as Kimi does. Add a tokenizer.json of the model"
        )
        raise ModelError(msg)
    data, control_ids = read_lines(path, "vocabulary"), dict(control_tokens(settings))
    return guarded(str(path), lambda: by_rank(read_ranks(data), control_ids, SPLITS))
