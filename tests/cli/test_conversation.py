"""The commands of `cpuserve chat`, and Ctrl-C at its prompt, without an engine."""

import asyncio
import json
import os
import signal

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.cli.chat import AGAIN_S, HELP, Conversation, Lines, interruptible

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answer to hello"}]


class FakeSession:
    """Answers "answer to X" to X, refuses "too long", stops at "stop"; keeps its inputs."""

    def __init__(self):
        self.rendered = []

    async def stream(self, call):
        self.rendered.append([dict(m) for m in call.messages])
        text = call.messages[-1]["content"]
        if text == "too long":
            msg = "the prompt is too long"
            raise InvalidRequest(msg)
        if text == "stop":
            raise asyncio.CancelledError
        return f"answer to {text}"


def talk(*lines, system=None):
    """Return (the conversation after `lines`, whether it continues, the inputs of the model)."""
    session = FakeSession()
    conversation = Conversation(session, system, {})

    async def run():
        return [await conversation.take(line) for line in lines]

    goes_on = asyncio.run(run())
    return conversation, goes_on, session.rendered


def test_turns_are_remembered():
    conversation, goes_on, rendered = talk("hello", "again", system="be brief")
    first = [{"role": "system", "content": "be brief"}]
    assert rendered[1] == [*first, *HELLO, {"role": "user", "content": "again"}]
    assert conversation.messages[:3] == [*first, *HELLO]
    assert len(conversation.messages) == 5
    assert goes_on == [True, True]


def test_a_turn_that_was_stopped_or_refused_leaves_no_trace(capsys):
    conversation, _, _ = talk("hello", "stop", "too long")
    assert conversation.messages == HELLO
    assert "the prompt is too long. /clear starts a new" in capsys.readouterr().err


def test_clear_forgets_all_but_the_system_message():
    conversation, _, rendered = talk("/system be brief", "hello", "/clear", "again")
    assert [m["role"] for m in rendered[1]] == ["system", "user"]
    assert len(conversation.messages) == 3


def test_system_sets_and_shows_the_message(capsys):
    conversation, _, _ = talk("/system", "/system  be  brief ", "hello", "/system")
    assert conversation.messages == [{"role": "system", "content": "be  brief"}, *HELLO]
    lines = capsys.readouterr().err.splitlines()
    assert "there is no system message" in lines[0]
    assert lines[1].endswith("the system message is: be  brief")


def test_save_writes_the_messages_and_overwrites_nothing(tmp_path, capsys):
    file = tmp_path / "a talk.json"
    talk("/system sei höflich", "hello", f"/save {file}", f"/save {file}", "/save", "/save /no/x")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == [{"role": "system", "content": "sei höflich"}, *HELLO]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(f"saved 3 messages to {file}")
    assert "already exists and was not changed" in lines[1]
    assert "needs the name of a new file" in lines[2]
    assert "/no/x cannot be written: No such file or directory" in lines[3]


def test_help_lists_every_command(capsys):
    _, goes_on, rendered = talk("/help", "/exit")
    assert capsys.readouterr().out == HELP + "\n"
    assert goes_on == [True, False]
    assert rendered == []


@pytest.mark.parametrize("line", ["/halp", "/", "/Clear now"])
def test_an_unknown_command_is_not_sent_to_the_model(line, capsys):
    _, goes_on, rendered = talk(line)
    assert (goes_on, rendered) == ([True], [])
    assert f"unknown command {line.split()[0]}; /help" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/etc/hosts has what?", "1/2", "what is /clear?", "//"])
def test_text_with_slashes_is_text(line):
    _, _, rendered = talk(line)
    assert rendered == [[{"role": "user", "content": line}]]


def test_ctrl_c_stops_an_answer_and_nothing_else():
    stopped = []

    async def answer():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)

    async def whole():
        return "whole"

    async def both():
        return [await interruptible(answer()), await interruptible(whole())]

    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(both()) == [None, "whole"]
    assert stopped == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_two_interrupts_at_the_prompt_have_to_come_within_two_seconds(capsys):
    times = iter([10.0, 10.0 + AGAIN_S + 0.1, 20.0, 20.0 + AGAIN_S])
    lines = Lines(clock=lambda: next(times))
    for _ in range(3):
        lines.interrupted()
    with pytest.raises(KeyboardInterrupt):
        lines.interrupted()
    assert capsys.readouterr().err.count("press Ctrl-C again within 2 s") == 3
