"""Predictions of how long measurements take."""

import pytest

from cpuserve.bench.step import Forecast, told_seconds


def test_the_longest_prompt_predicts_the_others():
    forecast = Forecast()
    assert forecast.prompt(1000) == 0, "nothing has been seen"
    forecast.saw_prompt(64, 1.0)
    forecast.saw_prompt(1024, 8.0)
    forecast.saw_prompt(32, 1.0)
    assert forecast.prompt(2048) == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "about a second"), (40.2, "about 40 s"), (170.0, "about 3 minutes")],
)
def test_seconds_are_told_in_words(seconds, text):
    assert told_seconds(seconds) == text
