"""What a model gets of parts that it cannot read, and when they are refused."""

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.prompts.chat_prompt import readable
from cpuserve.tokenizer.conversation import MediaPart

LINE = "[An image was left out: you can read text only.]"
SOUND_LINE = "[A sound was left out: you can read text and images only.]"


def part(kind, where="messages[0].content[0]", **given):
    noun = {"image": "an image", "audio": "a sound"}[kind]
    return MediaPart(kind=kind, type=kind, noun=noun, where=where, **given)


IMAGE, SOUND = part("image"), part("audio")


def said(role, *content):
    return {"role": role, "content": list(content)}


def test_messages_without_parts_are_the_same_list():
    messages = [{"role": "user", "content": "hi"}, said("user", "a", "b")]
    assert readable(messages) is messages


def test_a_conversation_of_the_caller_is_not_changed():
    messages = [said("user", IMAGE), said("assistant", "I see."), said("user", "b")]
    found = readable(messages)
    assert messages[0]["content"] == [IMAGE]
    assert found[0] == {"role": "user", "content": LINE}
    assert found[1:] == messages[1:]


def test_parts_that_the_model_reads_stay():
    messages = [said("user", "look", IMAGE, "and", SOUND, "listen"), said("assistant", "ok"),
                said("user", "x", IMAGE)]  # fmt: skip
    assert readable(messages, {"image"}) == [
        said("user", "look", IMAGE, f"and\n{SOUND_LINE}\nlisten"), *messages[1:]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reads", "why"),
    [
        (IMAGE, (), "messages[0].content[0] has type 'image'; this model reads text only"),
        (SOUND, {"image"},
         "messages[0].content[0] has type 'audio'; this model reads text and images only"),
        (part("image", hint="send text"), (),
         "messages[0].content[0] has type 'image'; this model reads text only: send text"),
        (part("image", why="is broken"), {"image"}, "messages[0].content[0] is broken"),
    ],
)  # fmt: skip
def test_a_part_in_the_last_turn_of_the_user_is_refused(given, reads, why):
    with pytest.raises(InvalidRequest) as caught:
        readable([said("user", "hi"), said("assistant", "ok"), said("user", given)], reads)
    assert caught.value.message == why


@pytest.mark.parametrize(
    ("roles", "refused"),
    [
        (["user*"], True),
        (["user*", "user"], True),
        (["system", "user*"], True),
        (["user*", "assistant"], True),  # the response continues the assistant's message
        (["user*", "assistant", "user"], False),
        (["user", "assistant", "tool*"], False),
        (["user", "assistant", "tool", "user*"], False),  # clients put a tool's output there
        (["user", "assistant", "tool", "assistant", "user*"], True),
        (["user", "assistant", "function", "user*"], False),
        (["user", "assistant*", "user"], False),
    ],
    ids=str,
)
def test_only_the_turn_that_waits_for_a_response_is_refused(roles, refused):
    messages = [said(role.rstrip("*"), IMAGE if role.endswith("*") else "text") for role in roles]
    if refused:
        with pytest.raises(InvalidRequest):
            readable(messages)
    else:
        assert [m["content"] for m in readable(messages) if m["content"] != ["text"]] == [LINE]
