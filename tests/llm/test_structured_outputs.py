"""Answers with a form, from a whole engine with random weights at temperature 1."""

import json
import re

import jsonschema
import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import InvalidRequest
from tests.helpers.depth import deep_but
from tests.helpers.oracle import precise_torch
from tests.helpers.tiny import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 8},
        "size": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 20}]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["ok", "name", "size", "tags"],
    "additionalProperties": False,
}
PROMPT = [5] * 7


@pytest.fixture(scope="module", params=deep_but(["native"], ["torch", "native"]))
def llm(request):
    threads = {"omp_threads_bind": "0"} if request.param == "torch" else {}
    sizes = {"max_model_len": 512, "max_num_seqs": 8}
    path = str(tiny_model("llama"))
    with precise_torch(), LLM(path, executor=request.param, **sizes, **threads) as made:
        yield made


def params(seed=1, **fields):
    return SamplingParams(**{"seed": seed, "max_tokens": None, "temperature": 1.0, **fields})


def texts(llm, sampling):
    return [
        completion.text
        for output in llm.generate([PROMPT] * len(sampling), sampling)
        for completion in output.outputs
    ]


def test_every_seed_answers_valid_json(llm):
    form = {"json": SCHEMA}
    seeds = range(10 if llm.config.executor == "torch" else 40)  # both have the masks of a grammar
    answers = texts(llm, [params(seed, structured_outputs=form) for seed in seeds])
    for text in answers:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(answers)) > 3 / 4 * len(seeds)


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "separator": ",",
        "at_least_one": True,
        "stop_after_first": True,
        "tags": [
            {
                "begin": f"<{name}>",
                "content": {"type": "regex", "pattern": pattern},
                "end": f"</{name}>",
            }
            for name, pattern in (("a", "[0-9]"), ("b", "x|y"))
        ],
    },
}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-\\d{2}"}, r"[a-c]{3}-\d\d"),
        ({"choice": ["to be", "not (to) be?", "ä\n"]}, r"to be|not \(to\) be\?|ä\n"),
        ({"grammar": 'root ::= "a" | "b" root'}, r"b*a"),
        ({"grammar": 'start: "x" /[0-9]/ "y"'}, r"x\dy"),
        ({"structural_tag": TAG}, r"<a>(\d)</a>|<b>[xy]</b>"),
    ],
    ids=["regex", "choice", "gbnf", "lark", "structural tag"],
)
def test_texts_have_the_form(llm, form, pattern):
    found = texts(llm, [params(seed, structured_outputs=form) for seed in range(12)])
    for text in found:
        assert re.fullmatch(pattern, text), text
    assert len(set(found)) > 1


def test_a_form_changes_no_neighbour_and_is_changed_by_none(llm):
    form = params(3, structured_outputs={"json": SCHEMA})
    free = params(4, max_tokens=60, ignore_eos=True)
    alone = [texts(llm, [form])[0], texts(llm, [free])[0]]
    others = [params(10 + i, structured_outputs={"regex": "[a-z ]{80}"}) for i in range(4)]
    assert texts(llm, [form, *others, free])[:: len(others) + 1] == alone


def test_n_answers_penalties_and_logprobs_work_with_a_form(llm):
    (output,) = llm.generate(
        [PROMPT],
        params(
            n=3,
            logprobs=2,
            presence_penalty=0.5,
            top_p=0.9,
            stop=["\n"],
            structured_outputs={"json": {"enum": ["one", "two", "three"]}},
        ),
    )
    assert len(output.outputs) == 3
    for completion in output.outputs:
        assert json.loads(completion.text) in ("one", "two", "three")
        assert completion.finish_reason == "stop"
        assert len(completion.logprobs) == len(completion.token_ids)
        for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
            assert row[token].rank >= 1
    # Logprobs are those of the model, without the grammar: hardly ever is its token the likeliest.
    ranks = [next(iter(row.values())).rank for c in output.outputs for row in c.logprobs]
    assert max(ranks) > 1


def test_a_bad_schema_is_an_error_that_says_why(llm):
    with pytest.raises(InvalidRequest, match=r"structured_outputs .*sound") as raised:
        texts(llm, [params(structured_outputs={"json": {"type": "sound"}})])
    assert raised.value.param == "structured_outputs"
    assert texts(llm, [params(structured_outputs={"choice": ["fine"]})]) == ["fine"]
