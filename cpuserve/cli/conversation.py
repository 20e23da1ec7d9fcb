"""The conversation of `cpuserve chat`: its messages, and commands that change them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.cli.line_input import interruptible
from cpuserve.cli.terminal import note, say
from cpuserve.errors import RequestError
from cpuserve.serving.calls.call import GenerateCall

if TYPE_CHECKING:
    from cpuserve.cli.session import ChatSession

ConversationMessage = dict[str, str]

HELP = """\
/clear          start a new conversation with the same system message
/system TEXT    set the system message; without TEXT, show it
/save FILE      write the messages to a new FILE, as JSON for the "messages" of a request
/help           show this list
/exit           end the conversation; so do Ctrl-D, and Ctrl-C twice
Ctrl-C          stop the response"""
# Matches a command such as /help; a path such as /etc/hosts is not a command.
_COMMAND = re.compile(r"/[a-zA-Z]*")


class Conversation:
    """The messages of a chat so far, and the sampling parameters of its responses."""

    def __init__(
        self, session: ChatSession, system: str | None, sampling: Mapping[str, Any]
    ) -> None:
        """sampling: sampling fields of each GenerateCall, such as temperature."""
        self._session = session
        self._sampling = sampling
        self._system = system or None
        self._said: list[ConversationMessage] = []

    @property
    def messages(self) -> list[ConversationMessage]:
        """The system message, if any, and the messages of all turns."""
        first = [{"role": "system", "content": self._system}] if self._system else []
        return [*first, *self._said]

    async def take(self, line: str) -> bool:
        """Send `line` to the model, or run it as a command; return False if it ends the chat."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if not _COMMAND.fullmatch(word):
            await self.turn(line)
        elif word == "/exit":
            return False
        elif word == "/clear":
            self._said.clear()
        elif word == "/system":
            self._set_system(rest)
        elif word == "/save":
            self._save(rest)
        elif word == "/help":
            say(HELP)
        else:
            note(f"unknown command {word}; /help lists the commands")
        return True

    async def turn(self, said: str) -> None:
        """Send a message and stream the response; drop the turn if it is interrupted or refused."""
        question = {"role": "user", "content": said}
        try:
            call = GenerateCall(messages=[*self.messages, question], **self._sampling)
            answer = await interruptible(self._session.stream(call))
        except RequestError as e:
            note(f"{e}. /clear starts a new conversation, /help lists the commands")
            return
        say()
        if answer is not None:
            self._said += [question, {"role": "assistant", "content": answer}]

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        elif self._system:
            note(f"the system message is: {self._system}")
        else:
            note("there is no system message; /system TEXT sets one")

    def _save(self, name: str) -> None:
        if not name:
            note("/save needs the name of a new file: /save FILE")
            return
        text = json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n"
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            note(f"{name} already exists and was not changed; choose another name")
        except (OSError, RuntimeError, ValueError) as e:  # such as a bad ~user or a null byte
            note(f"{name} cannot be written: {getattr(e, 'strerror', None) or e}")
        else:
            note(f"saved {len(self.messages)} messages to {name}")
