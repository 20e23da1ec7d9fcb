"""The default model answers the golden prompts at every ISA level; see at_level.py."""

import pytest

from tests.fidelity.at_level import certain, check_answers, check_batch_invariance
from tests.fidelity.passages import NUM_GREEDY, reference
from tests.helpers.levels import LEVELS
from tests.helpers.served import default_model

# at_level.py (.ci/run levels) takes whole answers, and level scalar, which takes minutes.
FEW = 4


VECTORS = [level for level in LEVELS if level != "scalar"]


@pytest.mark.deep  # 4 s each
@pytest.mark.network
@pytest.mark.parametrize("isa", VECTORS)
def test_answers_are_the_references_and_the_same_bits_among_others(isa):
    model = default_model()
    compared, alone, prompts = check_answers(model, isa, FEW)
    assert compared >= 30
    check_batch_invariance(model, isa, FEW, alone, prompts)


def test_answers_are_compared_up_to_the_first_close_call():
    assert certain([1.0, 0.05, 0.049, 3.0]) == 2
    assert certain([1.0, 0.2]) == 2
    assert certain([0.0]) == 0
    golden = reference()["greedy"]
    assert sum(certain(greedy["margins"]) for greedy in golden) > len(golden) * NUM_GREEDY // 2
