"""The time of day in a system text moves to the end of the conversation, and nothing else does."""

import pytest

from cpuserve.serving.prompts.chat_prompt import with_time_last

TIME = "Current time is 20:37:19. Today's date is 2024-12-20."
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "tool", "content": "d"},
]


@pytest.mark.parametrize(
    ("content", "rest"),
    [
        (f"{TIME}\nYou help.\nBe kind.", "You help.\nBe kind."),
        (f"You help.\nBe kind.\n{TIME}", "You help.\nBe kind."),
        (f"You help.\n\n{TIME}\n", "You help."),
        ([f"{TIME}\nYou help.", "Be kind."], ["You help.", "Be kind."]),
        (["You help.", f"Be kind.\n{TIME}"], ["You help.", "Be kind."]),
        (
            [{"type": "text", "text": f"{TIME}\nYou help."}],
            [{"type": "text", "text": "You help."}],
        ),
    ],
    ids=["first", "last", "with gaps", "first part", "last part", "objects"],
)
def test_the_time_goes_before_the_last_question(content, rest):
    moved = with_time_last([{"role": "system", "content": content}, *TURNS])
    assert moved == [
        {"role": "system", "content": rest},
        *TURNS[:2],
        {"role": "system", "content": TIME},
        *TURNS[2:],
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        TURNS,
        [{"role": "system", "content": TIME}, *TURNS],  # nothing else is in the text
        [{"role": "system", "content": f"You help.\n{TIME}\nBe kind."}, *TURNS],
        [{"role": "system", "content": "Today's date is 2024-12-20.\nBe kind."}, *TURNS],
        [{"role": "system", "content": "The office is open from 09:00.\nBe kind."}, *TURNS],
        [{"role": "system", "content": f"{TIME}\nBe kind."}],
        [{"role": "system", "content": None}, *TURNS],
        [{"role": "system", "content": [{"type": "image"}]}, *TURNS],
        ["no message", *TURNS],
    ],
)
def test_other_conversations_stay_as_they_are(messages):
    assert with_time_last(messages) == messages


def test_a_long_text_is_not_searched():
    text = "x\n" * 1_000_000 + TIME
    moved = with_time_last([{"role": "system", "content": text}, *TURNS])
    assert moved[0]["content"] == text.removesuffix(TIME).rstrip("\n")
