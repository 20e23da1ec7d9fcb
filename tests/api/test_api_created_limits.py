"""Limits and owners of the models that clients create: blobs, pulls, counts, folders in use."""

import asyncio
import hashlib
import json
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.manifest import Manifest, key_of
from cpuserve.api.ollama.created.store import CreatedModels
from cpuserve.base.errors import InvalidRequest
from tests.api.live import live
from tests.helpers.patience import PATIENCE_S, until

MIB = 1 << 20


def digest(data):
    return hashlib.sha256(data).hexdigest()


def loader_of(name, *_):
    return SimpleNamespace(name=name, aliases=(), adapters={}, most_body_bytes=1000)


@asynccontextmanager
async def serving(place, *, keys=(), max_bytes=MIB, max_models=4):
    """A server that keeps models, and a client for it; the client sends the key of `headers`."""
    async with live(api_key=keys) as server:
        directory = ModelDirectory(str(place), max_bytes, max_models, KnownCallers(keys))
        models = server.state.models
        server.state.created = CreatedModels(directory, models, loader_of, {})
        try:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                http.model = models.names[0]
                yield directory, http
        finally:
            directory.close()


def by(key):
    return {"authorization": f"Bearer {key}"}


async def send(http, data, key="none"):
    path = f"/api/blobs/sha256:{digest(data)}"
    return await http.post(path, content=data, headers=by(key))


async def change(http, method, path, key, **body):
    body = {"stream": False, **body} if path == "/api/create" else body
    answer = await http.request(method, path, json=body, headers=by(key))
    return answer.status_code


def on_disk(place):
    return sum(path.stat().st_size for path in place.glob("blobs/*"))


def test_parallel_blobs_exceed_no_limit_of_bytes(tmp_path):
    async def main():
        async with serving(tmp_path) as (directory, http):
            blobs = [bytes([number]) * 900_000 for number in range(12)]
            answers = await asyncio.gather(*(send(http, data) for data in blobs))
            statuses = [answer.status_code for answer in answers]
            assert statuses.count(201) <= 1
            assert set(statuses) <= {201, 413}
            assert on_disk(tmp_path) <= MIB
            assert directory._bytes.total == on_disk(tmp_path)
            small = b"small"
            assert (await send(http, small)).status_code == 201
            assert (await send(http, small)).status_code == 201
            assert directory._bytes.total == on_disk(tmp_path), "the same blob counts once"

    asyncio.run(main())


def test_the_number_of_blobs_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.api.ollama.created.directory.MOST_FILES", 2)
    monkeypatch.setattr("cpuserve.api.ollama.created.directory._BLOBS_A_MODEL", 1)

    async def main():
        async with serving(tmp_path, max_models=1) as (_, http):
            answers = await asyncio.gather(*(send(http, b"%d" % number) for number in range(8)))
            assert [answer.status_code for answer in answers].count(201) == 3
            refused = [answer for answer in answers if answer.status_code == 400]
            assert len(refused) == 5
            assert "3 files of models" in refused[0].json()["error"]
            assert len(list(tmp_path.glob("blobs/*"))) == 3

    asyncio.run(main())


def test_a_pull_reserves_its_bytes_before_they_arrive(tmp_path, monkeypatch):
    go_on = threading.Event()

    def resolve(name, *, progress, local):
        progress("the model", 0, 800_000)
        go_on.wait()
        progress("the model", 800_000, 800_000)
        return tmp_path

    monkeypatch.setattr("cpuserve.loader.hub.resolve_model", resolve)

    async def main():
        async with serving(tmp_path) as (directory, http):
            pull = asyncio.create_task(
                http.post("/api/pull", json={"model": "owner/name", "stream": False})
            )
            await until(lambda: directory._bytes.total == 800_000)
            assert (await send(http, b"x" * 500_000)).status_code == 413
            go_on.set()
            answer = await pull
            assert answer.json()["status"] == "success"
            assert directory._bytes.total == directory.manifests["owner/name"].size == 800_000
            assert (await send(http, b"x" * 100_000)).status_code == 201

    asyncio.run(main())


def test_a_model_is_pulled_while_another_caller_pulls_large_ones(tmp_path, monkeypatch):
    go_on, asked = threading.Event(), []

    def resolve(name, *, progress, local):
        asked.append(name)
        progress("the model", 0, 8)
        assert name.startswith("small/") or go_on.wait(PATIENCE_S)
        return tmp_path

    monkeypatch.setattr("cpuserve.loader.hub.resolve_model", resolve)

    async def main():
        async with serving(tmp_path, keys=("one", "two")) as (_, http):

            def pull(key, name):
                body = {"model": name, "stream": False}
                return asyncio.create_task(http.post("/api/pull", json=body, headers=by(key)))

            large = [pull("one", f"large/{number}") for number in range(2)]
            await until(lambda: asked)
            assert (await pull("two", "small/a")).json()["status"] == "success"
            assert len(asked) == 2, "the second large one waits for the first"
            go_on.set()
            assert [each.json()["status"] for each in await asyncio.gather(*large)] == [
                "success", "success"
            ]  # fmt: skip

    asyncio.run(main())


def test_models_that_are_being_created_count(tmp_path):
    directory = ModelDirectory(str(tmp_path), MIB, 2)
    with directory.creating(Manifest(name="a")), directory.creating(Manifest(name="b")):
        with pytest.raises(InvalidRequest, match="--models-count"):
            directory.check_room("c", "")
        directory.check_room("a", "")
    directory.check_room("c", "")
    directory.close()


def test_a_model_belongs_to_its_key_wherever_the_key_is(tmp_path):
    async def main():
        async with serving(tmp_path, keys=("one", "two")) as (_, http):
            ask = {"from": http.model, "system": "mine"}
            assert await change(http, "POST", "/api/create", "one", model="a", **ask) == 200
            for method, path, body in (
                ("POST", "/api/create", {"model": "a", "from": http.model}),
                ("POST", "/api/copy", {"source": http.model, "destination": "a"}),
                ("POST", "/api/pull", {"model": "a", "stream": False}),
                ("DELETE", "/api/delete", {"model": "a"}),
            ):
                status = await change(http, method, path, "two", **body)
                # A pull of a model that is served succeeds at once and changes nothing.
                assert status == (200 if path == "/api/pull" else 403), path
            copied = {"source": "a", "destination": "b"}
            assert await change(http, "POST", "/api/copy", "two", **copied) == 200
            assert await change(http, "DELETE", "/api/delete", "one", model="b") == 403
        async with serving(tmp_path, keys=("two", "one")) as (_, http):
            assert await change(http, "DELETE", "/api/delete", "two", model="a") == 403
            assert await change(http, "DELETE", "/api/delete", "two", model="b") == 200
            assert await change(http, "DELETE", "/api/delete", "one", model="a") == 200

    asyncio.run(main())


@pytest.mark.parametrize(("owner", "status"), [(None, 200), ("10.0.0.1", 200), ("key-ab", 403)])
def test_models_whose_owner_is_no_key_can_be_changed_by_all(tmp_path, owner, status):
    async def main():
        async with serving(tmp_path, keys=("one",)) as (_, http):
            ask = {"model": "a", "from": http.model}
            assert await change(http, "POST", "/api/create", "one", **ask) == 200
        (path,) = tmp_path.glob("models/*.json")
        record = json.loads(path.read_bytes())
        assert record.pop("owner").startswith("key-")
        path.write_text(json.dumps(record if owner is None else record | {"owner": owner}))
        async with serving(tmp_path, keys=("one",)) as (_, http):
            assert await change(http, "DELETE", "/api/delete", "one", model="a") == status

    asyncio.run(main())


def test_the_files_of_a_model_that_is_being_created_stay(tmp_path, monkeypatch):
    """Another model is deleted while the new one is checked, which drops what nobody uses."""

    async def main():
        async with serving(tmp_path) as (directory, http):
            data = b"weights"
            assert (await send(http, data)).status_code == 201
            files = {"model.gguf": digest(data)}
            other = {"model": "other", "from": http.model}
            assert await change(http, "POST", "/api/create", "none", **other) == 200
            checking, go_on = threading.Event(), threading.Event()

            def check(self, made):
                self.directory.folder(made.files)
                checking.set()
                go_on.wait()

            monkeypatch.setattr(CreatedModels, "_check_files", check)
            sent = {"model": "new", "files": {"model.gguf": f"sha256:{digest(data)}"}}
            making = asyncio.create_task(change(http, "POST", "/api/create", "none", **sent))
            await until(checking.is_set)
            assert await change(http, "DELETE", "/api/delete", "none", model="other") == 200
            directory.drop_unused(older_than_s=0)
            folder = tmp_path / "weights" / key_of(files)
            assert (folder / "model.gguf").read_bytes() == data
            go_on.set()
            assert await making == 200
            assert (folder / "model.gguf").read_bytes() == data
            assert await change(http, "DELETE", "/api/delete", "none", model="new") == 200
            assert not folder.exists()
            assert directory._bytes.total == on_disk(tmp_path) == 0

    asyncio.run(main())
