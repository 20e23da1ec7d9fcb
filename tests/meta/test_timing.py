"""No test looks at the clock: how long something takes depends on what else the machine does."""

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.engine import MAX_SHRINKING_SECONDS

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}
MAY_READ_CLOCKS = {
    "webui/chromium.py": "ends a wait for a browser that does not respond",
    "helpers/even_loop.py": "is a clock that stands still while the process does",
    "helpers/loop_watch.py": "measures stops of the event loop in CPU time",
    "helpers/patience.py": "ends a wait for what never happens",
    "engine/test_liveness.py": "tells the watch over an engine that it was asked a second ago",
    "fuzz/run.py": "no test: runs cases until the time is over",
    "api/kills.py": "kills processes and prints how long they are gone, and asserts no time",
    "api/test_api_access_log.py": "writes when a scripted engine began a request",
    "soak/driver.py": "loads a server until the time is over, and asserts no time",
    "on_arm.py": "no test: prints how long each job takes on an emulated CPU",
    "helpers/vm_guest.py": "no test: prints how long an emulated machine takes",
    "runtime/test_native_running.py": "two measurements of the same step are compared",
}


def reads_of_clocks(source):
    """Lines that call time.monotonic() and the like, or time() of an event loop."""
    if not any(word in source for word in (*CLOCKS, ".time")):
        return
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func)
        of_loop = name.endswith(".time") and "loop" in name
        if of_loop or name.rpartition(".")[2] in CLOCKS:
            yield call.lineno


@pytest.mark.parametrize(
    "line",
    ["time.monotonic()", "perf_counter()", "loop.time()", "asyncio.get_running_loop().time()"],
)
def test_reading_a_clock_is_seen(line):
    assert list(reads_of_clocks(f"x = 1\nassert {line} - x < 5\n")) == [2]
    assert not list(reads_of_clocks("assert time.time() and a.monotonic"))


def test_tests_wait_with_patience_and_measure_nothing():
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("*.py")
        if str(path.relative_to(TESTS)) not in MAY_READ_CLOCKS
        for line in reads_of_clocks(path.read_text())
    }
    assert not found, "use tests/helpers/patience.py, an event or a count; measure in benchmarks/"


def test_hypothesis_has_time_to_shrink_and_report_a_failure(pytestconfig):
    """A test that is ended while it looks for the smallest example never shows any."""
    assert float(pytestconfig.getini("timeout")) >= 2 * MAX_SHRINKING_SECONDS


def test_no_example_of_hypothesis_has_a_deadline():
    """By default, one that takes more than 0.2 s fails, as others do on a busy machine."""
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
