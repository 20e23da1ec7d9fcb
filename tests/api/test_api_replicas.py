"""`--data-parallel-size 2` with real processes: the endpoint survives the death of an engine."""

import json
import os
import signal
import threading

import pytest

from cpuserve.api.lifecycle.front_end import FrontEnd
from cpuserve.config.server import ServerOptions
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.serving.generation.fan_out import MAX_SEQUENCES_PER_REQUEST
from tests.api.fakes import FakeEngine
from tests.api.server_process import Served, events
from tests.helpers.fake_executor import fake_config
from tests.helpers.patience import wait_gone, wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model


class Pair(Served):
    """A server with two fake engines whose steps take 20 ms."""

    def __init__(self, model="fake:slow"):
        super().__init__(model, replicas=2)
        second = int(self.process.stdout.readline().split()[1])
        self.engines = [self.engine_pid, second]
        self.ready()

    def series(self, name):
        """Return the values of a metric by the label `engine`."""
        lines = self.get("/metrics")[1].decode().splitlines()
        found = [line for line in lines if line.startswith(name + "{")]
        return {line.split('engine="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


@pytest.fixture
def pair():
    server = Pair()
    try:
        yield server
    finally:
        server.close()


class Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, server, prompt):
        super().__init__()
        self.response = server.post(prompt=prompt, stream=True, max_tokens=120, seed=1)
        self.text = ""
        self.start()

    def run(self):
        self.text = self.response.read().decode()

    def events(self):
        self.join()
        return events(self.text)


@pytest.mark.deep
def test_kill_9_of_an_engine_ends_its_streams_with_an_error_and_the_rest_goes_on(pair):
    assert pair.get("/health") == (200, b"")
    readers = [Reader(pair, [n + 20] * 40) for n in range(4)]
    wait_until(lambda: pair.series("vllm:num_requests_running") == {"0": 2.0, "1": 2.0})
    os.kill(pair.engines[0], signal.SIGKILL)
    wait_until(lambda: pair.series("cpuserve:replica_up") == {"0": 0.0, "1": 1.0})
    status, body = pair.get("/health")
    assert status == 200
    assert json.loads(body) == {"status": "degraded", "replicas": 2, "serving": 1}
    later = Reader(pair, [7] * 40)

    ends = [reader.events()[-1] for reader in readers]
    lost = [end for end in ends if "error" in end]
    assert len(lost) == 2
    assert all("SIGKILL" in end["error"]["message"] for end in lost)
    assert [e["choices"][0]["finish_reason"] for e in ends if "error" not in e] == ["length"] * 2
    assert later.events()[-1]["choices"][0]["finish_reason"] == "length"

    wait_until(lambda: pair.get("/health") == (200, b""))
    assert pair.series("cpuserve:replica_restarts_total") == {"0": 1.0, "1": 0.0}
    new = pair.another_engine()
    assert new not in pair.engines
    pair.stop()
    log = pair.ends_with(0)
    assert "replica 0: the engine was killed by SIGKILL" in log
    assert "replica 0 serves again" in log
    wait_gone(new)
    wait_gone(pair.engines[1])


@pytest.mark.deep
def test_a_dead_engine_is_started_again(pair):
    os.kill(pair.engines[1], signal.SIGKILL)
    wait_until(lambda: pair.series("cpuserve:replica_restarts_total") == {"0": 0.0, "1": 1.0})
    assert pair.series("cpuserve:replica_up") == {"0": 1.0, "1": 1.0}


@pytest.mark.deep
def test_while_no_engine_serves_requests_get_503_and_later_ones_an_answer(pair):
    for pid in pair.engines:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pair.get("/health")[0] == 503)
    response = pair.post(max_tokens=3)
    body = json.loads(response.read())
    if response.status != 200:  # unless it is back already
        assert response.status == 503
        assert "started again" in body["error"]["message"]
    wait_until(lambda: pair.get("/health") == (200, b""))
    assert json.loads(pair.post(max_tokens=3).read())["usage"]["completion_tokens"] == 3


def test_turns_of_a_conversation_go_to_one_engine(pair):
    prompt, queries = list(range(1, 65)), []
    for turn in range(4):
        pair.post(prompt=prompt, max_tokens=2).read()
        prompt += [turn + 100] * 40
        queries.append(pair.series("vllm:prefix_cache_queries_total"))
    home = max(queries[0], key=queries[0].get)
    other = "1" if home == "0" else "0"
    assert [q[other] for q in queries] == [0.0] * 4
    assert queries[-1][home] > queries[0][home]


@pytest.mark.deep
def test_two_native_engines_answer_as_one_does():
    """With real kernels: each engine has its own core, answers are equal, all processes end."""
    model = tiny_model("llama")
    ask = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with running_server(model, "--served-model-name", "tiny") as server:
        wanted = server.post("/v1/completions", **ask)["choices"][0]["text"]
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this test needs two CPUs")
    with running_server(
        model, "--served-model-name", "tiny", "-dp", "2", "--omp-threads-bind", "auto"
    ) as server:
        for _ in range(4):
            assert server.post("/v1/completions", **ask)["choices"][0]["text"] == wanted
        cpu = json.loads(server.get("/v1/cpu"))
        assert len(cpu["placement"]["bind"].split("|")) == 2
        assert len(set(cpu["live"]["threads_on"])) == len(cpu["live"]["threads_on"])


def test_the_bounds_on_what_waits_are_per_engine():
    limits = limits_of_two(max_num_queued_reqs=3, max_num_queued_tokens=100)
    assert (limits.max_queued_requests, limits.max_queued_tokens) == (6, 200)


def limits_of_two(**http):
    """Return the limits of a server with two engines that run 64 sequences each."""
    configs = [fake_config(served_model_names=["fake"], max_num_seqs=64)] * 2
    front_end = FrontEnd(FakeEngine(), configs, ServerOptions(**http), "", CpuPlatform())
    return front_end.context.limits


@pytest.mark.parametrize("queued", [1024, 5000])
def test_no_other_bound_is_met_before_those_on_what_waits(queued):
    most = limits_of_two(max_num_queued_reqs=queued).max_sequences
    assert most == 2 * queued + MAX_SEQUENCES_PER_REQUEST + 2 * 64


def test_the_largest_request_may_wait_where_few_others_may():
    most = limits_of_two(max_num_queued_reqs=1).max_sequences
    assert most == 2 + MAX_SEQUENCES_PER_REQUEST + 2 * 64
