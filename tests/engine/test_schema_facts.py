"""Facts about schemas, compared with an independent validator on values of all types."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cpuserve.engine.grammars.schema_facts import (
    Reader,
    SchemaError,
    common_types,
    disjoint,
    listed,
    type_of,
    without_endless,
)

VALUES = [
    *(None, True, False, 0, 1, 2, 1.5, "", "a", "ab", [], [1], ["a"]),
    *({}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": "a"}, {"a": True, "c": None}),
]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def leaves_of(values):
    some = st.sampled_from(values)
    return st.one_of(
        st.booleans(),
        st.fixed_dictionaries({"type": st.sampled_from(TYPES)}),
        st.fixed_dictionaries({"const": some}),
        st.fixed_dictionaries({"enum": st.lists(some, min_size=1, max_size=4)}),
    )


leaves = leaves_of(VALUES)
# The patterns that exclude texts are for llguidance's regular expressions, not for Python's.
without_texts = leaves_of([value for value in VALUES if not isinstance(value, str)])
objects = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("ab"), leaves)},
    optional={
        "required": st.lists(st.sampled_from("abc"), unique=True),
        "additionalProperties": st.booleans(),
    },
)
schemas = st.recursive(
    st.one_of(leaves, objects),
    lambda part: st.one_of(
        st.fixed_dictionaries({"anyOf": st.lists(part, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(part, min_size=1, max_size=2)}),
    ),
    max_leaves=4,
)


def fits(schema, value):
    return Draft202012Validator(schema).is_valid(value)


def facts_of(schema):
    reader = Reader(schema, closed=False)
    return reader, reader.facts(schema, "#")


@given(schemas)
def test_every_value_of_a_schema_has_its_facts(schema):
    _, facts = facts_of(schema)
    for value in VALUES:
        if fits(schema, value):
            assert common_types({type_of(value)}, facts.types)
            assert facts.values is None or listed(value, facts.values)
            assert not isinstance(value, dict) or facts.required <= value.keys()
            assert not (isinstance(value, dict) and facts.closed) or value.keys() <= {*facts.names}


@given(schemas, schemas)
def test_no_value_fits_two_schemas_that_are_disjoint(left, right):
    reader, facts = facts_of(left)
    if disjoint(facts, facts_of(right)[1], reader, None):
        assert not [value for value in VALUES if fits(left, value) and fits(right, value)]


@given(without_texts, st.lists(st.sampled_from(TYPES), min_size=1, unique=True))
def test_the_negation_of_a_schema_has_the_other_values(schema, kinds):
    reader, base = facts_of({"type": kinds})
    negated = reader.negated(schema, base, "#")
    if negated is None:  # no keywords of JSON Schema express it
        return
    for value in VALUES:
        if fits({"type": kinds}, value):
            assert fits(negated, value) != fits(schema, value), (negated, value)


def test_parts_that_a_value_must_fit_add_their_facts():
    parts = [{"required": ["a"]}, {"required": ["b"], "properties": {"c": {"const": 1}}}]
    _, facts = facts_of({"type": "object", "allOf": parts})
    assert (facts.required, list(facts.names)) == ({"a", "b"}, ["c"])


def test_a_reference_back_adds_no_facts_and_an_endless_schema_is_refused():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    reader, facts = facts_of(schema)
    assert (facts.types, list(facts.names)) == ({"object"}, ["next"])
    assert disjoint(facts, facts_of({"type": "string"})[1], reader, None)
    endless = {**node, "required": ["next"]}
    with pytest.raises(SchemaError, match="no finite text"):
        without_endless({"$ref": "#/$defs/node"}, {"node": endless})
