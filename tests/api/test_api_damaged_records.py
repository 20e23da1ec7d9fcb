"""Damaged records in the directories of clients' data are logged and left out, and lose nothing."""

import asyncio
import json
import threading

import httpx
import pytest

from cpuserve.api.batches.directory import FileDirectory, UploadFacts
from cpuserve.api.batches.service import BatchService
from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.manifest import Manifest
from tests.api.live import live
from tests.api.test_api_quotas import create
from tests.helpers.patience import PATIENCE_S
from tests.helpers.special_files import replace_with

DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b"\x00" * 100,
    b"[" * 5000,
    b'{"caller": 1}',
    b'{"name": [], "batch": {}, "file": {}}',
]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_server_starts_beside_damaged_records_and_keeps_all_contents(tmp_path, caplog, data):
    async def main():
        async with live(files_dir=str(tmp_path), api_key=("k",)) as server:
            sent, batch, output = await create(server, "k")
        contents = {path.name: path.read_bytes() for path in tmp_path.glob("files/*.data")}
        (tmp_path / "files" / f"{sent}.json").write_bytes(data)
        (tmp_path / "batches" / "batch_other.json").write_bytes(data)
        async with live(files_dir=str(tmp_path), api_key=("k",)) as server:
            url = f"http://127.0.0.1:{server.port}"
            headers = {"authorization": "Bearer k"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as http:
                listed = (await http.get("/v1/files")).json()["data"]
                assert [entry["id"] for entry in listed] == [output]
                assert (await http.get(f"/v1/batches/{batch}")).json()["status"] == "completed"
                assert (await http.get(f"/v1/files/{sent}")).status_code == 404
        assert contents == {path.name: path.read_bytes() for path in tmp_path.glob("files/*.data")}
        assert (tmp_path / "files" / f"{sent}.json").read_bytes() == data

    asyncio.run(main())
    for name in ("files/", "batches/batch_other.json"):
        assert any(
            name in record.message and "is damaged and left out" in record.message
            for record in caplog.records
        ), name


def test_a_description_of_another_file_is_damaged(tmp_path):
    directory = FileDirectory(str(tmp_path), 1000, 10)
    made = directory.begin("me")
    directory.path_of(made).write_bytes(b"")
    described = asyncio.run(directory.add("me", made, UploadFacts("a", "batch")))
    directory.close()
    path = tmp_path / "files" / f"{made}.json"
    record = json.loads(path.read_bytes())
    record["file"]["id"] = "../../etc/passwd"
    path.write_text(json.dumps(record))
    directory = FileDirectory(str(tmp_path), 1000, 10)
    assert directory.files("me") == []
    BatchService(directory, lambda: 1000)
    assert directory.path_of(described.id).exists()
    directory.close()


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "link"])
def test_what_is_no_record_is_neither_waited_for_nor_read(tmp_path, caplog, kind):
    for folder in ("files", "batches"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "x.json"
        path.write_text("{}")
        replace_with(path, kind)
    started = []

    def start():
        directory = FileDirectory(str(tmp_path), 1000, 10)
        BatchService(directory, lambda: 1000)
        started.append(directory)

    starter = threading.Thread(target=start, daemon=True)
    starter.start()
    starter.join(PATIENCE_S)
    (directory,) = started
    directory.close()
    assert caplog.text.count("is damaged and left out") == 2


def test_a_folder_with_the_name_of_a_record_is_damaged(tmp_path, caplog):
    for folder in ("files", "batches"):
        (tmp_path / folder / "x.json").mkdir(parents=True)
    directory = FileDirectory(str(tmp_path), 1000, 10)
    BatchService(directory, lambda: 1000)
    directory.close()
    assert caplog.text.count("is damaged and left out") == 2


@pytest.mark.parametrize("data", DAMAGED)
def test_the_files_of_a_model_with_a_damaged_manifest_stay(tmp_path, caplog, data):
    directory = ModelDirectory(str(tmp_path), 1000, 10)
    digest = "a" * 64
    (tmp_path / "blobs" / f"sha256-{digest}").write_bytes(b"x")
    made = Manifest(name="a", files={"model.gguf": digest})
    folder = directory.folder(made.files)
    directory.save(made)
    directory.save(Manifest(name="b"))
    directory.close()
    (path,) = (p for p in tmp_path.glob("models/*.json") if b"gguf" in p.read_bytes())
    path.write_bytes(data)
    directory = ModelDirectory(str(tmp_path), 1000, 10)
    assert set(directory.manifests) == {"b"}
    directory.remove("b")
    directory.drop_unused(older_than_s=0)
    assert (folder / "model.gguf").read_bytes() == b"x"
    directory.close()
    assert "is damaged and left out" in caplog.text


def test_a_directory_below_the_home_directory_needs_no_shell(tmp_path, monkeypatch):
    """A file of options and a unit of systemd do not replace ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = FileDirectory("~/batches", 1000, 10)
    assert (tmp_path / "batches" / "files").is_dir()
    directory.close()
