"""A server for tests: the real front end with an engine that returns the replies of a script.

Listener, middleware, dialects, chat templates and parsers are the same as in `cpuserve serve`.
"""

from __future__ import annotations

import asyncio
import functools
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.api.app import app_of
from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.http.listener import open_listener
from cpuserve.api.http.server import make_server
from cpuserve.api.request.state import ServerState
from cpuserve.config.server import ServerOptions
from cpuserve.metrics.server import ServerMetrics
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.models.limits import ClientLimits, default_body_bytes
from cpuserve.serving.models.registry import ModelRegistry
from cpuserve.serving.tools.learn import LearnedFormat, learn_format
from cpuserve.testing.engine import ScriptedEngine
from cpuserve.testing.recorder import Exchange, Recorder
from cpuserve.testing.script import ReplyQueue, Responder, ScriptedModel
from cpuserve.testing.vocabulary import end_id, scripted_tokenizer
from cpuserve.testing.writing import TEMPLATE
from cpuserve.tokenizer.chat import ChatTemplate

if TYPE_CHECKING:
    from cpuserve.testing.replies import ScriptedReply
    from cpuserve.testing.script import ScriptedRequest
    from cpuserve.tokenizer.tokenizer import Tokenizer

MODEL = "scripted"
MAX_MODEL_LEN = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSettings:
    """The settings of a scripted server.

    any_name: whether requests may use any model name.
    port: the port of the server; 0 = a free port.
    record: a directory for files of the recorded exchanges.
    http: additional ServerOptions fields for the HTTP server.
    tokenizer: the tokenizer of the model; None = the tokenizer in vocabulary.py.
    """

    names: Sequence[str] = (MODEL,)
    any_name: bool = False
    max_model_len: int = MAX_MODEL_LEN
    pace_s: float = 0.0
    port: int = 0
    record: Path | None = None
    http: dict[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None


class ScriptedServer:
    """A running server with a script. Methods may be called from any thread.

    url: the base URL without a path. model: its name in lists. api_key: a key that it accepts.
    replies: the queue of scripted replies. script: the engine's part of them, with its pace.
    """

    def __init__(
        self,
        settings: ScriptedSettings,
        context: ModelContext,
        port: int,
        recorder: Recorder,
        model: ScriptedModel,
        replies: ReplyQueue,
    ) -> None:
        assert isinstance(context.client, ScriptedEngine)
        self.context = context
        self.engine = context.client
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.model = settings.names[0]
        self.api_key: str = next(iter(settings.http.get("api_key", ())), "none")
        self.replies = replies
        self._recorder = recorder
        self.script = model

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def exchanges(self) -> list[Exchange]:
        """The requests so far with their responses, ordered by the start of each request."""
        return self._recorder.exchanges

    @property
    def prompts(self) -> list[str]:
        """The rendered prompts that the model has received."""
        known = self.context.tokenizer
        assert known is not None
        return [known.decode(ids, skip_special_tokens=False) for ids, _ in list(self.engine.asked)]

    def add(self, *replies: ScriptedReply | str) -> None:
        """Append replies to the script; each request gets the next reply."""
        self.replies.add(*replies)

    def respond(self, function: Callable[[ScriptedRequest], ScriptedReply | str]) -> None:
        """Set a function that returns the reply to each request; it runs on the server's thread."""
        self.replies.respond = function

    def check(self) -> None:
        """Raise AssertionError if a request did not follow the script or a reply was not used."""
        faults = list(self.replies.faults)
        if left := self.replies.left:
            faults.append(f"no request used {len(left)} replies of the script: {left[0]}, ...")
        if faults:
            raise AssertionError("; ".join(faults))

    def reset(self) -> None:
        """Clear the script, the recorded requests and their prompts."""
        self.replies.clear()
        self._recorder.exchanges = []
        self.engine.forget()
        self.script.reset()


@functools.cache
def _template(tokenizer: Tokenizer) -> tuple[ChatTemplate, LearnedFormat]:
    """Return the chat template, and its format of responses, which takes 21 renderings to learn."""
    template = ChatTemplate(TEMPLATE, tokenizer)
    return template, learn_format(template)


def make_scripted_context(settings: ScriptedSettings, model: ScriptedModel) -> ModelContext:
    """Return the context of a model that is ready: a ScriptedEngine runs `model`."""
    tokenizer = settings.tokenizer or scripted_tokenizer()
    most = settings.max_model_len
    info = {
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": most,
        "kv_tokens": 4 * most,
        "max_top": 20,
        "eos_ids": [end_id(tokenizer)],
    }
    engine = ScriptedEngine(model, info)
    metrics = ServerMetrics(
        model_name=settings.names[0], max_model_len=most, stats=lambda: engine.stats
    )
    limits = ClientLimits(max_body_bytes=default_body_bytes(most))
    context = ModelContext(
        engine, metrics, tuple(settings.names), most, limits, any_name=settings.any_name
    )
    context.set_ready(tokenizer, *_template(tokenizer))
    return context


@asynccontextmanager
async def serving_script(
    settings: ScriptedSettings, respond: Responder | None = None
) -> AsyncIterator[ScriptedServer]:
    """Run a server in this event loop. respond: a function in place of the queue of replies."""
    queued = ReplyQueue()
    tokenizer = settings.tokenizer or scripted_tokenizer()
    model = ScriptedModel(tokenizer, respond or queued, settings.pace_s)
    context = make_scripted_context(settings, model)
    with open_listener(ServerOptions(port=settings.port)) as listener:
        port = listener.getsockname()[1]
        http = ServerOptions(port=port, **settings.http)
        state = ServerState(ModelRegistry(context), callers=KnownCallers.of(http))
        recorder = Recorder(app_of(state, http), settings.record)
        server = make_server(recorder, http)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            yield ScriptedServer(settings, context, port, recorder, model, queued)
        finally:
            server.should_exit = True
            server.force_exit = True
            await running


@contextmanager
def script_thread(
    settings: ScriptedSettings, respond: Responder | None = None
) -> Iterator[ScriptedServer]:
    """Run a server in a thread with its own event loop; `respond` is as in serving_script."""
    started: queue.SimpleQueue[
        tuple[ScriptedServer, asyncio.AbstractEventLoop, asyncio.Event] | None
    ]
    started = queue.SimpleQueue()

    async def main() -> None:
        stop = asyncio.Event()
        async with serving_script(settings, respond) as server:
            started.put((server, asyncio.get_running_loop(), stop))
            await stop.wait()

    with ThreadPoolExecutor(1, thread_name_prefix="cpuserve-scripted") as pool:
        running = pool.submit(lambda: asyncio.run(main()))
        running.add_done_callback(lambda _: started.put(None))
        found = started.get()
        if found is not None:
            server, loop, stop = found
            try:
                yield server
            finally:
                loop.call_soon_threadsafe(stop.set)
        running.result()


@contextmanager
def scripted(
    *replies: ScriptedReply | str,
    respond: Callable[[ScriptedRequest], ScriptedReply | str] | None = None,
    default: ScriptedReply | str | None = None,
    strict: bool = True,
    model: str = MODEL,
    max_model_len: int = MAX_MODEL_LEN,
    port: int = 0,
    api_key: str | None = None,
    record: Path | None = None,
) -> Iterator[ScriptedServer]:
    """Run a server that returns scripted replies, on a thread of this process.

    Args:
        replies: the reply to each request, in order: a text, or a result of `reply`, `raw` or
            `failure`.
        respond: a function that returns the reply to each request, in place of `replies`.
            The function runs on the thread of the server.
        default: the reply to all requests after the last of `replies`.
            Without it, these requests get an error.
        strict: whether the end of the `with` block calls `ScriptedServer.check`.
        model: the name of the model in lists; requests may use any name.
        max_model_len: the maximum tokens of a prompt and its reply together.
        port: the port of the server; 0 = a free port.
        api_key: a key that clients must send; None = the server accepts any key.
        record: a directory for files with each request and response.

    Raises:
        AssertionError: at the end, if a request did not follow the script or a reply was not used.
        OSError: the port is in use.
        ValueError: both `replies` and `respond` were given.
    """
    if respond is not None and replies:
        msg = "give replies or the function `respond`, not both"
        raise ValueError(msg)
    http = {} if api_key is None else {"api_key": (api_key,)}
    settings = ScriptedSettings(
        names=(model,),
        any_name=True,
        max_model_len=max_model_len,
        port=port,
        record=record,
        http=http,
    )
    with script_thread(settings) as server:
        server.add(*replies)
        server.replies.respond = respond
        server.replies.set_default(default)
        yield server
        if strict:
            server.check()
