"""How byte-level tokenizers split text into pieces before they merge bytes.

The keys are values of `tokenizer.ggml.pre` in GGUF files; records of families have further ones
(TokenizerTables.splits). The expressions come
from the original tokenizer.json of each family. Where llama.cpp approximates an expression
(its library has no \\p{Lu}, for example), this file has the original.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cpuserve.base.registry import imported
from cpuserve.models import FAMILIES, add_plugins

NOT_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = rf"{NOT_CASED}|{_WORD}|\p{{N}}{{1,3}}|{SIGNS}|{GAPS}"
_QWEN2 = rf"{NOT_CASED}|{_WORD}|\p{{N}}|{SIGNS}|{GAPS}"
# Words of o200k (OpenAI): upper case, then lower case. Combining marks belong to either case.
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def cased(suffix: str, upper: str = f"[{UPPER}]", lower: str = f"[{LOWER}]") -> str:
    """Return the expression of a word with letters of both cases, and `suffix` after it."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"


_O200K = rf"{cased(f'{NOT_CASED}?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{GAPS}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = (
    rf"{_ASCII_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{GAPS}"
)
# The letters of alphabets with upper and lower case, as DeepSeek LLM lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LONG_GAPS = "|".join([rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)])
# Chinese, Japanese, Thai, Lao, Khmer, Burmese, Javanese and Korean, as AFMoE lists them.
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)


def _threes(digit: str) -> str:
    """Return an expression that cuts a piece of digits into groups of three, from its end.

    The original expressions look ahead to the end of the number at each group.
    Here only the first group looks ahead, and each later group begins where the last one ended.
    """
    return rf"\A{digit}{{1,3}}(?=(?:{digit}{{3}})*\z)|\G(?<={digit}){digit}{{3}}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules for splitting texts that a value of `tokenizer.ggml.pre` selects.

    splits: regular expressions; each one cuts the pieces
      that the previous one made into its matches and the texts between them.
    late: further expressions, applied after the bytes have become characters of GPT-2's alphabet.
    forces_bos: texts begin with bos although files say otherwise, because their flag is wrong.
    raw: bytes do not become characters of this alphabet, and spaces become U+2581.
    """

    splits: tuple[str, ...] = (_GPT2,)
    late: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    forces_bos: bool = False
    raw: bool = False


_PLAIN = PreTokenizer()
_NFC = PreTokenizer(nfc=True)
_DIGITS = PreTokenizer((_DIGIT, _GPT2))
LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_RAW = PreTokenizer((r"[^\n]+|[\n]+",), raw=True)
LINES = replace(_RAW, add_bos=True, forces_bos=True)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CJK}",
    rf"{cased(f'{NOT_CASED}?')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{GAPS}",
)
_EXAONE_MOE = (
    rf"{NOT_CASED}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# The rule "whitespace" of llama.cpp is missing: only files of jina-bert-v2 have it,
# which are not supported.
_TABLE: dict[str, PreTokenizer] = {
    "default gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe "
    "gigachat a.x-4.0 mellum jais trillion granite-docling exaone4": _PLAIN,
    "mpt olmo modern-bert": _NFC,
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": _DIGITS,
    "command-r": replace(_DIGITS, nfc=True),
    "falcon": PreTokenizer(
        (r"[\p{P}$+<=>^`|~]+", _GPT2), late=(r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 jina-v5-nano": LLAMA,
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{NOT_CASED}|{_WORD}|\p{{N}}+|{SIGNS}|{GAPS}"), ignore_merges=True
    ),
    "jais-2": PreTokenizer((
        rf"{NOT_CASED}|{_WORD}|\p{{N}}{{1,3}}|{SIGNS}|\s*[\r\n]+|{_LONG_GAPS}|\s{{1,2}}(?!\S)|\s",
    )),
    "qwen2 deepseek-r1-qwen": replace(_QWEN, nfc=True),
    "megrez kormo f2llmv2 stablelm2 hunyuan grok-2 solar-open": _QWEN,
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{SIGNS}|{GAPS}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "afmoe": PreTokenizer((r"\p{N}+", _threes(r"\p{N}"), _AFMOE_SCRIPTS, _DEEPSEEK3)),
    # A number is cut into groups of three digits, counted from its end.
    # If a letter or "_" follows the number, the groups are counted from its beginning.
    "tiny_aya cohere2moe": PreTokenizer((r"(?<!\d)\d+\b", _threes(r"\d"), _O200K)),
    "seed-coder": PreTokenizer((
        rf"{NOT_CASED}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{GAPS}",
    )),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"(?<!\s)\s+$",  # the original, without (?<!\s), searches each rest of a run of spaces
        _DEEPSEEK_CJK,
        _DIGIT,
    )),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK,
    # The last expression is the original one, which finds groups in at most 297 digits.
    # This expression is for numbers that have other numerals than digits.
    "superbpe": PreTokenizer((r"\p{N}+", _threes(r"\d"), r"(?=(?:\d{3}){1,99}(?!\d))")),
    "spark2_5": PreTokenizer((
        r"\p{N}{1,3}",
        _CJK,
        rf"{_ASCII_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
        _DIGIT,
    )),
    "k2-horizon": PreTokenizer((
        rf"{NOT_CASED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\u200c\u200d]+|\p{{N}}{{1,3}}"
        rf"|{SIGNS}|{GAPS}",
    )),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_O200K,)),
    "granite-embed-multi-97m": PreTokenizer((_O200K,), ignore_merges=True),
    "tekken": PreTokenizer(
        (rf"{cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{GAPS}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "bloom gpt3-finnish poro-chat": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "chameleon": PreTokenizer(_CHAMELEON, add_bos=True),
    "granite-embed-multi-311m": LINES,
    "sarvam-moe": _RAW,
}  # fmt: skip
_BY_NAME = {name: pre for names, pre in _TABLE.items() for name in names.split()}


def pre_tokenizers() -> dict[str, PreTokenizer]:
    """Return the rules by the value of `tokenizer.ggml.pre`: those here and those of families."""
    own = {name: imported(place) for name, place in FAMILIES.tokenizer.splits.items()}
    return {**_BY_NAME, **own}


def pre_tokenizer(name: str) -> PreTokenizer | None:
    """Return the rules that a value of `tokenizer.ggml.pre` selects; None if nothing has them."""
    if name not in _BY_NAME and name not in FAMILIES.tokenizer.splits:
        add_plugins()
    place = FAMILIES.tokenizer.splits.get(name)
    return _BY_NAME.get(name) if place is None else imported(place)


def splitter(pre: PreTokenizer) -> Any:
    """Return the pre-tokenizer of the `tokenizers` library for `pre`."""
    from tokenizers import Regex, pre_tokenizers

    def split(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)

    steps = [split(pattern) for pattern in pre.splits]
    if not pre.raw:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    steps.extend(split(pattern) for pattern in pre.late)
    return pre_tokenizers.Sequence(steps)
