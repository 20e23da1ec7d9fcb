"""GET /v1/activity: the sequences and counters that the machine view draws."""

import json

import jsonschema
import msgspec

from cpuserve.api.status.router import Activity
from cpuserve.metrics.server import MAX_ENDED, ServerMetrics
from cpuserve.platforms.cpu_times import CpuTimes, cpu_times
from tests.api.fakes import Api

STAT = """cpu  10 0 5 100 5 1 1 0 0 0
cpu0 200 10 50 1000 40 5 5 10 7 0
cpu12 1 0 0 9 0 0 0 0 0 0
intr 5
"""


def activity(api):
    response = api.get("/v1/activity")
    assert response.headers["cache-control"] == "no-store"
    jsonschema.validate(response.json(), msgspec.json.schema(Activity))
    return response.json()


def test_a_finished_request_has_its_times_in_order_and_its_counts():
    api = Api()
    api.post("/v1/completions", model="tiny", prompt=[5, 6, 7], max_tokens=4)
    (model,) = activity(api)["models"]
    (sequence,) = model["sequences"]
    assert sequence["number"] == 1
    assert sequence["state"] in ("stop", "length")
    assert sequence["prompt_tokens"] == 3
    assert sequence["output_tokens"] == model["output_tokens"] > 0
    times = [sequence[name] for name in ("arrived_s", "scheduled_s", "first_s", "ended_s")]
    assert times == sorted(times)
    assert times[-1] <= activity(api)["time"]


def test_no_text_and_no_caller_is_shown():
    api = Api(api_keys=("secret",), key="secret")
    api.post("/v1/completions", model="tiny", prompt="a private text", max_tokens=4)
    text = json.dumps(activity(api))
    assert "private" not in text
    assert "key-" not in text
    assert "secret" not in text


def metrics():
    return ServerMetrics(model_name="m", max_model_len=100, stats=lambda: None)


def test_the_state_follows_the_life_of_a_sequence():
    from cpuserve.api.status.router import _sequence

    known = metrics()
    sequence = known.start(10, 5, 1)
    assert _sequence(sequence).state == "waiting"
    known.on_tokens(sequence, 1, 4, sequence.arrival)
    shown = _sequence(sequence)
    assert (shown.state, shown.cached_tokens, shown.ended_s) == ("generating", 4, None)
    known.finish(sequence, "nonsense")
    assert _sequence(sequence).state == "error"


def test_ended_sequences_are_forgotten_and_others_are_not():
    known = metrics()
    first = known.start(1, 1, 1)
    for _ in range(MAX_ENDED + 10):
        known.finish(known.start(1, 1, 1), "stop")
    numbers = [sequence.number for sequence in known.sequences()]
    assert len(numbers) == MAX_ENDED + 1
    assert numbers[-1] == first.number
    assert numbers[0] == 12


def test_times_come_from_the_line_of_each_cpu(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(STAT, encoding="ascii")
    assert cpu_times(stat) == [CpuTimes(0, 2.8, 10.4), CpuTimes(12, 0.01, 0.09)]


def test_systems_without_proc_ask_psutil(tmp_path):
    found = cpu_times(tmp_path / "none")
    assert [times.cpu for times in found] == list(range(len(found)))
    assert all(times.idle_s > 0 for times in found)
