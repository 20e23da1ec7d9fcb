"""Weights that give no finite number are noticed, and one broken prompt is not taken for them."""

import math

from cpuserve.core.results import DAMAGED_STEPS
from tests.engine.test_core import add, run
from tests.helpers.fake_executor import fake_core


class Weights:
    """The results of a model: all NaN while `broken`."""

    broken = True

    def __call__(self, step, outputs):
        if self.broken:
            outputs.tokens[:] = -1


def ask(core, times=1, **params):
    """Run requests one after the other; return whether the weights then count as damaged."""
    for number in range(times):
        add(core, number + 1, **params)
        run(core)
    return core.stats.damaged


def test_many_steps_without_a_finite_row_are_damage_and_one_finite_row_ends_it(caplog):
    weights = Weights()
    core = fake_core(fault=weights)
    assert not ask(core, DAMAGED_STEPS - 1)
    assert ask(core)
    assert ask(core)
    assert [record.message for record in caplog.records if "damaged" in record.message] == [
        f"the model's weights are damaged: {DAMAGED_STEPS} steps in a row computed no finite number"
    ]
    weights.broken = False
    assert not ask(core)
    weights.broken = True
    assert not ask(core, DAMAGED_STEPS - 1)


def test_a_request_that_excludes_every_token_is_no_damage():
    core = fake_core(fault=Weights())
    fields = {"logit_bias": {8: -math.inf}, "stop_token_ids": [9], "min_tokens": 2}
    assert not ask(core, 2 * DAMAGED_STEPS, **fields)


def test_one_row_of_a_batch_that_is_finite_is_enough():
    def fault(step, outputs):
        outputs.tokens[0] = -1

    core = fake_core(fault=fault)
    for number in range(2 * DAMAGED_STEPS):
        add(core, 2 * number + 1, max_tokens=1)
        add(core, 2 * number + 2, max_tokens=1)
        run(core)
    assert not core.stats.damaged


def test_an_idle_engine_stays_damaged():
    core = fake_core(fault=Weights())
    assert ask(core, DAMAGED_STEPS)
    core.step()
    assert core.stats.damaged
