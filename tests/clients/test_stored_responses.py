"""OpenAI's client with stored responses: chained, in the background, cancelled, conversations."""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from cpuserve.base.errors import EngineDead
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import ANSWER, speak, tokenizer
from tests.api.live import live
from tests.api.tools import template
from tests.helpers.patience import until

MODEL = {"model": "tiny"}


@asynccontextmanager
async def client_of(script=speak, **options):
    """A server with this script, and OpenAI's client for it."""
    async with live(script, **options) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        async with client:
            yield server, client


def held(event):
    """A script that writes one token, waits for `event`, and then writes the rest."""

    def script(engine, number, prompt, params):
        outputs = speak(engine, number, prompt, params)
        yield next(outputs)
        yield event
        yield from outputs

    return script


# A client that closes its connection may have closed only its sending side. The server notices it
# when it next writes: a token, or a ping.
SOON = {"limits": ClientLimits(silent_s=0.05)}


def run(work):
    asyncio.run(work())


def test_responses_are_stored_chained_listed_and_deleted():
    async def main():
        async with client_of() as (_, client):
            first = await client.responses.create(input="hi", **MODEL)
            assert await client.responses.retrieve(first.id) == first
            second = await client.responses.create(
                input="more", previous_response_id=first.id, **MODEL
            )
            assert second.usage.input_tokens > first.usage.input_tokens
            async with client.responses.stream(
                input="and more", previous_response_id=second.id, **MODEL
            ) as stream:
                third = await stream.get_final_response()
            assert third.previous_response_id == second.id
            assert (await client.responses.retrieve(third.id)).output_text == ANSWER
            items = [item async for item in client.responses.input_items.list(third.id, limit=1)]
            assert [item.content[0].text for item in items] == ["and more"]
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError) as refused:
                await client.responses.retrieve(first.id)
            assert refused.value.code == "response_not_found"

    run(main)


def test_a_background_response_goes_from_queued_to_completed():
    async def main():
        more = asyncio.Event()
        async with client_of(held(more)) as (server, client):
            made = await client.responses.create(input="hi", background=True, **MODEL)
            assert (made.status, made.background, made.output) == ("queued", True, [])

            async def status(wanted):
                while (found := await client.responses.retrieve(made.id)).status != wanted:
                    await asyncio.sleep(0.01)
                return found

            await status("in_progress")
            with pytest.raises(openai.BadRequestError, match="in_progress"):
                await client.responses.create(input="more", previous_response_id=made.id, **MODEL)
            more.set()
            assert (await status("completed")).output_text == ANSWER
            await server.is_sane()

    run(main)


def test_a_background_stream_is_read_again_from_any_event_and_outlives_its_client():
    async def main():
        more = asyncio.Event()
        async with client_of(held(more), **SOON) as (server, client):
            stream = await client.responses.create(
                input="hi", background=True, stream=True, **MODEL
            )
            seen = []
            async for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            assert [event.type for event in seen[:3]] == [
                "response.created", "response.queued", "response.in_progress",
            ]  # fmt: skip
            assert [seen[0].response.status, seen[2].response.status] == ["queued", "in_progress"]
            made, last = seen[0].response.id, seen[-1].sequence_number
            following = await client.responses.retrieve(made, stream=True, starting_after=last)
            more.set()
            rest = [event async for event in following]
            assert rest[0].sequence_number == last + 1
            assert rest[-1].type == "response.completed"
            assert rest[-1].response.output_text == ANSWER
            again = [event async for event in await client.responses.retrieve(made, stream=True)]
            assert [event.sequence_number for event in again] == list(range(len(seen + rest)))
            assert again == [*seen, *rest]
            assert (await client.responses.retrieve(made)).output == rest[-1].response.output
            assert server.engine.aborted == 0

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_response_stops_and_keeps_what_it_has_written(stream):
    async def main():
        never = asyncio.Event()
        async with client_of(held(never)) as (server, client):
            made = await client.responses.create(
                input="hi", background=True, stream=stream, **MODEL
            )
            if stream:
                events = [await anext(made) for _ in range(6)]
                name = events[0].response.id
            else:
                name = made.id
                await until(lambda: len(server.engine.asked) == 1)
                while (await client.responses.retrieve(name)).status == "queued":
                    await asyncio.sleep(0.01)
            cancelled = await client.responses.cancel(name)
            assert (cancelled.status, cancelled.id) == ("cancelled", name)
            assert ANSWER.startswith(cancelled.output_text)
            assert await client.responses.cancel(name) == cancelled
            assert await client.responses.retrieve(name) == cancelled
            if stream:
                last = [event async for event in made][-1]
                assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
            await until(lambda: server.engine.aborted == 1)
            await server.is_sane()

    run(main)


def test_deleting_a_running_response_ends_it():
    async def main():
        never = asyncio.Event()
        async with client_of(held(never)) as (server, client):
            made = await client.responses.create(input="hi", background=True, **MODEL)
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
            assert server.state.stored.num_bytes == 0
            await server.is_sane()

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_the_background_is_read_in_the_response(stream):
    def failing(engine, number, prompt, params):
        yield next(speak(engine, number, prompt, params))
        yield EngineDead("the engine has died")

    async def main():
        async with client_of(failing) as (server, client):
            made = await client.responses.create(
                input="hi", background=True, stream=stream, **MODEL
            )
            if stream:
                events = [event async for event in made]
                assert events[-1].type == "response.failed"
                name = events[0].response.id
            else:
                name = made.id
                await until(lambda: len(server.engine.asked) == 1 and not server.engine.running)
            failed = await client.responses.retrieve(name)
            assert (failed.status, failed.error.code) == ("failed", "server_error")

    run(main)


def test_a_bad_background_request_is_refused_at_once():
    async def main():
        async with client_of() as (server, client):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.responses.create(input="hi", background=True, temperature=-1, **MODEL)
            assert len(server.state.stored) == 0

    run(main)


def test_a_full_store_refuses_with_the_reason_and_keeps_what_runs():
    async def main():
        more = asyncio.Event()
        async with client_of(held(more), stored_responses=1) as (server, client):
            made = await client.responses.create(input="hi", background=True, **MODEL)
            with pytest.raises(openai.RateLimitError, match="store is full"):
                await client.responses.create(input="hi", **MODEL)
            kept = asyncio.create_task(client.responses.create(input="hi", store=False, **MODEL))
            await until(lambda: len(server.engine.asked) == 2)
            more.set()
            assert (await kept).output_text == ANSWER
            while (await client.responses.retrieve(made.id)).status != "completed":
                await asyncio.sleep(0.01)
            newer = await client.responses.create(input="hi", **MODEL)
            assert (await client.responses.retrieve(newer.id)).id == newer.id
            with pytest.raises(openai.NotFoundError, match="made room"):
                await client.responses.retrieve(made.id)

    run(main)


def test_a_client_that_disconnects_stores_nothing():
    async def main():
        never = asyncio.Event()
        async with client_of(held(never), **SOON) as (server, client):
            stream = await client.responses.create(input="hi", stream=True, **MODEL)
            assert (await anext(stream)).response.store is True
            assert len(server.state.stored) == 1
            await stream.close()
            await until(lambda: len(server.state.stored) == 0)
            await server.is_sane()

    run(main)


def test_conversations_of_openais_client():
    async def main():
        more = asyncio.Event()
        async with client_of(held(more)) as (server, client):
            talk = await client.conversations.create(metadata={"a": "b"})
            running = asyncio.create_task(
                client.responses.create(input="hi", conversation=talk.id, **MODEL)
            )
            await until(lambda: len(server.engine.asked) == 1)
            with pytest.raises(openai.ConflictError) as refused:
                await client.responses.create(input="hi", conversation=talk.id, **MODEL)
            assert refused.value.code == "conversation_locked"
            more.set()
            assert (await running).conversation.id == talk.id
            items = [item async for item in client.conversations.items.list(talk.id, limit=1)]
            assert [item.role for item in items] == ["assistant", "user"]
            hi = {"type": "message", "role": "user", "content": "and"}
            await client.conversations.items.create(talk.id, items=[hi])
            one = await client.conversations.items.retrieve(items[0].id, conversation_id=talk.id)
            assert one.content[0].text == ANSWER
            await client.conversations.items.delete(one.id, conversation_id=talk.id)
            await client.conversations.update(talk.id, metadata={"c": "d"})
            assert (await client.conversations.retrieve(talk.id)).metadata == {"c": "d"}
            assert (await client.conversations.delete(talk.id)).deleted

    run(main)


def test_compaction_of_openais_client():
    async def main():
        async with client_of() as (server, client):
            server.engine.info.update(kv_tokens=4096)
            server.context.max_model_len = 4096
            server.context.set_ready(tokenizer(), template())
            made = await client.responses.create(input="hi", **MODEL)
            compacted = await client.responses.compact(previous_response_id=made.id, **MODEL)
            assert [item.type for item in compacted.output] == ["message", "compaction"]
            items = [item.model_dump(mode="json", warnings=False) for item in compacted.output]
            again = await client.responses.create(
                input=[*items, {"role": "user", "content": "go on"}], **MODEL
            )
            assert again.output_text == ANSWER

    run(main)
