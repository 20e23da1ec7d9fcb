# ruff: noqa: RUF001
"""Make pre_tokenizers.json: how the rules of each `tokenizer.ggml.pre` cut texts into pieces.

    python -m tests.golden.make_pre_tokenizer_golden VOCABULARY.gguf LLAMA_PYTHON

VOCABULARY.gguf is a file without tensors and with a large byte-level vocabulary (llama.cpp's
models/ggml-vocab-llama-bpe.gguf made the file in the repository), LLAMA_PYTHON an interpreter with
llama-cpp-python (0.3.36). For each name the key in the vocabulary is changed to it, and both
programs encode the texts. Where the ids are equal, the pieces of cpuserve are written, and where
not, the text is left out. DIFFERENT says which rules differ from llama.cpp's, and why.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from cpuserve.tokenizer.splits import pre_tokenizers, splitter
from cpuserve.tokenizer.tokenizer import Tokenizer

FILE = Path(__file__).with_name("pre_tokenizers.json")
KEY = "tokenizer.ggml.pre"
TEXTS = [
    "I'll say it's CAN'T, DON'T; we've they're 'tis",
    "a1b22c333d4444 1234567 3.14159 v1.2.3 1,234,567",
    "½²³ Ⅷ ٠١٢٣٤ １２３４５",
    "  two  spaces   and\ttabs\t\tend  ",
    "line\nline\n\nline\n\n\n  indented\r\n\r\nend\n",
    "x = f(a[0], {'k': -1}) /* c++ */ && y != z; // http://a.b/c?d=e#f",
    "!!! ... --- ??? (*) #!/usr/bin/env $HOME <tag>&amp; `code`",
    "camelCase HTTPServer snake_case UPPERlower iPhone XMLHttp",
    "Größe naïve œuvre Ελληνικά ПРИВЕТ Привет мир",
    "漢字かなカナ 東京都。 你好，世界！ 「引用」",
    "안녕하세요 세계 ㄱㄴㄷ ㄅㄆㄇ",
    "नमस्ते दुनिया สวัสดี ชาวโลก தமிழ்",
    "שלום עולם مرحبا بالعالم ؟",
    "😀👍🏽 👨‍👩‍👧 ❤️ ☃",
    "a.b,c;d:e!f?g\"h'i`j~k@l#m$n%o^p&q*r(s)t-u_v=w+x[y]z",
    "end of line/\n/path/to/file\\n 50% $5.00 +1-2=3",
    "漢1字2 a漢b字c 1漢 。漢。",
    "<sentinel:12> IMGIMGABCZ x",
    "don’t it’s “quoted” …",
    "\u00a0nbsp\u3000wide\u2009thin\u200bzero",
]
# Names whose rules differ from llama.cpp's where the original tokenizer does.
DIFFERENT = {
    "default": "cpuserve takes GPT-2's rules, llama.cpp ones of its own, for files without a name",
    "falcon": "digits are split off after bytes have become GPT-2's alphabet, which has ¼, ½ and ¾",
    "deepseek-llm": "every digit is a piece; llama.cpp keeps digits together",
}
TEMPLATE = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(model_path=sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(open(sys.argv[2]))
print(json.dumps([model.tokenize(t.encode(), False, False) for t in texts]))
"""


def main() -> None:
    """Write the file."""
    vocabulary, python = Path(sys.argv[1]).read_bytes(), sys.argv[2]
    found: dict[str, list[list[str]]] = {}
    done = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, pre in pre_tokenizers().items():
            if pre in done or pre.raw:
                continue
            done.add(pre)
            file = Path(folder) / "v.gguf"
            file.write_bytes(_renamed(vocabulary, name))
            ours = Tokenizer.load(file)
            theirs = _llama(file, python)
            cut = splitter(pre)
            found[name] = []
            for text, ids in zip(TEXTS, theirs, strict=True):
                if ours.encode(text, add_special_tokens=False) == ids:
                    found[name].append([piece for piece, _ in cut.pre_tokenize_str(text)])
            left = len(TEXTS) - len(found[name])
            print(name, "leaves out", left, DIFFERENT.get(name, ""))
    rows = ",\n".join(f'"{name}": {json.dumps(pieces)}' for name, pieces in found.items())
    FILE.write_text(f"{{\n{rows}\n}}\n")


def _renamed(vocabulary: bytes, name: str) -> bytes:
    key = struct.pack("<Q", len(KEY)) + KEY.encode() + struct.pack("<I", 8)
    at = vocabulary.index(key) + len(key)
    size = struct.unpack_from("<Q", vocabulary, at)[0]
    return (
        vocabulary[:at] + struct.pack("<Q", len(name)) + name.encode() + vocabulary[at + 8 + size :]
    )


def _llama(file: Path, python: str) -> list[list[int]]:
    texts = file.with_suffix(".json")
    texts.write_text(json.dumps(TEXTS))
    command = [python, "-c", TEMPLATE, str(file), str(texts)]
    ids: list[list[int]] = json.loads(subprocess.check_output(command, text=True))
    return ids


if __name__ == "__main__":
    main()
