"""Work besides the generation of a response gives back all that was reserved for it."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.store import CreatedModels
from cpuserve.base.errors import EngineDead
from cpuserve.serving.threads import TurnThreads
from cpuserve.serving.work import CURRENT_WORK, RequestWork
from tests.api.test_api_created_limits import loader_of
from tests.api.test_api_work import BACKGROUND, CHAT, HI, RESPONSES, budgets, served
from tests.clients.test_batches import data_of, line
from tests.helpers.patience import PATIENCE_S, in_loop, until

MIB = 1 << 20


# --- the owner ---------------------------------------------------------------------------------


@in_loop
async def test_work_gives_everything_back_once_and_the_last_first():
    given, work = [], RequestWork()
    work.hold(lambda: given.append("first"))
    work.hold(lambda: 1 / 0)  # a part that fails takes no other with it
    work.hold(lambda: given.append("last"))
    task = asyncio.create_task(asyncio.sleep(0))
    work.continue_in(task)
    work.response_ended()
    assert not given
    await task
    await asyncio.sleep(0)
    assert given == ["last", "first"]
    assert work.ended
    work.hold(lambda: given.append("late"))
    assert given[2:] == ["late"]


@in_loop
async def test_a_thread_that_goes_on_after_its_request_delays_the_end_of_the_work():
    threads, go, work, given = TurnThreads(1, "of-a-test"), threading.Event(), RequestWork(), []
    work.hold(lambda: given.append(1))
    CURRENT_WORK.set(work)
    running = asyncio.create_task(threads.run(1, lambda: go.wait(PATIENCE_S)))
    waiting = asyncio.create_task(threads.run(1, lambda: None))
    await asyncio.sleep(0.01)
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait((running, waiting))
    work.response_ended()
    assert not given
    go.set()
    await until(lambda: given == [1])


# --- batches -----------------------------------------------------------------------------------


async def begun_batch(http, kind):
    """Start a batch of three lines; return the path to it."""
    if kind == "Anthropic":
        params = {"messages": HI, "max_tokens": 3, "model": "tiny"}
        requests = [{"custom_id": str(n), "params": params} for n in range(3)]
        answer = await http.post("/v1/messages/batches", json={"requests": requests})
        return f"/v1/messages/batches/{answer.json()['id']}"
    files = {"file": data_of(*(line(str(n)) for n in range(3)))}
    sent = await http.post("/v1/files", files=files, data={"purpose": "batch"})
    body = {"input_file_id": sent.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return f"/v1/batches/{(await http.post('/v1/batches', json=body)).json()['id']}"


@pytest.mark.parametrize("how", ["finished", "cancelled", "engine killed", "server stops"])
@pytest.mark.parametrize("kind", ["OpenAI", "Anthropic"])
@in_loop
async def test_batches_give_back_all_that_their_lines_had(tmp_path, monkeypatch, kind, how):
    monkeypatch.setattr("cpuserve.api.batches.line_runner._LONGEST_WAIT_S", 0.01)
    files = {"files_dir": str(tmp_path / "files")}
    async with served(tmp_path, "parallel=2 tpm=4000 rpm=100k", **files) as work:
        server, use, http, script = work
        path = await begun_batch(http, kind)
        await until(lambda: server.engine.running == 2)
        assert (await http.post(CHAT, json={"messages": HI})).status_code == 429
        assert use.running == 2, "the third line waits for a place"
        if how == "cancelled":
            assert (await http.post(f"{path}/cancel")).status_code == 200
        elif how == "engine killed":
            script.error = EngineDead("it was killed", ran=True)
            script.go.set()
            await until(lambda: len(server.engine.asked) > 3)
            script.error = None
        elif how == "finished":
            script.go.set()
        if how != "server stops":
            (record,) = server.state.batches._records.values()
            await until(lambda: record.ended and not budgets(server, use))
            assert not server.state.batches._slots._places._held
    assert not budgets(server, use)


# --- downloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_pull_keeps_its_place_and_its_bytes_until_its_thread_ends(
    tmp_path, monkeypatch, stream
):
    go, began = threading.Event(), threading.Event()

    def resolve(name, *, progress, local):
        progress("the model", 0, 800_000)
        began.set()
        assert go.wait(PATIENCE_S)
        progress("the model", 900_000, 900_000)  # fails if its client has left
        return tmp_path

    monkeypatch.setattr("cpuserve.loader.hub.resolve_model", resolve)
    async with served(tmp_path) as (server, use, http, _):
        directory = ModelDirectory(str(tmp_path / "models"), MIB, 4, server.state.callers)
        created = CreatedModels(directory, server.state.models, loader_of, {})
        server.state.created = created
        body = {"model": "owner/name", "stream": stream}
        pull = asyncio.create_task(http.post("/api/pull", json=body))
        await until(began.is_set)
        await until(lambda: directory._bytes.total == 800_000)
        pull.cancel()
        await asyncio.wait((pull,))
        await asyncio.sleep(0.2)  # whatever the server does when it notices
        assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 429
        assert (use.running, directory._bytes.total) == (1, 800_000)
        assert directory._creating
        go.set()
        await until(lambda: not budgets(server, use))
        assert (directory._bytes.total, directory._creating) == (0, [])
        assert not created.find("owner/name")
        directory.close()


# --- the end of the server ---------------------------------------------------------------------


@in_loop
async def test_background_responses_end_with_the_server_and_have_their_lines(tmp_path):
    audit = tmp_path / "audit.jsonl"
    async with served(tmp_path, audit=str(audit)) as (server, use, http, _):
        begun = (await http.post(RESPONSES, json=BACKGROUND)).json()
        await until(lambda: server.engine.running == 1)
        await server.state.end_background()
        assert not budgets(server, use)
        found = (await http.get(f"{RESPONSES}/{begun['id']}")).json()
        assert found["status"] == "cancelled"
    lines = [json.loads(text) for text in audit.read_text().splitlines()]
    assert [told["route"] for told in lines if told["method"] == "POST"] == [RESPONSES]
