"""Anthropic's client with batches of messages: whole flows, bad requests, restarts."""

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import httpx
import pytest

from cpuserve.api.batches.directory import FileDirectory
from cpuserve.api.batches.service import MESSAGE_BATCHES, BatchService
from tests.api.fakes import ANSWER, speak
from tests.api.live import live
from tests.helpers.patience import PATIENCE_S

HI = {"max_tokens": 30, "messages": [{"role": "user", "content": "hi"}], "model": "tiny"}


@asynccontextmanager
async def client_of(place, script=speak, **options):
    """A server with files in `place`, and Anthropic's client for it."""
    async with live(script, files_dir=str(place), **options) as server:
        url = f"http://127.0.0.1:{server.port}"
        key = options.get("api_key", ("none",))[0]
        client = anthropic.AsyncAnthropic(base_url=url, max_retries=0, api_key=key)
        async with client:
            yield server, client.messages.batches


def request(name, **params):
    return {"custom_id": name, "params": {**HI, **params}}


def three(engine, number, prompt, params):
    """The first three requests are answered; the others wait for ever."""
    if number >= 3:
        yield asyncio.Event()
    yield from speak(engine, number, prompt, params)


async def ended(batches, batch):
    while batch.processing_status != "ended":
        await asyncio.sleep(0.02)
        batch = await batches.retrieve(batch.id)
    return batch


async def results_of(batches, batch):
    return {each.custom_id: each.result async for each in await batches.results(batch.id)}


def test_a_batch_is_created_read_and_deleted(tmp_path):
    async def main():
        async with client_of(tmp_path) as (server, batches):
            made = await batches.create(requests=[
                request("good", system="Be kind."),
                request("cut", max_tokens=3),
                request("bad", temperature=-1),
                request("gone", model="other"),
                request("stream", stream=True),
            ])  # fmt: skip
            assert (made.processing_status, made.results_url) == ("in_progress", None)
            assert made.request_counts.processing == 5
            batch = await ended(batches, made)
            counts = batch.request_counts
            assert (counts.processing, counts.succeeded, counts.errored) == (0, 2, 3)
            assert batch.ended_at >= batch.created_at
            assert (
                batch.results_url
                == f"http://127.0.0.1:{server.port}{MESSAGE_BATCHES.path}/{batch.id}/results"
            )
            results = await results_of(batches, batch)
            assert {name: result.type for name, result in results.items()} == {
                "good": "succeeded", "cut": "succeeded", "bad": "errored", "gone": "errored",
                "stream": "errored",
            }  # fmt: skip
            assert results["good"].message.content[0].text == ANSWER
            assert results["cut"].message.stop_reason == "max_tokens"
            errors = {name: results[name].error.error for name in ("bad", "gone", "stream")}
            assert (errors["bad"].type, errors["gone"].type) == (
                "invalid_request_error", "not_found_error",
            )  # fmt: skip
            assert "temperature" in errors["bad"].message
            assert "stream" in errors["stream"].message
            assert min(server.engine.priorities) > 0
            deleted = await batches.delete(batch.id)
            assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
            with pytest.raises(anthropic.NotFoundError):
                await batches.retrieve(batch.id)
            assert [*tmp_path.glob("files/*"), *tmp_path.glob("batches/*")] == []

    asyncio.run(main())


def test_a_cancelled_batch_keeps_its_results_and_the_others_are_cancelled(tmp_path):
    async def main():
        async with client_of(tmp_path, three) as (_, batches):
            made = await batches.create(requests=[request(str(i)) for i in range(20)])
            waiting = await batches.create(requests=[request("x"), request("y")])
            directory = tmp_path / "files"
            while sum(p.read_bytes().count(b"batch_req") for p in directory.iterdir()) < 3:
                await asyncio.sleep(0.01)
            for work in (batches.delete(made.id), batches.results(made.id)):
                with pytest.raises(anthropic.AnthropicError):
                    await work
            # A batch that has not begun ends at once.
            assert (await batches.cancel(waiting.id)).processing_status == "ended"
            assert (await batches.cancel(made.id)).processing_status == "canceling"
            batch = await ended(batches, made)
            assert batch.cancel_initiated_at is not None
            counts = batch.request_counts
            assert (counts.succeeded, counts.canceled, counts.processing) == (3, 17, 0)
            results = await results_of(batches, batch)
            assert len(results) == 20
            kinds = [result.type for result in results.values()]
            assert (kinds.count("succeeded"), kinds.count("canceled")) == (3, 17)
            waited = await results_of(batches, waiting)
            assert {name: result.type for name, result in waited.items()} == {
                "x": "canceled", "y": "canceled",
            }  # fmt: skip
            with pytest.raises(anthropic.BadRequestError, match="cannot be cancelled"):
                await batches.cancel(batch.id)

    asyncio.run(main())


def test_a_batch_goes_on_after_a_restart_and_each_request_has_one_result(tmp_path):
    async def main():
        async with client_of(tmp_path, three) as (_, batches):
            made = await batches.create(requests=[request(str(i)) for i in range(12)])
            while sum(p.read_bytes().count(b"batch_req") for p in tmp_path.glob("files/*")) < 3:
                await asyncio.sleep(0.01)
        async with client_of(tmp_path) as (server, batches):
            batch = await ended(batches, await batches.retrieve(made.id))
            assert batch.request_counts.succeeded == 12
            assert len(server.engine.asked) == 9
            listed = [each async for each in await batches.results(batch.id)]
            assert sorted(int(each.custom_id) for each in listed) == list(range(12))
        async with client_of(tmp_path) as (_, batches):
            assert len(await results_of(batches, batch)) == 12

    asyncio.run(main())


def test_batches_are_listed_in_pages_and_belong_to_their_caller(tmp_path):
    async def main():
        async with client_of(tmp_path, api_key=("k1", "k2")) as (server, batches):
            made = [(await batches.create(requests=[request("a")])).id for _ in range(3)]
            assert {each.id async for each in batches.list(limit=2)} == set(made)
            page = await batches.list(limit=2)
            assert page.has_more
            before = await batches.list(before_id=page.data[1].id)
            assert [each.id for each in before.data] == [page.data[0].id]
            url = f"http://127.0.0.1:{server.port}"
            other = anthropic.AsyncAnthropic(base_url=url, max_retries=0, api_key="k2")
            async with other:
                assert (await other.messages.batches.list()).data == []
                for work in ("retrieve", "cancel", "delete", "results"):
                    with pytest.raises(anthropic.NotFoundError):
                        await getattr(other.messages.batches, work)(made[0])
            async with httpx.AsyncClient(
                headers={"authorization": "Bearer k1"}, timeout=PATIENCE_S
            ) as http:
                listed = (await http.get(f"{url}/v1/batches")).json()
                assert listed["data"] == [], "batches of files are others"
                assert (await http.get(f"{url}/v1/batches/{made[0]}")).status_code == 404
                assert (await http.get(f"{url}/v1/files")).json()["data"] == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([], "requests"),
        ([request("a"), request("a")], "requests.1.custom_id"),
        ([request("")], "custom_id"),
        ([request("a b")], "custom_id"),
        ([request("x" * 65)], "custom_id"),
        ([{"custom_id": "a"}], "params"),
        ([{"custom_id": "a", "params": []}], "params"),
        ("x", "requests"),
    ],
)
def test_a_bad_batch_is_refused_and_leaves_nothing(tmp_path, requests, named):
    async def main():
        async with (
            client_of(tmp_path) as (server, _),
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
        ):
            url = f"http://127.0.0.1:{server.port}{MESSAGE_BATCHES.path}"
            response = await http.post(url, json={"requests": requests})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert named in error["message"]
            assert [*tmp_path.glob("files/*"), *tmp_path.glob("batches/*")] == []

    asyncio.run(main())


def test_a_full_server_keeps_the_results_that_nobody_has_deleted(tmp_path):
    async def main():
        async with client_of(tmp_path, files_count=2) as (_, batches):
            made = [await batches.create(requests=[request("a")]) for _ in range(2)]
            for each in made:
                await ended(batches, each)
            with pytest.raises(anthropic.BadRequestError, match="delete one"):
                await batches.create(requests=[request("a")])
            await batches.delete(made[0].id)
            await batches.create(requests=[request("a")])
            assert len(await results_of(batches, made[1])) == 1

    asyncio.run(main())


def test_a_batch_that_failed_as_a_whole_says_why_in_each_result(tmp_path):
    async def main():
        async with client_of(tmp_path, files_bytes=500) as (_, batches):
            batch = await ended(
                batches, await batches.create(requests=[request("a"), request("b")])
            )
            assert batch.request_counts.errored == 2
            results = await results_of(batches, batch)
            assert {r.error.error.type for r in results.values()} == {"api_error"}
            assert all("--files-bytes" in r.error.error.message for r in results.values())

    asyncio.run(main())


def test_requests_that_were_not_reached_in_time_are_expired(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.api.batches.service.WINDOW_S", 0)

    async def main():
        async with client_of(tmp_path) as (_, batches):
            batch = await ended(batches, await batches.create(requests=[request("a")]))
            assert (batch.request_counts.expired, batch.request_counts.errored) == (1, 0)
            assert (await results_of(batches, batch))["a"].type == "expired"

    asyncio.run(main())


def test_a_batch_on_disk_needs_no_running_server(tmp_path):
    directory = FileDirectory(str(tmp_path), 10_000, 10)
    service = BatchService(directory, lambda: 1000)
    made = asyncio.run(service.create_of_lines(MESSAGE_BATCHES, "me", "/v1/messages", [b"{}\n"]))
    directory.close()
    again = BatchService(FileDirectory(str(tmp_path), 10_000, 10), lambda: 1000)
    assert again.find("me", made.batch.id, MESSAGE_BATCHES).batch == made.batch
    assert json.loads((tmp_path / "files" / f"{made.contents[0]}.data").read_text()) == {}
