"""Arguments between tags whose text contains the end tag itself, as files about formats do.

raullenchai/Rapid-MLX#1515, vllm-project/vllm#33965: the argument was cut there, and the call broke.
"""

import json
import re

import pytest

from cpuserve.serving.calls.events import Text, ToolCallDelta
from cpuserve.serving.tools.families import family
from tests.helpers.fuzzed_answers import cuts
from tests.serving.test_call_families import SCHEMA, WRITTEN

TAG = {n: m[1] for n, t in WRITTEN.items() if (m := re.search(r"Paris\s*(</[^>]+>)", t))}
VALUES = [
    "a {tag} b",
    'print("{tag}")',
    "{tag}",
    "{tag}{tag}",
    "one\n{tag}\ntwo",
    "{tag}\n",
    "<tool_call> and {tag} and </function",
    "a {tag} </",
    "{tag} \n <par",
]


def read(name, text):
    """(calls, text) of a response, which no division of the text changes."""
    results = []
    for pieces in ([text], list(text), cuts(text, 1), cuts(text, 2)):
        parser = family(name).parser(0, schemas={"f": SCHEMA, "g": {}})
        told = [p for part in pieces for p in parser.push(part)] + parser.flush()
        calls = []
        for piece in told:
            if isinstance(piece, ToolCallDelta):
                if piece.name is not None:
                    calls.append([piece.name, ""])
                calls[-1][1] += piece.arguments
        texts = "".join(p.text for p in told if isinstance(p, Text))
        results.append((calls, texts, parser.ends_with_call))
    assert all(result == results[0] for result in results)
    return results[0]


def test_the_families_with_tags_are_found():
    assert {"qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "seed_oss"} <= {*TAG}


@pytest.mark.parametrize("name", TAG)
@pytest.mark.parametrize("value", VALUES)
def test_an_argument_may_contain_its_end_tag(name, value):
    city = value.format(tag=TAG[name])
    calls, texts, ended = read(name, WRITTEN[name].replace("Paris", city))
    assert [[of, json.loads(given)] for of, given in calls] == [
        ["f", {"city": city, "days": 3}],
        ["g", {}],
    ]
    assert (texts, ended) == ("", True)


@pytest.mark.parametrize("value", ["ends with </tool_call> alone", "</tool_call>\n</tool_call>"])
def test_an_argument_of_qwen_may_contain_the_end_tag_of_the_call(value):
    calls, texts, _ = read("qwen3_coder", WRITTEN["qwen3_coder"].replace("Paris", value))
    assert [json.loads(given) for _, given in calls] == [{"city": value, "days": 3}, {}]
    assert texts == ""


@pytest.mark.parametrize("name", TAG)
def test_an_end_tag_at_the_end_of_the_response_ends_the_argument(name):
    text = WRITTEN[name].replace("Paris", f"a {TAG[name]} b")
    end = text.rindex(TAG[name], 0, text.index("days")) + len(TAG[name])
    ((_, arguments),), _, ended = read(name, text[:end])
    assert json.loads(arguments + "}") == {"city": f"a {TAG[name]} b"}
    assert not ended


@pytest.mark.parametrize("name", TAG)
def test_much_white_space_after_an_end_tag_is_not_waited_for(name):
    parser = family(name).parser(0, schemas={"f": SCHEMA, "g": {}})
    end = WRITTEN[name].index(TAG[name]) + len(TAG[name])
    parser.push(WRITTEN[name][:end])
    for _ in range(1000):
        parser.push("\n")
    assert len(parser._held) < 100
