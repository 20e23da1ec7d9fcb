"""Serving: what every endpoint works with, and whether the server may answer right now."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.core.admission import Limits
from cpuserve.entrypoints.openai.backlog import Backlog
from cpuserve.entrypoints.openai.errors import ServiceUnavailable
from cpuserve.entrypoints.openai.protocol import MAX_LOGPROBS
from cpuserve.errors import NotFound
from cpuserve.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpuserve.engine.client import EngineClient
    from cpuserve.entrypoints.openai.cpu import CpuView
    from cpuserve.entrypoints.openai.generation import Job
    from cpuserve.metrics import ServerMetrics
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on what one client, or all of them, may hold."""

    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    # Sequences accepted and not finished: a few KB each, here and in the engine. A server's are
    # those that may wait and those that its engines run; see FrontEnd.
    max_sequences: int = 2048
    # A stream's headers wait for its first token, so that an error still has its own status; but
    # proxies cut connections that stay silent for a minute, and a long prompt takes that long.
    silent_s: float = 15.0
    # Of those sequences, the ones that still wait for their first token; see Backlog.
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    # Sequences that run at a time, in all engines.
    slots: int = 1
    # Longest that a request may take, waiting included, and what it may take if it does not say.
    longest_s: float | None = None


@dataclass(slots=True)
class Serving:
    """The engine, the tokenizer and the model's facts, shared by all endpoints.

    `default_sampling` is for requests that set no values of their own. `tokenizer` is None until it
    is loaded. `loading` says how far loading is, `failed` why the engine is gone, `draining` that
    the server stops; see `unavailable`.
    """

    client: EngineClient
    metrics: ServerMetrics
    model_names: tuple[str, ...]
    max_model_len: int
    http: HttpLimits = field(default_factory=HttpLimits)
    default_sampling: Mapping[str, int | float] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    bounds: Limits = field(default_factory=lambda: Limits(0, 0, 0))
    build: str = ""
    cpu: CpuView | None = None
    loading: str = "starting"
    ready: bool = False
    failed: str | None = None
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    active_sequences: int = 0
    backlog: Backlog = field(init=False)

    def __post_init__(self) -> None:
        limits = self.http
        self.backlog = Backlog(
            limits.max_queued_requests,
            limits.max_queued_tokens,
            lambda: self.client.stats.prompt_rate,
            slots=limits.slots,
        )

    def set_ready(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        """Open the endpoints: the engine has said Ready."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        info = self.client.info

        def number(name: str, otherwise: int) -> int:
            value = info.get(name)
            return value if isinstance(value, int) else otherwise

        # The model may have more rows than the tokenizer has tokens: those ids are served too.
        self.bounds = Limits(
            self.max_model_len,
            number("kv_tokens", self.max_model_len),
            number("vocab_size", tokenizer.vocab_size),
            number("max_top", MAX_LOGPROBS),
        )
        self.ready = True

    def unavailable(self) -> str | None:
        """Why requests cannot be answered now, or None."""
        if self.draining:
            return "The server is shutting down"
        if self.failed is not None:
            return self.failed
        if not self.ready:
            return f"The model is loading ({self.loading})"
        if not self.client.alive:
            if self.client.ended:
                return "The engine has died"
            return "The engines have died and are being started again"
        return None

    def check_available(self) -> None:
        """ServiceUnavailable (503) with the reason while requests cannot be answered."""
        reason = self.unavailable()
        if reason is not None:
            raise ServiceUnavailable(reason)

    def check_model(self, name: str | None) -> str:
        """The served name a request means; NotFound (404) for one that is not served."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            msg = f"The model {name[:200]!r} does not exist. This server has: {served}"
            raise NotFound(msg, param="model")
        return name

    def check_room(self, jobs: Sequence[Job]) -> None:
        """TooManyRequests (429) when that many sequences more are too many, or the first token
        would come after the request's timeout."""
        sequences = len(jobs)
        self.backlog.check(jobs[0].timeout_s)
        if self.active_sequences + sequences > self.http.max_sequences:
            msg = (
                f"The server already holds {self.active_sequences} sequences of at most "
                f"{self.http.max_sequences}, and this request wants {sequences}: try again later"
            )
            raise self.backlog.refusal(msg)

    def admit(self, jobs: Sequence[Job]) -> None:
        """Count sequences as held and waiting, from now to `start` and `dismiss`; raises as
        check_room does. At once: whoever is checked before they run must see them."""
        self.check_room(jobs)
        seen: set[int] = set()
        for job in jobs:
            # The n sequences of a prompt wait for it to be computed once.
            job.num_queued = 0 if id(job.prompt) in seen else len(job.prompt.ids)
            seen.add(id(job.prompt))
            job.held = job.waits = True
            self.active_sequences += 1
            self.backlog.enter(job.num_queued)

    def start(self, job: Job, cached_tokens: int) -> None:
        """Its first output has come, after `cached_tokens` of its prompt had been found."""
        job.waits = False
        self.backlog.start(job.num_queued, len(job.prompt.ids) - cached_tokens)

    def dismiss(self, job: Job) -> None:
        """It is over, or will never run; again if need be."""
        if job.waits:
            self.backlog.leave(job.num_queued)
        self.active_sequences -= job.held
        job.held = job.waits = False

    @property
    def fingerprint(self) -> str:
        """Equal for servers whose answers to a seeded request are equal, as far as we know."""
        facts = "|".join((version(), self.model_names[0], self.build))
        return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10]

    def get_chat_template(self) -> ChatTemplate:
        """The model's chat template; only after check_available."""
        assert self.chat_template is not None
        return self.chat_template

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; only after check_available."""
        assert self.tokenizer is not None
        return self.tokenizer
