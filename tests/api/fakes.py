"""A scripted engine behind the real app, and helpers that send requests to it."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cpuserve.api.app import create_app
from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.request.state import ServerState
from cpuserve.engine.ipc import Output
from cpuserve.metrics.server import ServerMetrics
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.models.context import ModelContext
from cpuserve.serving.models.limits import ClientLimits
from cpuserve.serving.models.loaders import Loader
from cpuserve.serving.models.registry import ModelRegistry
from cpuserve.serving.tools.learn import LearnedFormat, learn_format
from cpuserve.testing.engine import EngineScript, EngineStep, ScriptedEngine, logprob_of
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

ANSWER = "Hello wörld \N{WAVING HAND SIGN}!"
VOCAB = 512
MAX_LEN = 128

Step = EngineStep
Script = EngineScript


@functools.cache
def tokenizer() -> Tokenizer:
    """The tiny models' tokenizer: 384 byte-level tokens and a ChatML template."""
    return Tokenizer.load(tiny_model("llama"))


@functools.cache
def _learned() -> tuple[ChatTemplate, LearnedFormat]:
    """Their chat template, and how it writes responses, which takes 21 renderings to find."""
    template = ChatTemplate(tokenizer().chat_template, tokenizer())
    return template, learn_format(template)


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
class FakeEngine(ScriptedEngine):
    """A ScriptedEngine that says ANSWER, with the limits of the tiny models."""

    script: Script = speak
    info: dict[str, Any] = field(
        default_factory=lambda: {
            "vocab_size": VOCAB,
            "max_model_len": MAX_LEN,
            "kv_tokens": 4 * MAX_LEN,
            "max_top": 20,
        }
    )


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
    # Tests change the template, and not the tokenizer, whose copy takes longest.
    own = copy.deepcopy(template, {id(tokenizer()): tokenizer()})
    context.set_ready(tokenizer(), own, answers)
    return context


class Api:
    """The app in this process; each call is one request on a fresh event loop."""

    def __init__(
        self,
        script: Script = speak,
        *,
        http: ClientLimits | None = None,
        api_keys: tuple[str, ...] = (),
        key_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        key: str | None = None,
        default_sampling: dict[str, float] | None = None,
        loaders: Sequence[Loader] = (),
        **access: Any,
    ) -> None:
        self.engine = FakeEngine(script)
        self.context = make_context(self.engine, http=http, default_sampling=default_sampling)
        self.state = ServerState(ModelRegistry(self.context, loaders))
        if api_keys or key_file is not None:
            self.state.callers = access["callers"] = KnownCallers(api_keys, key_file, clock)
        self.app = create_app(self.state, **access)
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
