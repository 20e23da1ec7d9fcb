"""The listing of a Program shows all that its operations use."""

from __future__ import annotations

import json

import pytest

from cpuserve.cli.listings import as_records
from cpuserve.models import build_program, spec_from_config
from tests.helpers.tiny import tiny_config


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "granite4-hybrid", "qwen3-next"])
def test_it_has_every_value_and_every_weight(family):
    program = build_program(spec_from_config(tiny_config(family)))
    records = json.loads(json.dumps(as_records(program)))
    shown = {name for record in records for name in record["weights"]}
    assert shown == {need.name for need in program.weights}
    for op, record in zip(program.ops, records, strict=True):
        assert len(record["values"]) == len({*op.reads(), op.written()} - {None})
