"""ChatSession: the model of `cpuserve chat` and `generate`, loaded in this process."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cpuserve.base.errors import ConfigError, RequestError
from cpuserve.cli.attachments import converted
from cpuserve.cli.terminal import draws, note, say, whisper
from cpuserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from cpuserve.cli.markdown import MarkdownStream
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.models.context import ModelContext


class ChatSession(Protocol):
    """A model that generates responses, in this process or at a server."""

    @property
    def name(self) -> str:
        """The name of the model, as shown to the user."""

    async def stream(self, call: GenerateCall) -> str:
        """Print the response to `call` as it is generated, and return its text."""


class ReplyPrinter:
    """Prints a response: its text on stdout, and its thought on stderr.

    markdown: whether the text is Markdown, which a terminal shows with its layout and colours.
    """

    def __init__(self, *, markdown: bool = False) -> None:
        self.text = ""
        self._shown: MarkdownStream | None = None
        if markdown and draws(sys.stdout):
            from cpuserve.cli.drawing import console_of
            from cpuserve.cli.markdown import MarkdownStream

            self._shown = MarkdownStream(console_of())
        self._thinks = False
        self._started = time.perf_counter()
        self._first = 0.0

    def think(self, text: str) -> None:
        """Print a piece of the thought."""
        if text:
            self._first = self._first or time.perf_counter()
            self._thinks = True
            whisper(text)

    def say(self, text: str) -> None:
        """Print a piece of the text."""
        if not text:
            return
        self._first = self._first or time.perf_counter()
        if self._thinks and not self.text:
            whisper("\n\n")
        self.text += text
        if self._shown is None:
            say(text, end="")
        else:
            self._shown.add(text)

    def close(self) -> None:
        """Show the end of the text; to call after an interrupt or an error, too."""
        if self._shown is not None:
            self._shown.close()

    def finish(self, num_prompt: int, num_generated: int) -> None:
        """Print the token counts and the token rate, if stderr is a terminal."""
        self.close()
        if sys.stderr.isatty() and num_generated > 1:
            rate = (num_generated - 1) / max(1e-9, time.perf_counter() - self._first)
            wait_s = self._first - self._started
            say()
            note(f"{num_prompt} prompt tokens in {wait_s:.2f} s, then {rate:.1f} tokens/s")


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model that processes calls as the endpoints of a server do."""

    name: str
    context: ModelContext
    markdown: bool = False

    async def stream(self, call: GenerateCall) -> str:
        """Print the response to `call` as it is generated, and return its text.

        Raises:
            RequestError: the call is invalid, or the engine failed.
        """
        from cpuserve.serving.calls.events import Text, Thought
        from cpuserve.serving.generation.prepare import prepare
        from cpuserve.serving.models.registry import Lease, Served

        served = Served(self.context, self.context.model_names[0], None, Lease())
        if call.messages is not None:
            call = msgspec.structs.replace(call, messages=converted(call.messages))
        generation = await prepare(served, call, num_bytes=0)
        printer = ReplyPrinter(markdown=self.markdown and call.messages is not None)
        with closing(printer):
            async with aclosing(generation.events()) as batches:
                async for events in batches:
                    for event in events:
                        if isinstance(event, Thought):
                            printer.think(event.text)
                        elif isinstance(event, Text):
                            printer.say(event.text)
        usage = generation.usage()
        printer.finish(usage.prompt, usage.completion)
        return printer.text


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the GenerateCall fields that sampling flags set; ConfigError for a wrong value."""
    given = {
        name: getattr(args, name)
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if getattr(args, name) is not None
    }
    try:
        SamplingParams(**given)
    except RequestError as e:
        raise ConfigError(str(e)) from None
    return given
