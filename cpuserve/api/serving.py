"""Serving: the state that all endpoints share, and whether the server can answer requests now."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.api.errors import ServiceUnavailable
from cpuserve.api.json_objects import MAX_OBJECTS
from cpuserve.api.openai.protocol import MAX_LOGPROBS
from cpuserve.api.uploads import BodyBudget
from cpuserve.core.admission import Limits
from cpuserve.errors import NotFound
from cpuserve.serving.backlog import Backlog
from cpuserve.serving.loading import Loading, loading_message
from cpuserve.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpuserve.api.openai.generation import Job
    from cpuserve.api.status.cpu import CpuView
    from cpuserve.engine.client import EngineClient
    from cpuserve.metrics import ServerMetrics
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer


# A prompt token takes 2 to 6 bytes of text in any language, and at most about 64 bytes of JSON, in
# many short messages with escapes for all non-ASCII characters. The minimum allows for requests
# with many prompts or long lists of token ids, whose sizes do not depend on the context.
BODY_BYTES_PER_TOKEN = 64
LEAST_BODY_BYTES = 4 << 20
LEAST_HELD_BYTES = 32 << 20

# Of texts with more characters than this, only LARGE_TEXTS_AT_ONCE are tokenized at the same time,
# because it takes much memory.
LARGE_TEXT_CHARS = 1 << 17
LARGE_TEXTS_AT_ONCE = 2


def default_body_bytes(max_model_len: int) -> int:
    """Return the default limit of a body's size in bytes."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on the memory and time that one client, or all clients together, may use."""

    max_body_bytes: int = LEAST_BODY_BYTES
    body_timeout_s: float = 60.0
    # Bytes of all bodies together, from reading them until their prompts are tokenized, and how
    # long a body may wait for its reservation; see BodyBudget. Bodies up to 64 KiB do not count.
    max_held_bytes: int = LEAST_HELD_BYTES
    body_wait_s: float = 10.0
    # Admitted sequences that have not finished; each takes a few KB, here and in the engine.
    # FrontEnd sets it to the number that may wait plus the number that its engines can run.
    max_sequences: int = 2048
    # A stream's headers wait for its first token, so that an earlier error has its own status. But
    # proxies close connections that are silent for a minute, and a long prompt can take that long:
    # after this time the headers and a comment are sent.
    silent_s: float = 15.0
    # Of those sequences, how many may wait for their first token, and with how many prompt tokens;
    # see Backlog.
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    # Sequences that can run at the same time in all engines.
    slots: int = 1
    # The longest time a request may take, including its wait, and the default of its timeout.
    longest_s: float | None = None


@dataclass(slots=True)
class Serving:
    """The engine's client, the tokenizer and facts about the model, shared by all endpoints.

    `default_sampling` applies to requests that set no values of their own. `tokenizer` is None
    until it is loaded. `loading` is the progress of loading and `failed` the reason why the engine
    is gone. `draining` means that the server will stop and should get no new requests (it still
    answers them), `stopping` that it answers no more. See `unavailable` and `unhealthy`.
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
    loading: Loading = field(default_factory=Loading)
    ready: bool = False
    failed: str | None = None
    draining: bool = False
    stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    active_sequences: int = 0
    backlog: Backlog = field(init=False)
    bodies: BodyBudget = field(init=False)
    large_texts: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        limits = self.http
        self.bodies = BodyBudget(limits.max_held_bytes)
        self.large_texts = asyncio.Semaphore(LARGE_TEXTS_AT_ONCE)
        self.backlog = Backlog(
            limits.max_queued_requests,
            limits.max_queued_tokens,
            lambda: self.client.stats.prompt_rate,
            slots=limits.slots,
        )

    def set_ready(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        """Make the endpoints available, after tokenizer and engine are loaded."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        info = self.client.info

        def number(name: str, otherwise: int) -> int:
            value = info.get(name)
            return value if isinstance(value, int) else otherwise

        # The model's vocabulary may be larger than the tokenizer's; all of its ids are valid.
        self.bounds = Limits(
            self.max_model_len,
            number("kv_tokens", self.max_model_len),
            number("vocab_size", tokenizer.vocab_size),
            number("max_top", MAX_LOGPROBS),
        )
        self.ready = True

    def unavailable(self) -> str | None:
        """Return why requests cannot be answered now, or None if they can."""
        if self.stopping:
            return "The server is shutting down"
        if self.failed is not None:
            return self.failed
        if not self.ready:
            return loading_message(self.loading)
        if not self.client.alive:
            return self.client.trouble
        return None

    def unhealthy(self) -> tuple[str, str] | None:
        """Return (status, reason) if load balancers should send no requests here, else None."""
        reason = self.unavailable()
        if self.draining or self.stopping:
            return "draining", reason or "The server is shutting down: send requests elsewhere"
        if reason is None:
            return None
        if self.failed is not None or self.client.ended:
            return "failed", reason
        return "restarting" if self.ready else "loading", reason

    def check_available(self) -> None:
        """Raise ServiceUnavailable (503) with the reason if requests cannot be answered now."""
        reason = self.unavailable()
        if reason is not None:
            raise ServiceUnavailable(reason)

    def check_model(self, name: str | None) -> str:
        """Return the served name that a request means; NotFound (404) if `name` is not served."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            msg = f"The model {name[:200]!r} does not exist. This server serves: {served}"
            raise NotFound(msg, param="model", code="model_not_found")
        return name

    def check_capacity(self, jobs: Sequence[Job]) -> None:
        """Raise TooManyRequests (429) if there is no capacity for these sequences, or if the first
        token would come after the request's timeout."""
        sequences = len(jobs)
        self.backlog.check(jobs[0].timeout_s)
        if self.active_sequences + sequences > self.http.max_sequences:
            msg = (
                f"This request needs {sequences} sequences, but {self.active_sequences} of at most "
                f"{self.http.max_sequences} are in use: try again later"
            )
            raise self.backlog.refusal(msg)

    def admit(self, jobs: Sequence[Job]) -> None:
        """Count sequences as waiting until `start`, and as active until `dismiss`; raises like
        check_capacity. They count before they run, so that the next check includes them."""
        self.check_capacity(jobs)
        seen: set[int] = set()
        for job in jobs:
            # A prompt is computed once for its n sequences, so its tokens count once.
            job.num_queued = 0 if id(job.prompt) in seen else len(job.prompt.ids)
            seen.add(id(job.prompt))
            job.held = job.waits = True
            self.active_sequences += 1
            self.backlog.enter(job.num_queued)

    def start(self, job: Job, cached_tokens: int) -> None:
        """Count `job` as running; `cached_tokens` of its prompt were found in the prefix cache."""
        job.waits = False
        self.backlog.start(job.num_queued, len(job.prompt.ids) - cached_tokens)

    def dismiss(self, job: Job) -> None:
        """Stop counting `job`, which has ended or will never run; repeated calls do nothing."""
        if job.waits:
            self.backlog.leave(job.num_queued)
        self.active_sequences -= job.held
        job.held = job.waits = False

    @property
    def most_message_objects(self) -> int:
        """The most JSON lists, objects and strings in `messages`.

        A message has 5 of them, and takes at least one token of the context.
        """
        return MAX_OBJECTS + 4 * self.max_model_len

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint: equal for servers whose settings give equal seeded answers."""
        facts = "|".join((version(), self.model_names[0], self.build))
        return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10]

    def get_chat_template(self) -> ChatTemplate:
        """Return the model's chat template; call check_available first."""
        assert self.chat_template is not None
        return self.chat_template

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; call check_available first."""
        assert self.tokenizer is not None
        return self.tokenizer
