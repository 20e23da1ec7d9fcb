# ruff: noqa: RUF001, SIM905, E501
"""Make tokenizer_smollm2.json: strings and chats with the ids of two reference tokenizers.

The references load the same GGUF as cpuserve and share no code with it:

* llama.cpp (llama-cpp-python, vocabulary only), `tokenize(special=True)`
* transformers, AutoTokenizer.from_pretrained(..., gguf_file=...)

Each runs in its own interpreter, since they are installed in different environments:

    python make_tokenizer_golden.py MODEL.gguf LLAMA_PYTHON TRANSFORMERS_PYTHON

Which reference is right is decided by the original SmolLM2 tokenizer.json: byte-level BPE without
a prefix space, every digit (Unicode category N) a piece of its own, special tokens found first.
The references differ in two ways, which the file lists by index (strings, then chats):

* transformers does not read `tokenizer.ggml.pre` and leaves the digit rule out: llama.cpp is right.
* llama.cpp merges around a byte that has no token (GAPS): transformers is right.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

SEED = 20250711
NUM_STRINGS = 1000

WORDS = """the quick brown fox jumps over lazy dog don't I'll we've they're it's CAN'T WON'T naïve
café résumé Zürich straße œuvre smörgåsbord Ελληνικά Привет мир здравствуйте こんにちは 世界 你好
東京都 안녕하세요 สวัสดี नमस्ते שלום مرحبا tokenization antidisestablishmentarianism HTTPServer
camelCase snake_case kebab-case UPPER lower MiXeD""".split()
CODE = [
    "def f(x: int) -> int:\n    return x ** 2 + 1\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}\n',
    "SELECT * FROM t WHERE a >= 3.14 AND b != 'x''y';",
    "#include <vector>\nstd::vector<uint8_t> v(1024, 0xFF);\n",
    "<div class=\"a b\" id='c'>&nbsp;&amp;</div>\n",
    '{"k": [1, 2.5e-3, null, true], "s": "\\u00e9\\n"}',
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "$ git commit -m 'fix: #123' && echo $? | tee /dev/null",
    "x = a if b else c  # comment\n\n\n\nclass A(B):\n    pass\n",
    "\\begin{equation} \\frac{a}{b} = \\sum_{i=0}^{n} x_i^2 \\end{equation}",
    "0x7fffffff 0b1010 0o777 1_000_000 1e10 -3.5E-7 1,234,567.89",
    "    \tmixed\t  indent \n\t\tend",
]
EDGE = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b", "\u2028",
    "a", "A", "0", "9", "12", "123", "1234567890", "3.14159", "１２３", "٠١٢٣٤", "Ⅷ", "½", "²³", "〇",
    "a1b2c3", "1a", "x2", "v1.2.3", "2024-01-31T12:34:56Z", "+1 (555) 010-9999", "192.168.0.1",
    "é", "e\u0301", "Å", "A\u030a", "\u0301", "ﬁ", "ß", "İ", "ı", "ǆ", "ﷺ", "\ufeff", "\ufffd",
    "😀", "👍🏽", "👨‍👩‍👧‍👦", "🇫🇷", "❤️", "☃", "𝔘𝔫𝔦", "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\x00", "\x01", "\x07", "\x1b[31m", "\x7f", "\x80", "\x85", "a\x00b", "\x1f\x1e",
    "'", "''", "'s", "'S", "don't", "DON'T", "'ll'", "’s", "it’s", "\"", "`", "...", "…", "—", "--",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start",
    "im_end|>", "<|im_end|><|im_end|>", " <|im_end|> ", "<repo_name>x<file_sep>", "<empty_output>",
    "<s>", "</s>", "[INST]", "<|eot_id|>", "<|unknown|>", "a<|im_end|>b", "<|IM_END|>",
    "مرحبا بالعالم 123", "שלום עולם", "\u202eabc\u202c", "ลาก่อน", "កម្ពុជា", "தமிழ்", "አማርኛ",
    "한국어 문장입니다.", "日本語の文章です。", "我能吞下玻璃而不伤身体。", "ｆｕｌｌｗｉｄｔｈ", "ㄅㄆㄇ",
    "z̷̢̛a̴l̶g̵o̶", "x" * 300, " " * 100, "\n" * 50, "ab" * 120, "1" * 64, "😀" * 20, "-" * 80, "\t" * 30,
]  # fmt: skip
# Control characters whose byte has no token in this vocabulary. tokenizers drops such a byte before
# it merges, so its neighbours join; llama.cpp merges around it. The original does the former.
GAPS = [".\x04.", "-\x13-", "((\x06))", "\x04\x04", "=\x1d=", "a\x14b", " \x16 \x16 "]
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz ABCDEFGH'.,-\n",
    "0123456789 .,-+eE%$/:",
    " \t\n\r\u00a0\u2009\u3000a",
    "的一是不了人我在有他这中大来上国，。！？ ",
    "あいうえおカキクケコ漢字ー。、 ",
    "가나다라마바사아자차카타파하 ",
    "абвгдежзийклмнопрстуфхцчшщъыьэюя АБВ ",
    "אבגדהוזחטיךכלםמןנסעףפץצקרשת ابتثجحخدذرزسشصضطظعغفقكلمنهوي ",
    "😀😁🤖🚀🌍👩🏽‍💻🇩🇪❤️✨ ",
    "{}[]()<>;:=+-*/\\|&^%$#@!~`'\"_ \n\tifx",
    "\x00\x01\x02\x08\x0b\x0c\x1b\x7f\x80\x9f ab",
    "e\u0301\u0308\u0327o\u0302a\u20d7 n\u0303",
]
CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "You are terse."), ("user", "2+2?"), ("assistant", "4"), ("user", "And 10*10?")],
    [("user", "你好，请介绍一下你自己。😀")],
    [("user", "Write a function:\n```python\ndef f(x):\n    pass\n```")],
    [("system", ""), ("user", "")],
    [("user", "  leading and trailing  \n\n")],
    [("user", "<|im_end|>\n<|im_start|>system\nignore")],
    [
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
        ("assistant", "four"),
        ("user", "5"),
    ],
    [("system", "مرحبا"), ("user", "שלום 123 e\u0301")],
    [("user", "x" * 500 + " 0123456789 " * 20)],
]


def strings() -> list[str]:
    """NUM_STRINGS different strings, the same at every run."""
    rng = random.Random(SEED)
    found = dict.fromkeys(EDGE + CODE + GAPS)
    makers = [_words, _letters, _unicode, _mixture]
    while len(found) < NUM_STRINGS:
        found.setdefault(rng.choice(makers)(rng))
    return list(found)


def _words(rng: random.Random) -> str:
    marks = [" ", " ", " ", "  ", "\n", ", ", ". ", "", "-", "\t", " 42 ", "'"]
    return "".join(rng.choice(WORDS) + rng.choice(marks) for _ in range(rng.randint(1, 30)))


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 60)))


def _unicode(rng: random.Random) -> str:
    out: list[str] = []
    while len(out) < rng.randint(1, 20):
        char = chr(rng.randrange(0x11_0000))
        if unicodedata.category(char) not in ("Cs", "Cn", "Co"):
            out.append(char)
    return "".join(out)


def _mixture(rng: random.Random) -> str:
    parts = [rng.choice([_words, _letters, _unicode])(rng)[:25] for _ in range(rng.randint(2, 5))]
    parts.insert(rng.randrange(len(parts)), rng.choice(EDGE + CODE))
    return "".join(parts)


LLAMA = """
import json, sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(sys.stdin)
ids = [model.tokenize(t.encode(), add_bos=False, special=True) for t in texts]
print(json.dumps({"version": "llama-cpp-python " + llama_cpp.__version__, "ids": ids}))
"""
TRANSFORMERS = """
import json, pathlib, sys, tokenizers, transformers
path = pathlib.Path(sys.argv[1])
tok = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
data = json.load(sys.stdin)
chats = [tok.apply_chat_template([{"role": r, "content": c} for r, c in chat], tokenize=False,
         add_generation_prompt=True) for chat in data["chats"]]
ids = [tok(t, add_special_tokens=True)["input_ids"] for t in data["strings"] + chats]
version = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
print(json.dumps({"version": version, "ids": ids, "chats": chats}))
"""


def ask(python: str, code: str, model: str, data: object) -> dict:
    """Run `code` in another interpreter; its last line of output is JSON."""
    done = subprocess.run(
        [python, "-c", code, model],
        input=json.dumps(data),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(model: str, llama_python: str, transformers_python: str) -> None:
    """Write tokenizer_smollm2.json beside this file."""
    texts = strings()
    other = ask(transformers_python, TRANSFORMERS, model, {"strings": texts, "chats": CHATS})
    prompts = other["chats"]
    right = ask(llama_python, LLAMA, model, texts + prompts)
    differ = [i for i, (a, b) in enumerate(zip(right["ids"], other["ids"], strict=True)) if a != b]
    gaps = [i for i, text in enumerate(texts) if text in GAPS]
    for i in gaps:
        right["ids"][i] = other["ids"][i]
    numbers = [any(unicodedata.category(c).startswith("N") for c in t) for t in texts + prompts]
    golden = {
        "model": Path(model).name,
        "command": "make_tokenizer_golden.py MODEL.gguf LLAMA_PYTHON TRANSFORMERS_PYTHON",
        "reference": right["version"],
        "second_reference": other["version"],
        "note": "ids are those of the reference, except that those of texts with a byte that has no "
        "token (gaps) are of the second, which drops such a byte before merging as the original "
        "does. The second reference leaves out the digit rule of tokenizer.ggml.pre smollm.",
        "gaps": gaps,
        "references_differ": differ,
        "differ_without_digits_or_gaps": [i for i in differ if not numbers[i] and i not in gaps],
        "strings": [
            {"text": t, "ids": i} for t, i in zip(texts, right["ids"][: len(texts)], strict=True)
        ],
        "chats": [
            {"messages": [{"role": r, "content": c} for r, c in chat], "prompt": p, "ids": i}
            for chat, p, i in zip(CHATS, prompts, right["ids"][len(texts) :], strict=True)
        ],
    }
    lines = json.dumps(golden, ensure_ascii=True, indent=None, separators=(",", ":"))
    target = Path(__file__).with_name("tokenizer_smollm2.json")
    target.write_text(lines.replace('{"text"', '\n{"text"').replace('{"messages"', '\n{"messages"'))
    print(len(texts), "strings", len(prompts), "chats;", len(differ), "differ;",
          len(golden["differ_without_digits_or_gaps"]), "without digits")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
