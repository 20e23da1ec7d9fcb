"""Limits on stored files and batches: reserved first, with shares; keys identify the owners."""

import asyncio
import hashlib
import json
import random
from pathlib import Path

import httpx
import pytest

from cpuserve.api.callers.key_file import owner_of
from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.store import CreatedModels
from cpuserve.api.stored.quota import Quota
from tests.api.live import live
from tests.clients.test_batches import CHAT, data_of, line

MIB = 1 << 20


@pytest.mark.parametrize("num_keys", [1, 2, 7])
def test_each_key_can_always_have_its_share_and_no_limit_is_exceeded(num_keys):
    keys = [f"key{number}" for number in range(num_keys)]
    chance = random.Random(num_keys)
    for _ in range(50):
        quota, held = Quota(1000, lambda: keys), dict.fromkeys(keys, 0)
        for _ in range(100):
            key, amount = chance.choice(keys), chance.randrange(400)
            if chance.random() < 0.3:
                quota.add(key, -held[key])
                held[key] = 0
            elif quota.take(key, amount):
                held[key] += amount
            assert quota.total == sum(held.values()) <= 1000
            share = 1000 // (2 * num_keys)
            assert all(quota.room(k) >= share - held[k] for k in keys)


def test_one_key_can_have_the_whole_limit_and_an_address_leaves_room_for_another():
    assert Quota(1600, lambda: ["key"]).room("key") == 1600
    quota = Quota(1600)
    assert quota.take("10.0.0.1", quota.room("10.0.0.1"))
    assert quota.room("10.0.0.2") == 100


async def upload(http, data, key="none"):
    """Upload a file; return the status, and the id or the error."""
    answer = await http.post(
        "/v1/files",
        files={"file": ("a.jsonl", data)},
        data={"purpose": "batch"},
        headers={"authorization": f"Bearer {key}"},
    )
    body = answer.json()
    return answer.status_code, body.get("id") or body["error"]["message"]


def on_disk(place):
    return sum(path.stat().st_size for path in place.glob("files/*.data"))


def test_parallel_uploads_exceed_no_limit_of_bytes(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path), files_bytes=MIB, api_key=("k",)) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                answers = await asyncio.gather(
                    *(upload(http, b"x" * 900_000, "k") for _ in range(12))
                )
            assert [status for status, _ in answers].count(200) <= 1
            assert {status for status, _ in answers} <= {200, 413}
            assert all("--files-bytes" in told for status, told in answers if status == 413)
            assert on_disk(tmp_path) <= MIB
            assert server.state.batches.directory.used_bytes() == on_disk(tmp_path)

    asyncio.run(main())


def test_parallel_uploads_exceed_no_limit_of_files(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path), files_count=3) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                answers = await asyncio.gather(*(upload(http, b"x" * 70_000) for _ in range(12)))
            assert [status for status, _ in answers].count(200) == 3
            assert all("--files-count" in told for status, told in answers if status == 400)
            assert len(list(tmp_path.glob("files/*.data"))) == 3

    asyncio.run(main())


def test_a_full_share_of_one_key_leaves_the_share_of_the_other(tmp_path):
    async def main():
        options = {"files_dir": str(tmp_path), "files_bytes": MIB, "files_count": 8}
        async with live(**options, api_key=("one", "two")) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                assert (await upload(http, b"x" * 700_000, "one"))[0] == 200
                assert (await upload(http, b"x" * 100_000, "one"))[0] == 413
                for _ in range(5):
                    assert (await upload(http, b"x", "one"))[0] == 200
                status, told = await upload(http, b"x", "one")
                assert (status, "--files-count" in told) == (400, True)
                assert (await upload(http, b"x" * 200_000, "two"))[0] == 200
                assert (await upload(http, b"x", "two"))[0] == 200

    asyncio.run(main())


def test_room_comes_back_when_files_and_batches_are_deleted(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path), files_bytes=MIB) as server:
            directory = server.state.batches.directory
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                _, sent = await upload(http, "\n".join([line("a"), line("b")]).encode())
                ask = {"input_file_id": sent, "endpoint": CHAT, "completion_window": "24h"}
                batch = (await http.post("/v1/batches", json=ask)).json()
                while batch["status"] != "completed":
                    await asyncio.sleep(0.02)
                    batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
                assert directory.used_bytes() == on_disk(tmp_path) > 0
                for name in (sent, batch["output_file_id"]):
                    assert (await http.delete(f"/v1/files/{name}")).status_code == 200
                assert (await upload(http, b"\xff" * 10))[0] == 400
                assert directory.used_bytes() == on_disk(tmp_path) == 0

    asyncio.run(main())


def test_nothing_is_kept_of_a_batch_that_failed_except_its_record(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path)) as server:
            directory = server.state.batches.directory
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                _, sent = await upload(http, "\n".join([line("a"), line("a")]).encode())
                ask = {"input_file_id": sent, "endpoint": CHAT, "completion_window": "24h"}
                batch = (await http.post("/v1/batches", json=ask)).json()
                while batch["status"] != "failed":
                    await asyncio.sleep(0.02)
                    batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
                assert list(directory._contents) == [sent]

    asyncio.run(main())


async def listed(place, keys, key):
    """The ids of the files that `key` sees on a server with `keys`."""
    async with live(files_dir=str(place), api_key=keys) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            allow = {"authorization": f"Bearer {key}"}
            files = (await http.get("/v1/files", headers=allow)).json()["data"]
            batches = (await http.get("/v1/batches", headers=allow)).json()["data"]
            return [entry["id"] for entry in files], [entry["id"] for entry in batches]


async def create(server, key):
    """Upload a file and create a batch of it; return their ids."""
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        allow = {"authorization": f"Bearer {key}"}
        _, sent = await upload(http, data_of(line("a"))[1], key)
        ask = {"input_file_id": sent, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=ask, headers=allow)).json()
        while batch["status"] != "completed":
            await asyncio.sleep(0.02)
            batch = (await http.get(f"/v1/batches/{batch['id']}", headers=allow)).json()
        return sent, batch["id"], batch["output_file_id"]


def test_files_and_batches_stay_with_their_key_when_keys_move(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path), api_key=("one", "two")) as server:
            sent, batch, output = await create(server, "one")
            # Logs and metrics go on naming the key by its place.
            assert {params.caller for _, params in server.engine.asked} == {"key-1"}
        for keys in (("two", "one"), ("new", "two", "one"), ("one",)):
            files, batches = await listed(tmp_path, keys, "one")
            assert (sorted(files), batches) == (sorted([sent, output]), [batch])
        assert await listed(tmp_path, ("two", "one"), "two") == ([], [])
        assert await listed(tmp_path, ("two",), "two") == ([], [])
        assert b"one" not in b"".join(path.read_bytes() for path in tmp_path.glob("*/*.json"))

    asyncio.run(main())


def test_records_of_the_place_of_a_key_go_to_the_key_that_has_it_at_the_next_start(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path), api_key=("one", "two")) as server:
            sent, batch, output = await create(server, "one")
        for path in tmp_path.glob("*/*.json"):
            record = json.loads(path.read_bytes())
            assert record["caller"] == owner_of("one")
            path.write_text(json.dumps(record | {"caller": "key-1"}))
        files, batches = await listed(tmp_path, ("one", "two"), "one")
        assert (sorted(files), batches) == (sorted([sent, output]), [batch])
        # From then on, the order of the keys has no meaning.
        assert await listed(tmp_path, ("two", "one"), "two") == ([], [])
        assert (await listed(tmp_path, ("two", "one"), "one"))[1] == [batch]

    asyncio.run(main())


def test_no_result_of_a_batch_and_no_blob_scans_a_directory(tmp_path, monkeypatch):
    """With 3000 files, a scan for each result took 2 s of the event loop for a small batch."""
    scans = []

    async def main():
        async with live(files_dir=str(tmp_path / "files")) as server:
            models = ModelDirectory(str(tmp_path / "models"), MIB, 10)
            server.state.created = CreatedModels(models, server.state.models, None, {})
            for name in ("glob", "iterdir"):
                real = getattr(Path, name)
                monkeypatch.setattr(
                    Path, name, lambda *args, real=real: scans.append(args) or real(*args)
                )
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                _, sent = await upload(http, "\n".join(map(line, "abcdefghij")).encode())
                ask = {"input_file_id": sent, "endpoint": CHAT, "completion_window": "24h"}
                batch = (await http.post("/v1/batches", json=ask)).json()
                while batch["status"] != "completed":
                    await asyncio.sleep(0.02)
                    batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
                assert batch["request_counts"]["completed"] == 10
                digest = hashlib.sha256(b"x").hexdigest()
                blob = await http.post(f"/api/blobs/sha256:{digest}", content=b"x")
                assert blob.status_code == 201

    asyncio.run(main())
    assert not [path for path, *_ in scans if tmp_path in path.parents]
