"""GBNF as llama.cpp reads it."""

import pytest

from cpuserve.engine.grammars.compiler import GrammarError
from tests.helpers.random_texts import Walker

JSON = r"""
# llama.cpp's grammars/json.gbnf
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def walker():
    return Walker()


def fits(walker, grammar, text):
    """Whether a text is one of a grammar."""
    matcher = walker.matcher("grammar", grammar)
    ids = {token: i for i, token in walker.bytes.items()}
    tokens = [ids[bytes([byte])] for byte in text.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON, ['{"a": [1, -2.5e3, "x\\u00e9\\n", {"b":true}]}', "{}", "{ }"], ["[1]", '{"a"}']),
        (r'root ::= "\u00e9\x41\U0001F600\x1b"', ["\u00e9A\U0001f600\x1b"], ["e9A"]),
        (r"root ::= [\u00e0-\u00ff\x30-9]+", ["\u00e9\u00ff07"], ["\u00df", "a"]),
        (r'root ::= "a" "b"{0} "c"', ["ac"], ["abc"]),
        (r'root ::= "a"{0,0} ("c" | "d"){2,} "e"{3}', ["cdeee", "cccceee"], ["ceee", "cdee"]),
        (r'root ::= "a"{0,2} "b"?', ["", "a", "aab", "b"], ["aaa", "bb"]),
        ('root ::= start\nstart ::= "x" start | "y"', ["y", "xxy"], ["x"]),
        ('root ::= rule-a rule_a ruleA RULE-A 1st\nrule-a ::= "1"\nrule_a ::= "2"\nruleA ::= "3"\n'
         'RULE-A ::= "4"\n1st ::= "5"', ["12345"], ["11111"]),
        ("root ::= . . .", ["a\nb", "\u00e9\"/"], ["ab", "abcd"]),
        (r'root ::= [a\-c\]]+ "\-"', ["a-", "-c-", "]--"], ["b-", "\\-", "a"]),
        (r"root ::= [\--0]+", ["-./0"], ["1", ","]),
        ('root ::= [^\\]"/a-c\\\\-]+', ["xyz.d"], ["a", "b", "]", '"', "/", "\\", "-"]),
        ('root ::= [a-] [\\n\\t] [/] "/" [.]', ["a\n//.", "-\t//."], ["b\n//.", "a\n//x"]),
        ('root ::= "a" | # one\n  "b" # two\n\n\n# three\nother ::= "c"', ["a", "b"], ["c"]),
        ('root ::= ( "a"\n | "b"\n)\r\nx ::= "c"\r\n', ["a", "b"], ["c"]),
        ('root ::= (("a" | "b")+ "c")* "d"', ["abacbcd", "d"], ["cd"]),
        ('root ::= [a]**', ["", "aaa"], ["b"]),
        ('root ::= "\\"" x "\\""\nx ::= [^"] x |', ['""', '"ab"'], ['"']),
        ('root ::= "start: x"', ["start: x"], ["start"]),
    ],
    ids=range(19),
)  # fmt: skip
def test_texts_of_a_grammar_are_those_of_llama_cpp(walker, grammar, right, wrong):
    for text in right:
        assert fits(walker, grammar, text), text
    for text in wrong:
        assert not fits(walker, grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('x ::= "a"', "needs a rule root"),
        ("root ::= other", "line 1: there is no rule other"),
        ('root ::= "a\nb', "has no end"),
        ("root ::= [a", "has no ]"),
        ('root ::= ("a"', "has no )"),
        (r'root ::= "\q"', r"\q is no escape"),
        (r'root ::= "\uD800"', r"\uD800 is no escape"),
        (r'root ::= "\u12"', "is no escape"),
        ("root ::= [z-a]", "is empty"),
        ('root ::= "a"{3,1}', "must go up"),
        ('root ::= "a"{99999999}', "at most"),
        ("root = x", "::= must follow"),
        ('root ::= "a" ) "b"', "cannot be here"),
        ("root ::= root", "no finite text"),
        ("?", "no name"),
        ('root ::= ' + "(" * 5000 + '"a"' + ")" * 5000, "too deeply"),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_with_its_line(walker, grammar, words):
    with pytest.raises(GrammarError) as raised:
        walker.matcher("grammar", grammar)
    assert words in str(raised.value)
