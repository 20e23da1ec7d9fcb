"""`cpuserve chat --url` and `complete --url`: generate with a model of a running server."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ConfigError, CpuserveError, RequestError
from cpuserve.bench.driver import CHAT, COMPLETIONS, Target, first_model
from cpuserve.bench.http import LoadError, exchange
from cpuserve.cli.session import ReplyPrinter
from cpuserve.config.env import environment
from cpuserve.config.values import base_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cpuserve.cli.session import ChatSession
    from cpuserve.serving.calls.call import GenerateCall


class _SaidDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _SaidChoice(msgspec.Struct):
    text: str | None = None
    delta: _SaidDelta = msgspec.field(default_factory=_SaidDelta)


class _SaidUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _SaidEvent(msgspec.Struct):
    choices: list[_SaidChoice] = []
    usage: _SaidUsage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """A model of a running server with the OpenAI API."""

    target: Target
    markdown: bool = False

    @property
    def name(self) -> str:
        """The name of the model and the URL of its server."""
        return f"{self.target.model} at {self.target.url}"

    async def stream(self, call: GenerateCall) -> str:
        """Print the response to `call` as it arrives, and return its text.

        Raises:
            RequestError: the server refused the call, or ended the stream with an error.
            BrokenPipeError: the reader of standard output has closed the pipe.
        """
        printer = ReplyPrinter(markdown=self.markdown and call.messages is not None)
        events = _SaidEvents(printer)
        endpoint = CHAT if call.messages is not None else COMPLETIONS
        body = msgspec.json.encode(_body(call, self.target.model))
        target = self.target
        try:
            with closing(printer):
                response = await exchange(
                    target.url, endpoint, body, api_key=target.api_key, on_body=events.feed
                )
        except LoadError as error:
            if events.no_reader is not None:
                raise events.no_reader from None
            raise RequestError(str(error)) from None
        if response.code != 200:
            said = said_error(response.body)
            msg = f"the server refused the request (HTTP {response.code}): {said}"
            raise RequestError(msg)
        printer.finish(events.usage.prompt_tokens, events.usage.completion_tokens)
        return printer.text


def _body(call: GenerateCall, model: str) -> dict[str, Any]:
    """Return the request body, with the fields of `call` that the commands can set."""
    most = call.max_tokens if call.max_tokens is not None else call.default_max_tokens
    fields: dict[str, Any] = {
        "messages": call.messages,
        "prompt": call.prompt,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k,
        "max_tokens": most,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}, **given}


def said_error(body: bytes) -> str:
    """Return the message of an error body, or the beginning of a body in another format."""
    try:
        found: Any = msgspec.json.decode(body)
        error = found["error"]
        return str(error if isinstance(error, str) else error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return " ".join(body[:300].decode(errors="replace").split())


class _SaidEvents:
    """Parses server-sent events, and prints the text of the response."""

    _decode = msgspec.json.Decoder(_SaidEvent).decode

    def __init__(self, printer: ReplyPrinter) -> None:
        self._printer = printer
        self._rest = b""
        self.usage = _SaidUsage()
        self.no_reader: BrokenPipeError | None = None

    def feed(self, piece: bytes) -> None:
        """Parse a piece of the body and print its text; RequestError for an error event.

        If standard output has no reader, this raises BrokenPipeError and stores it in `no_reader`.
        """
        try:
            self._feed(piece)
        except BrokenPipeError as error:
            self.no_reader = error
            raise

    def _feed(self, piece: bytes) -> None:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                self._take(line[5:])

    def _take(self, data: bytes) -> None:
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            msg = f"the server sent an event that cannot be parsed: {error}"
            raise RequestError(msg) from None
        if event.error is not None:
            raise RequestError(said_error(data))
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self._printer.think(choice.delta.reasoning_content or choice.delta.reasoning or "")
            self._printer.say(choice.text or choice.delta.content or "")


def target_of(args: argparse.Namespace) -> Target:
    """Return the server at --url without a model, for commands about the server itself."""
    url = base_url(args.url)
    if not url.startswith(("http://", "https://")):
        msg = f"flag --url={args.url}: write http://HOST:PORT or https://HOST"
        raise ConfigError(msg)
    keys = (args.api_key or environment().get("CPUSERVE_API_KEY", "")).split(",")
    return Target(url, "", keys[0] or None)


def asked(target: Target, path: str, body: bytes | None = None) -> bytes:
    """Send a request to a server (GET without a body), and return the body of the response.

    Raises:
        LoadError: the server does not respond, or is still starting.
        CpuserveError: the server refuses the request.
    """
    try:
        response = asyncio.run(exchange(target.url, path, body, api_key=target.api_key))
    except LoadError as error:
        raise _started(error) from None
    if response.code == 200:
        return response.body
    msg = f"{target.url}{path}: HTTP {response.code}: {said_error(response.body)}"
    if response.code == 503:  # 503: the server is still starting
        raise LoadError(msg)
    raise CpuserveError(msg)


def _started(error: LoadError) -> LoadError:
    """Return an error that also says how to get a server that answers."""
    return LoadError(f"{error}. Start one with `cpuserve serve`, or set --url")


def with_server(args: argparse.Namespace, work: Callable[[ChatSession], Awaitable[None]]) -> int:
    """Run `work` with the model MODEL, or the first model, of the server at --url.

    Raises:
        ConfigError: a flag was given that has an effect only on a model in this process.
        LoadError: the server does not respond, or lists no model.
    """
    for name, given in args.given.items():
        if name != "model":
            msg = f"{given.name} is an option of the server, so it has no effect with --url"
            raise ConfigError(msg)
    target = target_of(args)

    async def run() -> None:
        try:
            found = await first_model(target.url, target.api_key)
        except LoadError as error:
            raise _started(error) from None
        if (model := args.given.get("model")) is not None:
            found = Target(target.url, str(model.value), target.api_key)
        await work(RemoteSession(found, markdown=not getattr(args, "plain", True)))

    asyncio.run(run())
    return 0
