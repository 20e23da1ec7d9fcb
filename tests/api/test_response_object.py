"""The output items of a response, from the parts of its text."""

from types import SimpleNamespace

import msgspec
import pytest

from cpuserve.api.openai.responses.response_object import RAW, SUMMARY, items_of
from cpuserve.api.openai.responses.tools import Origin
from cpuserve.serving.calls.events import Thoughts, WholeToolCall

ORIGINS = {"grep": Origin("custom", "files", "grep"), "tools": Origin("search", None, "tools")}
THOUGHT = Thoughts(["a ", "thought"])


def items(*parts, reason="stop", **options):
    """Return the items as JSON objects."""
    choice = SimpleNamespace(parts=parts, reason=reason)
    return msgspec.json.decode(msgspec.json.encode(items_of(choice, "r", ORIGINS, [], **options)))


def call(name, arguments):
    return WholeToolCall("call_1", name, list(arguments))


def test_a_response_without_text_has_one_empty_message():
    (item,) = items()
    assert (item["type"], item["id"], item["status"]) == ("message", "msg_r_0", "completed")
    assert [part["text"] for part in item["content"]] == [""]


def test_items_are_in_the_order_of_the_parts_with_ids_of_their_kinds():
    found = items(THOUGHT, "text", call("weather", "{}"), call("grep", "a*"), call("tools", "{}"))
    assert [item["id"] for item in found] == ["rs_r_0", "msg_r_1", "fc_r_2", "ctc_r_3", "tsc_r_4"]
    weather, grep, search = found[2:]
    assert (weather["name"], weather["arguments"], "namespace" in weather) == (
        "weather", "{}", False,
    )  # fmt: skip
    assert (grep["namespace"], grep["name"], grep["input"]) == ("files", "grep", "a*")
    assert search["arguments"] == {}


@pytest.mark.parametrize(
    ("part", "reason", "status"),
    [
        ("text", "length", "incomplete"),
        ("text", "stop", "completed"),
        (THOUGHT, "length", "incomplete"),
        (call("weather", "{"), "length", "incomplete"),
        (call("weather", "{"), "stop", "incomplete"),
        (call("weather", "{}"), "tool_calls", "completed"),
    ],
)
def test_only_the_last_item_can_be_incomplete(part, reason, status):
    first, last = items("earlier", part, reason=reason)
    assert (first["status"], last["status"]) == ("completed", status)


@pytest.mark.parametrize(("form", "member"), [(RAW, "content"), (SUMMARY, "summary")])
def test_a_thought_is_raw_text_or_a_summary_and_can_be_sealed(form, member):
    seal = SimpleNamespace(sealed=lambda text: f"sealed {text}")
    (item,) = items(THOUGHT, thought_form=form, seal=seal)
    assert [part["text"] for part in item[member]] == ["a thought"]
    assert item["encrypted_content"] == "sealed a thought"
    assert not items(THOUGHT)[0].get("encrypted_content")
