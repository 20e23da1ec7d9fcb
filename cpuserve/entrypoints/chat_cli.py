"""`cpuserve generate` and `cpuserve chat`: the engine inline, streaming to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve import log
from cpuserve.entrypoints import flags
from cpuserve.entrypoints.commands import prepared_start
from cpuserve.entrypoints.prepare import for_one_engine, one_engine
from cpuserve.entrypoints.terminal import Progress, note, say
from cpuserve.errors import ConfigError, RequestError
from cpuserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from cpuserve.engine.inline import InlineClient
    from cpuserve.engine.ipc import Progress as ProgressMessage
    from cpuserve.entrypoints.prepare import Prepared
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer

CHAT_HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C stops an answer"


def generate(args: argparse.Namespace) -> int:
    """Complete one prompt, from --prompt or standard input."""
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if not prompt:
        msg = "there is no prompt: give --prompt TEXT or something on standard input"
        raise ConfigError(msg)

    async def complete(session: Session) -> None:
        ids = session.tokenizer.encode(prompt)
        await session.stream(ids, session.params(args, 256))
        say()

    return _with_session(args, complete)


def chat(args: argparse.Namespace) -> int:
    """Talk until the end of input; with --message, one answer."""

    async def talk(session: Session) -> None:
        conversation = Conversation(session, args.system, session.params(args, None))
        if args.message is not None:
            await conversation.turn(args.message)
            return
        note(f"{session.prepared.facts.name} is ready. {CHAT_HELP}")
        while (line := await _read_line()) is not None:
            if line == "/exit":
                return
            if line == "/clear":
                conversation.clear()
            elif line:
                await conversation.turn(line)

    return _with_session(args, talk)


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded engine and its tokenizer."""

    prepared: Prepared
    client: InlineClient
    tokenizer: Tokenizer
    template: ChatTemplate

    def params(self, args: argparse.Namespace, max_tokens: int | None) -> SamplingParams:
        """The flags' values over the model's defaults; `max_tokens` where neither has one."""
        defaults = self.prepared.resolved.config.default_sampling
        return sampling_params(args, {"max_tokens": max_tokens, **defaults})

    async def stream(self, ids: list[int], params: SamplingParams) -> str:
        """Write the completion of `ids` as it comes; returns it."""
        from cpuserve.engine.output import generate_text

        text = ""
        started = time.perf_counter()
        first, count = 0.0, 0
        async with aclosing(generate_text(self.client, self.tokenizer, ids, params)) as deltas:
            async for delta in deltas:
                first = first or time.perf_counter()
                count += len(delta.token_ids)
                text += delta.text
                say(delta.text, end="")
        if sys.stderr.isatty() and count > 1:
            rate = (count - 1) / max(1e-9, time.perf_counter() - first)
            say()
            note(f"{len(ids)} prompt tokens in {first - started:.2f} s, then {rate:.1f} tokens/s")
        return text


class Conversation:
    """The messages so far and how they are rendered."""

    def __init__(self, session: Session, system: str | None, params: SamplingParams) -> None:
        self._session = session
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._start)

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._start)

    async def turn(self, said: str) -> None:
        """Say something and stream the answer; an interrupted or refused turn leaves no trace."""
        messages = [*self._messages, {"role": "user", "content": said}]
        try:
            text = self._session.template.render(messages)
            ids = self._session.tokenizer.encode(text, add_special_tokens=False)
            answer = await _interruptible(self._session.stream(ids, self._params))
        except RequestError as e:
            note(f"{e}. {CHAT_HELP}")
            return
        say()
        if answer is not None:
            self._messages = [*messages, {"role": "assistant", "content": answer}]


async def _interruptible(work: Coroutine[Any, Any, str]) -> str | None:
    """The result of `work`; None after Ctrl-C, which ends it and nothing else."""
    task = asyncio.ensure_future(work)
    with _on_interrupt(task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            return None


@contextmanager
def _on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """Have the loop `call` on Ctrl-C.

    asyncio's own handler does not wake a loop that is just about to wait: that Ctrl-C is lost.
    """
    import signal

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def _with_session(args: argparse.Namespace, work: Any) -> int:
    asked = flags.asked(args)
    log.configure("warning")
    prepared, progress = prepared_start(for_one_engine(asked))
    try:
        asyncio.run(_run(prepared, progress, work))
    finally:
        progress.close()
    return 0


async def _run(prepared: Prepared, progress: Progress, work: Any) -> None:
    from cpuserve.engine.inline import InlineClient
    from cpuserve.tokenizer.load import load_tokenizer

    def show(message: ProgressMessage) -> None:
        progress(message.stage, message.done, message.total)

    client = InlineClient(one_engine(prepared), on_progress=show)
    try:
        names = prepared.facts.tokenizer_path, prepared.resolved.config.chat_template
        tokenizer, template = load_tokenizer(*names)
        await client.wait_ready()
        progress.close()
        await work(Session(prepared, client, tokenizer, template))
    finally:
        await client.close()


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, int | float | None]
) -> SamplingParams:
    """The sampling flags over `defaults`; ConfigError for a value out of range."""
    given = {
        name: getattr(args, name)
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if getattr(args, name) is not None
    }
    try:
        return SamplingParams(**{**defaults, **given})
    except RequestError as e:
        raise ConfigError(str(e)) from None


async def _read_line() -> str | None:
    """One line of the person; None at the end of input."""
    if sys.stdin.isatty():
        await _typed(sys.stdin.fileno())
        line = sys.stdin.readline()
    else:
        line = await asyncio.to_thread(sys.stdin.readline)
    return line.strip() if line else None


async def _typed(terminal: int) -> None:
    """Return when a line has been typed: a thread in `readline` would hold Ctrl-C up until then.

    Raises:
        KeyboardInterrupt: it was Ctrl-C.
    """
    loop, happened, interrupted = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        happened.set()

    with _on_interrupt(interrupt):
        sys.stderr.write("> ")
        sys.stderr.flush()
        loop.add_reader(terminal, happened.set)
        try:
            await happened.wait()
        finally:
            loop.remove_reader(terminal)
    if interrupted.is_set():
        raise KeyboardInterrupt
