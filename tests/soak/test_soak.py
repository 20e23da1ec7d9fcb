"""Minutes of all that clients do, at once: the processes of a server do not grow.

The driver also runs by hand, for longer and with another model: python -m tests.soak.driver.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.helpers.tiny import tiny_model
from tests.soak.clients import DOINGS
from tests.soak.driver import LOST, MAY_GROW, Soaked, for_count, report, soak
from tests.soak.processes import NAMES, Held, slopes

NOTHING = Held(0, 0, 0, 0, 0)


@pytest.mark.deep
def test_after_three_minutes_of_load_a_server_has_what_it_had_before():
    model = str(tiny_model("llama", max_position_embeddings=4096))
    found = asyncio.run(soak(model, 160, warm_up=1500))
    assert not found.faults, report(found)
    assert found.statuses.keys() <= {doing.__name__.strip("_") for doing in DOINGS}
    print(report(found))


def test_a_warm_up_ends_by_the_number_of_things_and_not_by_time():
    choose, rng = for_count(7), random.Random(0)
    found = [choose(rng) for _ in range(9)]
    assert set(found[:7]) <= set(DOINGS)
    assert found[7:] == [None, None]


@pytest.mark.parametrize("name", NAMES)
def test_what_grows_is_found_and_told(name):
    more = dict.fromkeys(NAMES, 0) | {name: getattr(MAY_GROW, name) + 1}
    found = Soaked(NOTHING, Held(**more), [], {}, "", 1.0)
    assert [fault.partition(" ")[0] for fault in found.faults] == [name]
    assert not Soaked(NOTHING, MAY_GROW, [], {}, "", 1.0).faults


def test_responses_and_logs_with_faults_are_found():
    log = "2026-11-27 12:00:00 INFO fine ERROR\n2026-11-27 12:00:01 ERROR no\n"
    found = Soaked(
        NOTHING, NOTHING, [], {"agent": Counter({200: 5, 503: 1, 504: 1, 500: 2})}, log, 1.0
    )
    assert "12:00:01 ERROR no" in found.faults[0]
    assert found.faults[1:] == ["2 responses 500 to agent"]
    few, many = ({"agent": Counter({200: 1000, LOST: lost})} for lost in (9, 20))
    assert not Soaked(NOTHING, NOTHING, [], few, "", 1.0).faults
    assert Soaked(NOTHING, NOTHING, [], many, "", 1.0).faults == [
        "20 of 1020 requests got no response"
    ]


def test_a_slope_is_that_of_the_line_and_its_error_that_of_the_rest():
    samples = [(3600.0 * hour, Held(100 + 10 * hour, 5, 3 + hour % 2, 2, 0)) for hour in range(11)]
    rss, fds, threads, *_ = slopes(samples)
    assert (rss.an_hour, rss.error) == pytest.approx((10, 0), abs=1e-9)
    assert (rss.first, rss.last) == (100, 200)
    assert (fds.an_hour, fds.error) == (0, 0)
    assert threads.an_hour == pytest.approx(0, abs=1e-9)
    assert 0.01 < threads.error < 0.1
