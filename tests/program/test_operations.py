"""Every operation is one record: its fields, its lowering and its reference."""

from __future__ import annotations

import pytest

from cpuserve import _C
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Op

OPERATIONS = Op.__subclasses__()


def test_the_builder_has_the_methods_of_every_family():
    families = {op.__module__ for op in OPERATIONS}
    assert families <= {base.__module__ for base in Builder.__mro__}
    assert len(families) > 1


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.__name__)
def test_an_operation_lowers_itself_and_has_a_reference(op):
    assert "reference" in vars(op)
    if "lower" not in vars(op):  # the native operation of its name gets all its fields from it
        assert {*_C.operation_fields()[op.native_name()]} <= {*op.__struct_fields__}
    assert set(op.reads_of) <= set(op.__struct_fields__) or "reads" in vars(op)
    assert op.write_of is None or op.write_of in op.__struct_fields__
