"""Fixtures of the tests that generate with a whole engine."""

import pytest

from cpuserve.core.drafts import DraftBudget


@pytest.fixture
def eager(monkeypatch):
    """Every guess for which the step has tokens is verified, whatever time it costs.

    What drafts are worth follows from measured times, so without this their number would differ
    from machine to machine.
    """

    def take(budget, _index, most):
        count = min(most, budget.tokens)
        budget.tokens -= count
        budget.spent += count
        return count

    monkeypatch.setattr(DraftBudget, "take", take)
