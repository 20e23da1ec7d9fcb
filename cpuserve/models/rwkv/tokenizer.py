"""The World tokenizer of RWKV: the longest token at each place of a text.

Source: BlinkDL, RWKV-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.tokenizer.directory import guarded_text, read_lines
from cpuserve.tokenizer.from_gguf import GgufTokenizer
from cpuserve.tokenizer.greedy import longest_match, read_vocabulary
from cpuserve.tokenizer.parts import guarded
from cpuserve.tokenizer.ranks import control_tokens
from cpuserve.tokenizer.vocabulary import longest_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

END_TEXT = "<|rwkv_tokenizer_end_of_text|>"  # the text of id 0 in published templates
IN_GGUF = GgufTokenizer("byte_level", lambda _file, vocab, _pre: longest_tokens(vocab))


def read_tokenizer(path: Path, settings: Mapping[str, Any]) -> Core:
    """Return the tokenizer of a published vocabulary.

    Its special tokens are id 0, and the tokens of the settings with ids that have no bytes.
    """
    from tokenizers import AddedToken

    text = guarded_text(read_lines(path, "vocabulary"), path)

    def build() -> Core:
        tokens = read_vocabulary(text.split("\n"))
        token_ids, special_tokens = set(tokens.values()), {0: END_TEXT}
        special_tokens |= {i: content for i, (content, _) in control_tokens(settings)}
        special = {name: i for i, name in special_tokens.items() if i not in token_ids}
        core = longest_match(tokens, special)
        core.add_special_tokens(
            [AddedToken(name, special=True, normalized=False) for name in special]
        )
        return core

    return guarded(str(path), build)
