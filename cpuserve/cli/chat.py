"""`cpuserve generate` and `cpuserve chat`: run the engine in this process and stream the output."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from typing import TYPE_CHECKING, Any

from cpuserve import log
from cpuserve.cli import flags
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.conversation import Conversation
from cpuserve.cli.line_input import Lines
from cpuserve.cli.session import Session, sampling_fields
from cpuserve.cli.terminal import ProgressBars, note, say
from cpuserve.config.nearest import nearest
from cpuserve.errors import ConfigError
from cpuserve.loader.builtin import BUILTIN
from cpuserve.loader.hub import may_be_model
from cpuserve.prepare import for_one_engine, one_engine
from cpuserve.serving.call import GenerateCall

if TYPE_CHECKING:
    from cpuserve.engine.ipc import StageProgress
    from cpuserve.prepare import Prepared


def generate(args: argparse.Namespace) -> int:
    """Complete one prompt from the arguments or from standard input."""
    prompt = _prompt(args)
    if not prompt:
        msg = (
            "the prompt is missing: put it after MODEL, set --prompt TEXT, or write it to "
            "standard input"
        )
        raise ConfigError(msg)

    fields = sampling_fields(args)

    async def complete(session: Session) -> None:
        await session.stream(GenerateCall(prompt=prompt, default_max_tokens=256, **fields))
        say()

    return _with_session(args, complete)


def _prompt(args: argparse.Namespace) -> str:
    """Return the prompt from --prompt, from the arguments after MODEL, or from standard input.

    If the first argument has spaces and cannot be the name of a model, it is the prompt, and the
    default model completes it.

    Raises:
        ConfigError: there are two prompts, or the first argument is neither a model nor a prompt.
    """
    words: list[str] = list(args.words)
    if words and "model" not in args.given:
        if may_be_model(words[0]):
            flags.take_model(args, words.pop(0))
        elif len(words) > 1 or len(words[0].split()) < 2:
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
    """Chat until the end of input, or respond to --message only."""

    _refuse_message(args)
    fields = sampling_fields(args)

    async def talk(session: Session) -> None:
        conversation = Conversation(session, args.system, fields)
        if args.message is not None:
            await conversation.turn(args.message)
            return
        note(f"{session.name} is ready. Type /help for commands, /exit to end")
        lines = Lines()
        while (line := await lines.read()) is not None:
            if line and not await conversation.take(line):
                return

    return _with_session(args, talk)


def _refuse_message(args: argparse.Namespace) -> None:
    """Raise ConfigError for a MODEL that can only be a message: chat "hello"."""
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


def _with_session(args: argparse.Namespace, work: Any) -> int:
    asked = flags.asked(args)
    log.configure("warning")
    prepared, progress = prepared_start(for_one_engine(asked))
    try:
        asyncio.run(_run(prepared, progress, work))
    finally:
        progress.close()
    return 0


async def _run(prepared: Prepared, progress: ProgressBars, work: Any) -> None:
    from cpuserve.api.lifecycle.model_context import load_texts, make_context
    from cpuserve.config.server import ServerOptions
    from cpuserve.engine.inline import InlineClient

    def show(message: StageProgress) -> None:
        progress(message.stage, message.done, message.total)

    config = one_engine(prepared)
    client = InlineClient(config, on_progress=show)
    is_interrupted = False
    try:
        context, _ = make_context(client, [config], ServerOptions(), prepared.platform, 0)
        texts = load_texts(config)
        await client.wait_ready()
        context.set_ready(*texts)
        progress.close()
        await work(Session(prepared.facts.name, context))
    except (asyncio.CancelledError, KeyboardInterrupt):
        is_interrupted = True  # the process ends now, and must not wait for an engine that loads
        raise
    finally:
        if not is_interrupted:
            await client.close()
