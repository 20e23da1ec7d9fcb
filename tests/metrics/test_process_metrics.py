"""Metrics of the server's processes, tasks and stores, and OpenMetrics with exemplars."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

import cpuserve
from cpuserve.api.request import state
from cpuserve.base.background import Pauses, keep
from cpuserve.metrics.families import (
    CONTENT_TYPE,
    MOST_IN_EXEMPLAR,
    OPEN_CONTENT_TYPE,
    exemplar_labels,
    exposition,
    wants_openmetrics,
)
from cpuserve.metrics.processes import Processes, ReadingPace, _Reading, huge_bytes, node_bytes
from tests.api.fakes import Api
from tests.api.live import live
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, in_loop, until
from tests.helpers.tiny import tiny_model

OPEN = {"accept": "application/openmetrics-text"}
# Uses some CPU time, and then waits.
WAITS = """
import sys, time
while time.process_time() < 0.05:
    pass
print(1, flush=True)
sys.stdin.read()
"""
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def child():
    """A function that starts a process, which has its own role and waits."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", WAITS, "a.module.that.waits"],
            **child_options(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def values(families):
    """{(name, role): value} of samples without other labels."""
    return {
        (sample.name, sample.labels["role"]): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.keys() == {"role"}
    }


def fresh():
    return Processes({"a.module.that.waits": "waiting"}, ReadingPace(0, 0, 0))


def test_each_role_has_the_figures_of_its_processes(child):
    before, children = time.time(), [child(), child()]
    found = values(fresh().families())
    assert found["cpuserve:processes", "front_end"] == 1
    assert found["cpuserve:processes", "waiting"] == 2
    shown = [psutil.Process(each.pid) for each in children]
    assert found["process_open_fds", "waiting"] == max(each.num_fds() for each in shown)
    assert found["process_max_fds", "waiting"] == shown[0].rlimit(psutil.RLIMIT_NOFILE)[0]
    resident = sum(each.memory_info().rss for each in shown)
    assert found["process_resident_memory_bytes", "waiting"] == pytest.approx(resident, rel=0.2)
    assert found["process_virtual_memory_bytes", "waiting"] > resident
    assert before - 1 < found["process_start_time_seconds", "waiting"] < time.time() + 1
    assert found["process_cpu_seconds_total", "waiting"] > 0
    own = sum(psutil.Process().cpu_times()[:2])
    assert 0 < found["process_cpu_seconds_total", "front_end"] <= own


def test_cpu_seconds_of_ended_processes_stay_counted(child):
    processes, first = fresh(), child()
    before = values(processes.families())["process_cpu_seconds_total", "waiting"]
    first.kill()
    first.communicate()
    after = values(processes.families())
    assert after["process_cpu_seconds_total", "waiting"] == before > 0
    assert ("process_open_fds", "waiting") not in after
    child()
    assert values(processes.families())["process_cpu_seconds_total", "waiting"] > before


def test_a_process_that_ends_while_it_is_read_is_left_out(child, monkeypatch):
    ending, staying, read = child(), child(), psutil.Process.num_fds

    def num_fds(process):
        if process.pid == ending.pid:
            ending.kill()
            ending.wait()
        return read(process)

    monkeypatch.setattr(psutil.Process, "num_fds", num_fds)
    found = values(fresh().families())
    assert found["cpuserve:processes", "waiting"] == 1
    assert ending.poll() == -signal.SIGKILL
    assert staying.poll() is None


def test_scrapes_within_a_second_read_the_processes_once(monkeypatch):
    reads, children = [], psutil.Process.children
    monkeypatch.setattr(
        psutil.Process, "children", lambda p, **how: reads.append(1) or children(p, **how)
    )
    kept = Processes({}, ReadingPace(PATIENCE_S))
    first = kept.families()
    assert values(kept.families()) == values(first)
    assert len(reads) == 1
    read = fresh()
    read.families()
    read.families()
    assert len(reads) == 3


def test_a_slow_reading_is_kept_for_longer():
    times = iter([0.0, 3.0, 62.9, 63.0, 64.0])  # of begin and end of each reading, and of a look
    reads, kept = [], _Reading(lambda: reads.append(1) or len(reads), 1.0, 20.0)
    found = [kept.get(lambda: next(times)) for _ in range(3)]
    assert found == [1, 1, 2]


ROLLUP = """55afcf367000-7ffc06f36000 ---p 00000000 00:00 0                          [rollup]
Rss:             1048576 kB
AnonHugePages:    204800 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    4096 kB
Swap:                  0 kB
"""
MAPS = """7f00 bind:0 anon=512 dirty=512 N0=512 kernelpagesize_kB=4
7f10 default file=/usr/lib/N2=5.so mapped=6 N0=2 N1=4 kernelpagesize_kB=4
7f20 default file=/memfd:a huge dirty=2 N1=2 kernelpagesize_kB=2048
7f30 default
"""


def test_huge_pages_and_numa_nodes_are_read_as_the_kernel_writes_them():
    assert huge_bytes(ROLLUP) == (204800 + 2048 + 4096) << 10
    assert node_bytes(MAPS.splitlines()) == {"0": 514 << 12, "1": (4 << 12) + (2 << 21)}


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA")
def test_the_memory_of_all_nodes_is_the_resident_memory(child):
    child()
    families = {family.name: family for family in fresh().families()}
    of_nodes = {
        sample.labels["role"]: sample.value
        for sample in families["cpuserve:numa_memory_bytes"].samples
    }
    resident = {
        sample.labels["role"]: sample.value
        for sample in families["process_resident_memory_bytes"].samples
    }
    assert of_nodes["waiting"] == pytest.approx(resident["waiting"], rel=0.3)


def test_each_module_that_runs_as_a_process_has_a_role():
    package = Path(cpuserve.__file__).parent
    texts = "".join(path.read_text() for path in package.rglob("*.py"))
    modules = re.findall(r'^(?:CHILD_)?MODULE = "([\w.]+)"', texts, re.MULTILINE)
    assert len(modules) >= 4
    assert set(modules) == set(state._ROLES)


@pytest.mark.deep
def test_all_processes_of_a_server_have_their_roles(shared_server):
    server = shared_server(tiny_model("llama"))
    messages = [{"role": "user", "content": "hi"}]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    asked = {"messages": messages, "max_tokens": 8, "response_format": schema}
    server.post("/v1/chat/completions", **asked)

    async def roles():
        families = text_string_to_metric_families(server.get("/metrics").decode())
        return {role for name, role in values(families) if name == "cpuserve:processes"}

    async def all_there():
        for _ in range(int(PATIENCE_S)):
            if (found := await roles()) >= {"front_end", "engine", "grammars", "templates"}:
                return found
            await asyncio.sleep(1)  # readings are kept for a second
        return await roles()

    assert asyncio.run(all_there()) == {"front_end", "engine", "grammars", "templates"}


@in_loop
async def test_metrics_wait_for_a_slow_system_on_another_thread(monkeypatch):
    begun, answered = threading.Event(), threading.Event()

    def families(_):
        begun.set()
        assert answered.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(Processes, "families", families)
    async with (
        live() as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client,
    ):
        scrape = asyncio.create_task(client.get("/metrics"))
        await until(begun.is_set)

        assert (await client.get("/v1/models")).status_code == 200
        answered.set()
        assert (await scrape).status_code == 200


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", True),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
            "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            True,
        ),
        ("text/plain, application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
        ("application/openmetrics-text-more", False),
        (";,;q=," * 1000, False),
    ],
)
def test_openmetrics_is_for_scrapers_that_ask_for_it(accept, is_open):
    assert wants_openmetrics(accept) is is_open
    response = Api().get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"] == (OPEN_CONTENT_TYPE if is_open else CONTENT_TYPE)
    assert response.text.endswith("# EOF\n") is is_open


def test_both_formats_have_the_same_samples():
    api = Api()
    api.complete("hi", max_tokens=5)
    text = {
        (sample.name, *sorted(sample.labels.items()))
        for family in text_string_to_metric_families(api.get("/metrics").text)
        for sample in family.samples
    }
    opened = {
        (sample.name, *sorted(sample.labels.items()))
        for family in open_families(api.get("/metrics", headers=OPEN).text)
        for sample in family.samples
    }
    assert text == opened
    assert len(text) > 300


def complete(api, **headers):
    """Send a request for max_tokens tokens with these headers."""
    body = {"prompt": "hi", "max_tokens": headers.pop("max_tokens", 5)}
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    assert api.request("POST", "/v1/completions", json=body, headers=headers).status_code == 200


def exemplars(api):
    """{name of the family: its exemplars by upper bound}."""
    return {
        family.name.removeprefix("vllm:"): {
            sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar
        }
        for family in open_families(api.get("/metrics", headers=OPEN).text)
    }


def test_a_bucket_names_the_last_request_in_it():
    api, before = Api(), time.time()
    for name in ("first", "second"):
        complete(api, x_request_id=name)
    complete(api, x_request_id="short", max_tokens=1)
    found = exemplars(api)["request_generation_tokens"]
    assert {le: each.labels for le, each in found.items()} == {
        "1.0": {"request_id": "short"},
        "5.0": {"request_id": "second"},
    }
    assert found["5.0"].value == 5
    assert before - 1 < float(found["5.0"].timestamp) < time.time() + 1
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert exemplars(api)[name]
    assert "# {" not in api.get("/metrics").text


def test_a_request_of_a_trace_is_named_by_it():
    api = Api()
    complete(api, traceparent=f"00-{TRACE}-{SPAN}-01", x_request_id="mine")
    (found,) = exemplars(api)["request_params_n"].values()
    assert found.labels == {"trace_id": TRACE, "request_id": "mine"}


@pytest.mark.parametrize("trace_id", ["", TRACE])
@pytest.mark.parametrize("length", [1, 77, 78, 79, 117, 118, 119, 128])
def test_the_labels_of_an_exemplar_fit(length, trace_id):
    labels = exemplar_labels("a" * length, trace_id)
    room = MOST_IN_EXEMPLAR - (len("trace_id") + len(TRACE) if trace_id else 0)
    assert ("request_id" in labels) == (len("request_id") + length <= room)
    assert ("trace_id" in labels) == bool(trace_id)
    assert sum(len(name) + len(value) for name, value in labels.items()) <= MOST_IN_EXEMPLAR


@pytest.mark.parametrize("given", [f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more"])
def test_a_traceparent_that_is_none_names_no_trace(given):
    """The span of such a request is in a trace of its own, which the exemplar must not deny."""
    api = Api()
    complete(api, traceparent=given, x_request_id="mine")
    (found,) = exemplars(api)["request_params_n"].values()
    assert found.labels == {"request_id": "mine"}


@in_loop
async def test_a_background_task_that_fails_is_down_until_it_works_again():
    fixed = asyncio.Event()

    async def work():
        if not fixed.is_set():
            raise ValueError
        await asyncio.Event().wait()

    async def shown(client):
        text = (await client.get("/metrics")).text
        return dict(re.findall(r'cpuserve:background_task_up{task="(.*?)"} (\d)', text))

    task = keep("a test", work, Pauses(first_s=0.01, longest_s=0.01, steady_s=0.01))
    async with (
        live() as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client,
    ):
        while (await shown(client)).get("a test") != "0":
            await asyncio.sleep(0.01)
        fixed.set()
        while (await shown(client)).get("a test") != "1":
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))
        assert "a test" not in await shown(client)


@in_loop
async def test_stores_tell_how_full_they_are(tmp_path):
    async with (
        live(files_dir=str(tmp_path), files_bytes=5000) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client,
    ):
        file = {"file": ("a.jsonl", b"{}\n" * 100)}
        sent = await client.post("/v1/files", files=file, data={"purpose": "batch"})
        assert sent.status_code == 200, sent.text
        text = (await client.get("/metrics")).text
        tasks = re.findall(r'cpuserve:background_task_up{task="(running batches)"} 1', text)
        found = dict(re.findall(r'cpuserve:(store_\w+{store="\w+"}) (\S+)', text))
        assert tasks == ["running batches"]
        assert float(found['store_bytes{store="files"}']) == 300
        assert float(found['store_max_bytes{store="files"}']) == 5000
        assert float(found['store_bytes{store="responses"}']) == 0
        body = {"model": "tiny", "input": "hi", "store": True}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        text = (await client.get("/metrics")).text
        (used,) = re.findall(r'cpuserve:store_bytes{store="responses"} (\S+)', text)
        assert float(used) == server.state.stored.num_bytes > 0


def test_the_text_of_families_is_the_same_in_both_libraries():
    families = fresh().families()
    assert exposition(families)
    assert exposition(families, openmetrics=True).endswith(b"# EOF\n")
