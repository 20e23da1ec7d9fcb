"""The tokenizer of Gemma 4 in GGUF files: BPE over lines, whose spaces are U+2581."""

from __future__ import annotations

from cpuserve.tokenizer.from_gguf import GgufTokenizer, with_merges

IN_GGUF = GgufTokenizer("byte_fallback", with_merges, add_bos=True, pre="gemma4")
