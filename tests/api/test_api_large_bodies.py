"""Large request bodies: limits on their memory and time, while other requests are served."""

import asyncio
import functools
import gc
import json
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.api.errors import http_errors as errors
from cpuserve.api.errors.http_errors import ServerBusy
from cpuserve.api.openai.chat.schema import ChatRequest
from cpuserve.api.request import context, memory_trim
from cpuserve.api.request.body import FREE_BYTES, decode_request
from cpuserve.api.request.body_budget import BodyBudget, Reservation
from cpuserve.api.request.object_limits import MAX_OBJECTS, num_objects
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.limits import ClientLimits, default_body_bytes
from tests.api.fakes import MAX_LEN, Api, error_of, tokenizer
from tests.api.live import live, post
from tests.api.test_api_connection import runs
from tests.helpers.patience import PATIENCE_S, until

MESSAGES = [{"role": "user", "content": "hi"}]
LARGE = 2 * FREE_BYTES


@pytest.fixture
def encoded(monkeypatch):
    """A list to which every text that is tokenized is added."""
    texts = []
    encode = type(tokenizer()).encode

    def recorded(self, text, *args, **kwargs):
        texts.append(text)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer()), "encode", recorded)
    return texts


@pytest.mark.parametrize("ask", ["chat", "complete"])
@pytest.mark.parametrize("character", ["1", " ", "é", "\N{WAVING HAND SIGN}"])
def test_a_text_longer_than_the_context_can_spell_is_refused_untokenized(encoded, ask, character):
    api = Api()
    text = character * (tokenizer().most_bytes_per_token * MAX_LEN + 1)
    error = error_of(getattr(api, ask)(text))
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_LEN) in error["message"]
    assert not encoded
    assert api.alive()


def test_one_long_text_among_many_prompts_is_refused(encoded):
    text = "1" * (tokenizer().most_bytes_per_token * MAX_LEN + 1)
    assert error_of(Api().complete(["a", text]))["code"] == "context_length_exceeded"


def test_a_text_of_too_many_tokens_is_tokenized_in_part(encoded):
    """Most of 10 million characters is not read, even if a token may have any length."""
    api = Api()
    api.context.tokenizer.__dict__["most_bytes_per_token"] = None
    try:
        error = error_of(api.complete("1" * 4_000_000))
    finally:
        del api.context.tokenizer.__dict__["most_bytes_per_token"]
    assert error["code"] == "context_length_exceeded"
    assert 0 < sum(map(len, encoded)) < 100_000


def tokenized(api, text):
    return api.post("/tokenize", prompt=text)


def counted_message(api, text):
    return api.post("/v1/messages/count_tokens", messages=[{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("count", "key"), [(tokenized, "count"), (counted_message, "input_tokens")]
)
def test_counting_tokens_takes_longer_texts_than_the_context_and_has_a_bound(encoded, count, key):
    api = Api()
    assert count(api, "some words " * 2000).json()[key] > 10 * MAX_LEN
    encoded.clear()
    refused = count(api, "1" * 4_000_000)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "maximum context length" in message or message.startswith("prompt is too long: 10000")
    assert sum(map(len, encoded)) < 1_000_000


@pytest.mark.parametrize(
    ("context", "most"), [(128, 4 << 20), (8192, 4 << 20), (1 << 17, 8 << 20), (1 << 20, 64 << 20)]
)
def test_the_largest_body_follows_from_the_context(context, most):
    assert default_body_bytes(context) == most


def test_fields_that_nobody_knows_are_not_built():
    many = b'{"messages":[],"x":[' + b"[]," * 1_000_000 + b'1],"y":{"messages":[]}}'
    tracemalloc.start()
    try:
        asked = decode_request(many, ChatRequest, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked.messages == []
    assert peak < 100_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template_kwargs", {"x": [[]] * (MAX_OBJECTS + 1)}),
        ("logit_bias", {str(i): 1 for i in range(MAX_OBJECTS + 1)}),
        ("tools", [{}] * (MAX_OBJECTS + 1)),
        ("documents", ["a"] * (MAX_OBJECTS + 1)),
        ("messages", MESSAGES * MAX_OBJECTS),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]),
        ("input", MESSAGES * MAX_OBJECTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_of_too_many_objects_is_refused_unbuilt(field, value, monkeypatch):
    def never(kind):
        pytest.fail("the body was decoded")

    api = Api()
    with monkeypatch.context() as patch:
        patch.setattr("cpuserve.api.request.body._decoder", never)
        ask = api.chat if field != "input" else functools.partial(api.post, "/v1/responses")
        error = error_of(ask(**{field: value}))
    assert error["param"] == field
    assert "at most" in error["message"]
    assert api.alive()


def test_a_conversation_may_have_more_objects_than_other_fields():
    api = Api()
    most = MAX_OBJECTS // 12  # objects in a message of responses, and more than one of chat has
    message = {"type": "message", "content": [{"type": "input_text", "text": "x" * 40}]}
    items = [{**message, "role": "user"}] * (most + 15)
    error = error_of(api.post("/v1/responses", input=items))
    assert error["code"] == "context_length_exceeded"


def test_too_many_prompts_are_refused_unbuilt():
    error = error_of(Api().complete([[5]] * 100_000))
    assert error["param"] == "prompt"


def test_brackets_and_quotes_in_a_text_are_no_objects():
    """A text like a program's source, for /tokenize, which accepts more than the context."""
    text = '[{"a\\": [' * 20_000
    response = Api().post("/tokenize", messages=[{"role": "user", "content": text[:20]}], x=text)
    assert response.status_code == 200, response.text
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert decode_request(body, ChatRequest, {"messages": 10}).messages[0]["content"] == text


def count(value) -> int:
    """Count lists, objects and strings in the result of Python's own JSON parser."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 0


TEXT = st.text(st.sampled_from('a"\\[]{},:é'), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


@pytest.mark.deep
@settings(max_examples=300, deadline=None)
@given(JSON, st.integers(0, 20))
def test_objects_are_counted_as_a_parser_would_make_them(value, enough):
    text = json.dumps(value, ensure_ascii=False).encode()
    assert (num_objects(text, enough) > enough) == (count(value) > enough)


def test_only_a_large_body_is_decoded_on_another_thread(monkeypatch):
    threads = []
    decode = context.decode_request

    def recorded(*args):
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(*args)

    monkeypatch.setattr(context, "decode_request", recorded)
    api = Api()
    assert api.chat().status_code == 200
    assert api.chat(x="a" * LARGE).status_code == 200
    assert threads == [True, False]


def test_freed_memory_is_given_back_after_large_bodies_only(monkeypatch):
    trimmed = threading.Event()
    monkeypatch.setattr(memory_trim, "_DELAY_S", 0.0)
    monkeypatch.setattr(memory_trim, "give_back", trimmed.set)
    api = Api()
    assert api.chat().status_code == 200
    assert not trimmed.is_set()
    api.chat(x="a" * LARGE)
    assert trimmed.wait(PATIENCE_S)


@runs
async def test_freed_memory_is_given_back_after_an_upload_that_never_ends(monkeypatch):
    trimmed = threading.Event()
    monkeypatch.setattr(memory_trim, "_DELAY_S", 0.0)
    monkeypatch.setattr(memory_trim, "give_back", trimmed.set)
    async with live() as server:
        _, writer = await server.open()
        writer.write(upload(SIZE, HALF))
        await server.until(lambda: server.state.bodies.held == SIZE)
        assert not trimmed.is_set()
        writer.close()
        await server.until(trimmed.is_set)


def test_giving_memory_back_works_where_the_library_can():
    memory_trim.give_back()
    memory_trim.trim_asleep()
    assert Api().chat().status_code == 200, "code is read again"


def test_only_unchanged_pages_of_files_are_dropped_while_asleep():
    def mapping(place, permissions, file, changed):
        inode = 7 if file else 0
        return (
            f"{place} {permissions} 00000000 08:01 {inode} {' ' * 20}{file}\n"
            f"Size: 8 kB\nAnonymous:{changed:>10} kB\nVmFlags: rd mr\n"
        )

    library = "/usr/lib/libx y.so"
    smaps = (
        mapping("1000-3000", "r-xp", library, 0)
        + mapping("3000-4000", "r--p", library, 4)  # the loader has written addresses there
        + mapping("4000-5000", "rw-p", library, 0)
        + mapping("5000-6000", "r--p", "", 0)
        + mapping("6000-7000", "r-xp", "[vdso]", 0)
        + mapping("7000-9000", "r--p", library, 0)
    )
    dropped = []
    memory_trim._drop_file_pages(smaps, lambda *call: dropped.append(call))
    assert [(place.value, size.value) for place, size, _ in dropped] == [
        (0x1000, 0x2000),
        (0x7000, 0x2000),
    ]


NEEDLE = "needle-in-the-body"
NEEDLES = [NEEDLE]  # a list, because the collector of garbage does not know dicts of texts
WITH_NEEDLES = {
    "chat_template_kwargs": {"x": [{"y": NEEDLES}]},
    "logit_bias": {"5": 1.0},
    "stream": True,
    "x": {NEEDLE: NEEDLES},
}
MESSAGE = {"role": "user", "content": "hi", "x": NEEDLES}
OF_CHAT = {"messages": [MESSAGE], "prompt": "hi", "tools": []}
OF_RESPONSES = {
    "input": [MESSAGE],
    "text": {"format": {"type": "text", "description": NEEDLE}},
    "tools": [{"type": "function", "name": "f", "parameters": {NEEDLE: NEEDLES}}],
    "tool_choice": "none",
}


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [
        ("/v1/chat/completions", OF_CHAT, b"[DONE]"),
        ("/v1/completions", OF_CHAT, b"[DONE]"),
        ("/v1/responses", OF_RESPONSES, b"response.incomplete"),
    ],
    ids=["chat", "completions", "responses"],
)
@runs
async def test_what_a_prompt_was_made_from_is_dropped_while_the_answer_is_written(
    path, fields, end
):
    gate = asyncio.Event()

    def gated(engine, number, prompt, params):
        yield Output(number, [70])
        yield gate
        yield Output(number, [71], "length")

    def holds_needle(item):
        values = [*item, *item.values()] if type(item) is dict else item
        return any(type(v) is str and v == NEEDLE for v in values)

    def held():
        gc.collect()
        return [o for o in gc.get_objects() if type(o) in (dict, list) and holds_needle(o)]

    async with live(gated) as server:
        before = len(held())
        reader, writer = await server.open()
        writer.write(post(path, {**WITH_NEEDLES, **fields}))
        await reader.readuntil(b"data: ")
        # Only the lists of this file remain. The thread that rendered the prompt holds its messages
        # until it runs once more.
        await until(lambda: len(held()) == before)
        gate.set()
        await reader.readuntil(end)


def upload(size: int, sent: int) -> bytes:
    """Return a chat request with a body of `size` bytes, cut off after `sent` bytes of it."""
    head, body = json.dumps({"messages": MESSAGES, "x": ""})[:-2], b'"}'
    whole = head.encode() + b"a" * (size - len(head) - len(body)) + body
    start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    start += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
    return start + whole[:sent]


def rest(size: int, sent: int) -> bytes:
    """Return the part of the body that `upload` has left out."""
    return upload(size, size)[len(upload(size, sent)) :]


SIZE = 1 << 20
HALF = SIZE // 2
ROOM_FOR_TWO = ClientLimits(max_held_bytes=2 * SIZE + 1000)


@runs
async def test_unfinished_uploads_count_and_others_wait_for_them():
    async with live(limits=ROOM_FOR_TWO) as server:
        opened = []
        for _ in range(3):
            reader, writer = await server.open()
            writer.write(upload(SIZE, HALF))
            opened.append((reader, writer))
            await until(lambda: server.state.bodies.held >= min(2, len(opened)) * SIZE)
        assert server.state.bodies.held == 2 * SIZE
        # Small bodies do not wait.
        small = await server.send(post("/v1/chat/completions", {"messages": MESSAGES}, close=True))
        assert small.startswith(b"HTTP/1.1 200 ")
        opened[0][1].write(rest(SIZE, HALF))
        assert (await opened[0][0].read()).startswith(b"HTTP/1.1 200 ")
        for reader, writer in opened[1:]:
            writer.write(rest(SIZE, HALF))
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        assert server.state.bodies.held == 0
        await server.is_sane()


@runs
async def test_an_upload_that_finds_no_room_is_503_with_a_time_to_come_back(monkeypatch):
    monkeypatch.setattr(errors, "LINGER_S", 0.1)
    limits = ClientLimits(max_held_bytes=SIZE, body_wait_s=0.2)
    async with live(limits=limits) as server:
        _, writer = await server.open()
        writer.write(upload(SIZE, HALF))
        await until(lambda: server.state.bodies.held == SIZE)
        answer = await server.send(upload(SIZE, HALF))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert b"connection: close" in answer.lower()
        writer.close()
        await until(lambda: server.state.bodies.held == 0)
        await server.is_sane()


@runs
async def test_an_upload_without_a_length_reserves_the_largest_body():
    limits = ClientLimits(max_body_bytes=3 * FREE_BYTES)
    async with live(limits=limits) as server:
        _, writer = await server.open()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        writer.write(b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n" % (FREE_BYTES + 1) + b" " * (FREE_BYTES + 1) + b"\r\n")
        await until(lambda: server.state.bodies.held == 3 * FREE_BYTES)
        writer.close()
        await until(lambda: server.state.bodies.held == 0)


@runs
async def test_room_goes_to_those_who_wait_in_order():
    budget, order = BodyBudget(10), []

    async def hold(name, size):
        with Reservation(budget) as held:
            await held.take(size, 20)
            order.append(name)
            await gates[name].wait()

    gates = {name: asyncio.Event() for name in "abcde"}
    sizes = {"a": 6, "b": 6, "c": 2, "d": 99, "e": 1}
    tasks = {}
    for name, size in sizes.items():
        tasks[name] = asyncio.create_task(hold(name, size))
        await asyncio.sleep(0)
    assert order == ["a"]  # c would fit, but b waits before it
    gates["a"].set()
    await tasks["a"]
    await asyncio.sleep(0)
    assert order == ["a", "b", "c"]
    gates["b"].set()
    gates["c"].set()
    await asyncio.gather(tasks["b"], tasks["c"])
    await asyncio.sleep(0)
    assert order[3:] == ["d"]  # larger than the whole budget, so admitted alone
    tasks["d"].cancel()
    await asyncio.gather(tasks["d"], return_exceptions=True)
    await asyncio.sleep(0)
    assert order[4:] == ["e"]
    gates["e"].set()
    await tasks["e"]
    assert budget.held == 0


@runs
async def test_room_goes_to_callers_in_turn():
    budget, order = BodyBudget(10), []
    await budget.take(10, 1)

    async def take(name):
        await budget.take(6, 20, name[0])  # more than a share of the budget
        order.append(name)
        budget.give_back(6, name[0])

    tasks = [asyncio.create_task(take(name)) for name in ("a1", "a2", "a3", "a4", "b1")]
    await asyncio.sleep(0)  # all of them wait
    budget.give_back(10)
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "a2", "a3", "a4"]
    assert budget.held == 0


@runs
async def test_a_caller_with_less_than_its_share_does_not_wait_for_slow_bodies_of_others():
    budget = BodyBudget(12)
    for _ in range(3):
        await budget.take(4, 1, "slow")
    more = [asyncio.create_task(budget.take(4, 20, "slow")) for _ in range(2)]
    await asyncio.sleep(0)
    await budget.take(6, 0, "modest")
    assert budget.held == 18
    for size in (1, 12):
        with pytest.raises(ServerBusy):  # it has its share, and a larger one it does not get
            await budget.take(size, 0.01, "modest")
    with pytest.raises(ServerBusy):  # unknown callers have none
        await budget.take(1, 0.01)
    waits = asyncio.create_task(budget.take(5, 20, "modest"))
    await asyncio.sleep(0)
    assert not waits.done()
    budget.give_back(6, "modest")
    await waits
    assert budget.held == 17
    others = [asyncio.create_task(budget.take(1, 20, f"caller {n}")) for n in range(20)]
    await asyncio.sleep(0)
    assert budget.held == 24, "twice the budget is the most"
    for task in (*more, *others):
        task.cancel()
    await asyncio.gather(*more, *others, return_exceptions=True)
    assert budget.held <= 24


@runs
async def test_a_slow_upload_of_one_caller_delays_no_body_of_another():
    keys = ["the-key-of-the-slow-caller", "the-key-of-the-modest-caller"]
    limits = ClientLimits(max_held_bytes=4 * FREE_BYTES, body_wait_s=0.2)
    async with live(api_key=keys, limits=limits) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        for _ in range(2):
            _, writer = await server.open()
            size = 2 * FREE_BYTES
            writer.write(head % (keys[0].encode(), size) + b" " * (FREE_BYTES + 1))
        await until(lambda: server.state.bodies.held == 4 * FREE_BYTES)
        body = b'{"prompt": [7], "max_tokens": 2}'.ljust(size)
        reader, writer = await server.open()
        writer.write(head % (keys[1].encode(), size) + body[: FREE_BYTES + 1])
        await until(lambda: server.state.bodies.held == 6 * FREE_BYTES)
        writer.write(body[FREE_BYTES + 1 :])
        assert (await reader.read(15)).startswith(b"HTTP/1.1 200 ")


@runs
async def test_who_stops_waiting_lets_those_behind_in():
    budget = BodyBudget(10)
    await budget.take(6, 1)
    large = asyncio.create_task(budget.take(9, 20))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(3, 20))
    await asyncio.sleep(0)
    large.cancel()
    await small
    assert budget.held == 9
    with pytest.raises(ServerBusy) as refused:
        await budget.take(5, 0.01)
    assert refused.value.status == 503
    budget.give_back(9)
    assert budget.held == 0
