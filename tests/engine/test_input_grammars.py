"""The grammars of custom tools inside the calls of other formats: in JSON strings and as text."""

import json
import random

import pytest

from cpuserve.engine.grammars.compiler import GrammarError
from cpuserve.engine.grammars.json_regex import RegexError, inside_json
from cpuserve.engine.grammars.lark_reader import LarkError, read_lark
from cpuserve.sampling.structured import InputGrammar
from cpuserve.serving.tools.families import HERMES, QWEN3_CODER, family
from tests.helpers.random_texts import Walker

# A grammar of patches, as agents offer one.
PATCH = r"""
start: first hunk+ last
first: "*** Begin Patch" LF
last: "*** End Patch" LF?
hunk: added | removed | changed      // one file
added: "*** Add File: " path LF ("+" /(.*)/ LF -> line)+
removed: "*** Delete File: " path LF
changed: "*** Update File: " path LF (change | context)+ ("*** End of File" LF)?
path: /(.+)/
context: ("@@" | "@@ " /(.+)/) LF   # where it is
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
GOOD_PATCH = (
    '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-    return "x\\n"\n'
    "+    return 'ü\t'\n*** Add File: c\n+\n+}\n*** End Patch"
)
SUMS = r"""
start: sum
?sum: product | sum ("+" | "-") product
?product: atom | product "*" atom
?atom: NUMBER | "(" sum ")" | TEXT
NUMBER.2: /[0-9]+/
TEXT: "\"" /[^"\\]*/ "\""
%import common (WS, INT)
%ignore WS
"""
# (grammar, texts that match, texts that do not)
LARK = {
    "patch": (PATCH, [GOOD_PATCH, GOOD_PATCH + "\n"], [GOOD_PATCH[:-1], "x" + GOOD_PATCH, ""]),
    "recursive": (SUMS, ["1", "(1 +\n2)*3", '"a b" + ( 4)', " 7"], ["1+", "(1", "a", ""]),
    "options": ('start: "a"~2..3 [B] "c"{1,2}\nB: "b"', ["aabc", "aaacc"], ["abc", "aabccc"]),
    "cases": ('start: "Select"i " " /x\\/y/i', ["sELECT X/Y"], ["Select x"]),
    "sets": ('start: A\nA: /[a-c"]+/ & ~/.*b.*/', ['a"c', "ca"], ["abc", "d"]),
    "ranges": ('start: ("0".."9" | "a".."c")+', ["09ac"], ["d", ""]),
    "empty": ('start: "x" ( | "y")\nunused: "z"', ["x", "xy"], ["y", "xz"]),
    "escapes": (r'start: "\x41\t\\" "\'"', ["A\t\\'"], ["x41"]),
}
REGEX = {
    "date": (r"^\d{4}-(0[1-9]|1[0-2])$", ["2026-11"], ["2026-13", "x2026-11"]),
    "anything": (r"(?s).*", ["", 'a"\\\n\x01\t\u00fc\U0001f600'], []),
    "lines": (r".*", ["a b", 'q"'], ["a\nb"]),
    "not a quote": (r'[^"]+', ["a\\b\nc"], ['a"b']),
    "classes": (r"[\s\w\-\]/]+", ["a b\n_-]/"], ["!"]),
    "control": (r"[\x00-\x1f]+", ["\n\x01\x1f"], ["a"]),
    "groups": (r"(?P<a>x|y)(?:\\|\")(?i:z)", ["x\\Z", 'y"z'], ["xz"]),
    "alternatives": ("^a$|^b$", ["a", "b"], ["ab", ""]),
    "posix": ("[[:punct:]]+[^[:space:]]", ['"\\x'], ["x", '" ']),
    "operators": (r"[\x20-\x7e&&[^a-z]]+[\d--[3]]", ['A"1'], ["a1", "A3"]),
    "properties": (r"\p{L}+\P{L}", ['\u00e4"', "a\n"], ["1a"]),
    "only escapes": (r'[\n\r"\\]+', ['\n"\\'], ["n"]),
    "escaped break": ("a\\\n[b\\\n]", ["a\nb", "a\n\n"], ["ab", "anb", "a\\b"]),
}
CASES = [
    pytest.param(syntax, *case, id=f"{syntax}-{name}")
    for syntax, cases in (("lark", LARK), ("regex", REGEX))
    for name, case in cases.items()
]


@pytest.fixture(scope="module")
def walker():
    return Walker()


def matcher(walker, found, syntax, definition, **more):
    schema = InputGrammar(syntax, definition).schema
    return walker.matcher("calls", found.grammar({"edit": schema}, "edit", several=False, **more))


def fits(of, walker, text):
    """Whether a matcher allows a whole text."""
    ids = {token: i for i, token in walker.bytes.items()}
    tokens = [ids[bytes([byte])] for byte in text.encode()]
    return of.try_consume_tokens(tokens) == len(tokens) and of.is_accepting()


@pytest.mark.parametrize(("syntax", "definition", "right", "wrong"), CASES)
def test_a_text_in_a_json_string_matches_its_grammar(walker, syntax, definition, right, wrong):
    for texts, wanted in ((right, True), (wrong, False)):
        for text in texts:
            call = f' {{"input": {json.dumps(text, ensure_ascii=False)}}}}}'
            assert fits(matcher(walker, HERMES, syntax, definition), walker, call) == wanted, text


@pytest.mark.parametrize(("syntax", "definition", "right", "wrong"), CASES)
def test_a_text_between_tags_matches_its_grammar(walker, syntax, definition, right, wrong):
    for texts, wanted in ((right, True), (wrong, False)):
        for text in texts:
            call = f"<parameter=input>\n{text}\n</parameter>\n</function>"
            found = matcher(walker, QWEN3_CODER, syntax, definition)
            assert fits(found, walker, call) == wanted, text


def test_a_call_in_free_text_matches_the_grammar(walker):
    schemas = {"edit": InputGrammar("regex", "[ab]+").schema, "other": None}
    grammar = HERMES.text_grammar(schemas)
    for text, wanted in (
        ('I edit.\n<tool_call>\n{"name": "edit", "arguments": {"input": "ab"}}\n</tool_call>', 1),
        ('<tool_call>\n{"name": "edit", "arguments": {"input": "abc"}}\n</tool_call>', 0),
        ('<tool_call>\n{"name": "edit", "arguments": {"text": "ab"}}\n</tool_call>', 0),
        ('<tool_call>\n{"name": "other", "arguments": {"input": "abc"}}\n</tool_call>', 1),
    ):
        assert fits(walker.matcher("calls", grammar), walker, text) == bool(wanted), text


@pytest.mark.parametrize(
    ("definition", "place", "why"),
    [
        ("", "line 1, column 1", "no rule start"),
        ('start: "a" foo', "line 1, column 12", "there is no rule or terminal foo"),
        ('start: "a"\n  | (B', "line 2, column 7", 'in place of the end of the line'),
        ('start: A\nA: b\nb: "x"', "line 2, column 4", "the terminal A refers to the rule b"),
        ('start: "a\n', "line 1, column 8", "is not valid here"),
        ('start: "a"\nstart: "b"', "line 2, column 1", "defined twice"),
        ("start: /a/x", "line 1, column 8", "flags x"),
        ("%import python.NAME\nstart: NAME", "line 1, column 9", "cannot be imported"),
        ("%import common.NAME\nstart: NAME", "line 1, column 16", "common has no NAME"),
        ('start: "b".."a"', "line 1, column 8", "ascending"),
        ('start: "a"~3..2', "line 1, column 11", "must ascend"),
        ('start{x}: "a"', "line 1, column 6", "a template"),
        ('start[lazy]: "a"', "line 1, column 6", "an option"),
        ("start: <|im_end|>", "line 1, column 8", "not supported"),
        ("start: @other", "line 1, column 8", "not supported"),
        ('start: %json {"type": "object"}', "line 1, column 8", "not supported"),
        ('%declare A\nstart: "a"', "line 1, column 1", "not supported"),
        ("start: \"\\q\"", "line 1, column 8", "not a valid text"),
        ('start "a"', "line 1, column 7", '":" is needed'),
    ],
)  # fmt: skip
def test_an_error_in_a_grammar_has_its_place(definition, place, why):
    with pytest.raises(LarkError) as caught:
        read_lark(definition)
    assert str(caught.value).startswith(place)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?<!a)b", r"a\b", "a^b", "a$b", "[a", "a\\", "[z-a]", "(?x) a", "[[:foo:]]", r"\1"],
)
def test_a_pattern_that_cannot_be_kept_is_refused(pattern):
    with pytest.raises(RegexError, match=r"cannot be used: .+"):
        inside_json(pattern)


@pytest.mark.parametrize(
    ("syntax", "definition", "why"),
    [
        ("lark", 'start: "a" foo', "the grammar of edit: line 1, column 12: there is no rule"),
        ("lark", 'start: "a"\n | /(/', "the grammar of edit: line 2, column 4: the regular expr"),
        ("lark", "start: A\nA: A", "the grammar of edit: the terminal A refers to itself"),
        ("lark", "start: /a{2}{3,1}/", "the grammar of edit: "),
        ("regex", "(?=a)", "line 1, column 1: the regular expression '(?=a)' cannot be used"),
        ("regex", "(a", "line 1, column 1: the regular expression '(a' cannot be used: ( is not"),
        ("regex", "a)", ") closes nothing"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply"),
    ],
)
@pytest.mark.parametrize("found", [HERMES, QWEN3_CODER], ids=lambda found: found.name)
def test_a_bad_grammar_is_an_error_with_the_tool(walker, found, syntax, definition, why):
    with pytest.raises(GrammarError) as caught:
        matcher(walker, found, syntax, definition)
    assert why in str(caught.value)


ESCAPED = json.dumps({"input": GOOD_PATCH}, ensure_ascii=False)
CALL, SEP = "tool\u2581call", "<\uff5ctool\u2581sep\uff5c>"
FAMILIES = {
    "apertus": f'<|tools_prefix|>[{{"edit": {ESCAPED}}}]<|tools_suffix|>',
    "deepseek_v31": f"<\uff5c{CALL}s\u2581begin\uff5c><\uff5c{CALL}\u2581begin\uff5c>"
    f"edit{SEP}{ESCAPED}<\uff5c{CALL}\u2581end\uff5c><\uff5c{CALL}s\u2581end\uff5c>",
    "glm45": f"<tool_call>edit\n<arg_key>input</arg_key>\n<arg_value>{GOOD_PATCH}</arg_value>\n"
    "</tool_call>",
    "hermes": f'<tool_call>\n{{"name": "edit", "arguments": {ESCAPED}}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0"
    f"<|tool_call_argument_begin|>{ESCAPED}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": f'{{"name": "edit", "parameters": {ESCAPED}}}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="input">'
    f"{GOOD_PATCH}</parameter>\n</invoke>\n</minimax:tool_call>",
    "mistral_args": f"[TOOL_CALLS]edit[ARGS]{ESCAPED}",
    "qwen3_coder": f"<tool_call>\n<function=edit>\n<parameter=input>\n{GOOD_PATCH}\n</parameter>\n"
    "</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function=edit>\n<parameter=input>{GOOD_PATCH}</parameter>\n"
    "</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_writes_a_patch_under_its_grammar(walker, name):
    schemas = {"edit": InputGrammar("lark", PATCH).schema, "other": None}
    grammar = family(name).text_grammar(schemas)
    assert fits(walker.matcher("calls", grammar), walker, FAMILIES[name])
    for damage in ("*** Begin", "@@ "):
        broken = FAMILIES[name].replace(damage, "x" + damage, 1)
        assert not fits(walker.matcher("calls", grammar), walker, broken), damage


def test_damaged_grammars_are_errors_of_the_client(walker):
    """A client may send anything: no other exception may come out."""
    rng = random.Random(5)
    sources = [("lark", case[0]) for case in LARK.values()]
    sources += [("regex", case[0]) for case in REGEX.values()]
    refused = 0
    for _ in range(400):
        syntax, text = rng.choice(sources)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text) + 1)
            new = rng.choice(["", *'()[]{}|*+?~&"/\\:.-^$%\n', "\\x", "&&", "[:", "(?", "\ud800"])
            text = text[:at] + new + text[at + rng.randrange(3) :]
        try:
            matcher(walker, rng.choice([HERMES, QWEN3_CODER]), syntax, text)
        except GrammarError:
            refused += 1
    assert refused > 100
