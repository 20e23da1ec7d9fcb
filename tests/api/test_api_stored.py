"""Stored responses and conversations: what is kept, for whom, for how long, and within what."""

import json

import pytest

from cpuserve.api.openai.responses.conversation import calls_of
from cpuserve.api.stored.store import Entry, Store, StoreBounds, StoredItem
from cpuserve.base.errors import InvalidRequest, TooManyRequests
from tests.api.fakes import ANSWER, Api, error_of
from tests.api.openai_responses import HI, PATH, WEATHER, ask
from tests.api.tools import CALL, prompt_of, says, tool_api

TEXT = [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]


def test_a_stored_response_is_read_again_and_deleted():
    api = Api()
    made = ask(api, "hi", metadata={"a": "b"}).json()
    assert made["store"] is True
    assert api.get(f"{PATH}/{made['id']}").json() == made
    gone = api.request("DELETE", f"{PATH}/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
    assert api.get(f"{PATH}/{made['id']}").status_code == 404
    assert (len(api.state.stored), api.state.stored.num_bytes) == (0, 0)


def test_store_false_keeps_nothing():
    api = Api()
    made = ask(api, store=False).json()
    assert made["store"] is False
    assert api.get(f"{PATH}/{made['id']}").status_code == 404
    assert api.state.stored.num_bytes == 0


def test_a_later_response_reads_the_items_of_the_earlier_ones():
    api = tool_api(says(f"I look.\n{CALL}"))
    first = ask(api, "How warm?", tools=[WEATHER], instructions="Be brief.").json()
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "18"}
    api.engine.script = says("18 degrees.")
    second = ask(api, [output], tools=[WEATHER], previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    chained = prompt_of(api)
    items = [{"role": "user", "content": "How warm?"}, *first["output"], output]
    ask(api, items, tools=[WEATHER], store=False)
    assert chained == prompt_of(api), "the instructions of the first response do not go on"
    api.request("DELETE", f"{PATH}/{first['id']}")
    ask(api, "Thanks", tools=[WEATHER], previous_response_id=second["id"])
    last = prompt_of(api)
    ask(api, [*items, *second["output"], {"role": "user", "content": "Thanks"}], tools=[WEATHER])
    assert last == prompt_of(api), "a deleted response stays in the history of a later one"


@pytest.mark.parametrize("stream", [False, True])
def test_references_become_the_items_that_they_name(stream):
    api = tool_api(says(f"I look.\n{CALL}"))
    first = ask(api, "How warm?", tools=[WEATHER], stream=stream)
    api.engine.script = says("18 degrees.")
    (response,) = (entry for entry in api.state.stored._entries.values())
    named = [{"type": "item_reference", "id": item.id} for item in response.items[1:]]
    assert len(named) == 2
    call = api.get(f"{PATH}/{response.id}").json()["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "18"}
    asked = {"role": "user", "content": "How warm?"}
    assert ask(api, [asked, *named, output], tools=[WEATHER]).status_code == 200
    referred = prompt_of(api)
    ask(api, [asked, *api.get(f"{PATH}/{response.id}").json()["output"], output], tools=[WEATHER])
    assert referred == prompt_of(api)
    assert first.status_code == 200


def test_an_unknown_item_and_an_unknown_response_are_not_found():
    api = Api()
    for item in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        refused = ask(api, [HI, item])
        assert (refused.status_code, error_of(refused)["code"]) == (404, "item_not_found")
    refused = ask(api, previous_response_id="resp_1")
    error = error_of(refused)
    assert (refused.status_code, error["param"]) == (404, "previous_response_id")
    assert error["code"] == "previous_response_not_found"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = api.request(method, f"{PATH}/resp_1{path}")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "response_not_found")


def test_another_caller_gets_the_404_of_an_id_that_does_not_exist():
    api = Api(api_keys=("k1", "k2"), key="k1")
    made = ask(api, "hi").json()
    talk = api.post("/v1/conversations", items=[HI]).json()
    item = made["output"][0]["id"]
    api._key = "k2"

    def told(response, own, other):
        assert response.status_code == 404
        return response.text.replace(own, other)

    for path in (f"{PATH}/ID", f"{PATH}/ID/input_items"):
        mine = api.get(path.replace("ID", made["id"]))
        assert told(mine, made["id"], "resp_0") == api.get(path.replace("ID", "resp_0")).text
    assert ask(api, previous_response_id=made["id"]).status_code == 404
    assert ask(api, conversation=talk["id"]).status_code == 404
    assert ask(api, [HI, {"type": "item_reference", "id": item}]).status_code == 404
    for method in ("GET", "DELETE"):
        assert api.request(method, f"/v1/conversations/{talk['id']}").status_code == 404
        assert api.request(method, f"{PATH}/{made['id']}").status_code == 404
    api._key = "k1"
    assert api.get(f"{PATH}/{made['id']}").json() == made


def test_input_items_come_in_pages():
    api = Api()
    sent = [{"role": "user", "content": str(i)} for i in range(5)]
    made = ask(api, sent).json()
    where = f"{PATH}/{made['id']}/input_items"

    def page(**query):
        body = api.get(where, params=query).json()
        return [item["content"][0]["text"] for item in body["data"]], body

    assert page()[0] == ["4", "3", "2", "1", "0"]
    texts, body = page(order="asc", limit=2)
    assert (texts, body["has_more"], body["object"]) == (["0", "1"], True, "list")
    assert page(order="asc", limit=2, after=body["last_id"])[0] == ["2", "3"]
    assert page(order="asc", limit=3, after=body["last_id"])[1]["has_more"] is False
    last = page(order="asc")[1]["last_id"]
    assert page(order="asc", limit=2, before=last)[0] == ["2", "3"]
    for query in (
        {"limit": 0},
        {"limit": "x"},
        {"order": "up"},
        {"after": "msg_0"},
        {"limit": 101},
    ):
        refused = api.get(where, params=query)
        assert (refused.status_code, error_of(refused)["param"]) == (400, next(iter(query)))
    second = ask(api, "more", previous_response_id=made["id"]).json()
    where = f"{PATH}/{second['id']}/input_items"
    assert page()[0] == ["more"]


def test_a_response_without_background_has_no_events_and_is_not_cancelled():
    api = Api()
    made = ask(api).json()
    refused = api.get(f"{PATH}/{made['id']}", params={"stream": "true"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "stream")
    refused = api.post(f"{PATH}/{made['id']}/cancel")
    assert "not created with background" in error_of(refused)["message"]
    for query in ({"stream": "yes"}, {"starting_after": "1"}, {"include": "everything"}):
        refused = api.get(f"{PATH}/{made['id']}", params=query)
        assert (refused.status_code, error_of(refused)["param"]) == (400, next(iter(query)))


def test_a_request_that_is_refused_stores_nothing():
    api = Api()
    talk = api.post("/v1/conversations", items=[HI]).json()["id"]
    before = api.state.stored.num_bytes
    assert ask(api, "hi", conversation=talk, temperature=-1).status_code == 400
    assert (len(api.state.stored), api.state.stored.num_bytes) == (1, before)
    assert ask(api, "hi", conversation=talk).status_code == 200, "the conversation is not locked"


def test_a_response_whose_generation_fails_is_not_stored():
    def failing(engine, number, prompt, params):
        yield ZeroDivisionError("secret")

    api = Api(failing)
    talk = api.post("/v1/conversations").json()["id"]
    for stream in (False, True):
        assert ask(api, stream=stream, conversation=talk).status_code == 500
    assert len(api.state.stored) == 1
    assert api.get(f"/v1/conversations/{talk}/items").json()["data"] == []


def test_conversations_grow_by_requests_and_by_responses():
    api = Api()
    made = api.post("/v1/conversations", items=[HI], metadata={"a": "b"}).json()
    where = f"/v1/conversations/{made['id']}"
    assert made == {"id": made["id"], "object": "conversation", "metadata": {"a": "b"},
                    "created_at": made["created_at"]}  # fmt: skip
    added = api.post(f"{where}/items", items=[{"role": "assistant", "content": "Hello"}]).json()
    assert [item["type"] for item in added["data"]] == ["message"]
    for stream in (False, True):
        ask(api, "again", conversation={"id": made["id"]}, stream=stream)
    prompt = prompt_of(api)
    items = api.get(f"{where}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 3
    assert items[-1]["content"] == TEXT
    ask(api, items[:-1], store=False)
    assert prompt_of(api) == prompt
    one = items[1]["id"]
    assert api.get(f"{where}/items/{one}").json() == items[1]
    assert api.request("DELETE", f"{where}/items/{one}").json() == made
    assert api.get(f"{where}/items/{one}").status_code == 404
    assert api.post(where, metadata={"c": "d"}).json()["metadata"] == {"c": "d"}
    assert api.get(where).json()["metadata"] == {"c": "d"}
    assert api.request("DELETE", where).json()["object"] == "conversation.deleted"
    assert api.get(where).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"type": "message", "role": "cat", "content": "x"}]}, "items"),
        ({"items": [{"type": "unknown"}]}, "items"),
        ({"items": [HI] * 21}, "items"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"items": "hi"}, "items"),
    ],
)
def test_a_bad_conversation_is_refused(body, param):
    refused = Api().post("/v1/conversations", **body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, param)


def test_a_compacted_conversation_has_the_users_messages_and_a_summary_that_the_model_reads():
    api = tool_api(says("The user greets."))
    first = ask(api, "hi").json()
    made = api.post(f"{PATH}/compact", previous_response_id=first["id"], model="tiny").json()
    assert "Summarize our conversation" in prompt_of(api)
    assert made["object"] == "response.compaction"
    assert [item["type"] for item in made["output"]] == ["message", "compaction"]
    ask(api, [*made["output"], {"role": "user", "content": "go on"}])
    assert "The user greets." in prompt_of(api)
    refused = api.post(f"{PATH}/compact", model="tiny")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input")


def test_an_id_that_a_client_repeats_names_two_responses_and_neither():
    api = Api()
    headers = {"x-request-id": "r1"}
    ids = {api.request("POST", PATH, json={"input": "hi"}, headers=headers).json()["id"]
           for _ in range(2)}  # fmt: skip
    assert len(ids) == 2
    assert all(api.get(f"{PATH}/{each}").status_code == 200 for each in ids)
    assert not any("r1" in each for each in ids)
    assert api.get(f"{PATH}/resp_r1").status_code == 404


def test_nothing_is_stored_where_storing_is_off():
    api = Api()
    api.state.stored = Store(StoreBounds(num_entries=0))
    assert ask(api).json()["store"] is False
    for field in ("store", "background"):
        refused = ask(api, **{field: True})
        assert (refused.status_code, error_of(refused)["param"]) == (400, field)
    assert "--stored-responses 0" in error_of(api.post("/v1/conversations"))["message"]


def entry(name, caller="a", running=False, size=1000):
    return Entry(caller, name, size=size, running=running)


def test_the_oldest_finished_entry_of_the_greatest_caller_makes_room():
    store = Store(StoreBounds(num_entries=4))
    store.add(entry("b1", "b"))
    store.add(entry("a1", running=True))
    for name in ("a2", "a3", "a4", "a5"):
        store.add(entry(name))
    kept = [e for c, e in (("b", "b1"), *(("a", f"a{i}") for i in range(1, 6)))
            if store.find(Entry, c, e)]  # fmt: skip
    assert kept == ["b1", "a1", "a4", "a5"]


def test_a_caller_with_many_small_entries_pushes_out_no_large_one_of_another():
    store = Store(StoreBounds(num_entries=20))
    store.add(entry("mine", "modest", size=100_000))
    for number in range(100):
        store.add(entry(str(number), "greedy"))
    assert store.find(Entry, "modest", "mine") is not None
    assert len(store) == 20


def test_a_caller_with_a_large_entry_pushes_out_no_small_ones_of_another():
    store = Store(StoreBounds(num_bytes=100_000))
    for number in range(20):
        store.add(entry(str(number), "modest"))
    for number in range(5):
        store.add(entry(str(number), "greedy", size=60_000))
    assert sum(store.find(Entry, "modest", str(number)) is not None for number in range(20)) == 20
    assert store.find(Entry, "greedy", "4") is not None


def test_a_store_that_running_entries_fill_refuses_and_keeps_the_finished_ones():
    store = Store(StoreBounds(num_entries=9, num_bytes=3000))
    store.add(entry("done"))
    store.add(entry("runs", running=True, size=2000))
    with pytest.raises(TooManyRequests, match="store is full"):
        store.add(entry("new", size=1500))
    with pytest.raises(InvalidRequest, match="--stored-bytes"):
        store.add(entry("huge", size=4000))
    assert [store.find(Entry, "a", name) is not None for name in ("done", "runs", "new")] == [
        True, True, False,
    ]  # fmt: skip
    assert store.num_bytes == 3000


def test_items_that_entries_share_count_once_and_last_as_long_as_one_of_them():
    store = Store()
    item = StoredItem("i", b"x" * 5000)
    first, second = entry("first"), entry("second")
    store.add(first, [item])
    alone = store.num_bytes
    store.add(second, [item])
    assert store.num_bytes - alone < 2000
    store.remove(first)
    assert store.item("a", "i") is item
    store.remove(second)
    assert (store.item("a", "i"), store.num_bytes) == (None, 0)


def test_an_entry_is_dropped_when_it_is_too_old_unless_it_runs():
    now = [0.0]
    store = Store(StoreBounds(age_s=10), clock=lambda: now[0])
    runs, done = entry("runs", running=True), entry("done")
    store.add(runs)
    store.add(done, [StoredItem("i", b"x")])
    now[0] = 10.5
    assert store.find(Entry, "a", "done") is None
    assert store.item("a", "i") is None
    assert store.find(Entry, "a", "runs") is runs


def test_to_make_room_each_entry_and_each_item_is_looked_at_once(monkeypatch):
    """With 200 entries of 50 items, a walk over all items for each entry would be 40 times more."""
    looks, held = [], Entry.held.fget
    monkeypatch.setattr(Entry, "held", property(lambda one: looks.append(one) or held(one)))
    sized, size = [], StoredItem.size.fget
    monkeypatch.setattr(StoredItem, "size", property(lambda one: sized.append(one) or size(one)))
    store = Store(StoreBounds(num_entries=1000, num_bytes=4_000_000))
    shared = [StoredItem(str(number), b"x" * 100) for number in range(50)]
    for number in range(200):
        store.add(entry(str(number), "ab"[number % 2]), shared)
    looks.clear()
    sized.clear()
    store.add(entry("new", size=3_990_000))
    assert len(store) == 1
    assert store.num_bytes == 3_990_000
    assert len(looks) < 3 * 200
    assert len(sized) < 3 * 50


def test_items_that_do_not_fit_leave_the_entry_as_it_was():
    store = Store(StoreBounds(num_bytes=9000))
    known = entry("known")
    store.add(known, [StoredItem("a", b"x")])
    before = store.num_bytes, known.held
    with pytest.raises(InvalidRequest, match="--stored-bytes"):
        store.grow(known, [StoredItem(str(number), b"x" * 100) for number in range(50)], 10)
    assert ([item.id for item in known.items], store.num_bytes, known.held) == (["a"], *before)
    assert store.item("a", "0") is None


def test_an_appended_output_needs_its_call_and_no_other_item_is_decoded():
    call = {"type": "function_call", "call_id": 'a"b', "name": "f", "arguments": "{}", "id": "1"}
    told = {"type": "function_call_output", "call_id": "c", "output": ['"a\\"b"', 'a"b'], "id": "2"}
    search = {"type": "tool_search_call", "execution": "server", "arguments": {}, "id": "3"}
    text = {"type": "message", "role": "user", "content": "hi", "id": "4"}
    earlier = [
        StoredItem(one["id"], json.dumps(one).encode()) for one in (call, told, search, text)
    ]
    output = {"type": "function_call_output", "call_id": 'a"b', "output": "x"}
    assert calls_of([output], earlier) == [call]
    assert calls_of([{"type": "tool_search_output", "id": "9"}], earlier) == [search]
    assert calls_of([text, {"type": ["x"]}], earlier) == []


def test_an_item_with_a_type_that_is_no_text_is_refused():
    for value in ([], {"a": 1}, 5):
        item = {"type": value, "content": "hi"}
        assert "not supported" in error_of(ask(Api(), [item, HI]))["message"]
        assert Api().post("/v1/conversations", items=[item]).status_code == 400
