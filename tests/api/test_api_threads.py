"""Long work runs on another thread than the event loop, also if it consists of small parts."""

import asyncio
import json
import threading
from unittest.mock import create_autospec

import msgspec
import pytest

from cpuserve.api.llamacpp.completion import prompts
from cpuserve.api.ollama import create
from cpuserve.api.ollama.created.store import CreatedModels
from cpuserve.api.openai import conversations
from cpuserve.api.openai.chat import router as chat
from cpuserve.api.openai.chat import schema
from cpuserve.api.openai.completions import router as completions
from cpuserve.api.openai.logprobs import TokenNames
from cpuserve.api.openai.responses import history
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.stored.store import StoredItem
from cpuserve.serving import threads
from cpuserve.serving.calls import bad_words
from cpuserve.serving.decisions import questions
from cpuserve.serving.decisions.questions import content_text
from cpuserve.serving.generation import prepare
from cpuserve.serving.prompts import chat_prompt
from cpuserve.tokenizer.tokenizer import LONG_CHARS, Tokenizer
from tests.api.fakes import MAX_LEN, Api, error_of

HI = json.dumps({"type": "message", "role": "user", "content": "hi"}).encode()


@pytest.fixture
def watch(monkeypatch):
    """watch(owner, name) returns a list to which each later call adds "loop" or "thread"."""

    def start(owner, name):
        where, real = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            main = threading.current_thread() is threading.main_thread()
            where.append("loop" if main else "thread")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)
        return where

    return start


@pytest.mark.parametrize(("count", "place"), [(2, "loop"), (60, "thread")])
def test_many_short_prompts_are_tokenized_where_their_sum_says(watch, count, place):
    where = watch(Tokenizer, "encode")
    text = "x" * (LONG_CHARS // 50)
    assert Api().complete([text] * count, max_tokens=1).status_code == 200
    assert where[:count] == [place] * count


@pytest.mark.parametrize("count", [1, 1000])
def test_templates_are_never_waited_for_on_the_loop(watch, count):
    where = watch(chat_prompt, "render_chat")
    messages = [{"role": "user", "content": ""}] * count
    Api().post("/v1/chat/completions", messages=messages)
    Api().post("/tokenize", messages=messages)
    assert where == ["thread"] * 2


@pytest.mark.parametrize("prompt", [[5] * (MAX_LEN + 1), ["text", [5] * (MAX_LEN + 1)]])
def test_too_many_ids_are_refused_before_anything_else_is_done(watch, monkeypatch, prompt):
    encoded = watch(Tokenizer, "encode")
    checked = watch(prepare, "sampling_params")
    error = error_of(Api().complete(prompt))
    assert error["param"] == "prompt"
    assert f"{MAX_LEN + 1} tokens" in error["message"]
    assert (encoded, checked) == ([], [])


def test_ids_of_many_prompts_are_checked_in_a_thread(watch, monkeypatch):
    monkeypatch.setattr(prepare, "_IDS_PER_US", 1)
    where = watch(prepare, "sampling_params")
    assert Api().complete([[5] * 120] * 40, max_tokens=1).status_code == 200
    assert where == ["thread"]


@pytest.mark.parametrize(("count", "place"), [(10, "loop"), (5000, "thread")])
def test_names_of_many_tokens_are_made_in_a_thread(watch, count, place):
    where = watch(TokenNames, "name")
    body = {"prompt": "a b " * count, "return_token_strs": True}
    response = Api().post("/tokenize", **body)
    assert response.status_code == 200
    assert set(where) == {place}


@pytest.mark.parametrize(("content", "place"), [("x", "loop"), ("äöü" * 12, "thread")])
def test_prompt_logprobs_are_written_in_a_thread(watch, monkeypatch, content, place):
    monkeypatch.setattr(threads, "LONG_CHARS", 2000)
    where = watch(chat, "prompt_logprobs")
    response = Api().chat(content, n=2, prompt_logprobs=20, max_tokens=1)
    assert response.status_code == 200, response.text
    assert where == [place]


@pytest.mark.parametrize(("length", "place"), [(5, "loop"), (120, "thread")])
def test_prompt_logprobs_are_written_once_for_all_choices(watch, length, place):
    where = watch(completions, "prompt_logprobs")
    response = Api().complete([5] * length, n=2, prompt_logprobs=20, max_tokens=1)
    assert response.status_code == 200, response.text
    assert where == [place]


def test_a_long_echo_in_a_stream_is_written_in_a_thread(watch, monkeypatch):
    monkeypatch.setattr(threads, "LONG_CHARS", 1000)
    where = watch(completions.CompletionWriter, "_members")
    fields = {"n": 2, "echo": True, "logprobs": 20, "max_tokens": 3, "stream": True}
    assert Api().complete([5] * 120, **fields).status_code == 200
    assert where.count("thread") == 2
    assert where.count("loop") == 4


def test_many_ids_are_made_text_in_a_thread(watch):
    where = watch(Tokenizer, "decode")
    for count in (10, 5000):
        assert Api().post("/detokenize", tokens=[5] * count).status_code == 200
    assert where == ["loop", "thread"]
    error = error_of(Api().post("/detokenize", tokens=[5] * 100_000 + [-1]))
    assert "-1" in error["message"]


@pytest.mark.parametrize(("count", "place"), [(5, "loop"), (200, "thread")])
def test_many_bad_words_are_tokenized_in_a_thread(watch, count, place):
    where = watch(bad_words, "_spellings")
    words = [f"word{number}" for number in range(count)]
    assert Api().chat(bad_words=words, max_tokens=1).status_code == 200
    assert where == [place] * count


@pytest.mark.parametrize(("length", "place"), [(10, "loop"), (10_000, "thread")])
def test_a_long_modelfile_is_read_in_a_thread(watch, length, place):
    where, api = watch(create, "read_modelfile"), Api()
    api.state.created = create_autospec(CreatedModels)
    api.post("/api/create", model="new", modelfile="FROM tiny\n" + "#" * length)
    assert where == [place]


@pytest.mark.parametrize(("count", "place"), [(5, "loop"), (2000, "thread")])
def test_many_messages_become_a_call_in_a_thread(watch, count, place):
    where = watch(schema, "chat_messages")
    Api().chat(messages=[{"role": "user", "content": "x"}] * count)
    assert where == [place]


@pytest.mark.parametrize(("count", "place"), [(5, "loop"), (5000, "thread")])
def test_long_histories_are_read_in_a_thread(watch, monkeypatch, count, place):
    """For the next response of a stored conversation, and to append an item."""
    monkeypatch.setattr(history, "_ITEM_US", 0)
    read, checked = watch(history, "decoded"), watch(conversations, "check_items")
    api = Api()
    talk = api.post("/v1/conversations", items=[{"role": "user", "content": "hi"}]).json()["id"]
    (stored,) = api.state.stored._entries.values()
    items = [StoredItem(f"msg_{i}", HI) for i in range(count)]
    api.state.stored.grow(stored, items)
    api.post("/v1/responses", input="hi", conversation=talk)
    again = {"role": "user", "content": "hi"}
    assert api.post(f"/v1/conversations/{talk}/items", items=[again]).status_code == 200
    assert set(read) == {place}
    assert checked[-1] == place
    assert not stored.running
    assert api.state.bodies.held == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [("/detokenize", {"tokens": [5] * 131_073}), ("/decode", {"ids": [[5] * 131_072, [5]]})],
)
def test_more_ids_than_are_counted_are_refused_undecoded(watch, path, body):
    decoded = watch(Tokenizer, "decode")
    refused = Api().post(path, **body)
    assert refused.status_code == (422 if path == "/decode" else 400), refused.text
    assert "at most 131072 are allowed" in refused.text
    assert decoded == []


@pytest.mark.parametrize(("count", "place"), [(10, "loop"), (40_000, "thread")])
def test_prompts_of_many_ids_of_llama_cpp_are_read_in_a_thread(watch, count, place):
    where = watch(prompts, "_texts_of"), watch(prompts, "_joined")
    Api().post("/completion", prompt=["a", *[5] * count])
    assert where == ([place], [place])


def test_long_json_is_written_in_steps_and_stays_the_same(monkeypatch):
    rows = [[1.5, 2, None], {"a": "é\n"}, []]
    assert msgspec.json.encode({"a": in_parts(rows)}) == msgspec.json.encode({"a": rows})
    whole = content_text(rows)
    monkeypatch.setattr(questions, "_LONG_BYTES", 5)
    assert content_text(rows) == whole == json.dumps(rows, ensure_ascii=False)


def test_work_waits_for_a_thread_in_turns_of_the_callers():
    pool, gate, order = threads.TurnThreads(1, "test"), threading.Event(), []

    async def work(caller, number, size):
        threads.WORKS_FOR.set(caller)
        await pool.run(size, lambda: order.append((caller, number, threads.WORKS_FOR.get())))

    async def run_all():
        tasks = [asyncio.create_task(pool.run(1, gate.wait))]
        tasks += [asyncio.create_task(work("many", number, 10)) for number in range(9)]
        tasks += [asyncio.create_task(work("single", number, 30)) for number in range(2)]
        gone = asyncio.create_task(work("many", "gone", 10))
        await asyncio.sleep(0)  # all tasks have begun, and wait for the thread
        gone.cancel()
        await asyncio.wait([gone])
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run_all())
    assert "".join(caller[0] for caller, _, _ in order) == "msmms" + 6 * "m"
    assert [number for caller, number, _ in order if caller == "many"] == list(range(9))
    assert all(caller == named for caller, _, named in order)


def test_work_that_is_known_late_counts_in_the_turns_of_the_callers():
    pool, gate, order = threads.TurnThreads(1, "test"), threading.Event(), []

    def found(caller, more):
        order.append(caller)
        pool.charge(more)

    async def work(caller, size, more):
        threads.WORKS_FOR.set(caller)
        await pool.run(size, lambda: found(caller, more))

    async def run_all():
        tasks = [asyncio.create_task(pool.run(1, gate.wait))]
        tasks += [asyncio.create_task(work("many", 1, 100)) for _ in range(9)]
        tasks += [asyncio.create_task(work("single", 30, 0)) for _ in range(2)]
        await asyncio.sleep(0)  # all tasks have begun, and wait for the thread
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run_all())
    assert "".join(caller[0] for caller in order) == "mss" + 8 * "m"


def test_an_error_of_work_on_a_thread_is_raised_where_it_is_awaited():
    pool = threads.TurnThreads(1, "test")
    with pytest.raises(ZeroDivisionError):
        asyncio.run(pool.run(1, lambda: 1 / 0))
    assert asyncio.run(pool.run(1, lambda: 7)) == 7


def test_requests_do_their_work_in_the_turn_of_their_caller(monkeypatch):
    seen, real = [], threads.TurnThreads.run

    async def recorded(pool, size, work):
        seen.append(threads.WORKS_FOR.get())
        return await real(pool, size, work)

    monkeypatch.setattr(threads.TurnThreads, "run", recorded)
    api = Api(api_keys=("secret-one", "secret-two"))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    headers = {"authorization": "Bearer secret-two"}
    assert api.request("POST", "/v1/chat/completions", json=body, headers=headers).is_success
    assert set(seen) == {"key-2"}
