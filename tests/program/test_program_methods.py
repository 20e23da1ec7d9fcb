"""The methods of _C.Program that add operations: their arguments, in order or by name."""

import pytest

from cpuserve import _C
from tests.helpers.levels import LEVELS


@pytest.fixture
def program():
    made = _C.Program(LEVELS[0], 8, 4)
    made.value("x", 64, "f32")
    made.value("y", 64, "f32")
    return made


def test_fields_are_passed_in_their_order_or_by_name(program):
    program.add(0, 1)
    program.add(out=1, x=0)
    program.add(0, column=0, out=1)


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ((0,), {}, "needs a value for out"),
        ((0, 1, 0, 3), {}, "takes at most 3 arguments, got 4"),
        ((0, 1), {"x": 0}, "has two values for x"),
        ((0, 1), {"y": 0}, "no field of the operation"),
        (("x", 1), {}, "cannot read the value of x: 'x'"),
        ((0, None), {}, "cannot read the value of out: None"),
        ((0, 1.5), {}, "cannot read the value of out: 1.5"),
    ],
)
def test_arguments_that_are_no_fields_are_refused(program, args, kwargs, why):
    with pytest.raises(TypeError, match=rf"add\(\): .*{why}"):
        program.add(*args, **kwargs)
