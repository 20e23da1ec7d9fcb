"""`cpuserve run`, `chat` and `complete`: generate with a model in this process or at a server.

`Lines` reads the lines of `chat`, and `interruptible` lets Ctrl-C end only a response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base import log
from cpuserve.base.errors import ConfigError, RequestError
from cpuserve.cli import flags
from cpuserve.cli.attachments import content_of, part_of
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.session import ChatSession, Session, sampling_fields
from cpuserve.cli.terminal import ProgressBars, note, say
from cpuserve.config.nearest import nearest
from cpuserve.loader.builtin import BUILTIN
from cpuserve.loader.hub import may_be_model
from cpuserve.prepare import for_one_engine, one_engine
from cpuserve.serving.calls.call import GenerateCall

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from prompt_toolkit import PromptSession

    from cpuserve.engine.ipc import StageProgress
    from cpuserve.prepare import Prepared

ConversationMessage = dict[str, Any]

HELP = """\
/clear          start a new conversation with the same system message
/system TEXT    set the system message; without TEXT, show it
/image FILE     send a picture or a document with the next message
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
        self._attached: list[dict[str, Any]] = []

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
        elif word == "/image":
            self._attach(rest)
        elif word == "/save":
            self._save(rest)
        elif word == "/help":
            say(HELP)
        else:
            note(f"unknown command {word}; /help lists the commands")
        return True

    async def turn(self, said: str) -> None:
        """Send a message and stream the response; drop the turn if it is interrupted or refused."""
        question = {"role": "user", "content": content_of(said, self._attached)}
        try:
            call = GenerateCall(messages=[*self.messages, question], **self._sampling)
            answer = await interruptible(self._session.stream(call))
        except RequestError as e:
            note(f"{e}. /clear starts a new conversation, /help lists the commands")
            return
        say()
        if answer is not None:
            self._attached = []
            self._said += [question, {"role": "assistant", "content": answer}]

    def attach(self, part: dict[str, Any]) -> None:
        """Send a content part with the next message."""
        self._attached.append(part)

    def _attach(self, name: str) -> None:
        if not name:
            note("/image needs a file: /image FILE")
            return
        try:
            self.attach(part_of(name))
        except ConfigError as error:
            note(str(error))
            return
        note(f"{name} goes with the next message")

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


def generate(args: argparse.Namespace) -> int:
    """Complete one prompt, from the arguments or from standard input."""
    prompt = _prompt(args)
    if not prompt:
        msg = (
            "the prompt is missing: put it after MODEL, set --prompt TEXT, or write it to "
            "standard input"
        )
        raise ConfigError(msg)

    fields = sampling_fields(args)

    async def complete(session: ChatSession) -> None:
        await session.stream(GenerateCall(prompt=prompt, default_max_tokens=256, **fields))
        say()

    return _with_session(args, complete)


def _prompt(args: argparse.Namespace) -> str:
    """Return the prompt from --prompt, from the arguments after MODEL, or from standard input.

    Without --url, the first argument is MODEL if it looks like a model. Otherwise it must be the
    only argument and contain spaces: it is then the prompt for the default model.

    With --url, any text may be a model name. The first argument is then MODEL,
    unless it is the only argument and --prompt is not set: then it is the prompt.

    Raises:
        ConfigError: there are two prompts, or the first argument is neither a model nor a prompt.
    """
    words: list[str] = list(args.words)
    if words and "model" not in args.given:
        remote = args.url is not None and (len(words) > 1 or args.prompt is not None)
        if remote or (args.url is None and may_be_model(words[0])):
            flags.take_model(args, words.pop(0))
        elif args.url is None and (len(words) > 1 or len(words[0].split()) < 2):
            msg = (
                f"{words[0]!r:.100} is not a model; put the whole prompt in quotes, or set "
                '--prompt "TEXT"'
            )
            raise ConfigError(msg)
    if words and args.prompt is not None:
        msg = f"there are two prompts: --prompt, and {' '.join(words)!r:.100} among the arguments"
        raise ConfigError(msg)
    if words:
        return " ".join(words)
    if args.prompt is not None:
        return str(args.prompt)
    if sys.stdin.isatty():
        note("type the prompt, then Ctrl-D on an empty line")
    return sys.stdin.read()


def chat(args: argparse.Namespace) -> int:
    """Chat until the end of input, or only respond to --message."""

    if args.url is None:
        _refuse_message(args)
    fields = sampling_fields(args)

    return _with_session(args, lambda session: _talk(session, args, args.message, fields))


def run(args: argparse.Namespace) -> int:
    """Respond to a message from the arguments or standard input; on a terminal, chat instead."""
    message = _message(args)
    fields = sampling_fields(args)
    return _with_session(args, lambda session: _talk(session, args, message, fields))


def _message(args: argparse.Namespace) -> str | None:
    """Return a message from the arguments after MODEL and standard input; None = chat instead.

    Raises:
        ConfigError: the first argument is no model, or standard input is empty.
    """
    words: list[str] = list(args.words)
    if words and "model" not in args.given:
        if not may_be_model(words[0]):
            near = nearest(words[0], BUILTIN) or ";"
            msg = (
                f"{words[0]!r:.100} is not a model{near} write `cpuserve run MODEL "
                f"{shlex.quote(' '.join(words))[:100]}`"
            )
            raise ConfigError(msg)
        flags.take_model(args, words.pop(0))
    parts = [" ".join(words)] if words else []
    if not sys.stdin.isatty() and (piped := sys.stdin.read().strip()):
        parts.append(piped)
    if parts:
        return "\n\n".join(parts)
    if not sys.stdin.isatty():
        msg = "standard input is empty: write the message to it, or put it after MODEL"
        raise ConfigError(msg)
    return None


async def _talk(
    session: ChatSession, args: argparse.Namespace, message: str | None, fields: dict[str, Any]
) -> None:
    """Respond to `message`; if it is None, chat until the end of input."""
    conversation = Conversation(session, args.system, fields)
    parts = [part_of(name) for name in args.image or []]
    if message is not None:
        said = [*conversation.messages, {"role": "user", "content": content_of(message, parts)}]
        await session.stream(GenerateCall(messages=said, **fields))
        say()
        return
    for part in parts:
        conversation.attach(part)
    note(f"{session.name} is ready. Type /help for commands, /exit to end")
    lines = Lines()
    while (line := await lines.read()) is not None:
        if line and not await conversation.take(line):
            return


def _refuse_message(args: argparse.Namespace) -> None:
    """Raise ConfigError if MODEL can only be a message, as in `cpuserve chat "hello"`."""
    given = args.given.get("model")
    if given is None or may_be_model(str(given.value)):
        return
    said = str(given.value)
    near = nearest(said, BUILTIN) or ";"
    msg = (
        f"{said!r:.100} is not a model{near} to send it as a message, run `cpuserve chat --message "
        f"{shlex.quote(said)[:100]}`"
    )
    raise ConfigError(msg)


def _with_session(args: argparse.Namespace, work: Callable[[ChatSession], Awaitable[None]]) -> int:
    if args.url is not None:
        from cpuserve.cli.remote import with_server

        return with_server(args, work)
    asked = flags.asked(args)
    log.configure("warning")
    prepared, progress = prepared_start(for_one_engine(asked))
    try:
        asyncio.run(_run(prepared, progress, work, markdown=not getattr(args, "plain", True)))
    finally:
        progress.close()
    return 0


async def _run(
    prepared: Prepared,
    progress: ProgressBars,
    work: Callable[[ChatSession], Awaitable[None]],
    *,
    markdown: bool,
) -> None:
    from cpuserve.api.lifecycle.model_context import load_texts, make_context
    from cpuserve.api.lifecycle.model_details import details_of
    from cpuserve.config.server import ServerOptions
    from cpuserve.engine.inline import InlineClient

    def show(message: StageProgress) -> None:
        progress(message.stage, message.done, message.total)

    config = one_engine(prepared)
    client = InlineClient(config, on_progress=show)
    is_interrupted = False
    try:
        details = details_of(prepared)
        context, _ = make_context(client, [config], ServerOptions(), prepared.platform, 0, details)
        texts = load_texts(config)
        await client.wait_ready()
        context.set_ready(*texts)
        progress.close()
        await work(Session(prepared.facts.name, context, markdown))
    except (asyncio.CancelledError, KeyboardInterrupt):
        is_interrupted = True  # end the process now, without waiting for a loading engine
        raise
    finally:
        if not is_interrupted:
            await client.close()


AGAIN_S = 2.0


class Lines:
    """Reads lines from standard input. On a terminal, only a second Ctrl-C ends the input.

    On a terminal, users can edit a line, and recall earlier lines with the arrow keys. A pasted
    block becomes one line, which may contain line breaks. Earlier lines are kept only in memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interrupted: float | None = None
        self._session: PromptSession[str] | None = None

    async def read(self) -> str | None:
        """Return the next line without surrounding white space; None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice within AGAIN_S seconds on a terminal.
        """
        if not sys.stdin.isatty():
            line = await asyncio.to_thread(sys.stdin.readline)
            return line.strip() if line else None
        if self._session is None:
            self._session = _session()
        while True:
            try:
                return (await self._session.prompt_async("> ")).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.interrupted()

    def interrupted(self) -> None:
        """Handle Ctrl-C at the prompt; the unfinished line is discarded.

        Raises:
            KeyboardInterrupt: this is the second Ctrl-C within AGAIN_S seconds.
        """
        now, before = self._clock(), self._interrupted
        if before is not None and now - before <= AGAIN_S:
            raise KeyboardInterrupt
        self._interrupted = now
        note(f"press Ctrl-C again within {AGAIN_S:.0f} s to end the conversation")


def _session() -> PromptSession[str]:
    """Return a line editor that draws on standard error, because stdout is for responses."""
    from prompt_toolkit import PromptSession  # imported here because it takes 0.1 s
    from prompt_toolkit.output import create_output

    output = create_output(stdout=sys.stderr)
    if hasattr(output, "enable_cpr"):
        output.enable_cpr = False  # some terminals do not report the cursor position
    return PromptSession(output=output)


async def interruptible(work: Coroutine[Any, Any, str]) -> str | None:
    """Return the result of `work`; None if Ctrl-C cancelled it."""
    task = asyncio.ensure_future(work)
    with _on_interrupt(task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            return None


@contextmanager
def _on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """Make the event loop call `call` when Ctrl-C is pressed.

    The handler of asyncio does not wake a loop that is about to wait, and so loses a Ctrl-C.
    """
    import signal

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
