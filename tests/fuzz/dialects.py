"""Targets: the requests of each dialect, changed at random, to a server with all routes.

A case is a request and what the model says. A response must not be a fault of the server (500),
must be JSON where it says so, and errors have the format of the dialect. No case may log an error,
leave a sequence running, or keep the server from answering the next request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import quote

from cpuserve.base.errors import printable
from cpuserve.engine.ipc import AddRequest, encode_frame
from tests.api.all_routes import all_routes
from tests.api.fakes import ANSWER, FakeEngine, Script, logprob_of, make_context, tokenizer
from tests.api.live import Live
from tests.api.post_routes import HI, answers
from tests.api.test_api_fuzz import MODELS
from tests.api.test_api_shapes import check as check_error
from tests.api.test_api_shapes import dialect_of
from tests.api.tools import says, template
from tests.fuzz.edits import apply, draw
from tests.fuzz.frames import pieces
from tests.fuzz.json_edits import edited, nasty
from tests.fuzz.operations import Operation, fields, seeds
from tests.helpers.fuzzed_answers import changed
from tests.helpers.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from typing_extensions import NotRequired

CONTEXT = 4096
MOST_CHARS = 2000  # of the message of an error
# Statuses above 500 that are no faults of the server: what it does not offer, not now, or not
# within the timeout of the request.
REFUSALS = (501, 503, 504)
SECRETS = re.compile(rb"Traceback|/cpuserve/|\.py\b|object at 0x")
JSON = "application/json"
TEXTS = (ANSWER, "", *(written for _, written in MODELS.values()))
IDS = (
    "tiny",
    "resp_1",
    "file-0",
    "batch_0",
    "conv_0",
    "0",
    "-1",
    "9" * 30,
    "..",
    "../a",
    "a/b",
    "%",
)
IDS += ("\0", "\ud800", "\U0001f600", "a" * 300, "sha256:" + "0" * 64, "sha256-" + "g" * 64)
QUERY = (
    "after",
    "before_id",
    "after_id",
    "limit",
    "order",
    "purpose",
    "action",
    "verbose",
    "stream",
)
QUERY += ("include", "starting_after", "beta", "model")
_UPLOAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/jsonl\r\n\r\n"
    + b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'
    + b"\n\r\n--b--\r\n"
)
# Bodies that are not JSON, by path: the media type and the bytes.
RAW = {
    "/v1/files": ("multipart/form-data; boundary=b", _UPLOAD),
    "/v1/uploads/{upload_id}/parts": (
        "multipart/form-data; boundary=b",
        _UPLOAD.replace(b'name="file"', b'name="data"'),
    ),
    "/api/blobs/{digest}": ("application/octet-stream", b"GGUF\3\0\0\0"),
}
MEDIA = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "audio/wav")
# Paths that several dialects have, and the formats of their errors.
SHARED = ("/", "/invocations", "/rerank", "/tokenize")
DIALECTS = ("openai", "tei", "tgi", "cohere", "ollama")
# What may have put the server to sleep.
SLEEP, WAKE = "/sleep", "/wake_up"


class Request(TypedDict):
    """A case.

    body: text, or bytes that are no UTF-8 as surrogates. says: what the model says.
    cut: the seed of the chunks that the body is sent in; 0 = it is sent in one piece.
    """

    method: str
    path: str
    media: str
    body: str
    says: str
    pooling: str
    cut: NotRequired[int]


class HttpBench:
    """Some operations, and a server for each pooling that they need."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def __init__(self, some: Sequence[Operation]) -> None:
        self._operations = some
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._servers: dict[str, Live] = {}
        self._faults: list[str] = []
        self._handler = _Faults(self._faults)
        logging.getLogger().addHandler(self._handler)
        self._loop.set_exception_handler(lambda _, found: self._faults.append(str(found)))

    def draw(self, rng: random.Random) -> Request:
        """Return a random case."""
        return drawn(rng, self._operations)

    def outcome(self, case: Request) -> str:
        """What a request comes to: the status of its response, and what an error says.

        Raises:
            AssertionError: the response is a fault, or the server is not as it was.
        """
        return self._loop.run_until_complete(self._outcome(case))

    def close(self) -> None:
        """End the servers."""
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()
        logging.getLogger().removeHandler(self._handler)

    async def _outcome(self, case: Request) -> str:
        server = await self._server(case["pooling"])
        self._speak(server, case["says"])
        body = case["body"].encode("utf-8", "surrogateescape")
        sent = case["method"], case["path"], case["media"], body
        try:
            told = await _send(server, *sent, case.get("cut", 0))
        except ConnectionError:  # a refusal that came before the last chunk, and was lost
            assert case.get("cut"), "the connection was reset"
            told = await _send(server, *sent)
        path = case["path"].partition("?")[0]
        said = checked(told, case["method"], path)
        await self._is_sane(server, path)
        return said

    async def _server(self, pooling: str) -> Live:
        if pooling not in self._servers:
            home = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            made = all_routes(self._context(), pooling, home)
            self._servers[pooling] = await self._stack.enter_async_context(made)
        return self._servers[pooling]

    def _context(self) -> Any:
        """Return a model for a server."""
        context = make_context(FakeEngine(answers))
        context.client.info.update(kv_tokens=CONTEXT, max_model_len=CONTEXT)
        context.max_model_len = CONTEXT
        context.set_ready(tokenizer(), template())
        return context

    def _speak(self, server: Live, text: str) -> None:
        """Let the model say `text`."""
        server.engine.script = _script(text)

    async def _is_sane(self, server: Live, path: str) -> None:
        """Check that nothing runs, the next request is answered, and no error was logged."""
        if path == SLEEP:
            await _send(server, "POST", WAKE, "", b"")
        await until(lambda: server.engine.running == 0)
        await until(lambda: server.context.active_sequences == 0)
        server.engine.script = answers
        if server.context.pooling == "none":
            hi = json.dumps({"messages": HI}).encode()
            await self._answers(server, "POST", "/v1/chat/completions", hi)
        else:
            await self._answers(server, "GET", "/health", b"")
        server.engine.forget()
        self._quiet()

    async def _answers(self, server: Live, method: str, path: str, body: bytes) -> None:
        told = await _send(server, method, path, JSON if body else "", body)
        assert told.startswith(b"HTTP/1.1 200 "), told

    def _quiet(self) -> None:
        faults, self._faults[:] = [*self._faults], []
        assert not faults, "\n".join(faults)


def _script(text: str) -> Script:
    """Return a script that says `text` and what else a request asks an engine for."""

    def script(engine: Any, number: int, prompt: list[int], params: Any) -> Iterator[Any]:
        if params.label_ids or not params.max_tokens:
            yield from answers(engine, number, prompt, params)
            return
        encode_frame(AddRequest(number, b"", params, 0.0))  # as to a real engine
        of_prompt = None
        if params.prompt_logprobs is not None:
            of_prompt = [None, *(logprob_of(token, params.prompt_logprobs) for token in prompt[1:])]
        for output in says(text)(engine, number, prompt, params):
            if params.logprobs is not None:
                output.logprobs = [logprob_of(token, params.logprobs) for token in output.tokens]
            output.prompt_logprobs, of_prompt = of_prompt, None
            yield output

    return script


def drawn(rng: random.Random, some: Sequence[Operation]) -> Request:
    """Return a random request of one of some operations."""
    operation = rng.choice(some)
    media, body = _body(rng, operation)
    texts = TEXTS if rng.random() < 0.7 else [changed(rng.choice(TEXTS), rng.random(), TEXTS)]
    path = re.sub(r"\{[^}]*\}", lambda _: _quoted(rng.choice(IDS)), operation.path)
    if operation.method == "GET" and rng.random() < 0.5:
        pairs = ((rng.choice(QUERY), str(nasty(rng))[:100]) for _ in range(rng.randint(1, 3)))
        path += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in pairs)
    return {
        "method": operation.method,
        "path": path,
        "media": media,
        "body": body.decode("utf-8", "surrogateescape"),
        "says": rng.choice(texts),
        "pooling": operation.pooling,
        "cut": rng.getrandbits(32) if body and rng.random() < 0.2 else 0,
    }


class _Faults(logging.Handler):
    """Keeps the records of errors, and those with a traceback."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self._found.append(logging.Formatter().format(record))


def _body(rng: random.Random, operation: Operation) -> tuple[str, bytes]:
    """Return the media type and the bytes of a changed body."""
    if operation.path in RAW and operation.method == "POST":
        media, body = RAW[operation.path]
        edits = draw(rng, {"body": body})
        return media, apply(edits, "body", body)
    if operation.method == "GET" or operation.path not in seeds():
        given = b"" if rng.random() < 0.9 else json.dumps(nasty(rng)).encode()
        return (JSON if given else ""), given
    known = seeds()
    donors = known[operation.path] if rng.random() < 0.7 else known[rng.choice([*known])]
    body = edited(rng, rng.choice(known[operation.path]), fields(operation.path), donors)
    return (JSON if rng.random() < 0.98 else rng.choice(MEDIA)), body


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="./")


async def _send(
    server: Live, method: str, path: str, media: str, body: bytes, cut: int = 0
) -> bytes:
    """Send a request; return all bytes of the response. cut: see Request."""
    head = f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
    head += f"content-type: {media}\r\n" if media else ""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        if cut:
            writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            for piece in [*pieces(body, cut), b""]:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0)  # the server gets some pieces before others
        else:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


def checked(told: bytes, method: str, path: str) -> str:
    """Check a response; return its status, and what an error says."""
    head, _, body = told.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    media = fields.get(b"content-type", b"")
    assert status < 500 or status in REFUSALS, told
    assert b"Traceback" not in body, told
    if fields.get(b"transfer-encoding") == b"chunked":
        body = _joined(body)
    elif method != "HEAD" and b"content-length" in fields:
        assert len(body) == int(fields[b"content-length"]), told
    if status >= 400:
        assert not SECRETS.search(body), told
        _check_error(body, path, told)
        message = _message(json.loads(body))
        assert len(message) <= MOST_CHARS, message
        assert message == printable(message), message
        return f"{status}: {message}"
    if media.startswith(b"application/json"):
        json.loads(body, parse_constant=_no_json)
    elif media.startswith(b"text/event-stream"):
        for line in body.decode().split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                json.loads(line[6:], parse_constant=_no_json)
    return f"{status} {media.decode().partition(';')[0]}"


def _check_error(body: bytes, path: str, told: bytes) -> None:
    """Check the format of an error; that of a shared path is one of any dialect."""
    dialects = DIALECTS if path in SHARED else (dialect_of(path),)
    for dialect in dialects:
        try:
            return check_error(body, dialect, told)
        except (AssertionError, AttributeError):
            if dialect == dialects[-1]:
                raise
    return None


def _joined(body: bytes) -> bytes:
    """Return a chunked body in one piece, which must be complete."""
    found = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert body == b"\r\n", body
            return found
        found, body = found + body[:length], body[length + 2 :]


def _message(error: Any) -> str:
    """Return the text in an error of any dialect."""
    inner = error.get("error", error)
    return inner if isinstance(inner, str) else inner["message"]


def _no_json(word: str) -> None:
    msg = f"{word} is no JSON"
    raise AssertionError(msg)
