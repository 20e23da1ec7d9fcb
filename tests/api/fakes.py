"""A scripted engine behind the real app, and helpers that send requests to it."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cpuserve.api.app import create_app
from cpuserve.api.state import ServerState
from cpuserve.engine.client import ReplicaStatus
from cpuserve.engine.ipc import Output, Stats, TokenLogprob
from cpuserve.errors import EngineDead
from cpuserve.metrics import ServerMetrics
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.context import ModelContext
from cpuserve.serving.limits import ClientLimits
from cpuserve.serving.loaders import Loader
from cpuserve.serving.registry import ModelRegistry
from cpuserve.serving.tools.learn import LearnedFormat, learn_format
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

ANSWER = "Hello wörld \N{WAVING HAND SIGN}!"
VOCAB = 512
MAX_LEN = 128

# A step of a script: an output, a pause in seconds, an event to wait for, or an error to raise.
Step = Output | float | asyncio.Event | Exception
Script = Callable[["FakeEngine", int, list[int], SamplingParams], Iterable[Step]]


@functools.cache
def tokenizer() -> Tokenizer:
    """The tiny models' tokenizer: 384 byte-level tokens and a ChatML template."""
    return Tokenizer.load(tiny_model("llama"))


@functools.cache
def _learned() -> tuple[ChatTemplate, LearnedFormat]:
    """Their chat template, and how it writes responses, which takes 21 renderings to find."""
    template = ChatTemplate(tokenizer().chat_template, tokenizer())
    return template, learn_format(template)


def logprob_of(token: int, top: int) -> TokenLogprob:
    """Return a recognizable entry: the token has rank 2, the alternatives are 0, 1, 2, ..."""
    alternatives = [(i, -0.5 * (i + 1)) for i in range(top)]
    return TokenLogprob(token, -0.25 * (token % 8) - 0.125, 2, alternatives)


def speak(engine: FakeEngine, number: int, prompt: list[int], params: SamplingParams):
    """Yield ANSWER in outputs of one token, then end-of-text; max_tokens may end it earlier."""
    tokens = [*tokenizer().encode(ANSWER, add_special_tokens=False), min(tiny_end_ids("llama"))]
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None, *(logprob_of(t, params.prompt_logprobs) for t in prompt[1:])]
    if params.max_tokens == 0:
        yield Output(number, [], "length", prompt_logprobs=prompt_logprobs)
        return
    for i, token in enumerate(tokens):
        finish = "stop" if token == tokens[-1] else None
        if finish is None and i + 1 == params.max_tokens:
            finish = "length"
        logprobs = None if params.logprobs is None else [logprob_of(token, params.logprobs)]
        yield Output(
            number,
            [token],
            finish,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs if i == 0 else None,
        )
        if finish:
            return


@dataclass
class FakeEngine:
    """An EngineClient whose outputs come from a script; it records the requests it gets."""

    script: Script = speak
    info: dict[str, Any] = field(
        default_factory=lambda: {
            "vocab_size": VOCAB,
            "max_model_len": MAX_LEN,
            "kv_tokens": 4 * MAX_LEN,
            "max_top": 20,
        }
    )
    stats: Stats = field(default_factory=Stats)
    alive: bool = True
    trouble: str = "the engine was killed by SIGKILL"
    replicas: tuple[ReplicaStatus, ...] = ()
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    wishes: list[tuple[float | None, bool]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    continued: list[bool] = field(default_factory=list)
    running: int = 0
    aborted: int = 0

    @property
    def ended(self) -> bool:
        return not self.alive

    async def wait_ready(self) -> None:
        pass

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        timeout_s: float | None = None,
        progress: bool = False,
        continues: bool = False,
    ) -> AsyncGenerator[Output, None]:
        self.wishes.append((timeout_s, progress))
        self.continued.append(continues)
        self.priorities.append(priority)
        number = len(self.asked)
        self.asked.append((list(prompt_ids), params))
        self.running += 1
        finished = False
        try:
            for step in self.script(self, number, prompt_ids, params):
                if isinstance(step, Exception):
                    finished = True
                    raise step
                if isinstance(step, Output):
                    finished = step.finish is not None
                    yield step
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    await asyncio.sleep(step)
            assert finished, "a script must finish"
        finally:
            self.running -= 1
            self.aborted += not finished

    async def ask(self, what: str) -> dict[str, object]:
        if not self.alive:
            msg = "the engine was killed by SIGKILL"
            raise EngineDead(msg)
        return {"ok": True}

    async def close(self) -> None:
        self.alive = False


def make_context(
    engine: FakeEngine | None = None,
    *,
    http: ClientLimits | None = None,
    default_sampling: dict[str, float] | None = None,
) -> ModelContext:
    """A ModelContext that is ready."""
    engine = engine or FakeEngine()
    metrics = ServerMetrics(model_name="tiny", max_model_len=MAX_LEN, stats=lambda: engine.stats)
    context = ModelContext(
        engine, metrics, ("tiny", "alias"), MAX_LEN, http or ClientLimits(), default_sampling or {}
    )
    template, answers = _learned()
    context.set_ready(tokenizer(), copy.deepcopy(template), answers)  # tests change the template
    return context


class Api:
    """The app in this process; each call is one request on a fresh event loop."""

    def __init__(
        self,
        script: Script = speak,
        *,
        http: ClientLimits | None = None,
        api_keys: tuple[str, ...] = (),
        key: str | None = None,
        default_sampling: dict[str, float] | None = None,
        loaders: Sequence[Loader] = (),
        **access: Any,
    ) -> None:
        self.engine = FakeEngine(script)
        self.context = make_context(self.engine, http=http, default_sampling=default_sampling)
        self.state = ServerState(ModelRegistry(self.context, loaders))
        self.app = create_app(self.state, api_keys=api_keys, **access)
        self._key = key

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Send one request."""
        return asyncio.run(self._request(method, path, **kwargs))

    async def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=headers
        ) as c:
            return await c.request(method, path, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        """GET."""
        return self.request("GET", path, **kwargs)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST `body` as JSON."""
        return self.request("POST", path, json=body)

    def raw(self, path: str, body: bytes, content_type: str = "application/json") -> httpx.Response:
        """POST bytes."""
        return self.request("POST", path, content=body, headers={"content-type": content_type})

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions with one user message."""
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return self.post("/v1/chat/completions", messages=messages, **fields)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self.post("/v1/completions", prompt=prompt, **fields)

    def alive(self) -> bool:
        """Whether a simple request is answered and no sequence is left running."""
        good = self.chat().json()["choices"][0]["message"]["content"] == ANSWER
        return good and self.engine.running == 0 and self.context.active_sequences == 0


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response, after checking its format."""
    body = response.json()
    assert list(body) == ["error"], body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


def events_of(response: httpx.Response) -> list[Any]:
    """Return the JSON of a stream's events, after checking the framing and the final [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = response.text
    assert text.endswith("\n\n")
    lines = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[len("data: ") :]) for line in lines[:-1]]


def named_events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events, each with its name, after checking the framing."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        event, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert event == f"event: {body['type']}"
        found.append(body)
    return found


def close_to(value: float, wanted: float) -> bool:
    """Whether both are equal except for rounding."""
    return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
