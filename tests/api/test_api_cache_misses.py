"""Each dialect says why a prompt was computed again: where it differs, and from what."""

import json

import pytest

from tests.api.anthropic_messages import WEATHER as CLAUDE_WEATHER
from tests.api.anthropic_messages import ask, events_of, folded
from tests.api.fakes import Api, error_of, named_events_of, tokenizer
from tests.api.fakes import events_of as sse
from tests.api.tools import WEATHER, prompt_of, says, tool_api

SYSTEM = "You are an agent. Be kind, be short, and read each file before you change it."
QUESTION = "What is a cat, and where does it live?" + " Say it in one short sentence." * 12
ONE = [{"role": "user", "content": QUESTION}]
OTHER = [{"role": "user", "content": QUESTION.replace("cat", "dog")}]
MISS, UUID = "x-cache-miss", "6f9619ff-8b86-d011-b42d-00c04fc964ff"


@pytest.fixture
def api():
    return tool_api(says("A kind of animal."), api_keys=("key",), key="key")


def miss(response):
    """The header, or None."""
    assert response.status_code == 200, response.text
    return json.loads(response.headers[MISS]) if MISS in response.headers else None


def animals(found):
    return found["before"].strip()[:3], found["now"].strip()[:3]


def cached(api, tokens):
    """Let all further prompts have this many tokens in the cache."""
    script = api.engine.script

    def found(*args):
        for output in script(*args):
            output.cached_tokens = tokens
            yield output

    api.engine.script = found


# --- Messages ------------------------------------------------------------------------------------


def message(api, messages=ONE, named=None, system=SYSTEM, **fields):
    fields["diagnostics"] = {"previous_message_id": named}
    return ask(api, messages, system=system, **fields)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"messages": OTHER}, "messages_changed"),
        ({"system": SYSTEM.replace("kind", "rude")}, "system_changed"),
        ({"tools": [CLAUDE_WEATHER]}, "tools_changed"),
    ],
    ids=["messages", "system", "tools"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_messages_report_the_first_part_that_differs(api, changed, kind, stream):
    first = message(api).json()
    assert first["diagnostics"] is None
    response = message(api, named=first["id"], stream=stream, **changed)
    body = folded(events_of(response)) if stream else response.json()
    reason = body["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == kind
    assert reason["cache_missed_input_tokens"] > 0
    where = reason["first_difference"]
    assert where["before"] != where["now"]
    assert miss(response)["token"] == where["token"]
    if kind == "messages_changed":
        assert animals(where) == ("cat", "dog")


def test_messages_have_no_diagnostics_unless_asked(api):
    assert "diagnostics" not in ask(api).json()


def test_the_next_turn_of_a_conversation_has_no_difference(api):
    first = message(api).json()
    turns = [*ONE, {"role": "assistant", "content": first["content"]}, *OTHER]
    response = message(api, turns, named=first["id"])
    assert response.json()["diagnostics"] is None
    assert miss(response) == {"reason": "not_cached", "token": 0, "of": first_tokens(first)}


def first_tokens(body):
    return body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"]


def test_an_unknown_message_is_reported(api):
    body = message(api, named="msg_other").json()
    assert body["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_another_thinking_mode_is_not_compared(api):
    first = message(api).json()
    changed = {"messages": OTHER, "thinking": {"type": "disabled"}}
    body = message(api, named=first["id"], **changed).json()
    reason = body["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "unavailable"
    assert "cache_missed_input_tokens" not in reason


def test_a_message_of_another_key_is_not_found():
    api = tool_api(says("Yes."), api_keys=("one", "two"), key="one")
    first = message(api).json()
    api._key = "two"
    response = message(api, OTHER, named=first["id"])
    reason = response.json()["diagnostics"]["cache_miss_reason"]
    assert reason == {"type": "previous_message_not_found"}
    assert miss(response) is None, "texts of another caller must not be shown"
    api._key = "one"
    assert miss(message(api, OTHER))["before"].strip().startswith("cat")


@pytest.mark.parametrize("wrong", [{"previous_message_id": 7}, "msg_1"])
def test_invalid_diagnostics_are_refused(api, wrong):
    response = ask(api, diagnostics=wrong)
    assert response.status_code == 400
    assert "diagnostics" in response.json()["error"]["message"]


# --- Responses -----------------------------------------------------------------------------------


def respond(api, question, named=None, **fields):
    fields["prompt_cache_options"] = {"comparison_response_id": named}
    return api.post("/v1/responses", model="tiny", input=question, instructions=SYSTEM, **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_compare_with_the_response_that_is_asked_for(api, stream):
    first = respond(api, "What is a cat? Please say it in one sentence.").json()
    assert "prompt_cache_diagnostics" not in first
    response = respond(
        api, "What is a dog? Please say it in one sentence.", first["id"], stream=stream
    )
    body = named_events_of(response)[-1]["response"] if stream else response.json()
    found = body["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")
    assert found["comparison_reusable_tokens"] == first["usage"]["input_tokens"]
    where = found["first_difference"]
    assert animals(where) == ("cat", "dog")
    assert found["cache_missed_tokens"] == first["usage"]["input_tokens"] - where["token"]


def test_responses_report_a_hit_other_tools_and_an_unknown_response(api):
    question = "What is a cat? Please say it in one sentence."
    first = respond(api, question).json()
    again = respond(api, question, first["id"]).json()
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    tools = [{"type": "function", **WEATHER["function"]}]
    other = respond(api, question, first["id"], tools=tools).json()
    assert other["prompt_cache_diagnostics"]["reason"] == "tools_changed"
    unknown = respond(api, question, "resp_other").json()
    assert unknown["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_a_request_that_only_warms_the_cache_is_refused(api):
    fields = {"input": "hi", "prompt_cache_options": {"prewarm": True}}
    response = api.post("/v1/responses", model="tiny", **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt_cache_options"


# --- the header of all dialects ------------------------------------------------------------------


def chat(api, messages, **fields):
    system = {"role": "system", "content": SYSTEM}
    return api.chat(messages=[system, *messages], **fields)


def ollama(api, messages, **fields):
    system = {"role": "system", "content": SYSTEM}
    fields.setdefault("stream", False)
    return api.post("/api/chat", model="tiny", messages=[system, *messages], **fields)


def complete(api, messages, **fields):
    return api.complete(SYSTEM + messages[0]["content"], **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", [chat, ollama, complete])
def test_a_header_shows_the_first_difference(api, dialect, stream):
    assert miss(dialect(api, ONE)) is None
    found = miss(dialect(api, OTHER, stream=stream))
    kind = "prompt_changed" if dialect is complete else "messages_changed"
    assert found["reason"] == kind
    assert animals(found) == ("cat", "dog")


def test_a_prompt_that_is_cached_as_far_as_possible_has_no_header(api):
    body = chat(api, ONE).json()
    cached(api, body["usage"]["prompt_tokens"] - 20)
    assert miss(chat(api, ONE)) is None


def test_a_header_has_ascii_only(api):
    chat(api, ONE)
    header = chat(api, [{"role": "user", "content": "The \x7f\n\u4e2d\U0001f600 q" * 9}])
    assert header.headers[MISS].isascii()
    assert header.headers[MISS].isprintable()


def test_the_time_of_day_comes_after_tools_and_earlier_turns(api):
    system = {"role": "system", "content": f"Current time is 11:55:05.\n{SYSTEM}"}
    turns = [*ONE, {"role": "assistant", "content": "An animal."}, *OTHER]
    assert api.chat(messages=[system, *turns], tools=[WEATHER]).status_code == 200
    places = [prompt_of(api).index(text) for text in ("Tools:", SYSTEM, "An animal.", "11:55:05")]
    assert places == sorted(places)
    assert prompt_of(api).index("11:55:05") < prompt_of(api).index("dog")


@pytest.mark.parametrize("session", ["", f"user_1_account_2_session_{UUID}"])
def test_without_keys_only_a_session_sees_its_earlier_texts(session):
    api = tool_api(says("Yes."))
    for messages in (ONE, OTHER):
        response = ask(api, messages, system=SYSTEM, metadata={"user_id": session})
    found = miss(response)
    assert found["now"].strip().startswith("dog")
    assert ("before" in found) is bool(session)


def test_a_long_id_of_a_session_is_not_kept():
    api, sessions = tool_api(says("Yes.")), (UUID, UUID + "x" * 10_000)
    for session in sessions:
        assert ask(api, system=SYSTEM, metadata={"user_id": session}).status_code == 200
    kept = api.context.recent.of("127.0.0.1", ("", 1.0, ""))
    assert [prompt.session for prompt in kept] == ["", UUID]


@pytest.mark.parametrize("number", ["1", UUID])
def test_the_id_of_a_message_shows_its_text_and_the_id_of_its_request_does_not(number):
    api = tool_api(says("Yes."))
    asked = {"model": "tiny", "max_tokens": 9, "system": SYSTEM, "messages": ONE}
    headers = {"x-request-id": number}
    first = api.request("POST", "/v1/messages", json=asked, headers=headers).json()
    body = message(api, OTHER, named=first["id"]).json()
    where = body["diagnostics"]["cache_miss_reason"]["first_difference"]
    assert where["now"].strip().startswith("dog")
    assert where["before"].strip().startswith("cat")
    for guess in (number, f"msg_{number}", f"chatcmpl-{number}"):
        body = message(api, OTHER, named=guess).json()
        assert body["diagnostics"]["cache_miss_reason"] == {"type": "previous_message_not_found"}


def test_misses_are_counted_by_reason(api):
    def counted():
        lines = api.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("cpuserve:prompt_cache_misses_total{")]
        return {line.split('reason="')[1].split('"')[0]: line.rsplit(" ", 1)[1] for line in found}

    chat(api, ONE)
    assert counted() == {}
    chat(api, OTHER)
    chat(api, OTHER)
    assert counted() == {"messages_changed": "1.0", "not_cached": "1.0"}


def test_salts_share_nothing(api):
    chat(api, ONE, cache_salt="a")
    assert miss(chat(api, OTHER, cache_salt="b")) is None
    assert miss(chat(api, OTHER, cache_salt="a")) is not None


def test_nothing_is_remembered_without_a_prefix_cache():
    api = Api()
    api.engine.info["prefix_caching"] = False
    api.context.recent = None
    api.context.set_ready(tokenizer(), api.context.chat_template)
    api.chat("What is a cat, in this long question of so many words?")
    assert miss(api.chat("What is a dog, in this long question of so many words?")) is None
    assert api.context.recent is None


# --- timings and counts --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", [chat, complete])
def test_timings_count_the_cached_tokens_and_explain_a_miss(api, dialect, stream):
    assert "timings" not in dialect(api, ONE).json()
    cached(api, 96)
    response = dialect(api, OTHER, stream=stream, timings_per_token=True)
    if stream:
        found = [event["timings"] for event in sse(response) if "timings" in event]
        counts = [timings["predicted_n"] for timings in found]
        assert len(counts) > 2
        assert counts == sorted(counts)
        timings = found[-1]
    else:
        timings = response.json()["timings"]
    assert timings["cache_n"] == 96
    usage = dialect(api, OTHER).json()["usage"]
    assert timings["prompt_n"] == usage["prompt_tokens"] - 96
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["cache_miss"] == miss(response)
    assert min(timings["prompt_per_second"], timings["predicted_per_second"]) > 0


def test_ollama_counts_the_cached_tokens(api):
    cached(api, 96)
    assert ollama(api, ONE).json()["prompt_eval_cached_count"] == 96


# --- thoughts of earlier turns -------------------------------------------------------------------

KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
SOME = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]}
READS = "{{ preserve_thinking is defined and preserve_thinking and not clear_thinking }}"


@pytest.mark.parametrize(
    ("management", "keeps"), [(None, "False"), (KEPT, "True"), (SOME, "False"), ({}, "False")]
)
def test_the_template_learns_that_all_thoughts_are_to_be_kept(management, keeps):
    api = tool_api(says("Yes."), source=READS)
    assert ask(api, context_management=management).status_code == 200
    assert prompt_of(api) == keeps


@pytest.mark.parametrize("wrong", [{"edits": 3}, {"edits": ["a"]}, []])
def test_invalid_context_management_is_refused(api, wrong):
    response = ask(api, context_management=wrong)
    assert response.status_code == 400
    assert "context_management" in response.json()["error"]["message"]
