"""The table of sampling fields: its limits, and the types of the fields in bodies and calls."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from types import UnionType

import msgspec
import pytest

import cpuserve
from cpuserve.api.anthropic.schema import MessagesRequest
from cpuserve.api.llamacpp.completion.schema import LlamaOptions
from cpuserve.api.ollama.options import OllamaOptions
from cpuserve.api.openai.schema import GenerationRequest
from cpuserve.api.tgi.schema import TgiParameters
from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.ipc import AddRequest, encode_frame
from cpuserve.sampling.fields import (
    CHAINED,
    LIMITED,
    NEUTRAL,
    OF_SAMPLERS,
    REFUSED,
    SHAPING,
    SamplerFields,
    SamplingFields,
    fields_in,
    names_in,
)
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.params import check_values

# Fields with another type in requests: JSON has texts as keys, a text may stand for a list,
# and rules of structure and repetition are checked later.
OTHER_TYPES = {"stop", "logit_bias", "structured_outputs", "repetition_detection"}


def types_of(struct):
    hints = typing.get_type_hints(struct)
    return {each.name: hints[each.name] for each in msgspec.structs.fields(struct)}


def not_none(kind):
    """The members of a type without None."""
    is_union = typing.get_origin(kind) in (typing.Union, UnionType)
    return {*typing.get_args(kind)} - {type(None)} if is_union else {kind}


BODIES = [
    (GenerateCall, "vllm"),
    (GenerationRequest, "vllm"),
    (LlamaOptions, "llama.cpp"),
    (OllamaOptions, "ollama"),
    (TgiParameters, "tgi"),
    (MessagesRequest, "anthropic"),
]


@pytest.mark.parametrize(("body", "dialect"), BODIES, ids=[body.__name__ for body, _ in BODIES])
def test_a_sampling_field_has_its_type_in_bodies_and_calls(body, dialect):
    own, names = types_of(SamplingFields), names_in(dialect)
    # Fields that the dialect refuses are Any.
    theirs = {name: kind for name, kind in types_of(body).items() if kind is not typing.Any}
    assert {*names.values()} <= theirs.keys()
    shared = {name for name in own if names.get(name, name) in theirs} - OTHER_TYPES
    assert shared >= {"temperature", "top_k", "top_p", "max_tokens"}
    for name in shared:
        assert not_none(own[name]) == not_none(theirs[names.get(name, name)]), name


@pytest.mark.parametrize(("body", "dialect"), BODIES[2:5], ids=[b.__name__ for b, _ in BODIES[2:5]])
def test_a_body_has_the_fields_of_its_dialect(body, dialect):
    assert fields_in(dialect).keys() <= {*body.__struct_fields__}


@pytest.mark.parametrize("name", ["min_p", "mirostat_tau", "repeat_last_n"])
def test_a_field_is_declared_in_the_table_only(name):
    root = Path(cpuserve.__file__).parent
    sources = {path: path.read_text("utf-8") for path in root.rglob("*.py")}
    declaring = {
        path.relative_to(root).as_posix()
        for path, source in sources.items()
        if re.search(rf"^    {name}: ", source, re.MULTILINE)
    }
    assert declaring == {"sampling/fields.py"}


def test_only_fields_without_a_meaning_of_their_own_are_neutral():
    """A decision resets all of them, so that no default of the server changes it."""
    assert SHAPING == ["temperature", "top_p", "top_k", "min_p"]
    assert NEUTRAL == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 16,
    }  # fmt: skip


def neighbours(name, rule):
    """Values of a field at its limits, and beyond them."""
    kind = types_of(SamplingFields)[name]
    step = 1 if int in (kind, *typing.get_args(kind)) else 1e-6 * max(1.0, abs(rule.most))
    inside = [limit for limit in (rule.least, rule.most) if abs(limit) != float("inf")]
    outside = [
        value for value in (rule.least - step, rule.most + step) if abs(value) != float("inf")
    ]
    return inside, outside


@pytest.mark.parametrize("name", LIMITED)
def test_the_limits_of_a_field_are_allowed_and_its_neighbours_are_not(name):
    rule = LIMITED[name]
    others = {rule.needs: 1} if rule.needs else {}
    if name == "min_tokens":
        others["max_tokens"] = None
    inside, outside = neighbours(name, rule)
    assert inside
    for value in inside:
        SamplingParams(**others, **{name: value})
    for value in outside:
        if (name, value) == ("top_k", -1):
            continue  # all tokens, as 0
        with pytest.raises(InvalidRequest, match=name) as refused:
            SamplingParams(**others, **{name: value})
        assert refused.value.role == name


@pytest.mark.parametrize("name", [name for name, rule in LIMITED.items() if rule.needs])
def test_the_parameter_of_a_sampler_that_is_off_is_not_checked(name):
    SamplingParams(**{name: LIMITED[name].most + 1})


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_takes_none_and_its_neutral_values(name):
    for value in (None, *REFUSED[name].only):
        SamplingParams(**{name: value})
    with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
        SamplingParams(**{name: [1]})


def test_a_chain_has_every_parameter_of_its_samplers():
    chain = SamplingParams(samplers=["temperature"]).chain
    assert {name: getattr(chain, name) for name in CHAINED} == {
        name: rule.unset for name, rule in CHAINED.items()
    }
    others = {"samplers", "repeat_last_n", "dry_sequence_breakers", "post_sampling_probs"}
    others |= {"no_repeat_ngram_size", "ngram_size", "window_size", "whitelist_token_ids"}
    assert {*SamplerFields.__struct_fields__} - others == {*CHAINED}


@pytest.mark.parametrize(("name", "switch"), OF_SAMPLERS.items())
def test_parameters_of_a_sampler_that_is_off_may_have_any_value(name, switch):
    off = SamplingParams(**{name: -(10**40), switch: 0, "typical_p": 0.5})
    if name in CHAINED:
        assert getattr(off.chain, name) == CHAINED[name].unset
    else:
        assert (name, off.banned_ngram_size) == ("window_size", 0)
    encode_frame(AddRequest(1, b"", off, 0.0))
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: -(10**40), switch: 1})


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"vectors": "unit_tokens"}, 16 * 1024),
        ({"vectors": "raw_weights+unit_multi"}, 16 * 1024 * 1024 // 513),
        ({"classify": "tokens"}, 16 * 1024),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_the_vectors_of_all_tokens_have_at_most_16_mi_numbers(fields, most):
    call, widths = GenerateCall(embed=True, **fields), {"weights": 1, "multi": 512, "tokens": 1024}
    check_values(call, most, widths)
    with pytest.raises(InvalidRequest, match=r"at most 16777216 are allowed"):
        check_values(call, most + 1, widths)


def test_a_vector_for_each_text_has_no_limit_of_tokens():
    check_values(GenerateCall(embed=True, vectors="plain"), 1 << 40, {"tokens": 1024})
