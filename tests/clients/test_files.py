"""The clients of OpenAI and Anthropic with files: both halves of each, parts, owners, limits."""

import asyncio
import hashlib
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest

from cpuserve.api.batches import part_uploads
from tests.api.live import live
from tests.clients.test_batches import client_of, ended, line

PDF = b"%PDF-1.4\n\xff\xfe\n"
PURPOSES = ["user_data", "vision", "assistants", "batch"]
MIB = 1 << 20


def of_anthropic(server, key="none", kind=anthropic.AsyncAnthropic):
    url = f"http://127.0.0.1:{server.port}"
    return kind(base_url=url, max_retries=0, api_key=key)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_file_is_stored_for_each_purpose_and_comes_back_whole(tmp_path, purpose):
    data = b"{}\n" if purpose == "batch" else PDF

    async def main():
        async with client_of(tmp_path) as (_, client):
            made = await client.files.create(file=("a.pdf", data), purpose=purpose)
            assert (made.bytes, made.purpose, made.expires_at) == (len(data), purpose, None)
            assert (await client.files.content(made.id)).content == data
            assert [each.id async for each in client.files.list(purpose=purpose)] == [made.id]
            assert [each.id async for each in client.files.list(purpose="evals")] == []

    asyncio.run(main())


def test_openais_blocking_client_has_the_same_files(tmp_path):
    async def main():
        async with client_of(tmp_path) as (server, client):
            url = f"http://127.0.0.1:{server.port}/v1"

            def blocking():
                with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as other:
                    path = tmp_path / "notes.md"
                    path.write_bytes(b"# Notes\n")
                    made = other.files.create(file=path, purpose="user_data")
                    assert other.files.wait_for_processing(made.id).status == "processed"
                    part = other.uploads.upload_file_chunked(
                        file=path, mime_type="text/markdown", purpose="user_data", part_size=3
                    )
                    assert part.status == "completed"
                    assert other.files.content(part.file.id).read() == b"# Notes\n"
                    return {made.id, part.file.id}

            ids = await asyncio.to_thread(blocking)
            assert {each.id async for each in client.files.list()} == ids

    asyncio.run(main())


def test_the_purpose_is_checked_before_the_encoding(tmp_path):
    async def main():
        async with client_of(tmp_path) as (_, client):
            for purpose, named in (("fine-tune", "purpose"), ("batch", "UTF-8")):
                with pytest.raises(openai.BadRequestError, match=named):
                    await client.files.create(file=("a", b"\xff\xfe{"), purpose=purpose)
            with pytest.raises(openai.BadRequestError, match="trains"):
                await client.files.create(file=("a", b"{}"), purpose="evals")
            assert list(tmp_path.glob("files/*")) == []

    asyncio.run(main())


def test_a_batch_file_with_a_byte_order_mark_is_read(tmp_path):
    async def main():
        async with client_of(tmp_path) as (_, client):
            data = b"\xef\xbb\xbf" + line("a").encode() + b"\n" + line("b").encode()
            sent = await client.files.create(file=("a.jsonl", data), purpose="batch")
            batch = await ended(client, await client.batches.create(
                input_file_id=sent.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                output_expires_after={"anchor": "created_at", "seconds": 7200},
            ))  # fmt: skip
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 0)
            output = await client.files.retrieve(batch.output_file_id)
            assert output.expires_at == output.created_at + 7200

    asyncio.run(main())


def test_a_batch_reads_no_file_of_another_purpose(tmp_path):
    async def main():
        async with client_of(tmp_path) as (_, client):
            sent = await client.files.create(file=("a.jsonl", line("a").encode()), purpose="vision")
            with pytest.raises(openai.BadRequestError, match="purpose batch"):
                await client.batches.create(
                    input_file_id=sent.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )

    asyncio.run(main())


@pytest.mark.parametrize("half", ["files", "beta"])
def test_anthropics_client_uploads_lists_reads_and_deletes(tmp_path, half):
    async def main():
        async with live(files_dir=str(tmp_path)) as server, of_anthropic(server) as client:
            files = client.files if half == "files" else client.beta.files
            betas = {} if half == "files" else {"betas": ["files-api-2025-04-14"]}
            made = await files.upload(file=("plan.pdf", PDF, "application/pdf"), **betas)
            assert (made.type, made.mime_type, made.filename) == (
                "file", "application/pdf", "plan.pdf",
            )  # fmt: skip
            assert (made.size_bytes, made.downloadable, made.expires_at) == (len(PDF), True, None)
            other = await files.upload(file=("a.py", b"x = 1"), expires_in_seconds=3600, **betas)
            assert (other.expires_at - other.created_at).seconds == 3600
            assert [each.id async for each in files.list(limit=1)] == [other.id, made.id]
            assert [each.id async for each in files.list(ids=[made.id, "gone"])] == [made.id]
            assert await files.retrieve_metadata(made.id) == made
            assert await (await files.download(made.id)).read() == PDF
            assert (await files.delete(made.id)).type == "file_deleted"
            with pytest.raises(anthropic.NotFoundError) as gone:
                await files.retrieve_metadata(made.id)
            assert gone.value.body["error"]["type"] == "not_found_error"

    asyncio.run(main())


def test_anthropics_blocking_client_deletes_the_files_as_it_lists_them(tmp_path):
    async def main():
        async with live(files_dir=str(tmp_path)) as server:

            def blocking():
                with of_anthropic(server, kind=anthropic.Anthropic) as client:
                    for number in range(5):
                        client.beta.files.upload(file=(f"{number}.txt", b"a"))
                    for each in client.beta.files.list(limit=2):
                        client.beta.files.delete(each.id)
                    return [each.id for each in client.files.list()]

            assert await asyncio.to_thread(blocking) == []

    asyncio.run(main())


def test_a_caller_sees_and_joins_only_its_own_files(tmp_path):
    async def main():
        async with client_of(tmp_path, api_key=("one", "two")) as (server, client):
            url = f"http://127.0.0.1:{server.port}/v1"
            other = openai.AsyncOpenAI(base_url=url, api_key="two", max_retries=0)
            made = await client.files.create(file=("a.txt", b"hi"), purpose="user_data")
            upload = await client.uploads.create(
                bytes=2, filename="b.txt", mime_type="text/plain", purpose="user_data"
            )
            part = await client.uploads.parts.create(upload.id, data=b"hi")
            for call in (
                other.files.retrieve(made.id),
                other.uploads.parts.create(upload.id, data=b"hi"),
                other.uploads.complete(upload.id, part_ids=[part.id]),
                other.uploads.cancel(upload.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            await other.close()
            async with of_anthropic(server, "two") as theirs:
                with pytest.raises(anthropic.NotFoundError):
                    await theirs.beta.files.download(made.id)
                assert [each async for each in theirs.beta.files.list()] == []
            assert (await client.uploads.complete(upload.id, part_ids=[part.id])).file.bytes == 2

    asyncio.run(main())


def test_parts_are_joined_in_the_order_that_the_client_names(tmp_path):
    async def main():
        async with client_of(tmp_path) as (server, client):
            pieces = [b"x" * 70_000, b"y" * 70_000, b"unused", b""]
            whole = pieces[1] + pieces[0]
            upload = await client.uploads.create(
                bytes=len(whole), filename="d/big.csv", mime_type="text/csv", purpose="user_data"
            )
            assert (upload.status, upload.filename) == ("pending", "big.csv")
            parts = await asyncio.gather(
                *(client.uploads.parts.create(upload.id, data=each) for each in pieces)
            )
            order = [parts[1].id, parts[3].id, parts[0].id]
            with pytest.raises(openai.BadRequestError, match="announced"):
                await client.uploads.complete(upload.id, part_ids=order[:2])
            with pytest.raises(openai.BadRequestError, match="twice"):
                await client.uploads.complete(upload.id, part_ids=order * 2)
            with pytest.raises(openai.BadRequestError, match="no part"):
                await client.uploads.complete(upload.id, part_ids=["part_0"])
            done = await client.uploads.complete(
                upload.id, part_ids=order, md5=hashlib.md5(whole).hexdigest()
            )
            assert (done.status, done.file.bytes) == ("completed", len(whole))
            assert (await client.files.content(done.file.id)).content == whole
            assert server.state.batches.directory.used_bytes() == len(whole)
            assert len(list(tmp_path.glob("files/*.data"))) == 1
            with pytest.raises(openai.NotFoundError):
                await client.uploads.cancel(upload.id)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["cancel", "md5", "encoding", "expiry", "disk"])
def test_an_upload_that_ends_without_a_file_leaves_nothing(tmp_path, end, monkeypatch):
    monkeypatch.setattr(part_uploads, "LASTS_S", 0.2 if end == "expiry" else 3600)
    purpose = "batch" if end == "encoding" else "user_data"

    async def main():
        async with client_of(tmp_path, files_count=1) as (server, client):
            upload = await client.uploads.create(
                bytes=2, filename="a", mime_type="text/plain", purpose=purpose
            )
            if end == "expiry":
                await server.until(lambda: not server.state.batches.uploads._known)
                with pytest.raises(openai.NotFoundError):
                    await client.uploads.parts.create(upload.id, data=b"hi")
            else:
                part = await client.uploads.parts.create(upload.id, data=b"\xff\xff")
            if end == "cancel":
                assert (await client.uploads.cancel(upload.id)).status == "cancelled"
            elif end == "disk":
                next(tmp_path.glob("files/*.data")).unlink()
                with pytest.raises(openai.InternalServerError):
                    await client.uploads.complete(upload.id, part_ids=[part.id])
            elif end != "expiry":
                more = {"md5": "0"} if end == "md5" else {}
                with pytest.raises(openai.BadRequestError, match=r"md5|UTF-8"):
                    await client.uploads.complete(upload.id, part_ids=[part.id], **more)
            assert list(tmp_path.glob("files/*")) == []
            assert server.state.batches.directory.used_bytes() == 0
            await client.files.create(file=("a", b"hi"), purpose="user_data")  # its place is free

    asyncio.run(main())


def test_parts_have_the_limits_of_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(part_uploads, "MOST_PARTS", 2)

    async def main():
        async with client_of(tmp_path, files_bytes=MIB) as (server, client):
            with pytest.raises(openai.BadRequestError, match="--files-bytes"):
                await client.uploads.create(
                    bytes=MIB + 1, filename="a", mime_type="text/plain", purpose="user_data"
                )
            upload = await client.uploads.create(
                bytes=MIB, filename="a", mime_type="text/plain", purpose="user_data"
            )
            for _ in range(2):
                await client.uploads.parts.create(upload.id, data=b"a")
            with pytest.raises(openai.BadRequestError, match="2 parts"):
                await client.uploads.parts.create(upload.id, data=b"a")
            url = f"http://127.0.0.1:{server.port}/v1/uploads"
            async with httpx.AsyncClient() as http:
                told = await http.post(f"{url}/{upload.id}/parts", files={"file": ("a", b"a")})
                assert told.status_code == 400
                await client.uploads.cancel(upload.id)
            assert server.state.batches.directory.used_bytes() == 0

    asyncio.run(main())


@pytest.mark.deep
def test_the_largest_part_is_stored_and_a_larger_one_is_refused(tmp_path):
    async def main():
        async with client_of(tmp_path) as (_, client):
            size = part_uploads.MOST_PART_BYTES
            upload = await client.uploads.create(
                bytes=size, filename="a", mime_type="text/plain", purpose="user_data"
            )
            part = await client.uploads.parts.create(upload.id, data=bytes(size))
            with pytest.raises(openai.APIStatusError) as refused:
                await client.uploads.parts.create(upload.id, data=bytes(size + 1))
            assert refused.value.status_code == 413
            done = await client.uploads.complete(upload.id, part_ids=[part.id])
            assert done.file.bytes == size

    asyncio.run(main())


def test_a_file_expires_unless_a_batch_reads_it(tmp_path, monkeypatch):
    async def main():
        async with client_of(tmp_path) as (server, client):
            expires = {"anchor": "created_at", "seconds": 3600}
            for bad in ({**expires, "seconds": 60}, {**expires, "anchor": "now"}):
                with pytest.raises(openai.BadRequestError, match="expires_after"):
                    await client.files.create(
                        file=("a", b"hi"), purpose="vision", expires_after=bad
                    )
            made = await client.files.create(
                file=("a", b"hi"), purpose="user_data", expires_after=expires
            )
            assert made.expires_at == made.created_at + 3600
            directory = server.state.batches.directory
            now = made.expires_at + 1.0
            monkeypatch.setattr("cpuserve.api.batches.directory.time.time", lambda: now)
            directory.is_read = lambda _: True
            assert (await client.files.retrieve(made.id)).id == made.id
            directory.is_read = lambda _: False
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(made.id)
            assert [each async for each in client.files.list()] == []
            assert list(tmp_path.glob("files/*")) == []

    asyncio.run(main())


@asynccontextmanager
async def _part_arrives(client, server, upload):
    """A part whose client has sent only its beginning."""
    head = (
        f"POST /v1/uploads/{upload.id}/parts HTTP/1.1\r\nhost: localhost\r\n"
        "content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="data"; filename="a"\r\n\r\nhi'
    )
    _, writer = await server.open()
    writer.write(head.encode())
    uploads = server.state.batches.uploads
    await server.until(lambda: uploads._known[upload.id].num_open == 1)
    yield
    writer.close()


def test_an_upload_waits_for_no_part_and_ends_without_it(tmp_path):
    async def main():
        async with client_of(tmp_path) as (server, client):
            upload = await client.uploads.create(
                bytes=0, filename="a", mime_type="text/plain", purpose="user_data"
            )
            async with _part_arrives(client, server, upload):
                with pytest.raises(openai.BadRequestError, match="still arriving"):
                    await client.uploads.complete(upload.id, part_ids=[])
                await client.uploads.cancel(upload.id)
            directory = server.state.batches.directory
            await server.until(lambda: not list(tmp_path.glob("files/*")))
            assert directory.used_bytes() == 0

    asyncio.run(main())
