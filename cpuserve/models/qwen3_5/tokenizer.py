"""How the tokenizer of Qwen3.5 splits texts: as Qwen2's, with marks among the letters."""

from __future__ import annotations

from cpuserve.tokenizer.splits import GAPS, NOT_CASED, PreTokenizer

SPLITS = PreTokenizer(
    (
        rf"{NOT_CASED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{GAPS}",
    ),
    nfc=True,
)
