"""OpenAI's client with files and batches: whole flows, broken files, a server that is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from cpuserve.api.batches.directory import FileDirectory
from cpuserve.base.errors import ConfigError
from tests.api.fakes import ANSWER, speak
from tests.api.faulty import FAULTY
from tests.api.live import live
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.ports import reserve_port
from tests.helpers.tiny import tiny_model

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def client_of(place, script=speak, **options):
    """A server with files in `place`, and OpenAI's client for it."""
    async with live(script, files_dir=str(place), **options) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        key = {"api_key": options.get("api_key", ("none",))[0]}
        client = openai.AsyncOpenAI(base_url=url, max_retries=0, **key)
        async with client:
            yield server, client


def line(name, url=CHAT, **body):
    body = body or {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def data_of(*lines):
    return ("lines.jsonl", "\n".join(lines).encode() + b"\n")


async def ended(client, batch):
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def run_batch(client, *lines, endpoint=CHAT):
    sent = await client.files.create(file=data_of(*lines), purpose="batch")
    made = await client.batches.create(
        input_file_id=sent.id, endpoint=endpoint, completion_window="24h"
    )
    return await ended(client, made)


async def results_of(client, file_id):
    text = (await client.files.content(file_id)).text
    return [json.loads(each) for each in text.splitlines()]


def test_files_are_uploaded_listed_read_and_deleted(tmp_path):
    async def main():
        async with client_of(tmp_path) as (_, client):
            made = await client.files.create(file=data_of("{}"), purpose="batch")
            assert (made.filename, made.bytes, made.purpose) == ("lines.jsonl", 3, "batch")
            other = await client.files.create(file=data_of("{}", "{}"), purpose="batch")
            assert [f.id async for f in client.files.list(limit=1)] == [other.id, made.id]
            assert await client.files.retrieve(made.id) == made
            assert (await client.files.content(made.id)).content == b"{}\n"
            assert (await client.files.delete(made.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.content(made.id)
            assert len(list(tmp_path.glob("files/*.data"))) == 1

    asyncio.run(main())


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_web_page_uploads_no_file(tmp_path, header):
    async def main():
        async with client_of(tmp_path) as (_, client):
            with pytest.raises(openai.APIStatusError, match="any web page could") as error:
                await client.files.create(
                    file=data_of("{}"), purpose="batch", extra_headers={header: "null"}
                )
            assert error.value.status_code == 415
            assert [f async for f in client.files.list()] == []

    asyncio.run(main())


def test_a_batch_runs_each_line_and_a_broken_one_fails_alone(tmp_path):
    async def main():
        async with client_of(tmp_path) as (server, client):
            lines = [
                line("good"),
                "{broken",
                line("bad value", messages=[], temperature=-1),
                line("stream", messages=[{"role": "user", "content": "x"}], stream=True),
                line("other url", url="/v1/completions"),
                "",
                line("last"),
            ]
            batch = await run_batch(client, *lines)
            assert batch.status == "completed"
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (6, 2, 4)
            good = {r["custom_id"]: r for r in await results_of(client, batch.output_file_id)}
            assert set(good) == {"good", "last"}  # in the order in which they ended
            for result in good.values():
                body = result["response"]["body"]
                assert body["choices"][0]["message"]["content"] == ANSWER
                assert (result["response"]["status_code"], result["error"]) == (200, None)
            bad = {r["custom_id"]: r for r in await results_of(client, batch.error_file_id)}
            assert set(bad) == {None, "bad value", "stream", "other url"}
            assert bad[None]["error"]["code"] == "invalid_json_line"
            assert bad["bad value"]["response"]["status_code"] == 400
            assert bad["stream"]["error"]["param"] == "body.stream"
            assert bad["other url"]["error"]["code"] == "invalid_url"
            assert min(server.engine.priorities) > 0
            await server.is_sane()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "hi", "max_tokens": 40}), ("/v1/responses", {"input": "hi"})],
)
def test_lines_of_other_endpoints_run(tmp_path, url, body):
    async def main():
        async with client_of(tmp_path) as (server, client):
            batch = await run_batch(client, line("a", url=url, **body), endpoint=url)
            (result,) = await results_of(client, batch.output_file_id)
            assert ANSWER in json.dumps(result["response"]["body"], ensure_ascii=False)
            assert len(server.state.stored) == 0

    asyncio.run(main())


def test_a_batch_is_cancelled_and_keeps_its_results(tmp_path):
    def script(engine, number, prompt, params):
        if number:
            yield asyncio.Event()
        yield from speak(engine, number, prompt, params)

    async def main():
        async with client_of(tmp_path, script) as (_, client):
            lines = [line(str(i)) for i in range(20)]
            sent = await client.files.create(file=data_of(*lines), purpose="batch")
            made = await client.batches.create(
                input_file_id=sent.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
            )
            while made.request_counts.completed == 0:
                await asyncio.sleep(0.01)
                made = await client.batches.retrieve(made.id)
            with pytest.raises(openai.BadRequestError, match="not ended"):
                await client.files.delete(sent.id)
            assert (await client.batches.cancel(made.id)).status == "cancelling"
            batch = await ended(client, made)
            assert (batch.status, batch.metadata) == ("cancelled", {"a": "b"})
            assert len(await results_of(client, batch.output_file_id)) == 1
            with pytest.raises(openai.BadRequestError, match="is cancelled"):
                await client.batches.cancel(made.id)
            assert [b.id async for b in client.batches.list()] == [made.id]

    asyncio.run(main())


def test_a_file_that_cannot_run_fails_its_batch_with_the_reason(tmp_path):
    async def main():
        async with client_of(tmp_path) as (server, client):
            batch = await run_batch(client, line("a"), line("b"), line("a"))
            (error,) = batch.errors.data
            assert (batch.status, error.code, error.line) == ("failed", "duplicate_custom_id", 3)
            batch = await run_batch(client, "")
            assert batch.errors.data[0].code == "empty_file"
            assert server.engine.asked == []

    asyncio.run(main())


def test_bad_uploads_are_refused_and_leave_nothing(tmp_path):
    async def main():
        async with client_of(tmp_path, files_bytes=2000, files_count=2) as (server, client):
            with pytest.raises(openai.BadRequestError, match="not UTF-8"):
                await client.files.create(file=("a", b"\xff\xfe{"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await client.files.create(file=("a", b"{}"), purpose="fine-tune")
            with pytest.raises(openai.APIStatusError) as refused:
                await client.files.create(file=("a", b"x" * 4000), purpose="batch")
            assert refused.value.status_code == 413
            url = f"http://127.0.0.1:{server.port}/v1/files"
            async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
                kind = {"content-type": "multipart/form-data; boundary=b"}
                empty = b"--b\r\n\r\n\r\n"
                for body in (b"--b\r\n", b"nonsense", b"", 17 * empty + b"--b--\r\n", 99 * empty):
                    answer = await http.post(url, content=body, headers=kind)
                    assert answer.status_code == 400, answer.text
                assert "too many" in answer.json()["error"]["message"]
                long = {"content-type": f"multipart/form-data; boundary={'b' * 257}"}
                answer = await http.post(url, content=b"--b--", headers=long)
                assert answer.status_code == 400
                assert "Boundary" in answer.json()["error"]["message"]
                answer = await http.post(url, json={"file": "x"})
                assert answer.status_code == 415
                answer = await http.post(
                    url, content=b"x", headers={**kind, "content-encoding": "gzip"}
                )
                assert answer.status_code == 415
            assert list(tmp_path.glob("files/*")) == []
            for _ in range(2):
                await client.files.create(file=("a", b"{}"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="--files-count"):
                await client.files.create(file=("a", b"{}"), purpose="batch")

    asyncio.run(main())


def test_files_and_batches_belong_to_their_caller(tmp_path):
    async def main():
        async with client_of(tmp_path, api_key=("k1", "k2")) as (_, client):
            batch = await run_batch(client, line("a"))
            other = client.with_options(api_key="k2")
            for work in (
                other.files.retrieve(batch.input_file_id),
                other.files.delete(batch.output_file_id),
                other.batches.retrieve(batch.id),
                other.batches.cancel(batch.id),
                other.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await work
            assert (await other.files.list()).data == []

    asyncio.run(main())


def test_a_batch_does_not_wait_for_the_batches_of_another_caller(tmp_path):
    opened = asyncio.Event()

    def script(engine, number, prompt, params):
        if params.caller == "key-1":
            yield opened
        yield from speak(engine, number, prompt, params)

    async def main():
        async with client_of(tmp_path, script, api_key=("k1", "k2")) as (_, client):
            lines = [line(str(number)) for number in range(6)]
            sent = await client.files.create(file=data_of(*lines), purpose="batch")
            options = {"input_file_id": sent.id, "endpoint": CHAT, "completion_window": "24h"}
            first = await client.batches.create(**options)
            second = await client.batches.create(**options)
            other = client.with_options(api_key="k2")
            batch = await run_batch(other, line("a"))
            assert batch.request_counts.completed == 1
            first = await client.batches.retrieve(first.id)
            assert (first.status, first.request_counts.completed) == ("in_progress", 0)
            assert (await client.batches.retrieve(second.id)).status == "validating"
            opened.set()
            for one in (first, second):
                assert (await ended(client, one)).request_counts.completed == 6

    asyncio.run(main())


def test_without_a_directory_the_error_names_the_option():
    async def main():
        async with live() as server:
            client = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
            )
            async with client:
                with pytest.raises(openai.NotFoundError, match="--files-dir"):
                    await client.files.create(file=("a", b"{}"), purpose="batch")

    asyncio.run(main())


def test_one_server_at_a_time_uses_a_directory_and_links_are_not_followed(tmp_path):
    directory = FileDirectory(str(tmp_path / "d"), 1000, 10)
    with pytest.raises(ConfigError, match="another server uses"):
        FileDirectory(str(tmp_path / "d"), 1000, 10)
    directory.close()
    FileDirectory(str(tmp_path / "d"), 1000, 10).close()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        FileDirectory(str(tmp_path / "link"), 1000, 10)


def start(port, place, fault=""):
    command = [sys.executable, "-m", "cpuserve", "serve", str(tiny_model("llama"))]
    command += ["--port", str(port), "--files-dir", str(place), "--max-model-len", "64"]
    command += ["--served-model-name", "tiny"]
    options = child_options(CPUSERVE_FAULT=fault)
    options["env"]["PYTHONPATH"] = os.pathsep.join([FAULTY, options["env"]["PYTHONPATH"]])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet, **options)
    try:
        wait_until(lambda: is_ready(port), "the server did not start", poll_s=0.05)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def is_ready(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.deep
def test_a_killed_server_runs_the_rest_of_a_batch_once(tmp_path):
    port, held = reserve_port()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    url = "/v1/completions"
    lines = [line(str(i), url=url, **body) for i in range(199)] + ["{broken"]
    # It is killed before a write: a kill by this process might come when all lines have ended.
    server = start(port, tmp_path, "content.write:60:kill")
    try:
        sent = client.files.create(file=data_of(*lines), purpose="batch")
        made = client.batches.create(input_file_id=sent.id, endpoint=url, completion_window="24h")
        assert server.wait(PATIENCE_S) == -signal.SIGKILL
        (output,) = (p for p in tmp_path.glob("files/*.data") if b"batch_req" in p.read_bytes())
        assert 20 <= output.read_bytes().count(b"\n") < 199, "the batch was not interrupted"
        with output.open("ab") as torn:
            torn.write(b'{"id":"batch_req_')
        server = start(port, tmp_path)
        while (batch := client.batches.retrieve(made.id)).status in ("in_progress", "finalizing"):
            time.sleep(0.05)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", 199, 1)
        results = [json.loads(each) for each in client.files.content(
            batch.output_file_id).text.splitlines()]  # fmt: skip
        assert sorted(int(each["custom_id"]) for each in results) == list(range(199))
        texts = {each["response"]["body"]["choices"][0]["text"] for each in results}
        assert len(texts) == 1, "each line has the same prompt"
        errors = client.files.content(batch.error_file_id).text.splitlines()
        assert len(errors) == 1
    finally:
        client.close()
        server.kill()
        server.wait()
        held.close()
