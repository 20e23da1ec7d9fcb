"""Scripted replies reach the clients of every dialect, whole and streamed."""

import json
from functools import partial

import anthropic
import httpx
import ollama
import openai
import pytest

from cpuserve.testing import call, failure, raw, reply, scripted
from tests.helpers.patience import PATIENCE_S

READ = {"name": "read", "parameters": {"type": "object", "properties": {"path": {}}}}
TOOLS = [{"type": "function", "function": READ}]
USER = [{"role": "user", "content": "Read the file."}]
WHOLE = reply("So.", calls=[call("read", path="a")], thought="Look first.")
SEEN = ("Look first.", "So.", [("read", {"path": "a"})])


@pytest.fixture(scope="module")
def shared():
    with scripted(strict=False) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.reset()
    yield shared
    shared.check()


def client_of(server, **options):
    return openai.OpenAI(
        base_url=server.openai_url, api_key=server.api_key, max_retries=0, **options
    )


def chat(server, stream):
    with client_of(server) as client:
        ask = partial(client.chat.completions.create, model="m", messages=USER, tools=TOOLS)
        if not stream:
            said = ask().choices[0].message
            calls = [(c.function.name, json.loads(c.function.arguments)) for c in said.tool_calls]
            return said.reasoning_content, said.content, calls
        thought, text, names, arguments = "", "", [], ""
        with ask(stream=True) as chunks:
            for chunk in chunks:
                delta = chunk.choices[0].delta
                thought += getattr(delta, "reasoning_content", None) or ""
                text += delta.content or ""
                for part in delta.tool_calls or []:
                    names += [part.function.name] if part.function.name else []
                    arguments += part.function.arguments or ""
        return thought, text, [(name, json.loads(arguments)) for name in names]


def responses(server, stream):
    tools = [{"type": "function", "strict": False, **READ}]
    with client_of(server) as client:
        ask = partial(client.responses.create, model="m", input="Read the file.", tools=tools)
        if stream:
            with ask(stream=True) as events:
                (given,) = [e.response for e in events if e.type == "response.completed"]
        else:
            given = ask()
    thought, message, called = given.output
    calls = [(called.name, json.loads(called.arguments))]
    return thought.content[0].text, message.content[0].text, calls


def messages(server, stream):
    tools = [{"name": "read", "input_schema": READ["parameters"]}]
    asked = {"model": "m", "max_tokens": 200, "messages": USER, "tools": tools}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                given = events.get_final_message()
        else:
            given = client.messages.create(**asked)
    thought, text, use = given.content
    return thought.thinking, text.text, [(use.name, use.input)]


def ollama_chat(server, stream):
    client = ollama.Client(server.url)
    given = client.chat("m", messages=USER, tools=TOOLS, stream=stream)
    parts = list(given) if stream else [given]
    said = [part.message for part in parts]
    calls = [c.function for message in said for c in message.tool_calls or []]
    client._client.close()
    return (
        "".join(message.thinking or "" for message in said),
        "".join(message.content or "" for message in said),
        [(c.name, dict(c.arguments)) for c in calls],
    )


DIALECTS = [chat, responses, messages, ollama_chat]


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ask", DIALECTS, ids=lambda ask: ask.__name__)
def test_thought_text_and_call_arrive(server, ask, stream):
    server.add(WHOLE)
    thought, text, calls = ask(server, stream)
    assert (thought.strip(), text.strip(), calls) == SEEN


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "Read"}),
        ("/v1/responses", {"input": "Read"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 50}),
        ("/api/chat", {"messages": USER}),
        ("/completion", {"prompt": "Read"}),
    ],
)
def test_a_failure_has_its_status_and_the_words_of_the_script(server, path, body, stream):
    server.add(failure(429, "wait for me", retry_after_s=7))
    given = httpx.post(
        server.url + path, json={"model": "m", "stream": stream, **body}, timeout=PATIENCE_S
    )
    assert given.status_code == 429
    assert given.headers["retry-after"] == "7"
    assert "wait for me" in given.text


def test_a_stream_breaks_after_its_first_text(server):
    server.add(failure(503, "the engine was stopped", after="This far and no further than this"))
    texts = []
    with client_of(server) as client:
        stream = client.chat.completions.create(model="m", messages=USER, stream=True)
        with stream, pytest.raises(openai.APIError, match="the engine was stopped"):
            texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(texts) == "This far and no further than this"


def test_plain_texts_come_in_their_order_and_requests_are_recorded(server):
    server.add("one", raw("<think>\nt\n</think>\n\ntwo"))
    with client_of(server) as client:
        for wanted in ("one", "two"):
            given = client.chat.completions.create(model="gpt-x", messages=USER)
            assert given.choices[0].message.content == wanted
    assert [e.body["model"] for e in server.exchanges] == ["gpt-x", "gpt-x"]
    assert "Read the file." in server.prompts[0]


def test_a_reply_can_be_cut_as_if_it_were_too_long(server):
    server.add(reply("half a", finish="length"))
    with client_of(server) as client:
        choice = client.chat.completions.create(model="m", messages=USER).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("half a", "length")


def test_a_function_responds_to_what_a_request_says(server):
    def respond(request):
        assert request.tools == ("read",)
        return reply(f"{len(request.turns)} turns, the last: {request.last}")

    server.respond(respond)
    with client_of(server) as client:
        given = client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
    assert given.choices[0].message.content == "1 turns, the last: Read the file."


def test_a_delay_makes_a_client_time_out(server):
    server.add(reply("late", delay_s=PATIENCE_S))
    # So long that the server has begun with the reply, which the check at the end asks for.
    with client_of(server, timeout=3.0) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="m", messages=USER)


def unscripted(server, **fields):
    with client_of(server) as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="m", messages=USER, **fields)
    return str(error.value)


def test_a_request_without_a_reply_is_refused_and_fails_the_check():
    with pytest.raises(AssertionError, match="no reply left"), scripted() as server:
        assert "no reply left for request 0, which ended with 'Read the file.'" in unscripted(
            server
        )


def test_a_reply_that_nobody_used_fails_the_check():
    with pytest.raises(AssertionError, match="used 1 replies"), scripted("unused"):
        pass


def test_calls_need_tools_and_a_forced_call_needs_a_reply_with_it(shared):
    shared.reset()
    shared.add(WHOLE, "no call")
    assert "the script calls read, but request 0 offers no tools" in unscripted(shared)
    assert "forces a call" in unscripted(shared, tools=TOOLS, tool_choice="required")
    with pytest.raises(AssertionError, match="offers no tools; request 1 forces a call"):
        shared.check()


def test_a_function_that_fails_is_an_error_of_the_request_and_of_the_check(shared):
    shared.reset()
    shared.respond(lambda request: {}["missing"])
    assert "the function of the script raised KeyError: 'missing'" in unscripted(shared)
    with pytest.raises(AssertionError, match="KeyError"):
        shared.check()


def test_a_forced_call_gets_the_arguments_of_the_script(server):
    server.add(reply(calls=[call("read", path="b")]))
    with client_of(server) as client:
        given = client.chat.completions.create(
            model="m", messages=USER, tools=TOOLS, tool_choice="required"
        )
    (called,) = given.choices[0].message.tool_calls
    assert json.loads(called.function.arguments) == {"path": "b"}


def test_default_key_name_and_record_are_used(tmp_path):
    with scripted(default="again", model="my-model", api_key="k", record=tmp_path) as server:
        with client_of(server) as client:
            assert client.models.list().data[0].id == "my-model"
            for _ in range(2):
                given = client.chat.completions.create(model="my-model", messages=USER)
                assert given.choices[0].message.content == "again"
        assert httpx.get(server.openai_url + "/models", timeout=PATIENCE_S).status_code == 401
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: failure(418), "cannot have status 418; choose one of 400"),
        (lambda: failure(500, retry_after_s=1), "status 500 has no Retry-After"),
        (lambda: scripted("a", respond=len).__enter__(), "not both"),
    ],
)
def test_what_a_script_cannot_have_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_reply_of_another_type_is_refused(shared):
    with pytest.raises(TypeError, match="not 3"):
        shared.add(3)
