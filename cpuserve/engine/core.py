"""EngineCore: handles messages, and returns a StepOutput per step; engine/build.py builds it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from time import process_time
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.errors import RequestError, SourceChanged
from cpuserve.base.ids import RequestId
from cpuserve.base.log import get_logger
from cpuserve.core.admission import Limits, check_request, output_limit
from cpuserve.core.request import Delta, Request
from cpuserve.core.results import DamageWatch
from cpuserve.core.scheduler import Scheduler
from cpuserve.core.speculation.drafter import learned_rows, make_drafter
from cpuserve.core.speculation.proposer import Proposer
from cpuserve.core.step import StepBatch
from cpuserve.engine.grammars.grammar_queue import QueueFull
from cpuserve.engine.interrupt import EndsFor, Interrupt
from cpuserve.engine.ipc import (
    Abort,
    AddRequest,
    Ask,
    Inbound,
    MediaPayload,
    Output,
    Reply,
    Stats,
    StepOutput,
    TierStats,
)
from cpuserve.engine.kv_events import KvEventPublisher
from cpuserve.engine.lora import ALONE_S, BESIDE_STREAMS_S, CHANGES, AdapterSlots
from cpuserve.engine.media import make_encoder
from cpuserve.engine.media_checks import check_media
from cpuserve.engine.memory_use import resident_bytes
from cpuserve.engine.offload import make_kv
from cpuserve.loader.dense_module import Head
from cpuserve.runtime.pack import pack, unpack
from cpuserve.runtime.pooling import make_pooler

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.core.kv.offload import Offload
    from cpuserve.engine.grammars.client import Grammars
    from cpuserve.runtime.executor import Executor, Int32
    from cpuserve.sampling.params import SamplingParams

LATE_S = 0.02  # seconds that a step waits for late bitmasks if no other request can run
CPU_TIME_S = 0.1  # the CPU time that counts as progress; an hour of replies to Pings takes less

log = get_logger("engine")


class EngineCore:
    """The scheduler and the executor of one engine. One thread calls all methods but `progress`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        vocab: int,
        eos_ids: Iterable[int] = (),
        facts: dict[str, object] | None = None,
        adapters: AdapterSlots | None = None,
        head: Head | None = None,
        kv_events: KvEventPublisher | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.config = config
        self._kv_events, self._proposer = kv_events, proposer
        self._head = head or Head(config.pooling)
        self.executor = executor
        self.stats = Stats()
        self.kv = make_kv(config, executor, kv_events, proposer)
        longest = max(config.max_model_len, config.kv_blocks * config.block_size)
        kv_tokens = self.kv.use.most_tokens(self.kv.num_blocks, longest)
        self._eos_ids = frozenset(eos_ids)
        length, rows = config.max_model_len, config.max_num_batched_tokens
        media_limits = dict.fromkeys(executor.towers, config.media_rows)
        self.limits = Limits(
            length, kv_tokens, vocab, eos_ids=self._eos_ids, max_rows=rows, media_rows=media_limits
        )
        media, self.encoder = make_encoder(
            executor, config.media_rows, self.kv.offload, whole=config.media_span > 0
        )
        self._starved = False  # whether nothing can run before the payload of a media item comes
        self.scheduler = Scheduler(
            self.kv,
            executor,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            itl_target_s=config.itl_target_ms / 1000,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            whole_prompts=config.whole_prompts,
            drafter=make_drafter(config, self.kv, executor.text_indexes, proposer),
            media=media,
        )
        self.interrupt = Interrupt(executor.cancel)
        self._facts = facts or {}
        self.adapters = adapters or AdapterSlots()
        self.adapters.in_use = self._slots_in_use
        self._bytes_per_step = float(executor.bytes_per_step)
        self._seeds = random.Random(config.seed)
        self._refused: list[Output] = []
        self._early: dict[int, Request] = {}  # requests that arrived during a step, by id
        self._stale = False  # whether the gauges have changed since the last step
        self._asked: list[Ask] = []
        self._probe: Iterator[dict[str, object]] | None = None  # the one of the roofline
        self._limits: dict[str, object] = {}  # the measured limits of this machine
        self.turns = 0  # iterations of the engine's loop so far
        self.wake: Callable[[], None] = _no_one
        self._grammars: Grammars | None = None
        self._damage = DamageWatch()
        self._rows = learned_rows(self.scheduler.drafter, executor.row_times())

    def progress(self) -> object:
        """Return a value that changes while the engine makes progress; another thread calls this.

        If the executor reports no progress, CPU time is used, because a hung step uses no CPU time.
        """
        inside = self.executor.progress()
        return self.turns, process_time() // CPU_TIME_S if inside is None else inside

    # --- messages to the engine ---------------------------------------------------------------

    def handle(self, message: Inbound) -> None:
        """Handle one message (the loop handles Shutdown)."""
        self._starved = False
        if isinstance(message, AddRequest):
            self._add(message)
            self.interrupt.added(message.id)
        elif isinstance(message, Abort):
            for number in message.ids:
                self._stale |= self.scheduler.abort(RequestId(number))
            self.interrupt.handled(message.ids)
        elif isinstance(message, MediaPayload):
            number, index = RequestId(message.id), message.index
            self.scheduler.media.take(number, index, message.payload)
        elif isinstance(message, Ask) and message.what in CHANGES:
            self.adapters.ask(message)
        elif isinstance(message, Ask):
            self._asked.append(message)

    @property
    def has_work(self) -> bool:
        """Whether a step has work: to run tokens, refuse a request, or update gauges."""
        compiled = self._grammars is not None and self._grammars.has_done
        works = self.scheduler.has_work and not self._starved
        return works or bool(self._refused) or self._stale or compiled

    def _add(self, message: AddRequest) -> None:
        ids, params = np.frombuffer(message.prompt, np.int32), message.params
        early = self._early.pop(message.id, None)
        prompt: list[int] = ids.tolist() if early is None else early.token_ids
        try:
            check_request(ids, params, self.limits)
            check_media(message.media, len(ids), self.limits)
        except RequestError as error:
            self._refused.append(Output(message.id, [], "error", error=error.message))
            return
        number, salt = -1, params.cache_salt or ""
        if params.adapter is not None:
            adapter = self.adapters.find(params.adapter)
            if adapter is None:
                msg = f"there is no adapter {params.adapter[:200]!r}, or no longer"
                self._refused.append(Output(message.id, [], "error", error=msg, fault="model"))
                return
            number = adapter.slot
            key, scale = adapter.fingerprint, params.scale_key
            salt = f"{key}{scale}@{salt}"  # the salt of a client contains no @
            if self._kv_events is not None:
                self._kv_events.adapters[key] = params.adapter
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed % 2**64
        request = Request(
            RequestId(message.id),
            prompt,
            params,
            output_limit(len(prompt), params, self.limits),
            seed,
            self._eos_ids,
            arrival=message.arrival,
            priority=message.priority,
            progress=message.progress,
            continues=message.continues,
            pooler=make_pooler(self._head, vectors=params.vectors),
            adapter=number,
            salt=salt,
            media=message.media,
        )
        if early is not None and early.chain.salt == salt:
            request.chain = early.chain
        if params.structured_outputs is None or self._add_grammar(request):
            self.scheduler.add(request)

    def _ends_for(self, started: float) -> EndsFor:
        """Return a thread-safe function that says whether a new request ends the running step.

        started: the time when the step began.
        """

        def ends_for(message: AddRequest) -> bool:
            elapsed = time.perf_counter() - started
            if len(message.prompt) > 4 * self.limits.max_model_len:
                return False  # the prompt (4 bytes a token) is too long, so it will be refused
            return self.scheduler.ends_for(self._read_early(message), elapsed)

        return ends_for

    def _read_early(self, message: AddRequest) -> Request:
        """Read a prompt and look it up in the prefix cache during a step, so `_add` is faster."""
        request = self._early.get(message.id)
        if request is None:
            prompt, params = np.frombuffer(message.prompt, np.int32).tolist(), message.params
            media, priority = message.media, message.priority
            request = Request(
                RequestId(message.id), prompt, params, 1, 0, priority=priority, media=media
            )
            request.ready = params.structured_outputs is None  # a grammar must be compiled first
            if request.reads_prefixes and params.adapter is None:
                self.kv.num_cached_tokens(request.chain, prompt)
            self._early[message.id] = request
        return request

    # --- adapters -----------------------------------------------------------------------------

    @property
    def changing(self) -> bool:
        """Whether a change of adapters is not finished yet."""
        return self.adapters.changing

    def change_adapters(self) -> None:
        """Continue changes of adapters for a short time."""
        self.adapters.advance(BESIDE_STREAMS_S if self.scheduler.running else ALONE_S)

    def _slots_in_use(self) -> set[int]:
        return {request.adapter for request in self.scheduler.requests.values()}

    # --- grammars -----------------------------------------------------------------------------

    @property
    def _grammars_in_use(self) -> Grammars:
        """The grammars of this engine; created when the first request with a grammar arrives."""
        if self._grammars is None:
            from cpuserve.engine.grammars.client import Grammars
            from cpuserve.engine.grammars.proposer import GrammarProposer

            self._grammars = Grammars(
                self.config, self.limits.vocab, self._eos_ids, lambda: self.wake()
            )
            if (drafter := self.scheduler.drafter) is not None:
                most_tokens = self.config.max_num_batched_tokens
                drafter.with_masks = GrammarProposer(self._grammars, most_tokens)
        return self._grammars

    def _add_grammar(self, request: Request) -> bool:
        """Return whether a request's grammar can be used; if not, refuse the request."""
        try:
            why_not = self._grammars_in_use.add(request)
        except QueueFull as full:
            error = f"The queue is full: {full}. Try again later"
            self._refused.append(Output(request.id, [], "error", error=error, queue_full=True))
            return False
        if why_not:
            self._refuse_grammar(request.id, request.params, why_not)
        return not why_not

    def _refuse_grammar(self, number: RequestId, params: SamplingParams, error: str) -> None:
        outputs = params.structured_outputs
        role = outputs.role_of(error) if outputs is not None else "structured_outputs"
        message = f"{role} cannot be compiled to a grammar: {error}"
        self._refused.append(Output(number, [], "error", error=message, fault=role))

    def _take_compiled(self, grammars: Grammars) -> None:
        """Start the requests with compiled grammars, and refuse requests with faulty grammars."""
        for verdict in grammars.collect():
            request = self.scheduler.requests.get(verdict.request)
            if request is None:
                continue  # the request was aborted
            if not verdict.error:
                self.scheduler.make_ready(request)
                continue
            self.scheduler.abort(request.id)
            if verdict.fault:
                self._refuse_grammar(request.id, request.params, verdict.error)
            else:
                error = f"the form of the response cannot be kept now: {verdict.error}"
                refused = Output(request.id, [], "error", error=error, unavailable=True)
                self._refused.append(refused)

    def _masks(self, batch: StepBatch) -> Int32 | None:
        """Return the bitmasks for a step; None if it needs no bitmask, or if they are late."""
        if self._grammars is None:  # most servers never get a request with a grammar
            return None
        pairs = zip(self.scheduler.batch_requests, batch.chunks, strict=True)
        masked = [r for r, c in pairs if r.masked and c.rows and c.rows[-1].mask >= 0]
        if not masked:
            return None
        masks = self._grammars.masks_for(masked)
        if masks is None:
            self.scheduler.masks_late = True
            return None
        for request in masked:
            if request.num_output < request.params.min_tokens and self._grammars.is_complete(
                request
            ):
                self.scheduler.end_with_the_grammar(request)
        return masks

    def _after_step(self, grammars: Grammars, deltas: list[Delta]) -> None:
        """Add the errors of grammars to `deltas`, and ask for bitmasks if no model drafts."""
        for delta in deltas:
            if delta.error:
                grammars.add_error(delta)
        grammars.forget_all_but(self.scheduler.requests)
        if self._proposer is None:
            self._fill(grammars)

    def _fill(self, grammars: Grammars) -> None:
        """Ask for the bitmasks of the next step, when the drafts are known."""
        running = self.scheduler.running
        masked = [r for r in running if r.masked and r.num_output]
        drafter = self.scheduler.drafter
        jumps = 0 if drafter is None else drafter.most_jumps
        grammars.begin_fill(masked, jumps // max(len(masked), 1))

    # --- one step -----------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Run one step: schedule, execute, update."""
        started, offload = time.perf_counter(), self.kv.offload
        waited_s = self.executor.barrier_wait_s  # loading and probes have waits as well
        moving_s = offload.seconds if offload is not None else 0.0
        if self._grammars is not None:
            self._take_compiled(self._grammars)
            masks_late, drafter = self.scheduler.masks_late, self.scheduler.drafter
            self.scheduler.masks_late = not self._grammars.begin_step(late=masks_late)
            if drafter is not None and not self.scheduler.masks_late:
                drafter.propose_with_masks(self.scheduler.running)
        batch = self.scheduler.schedule()
        if self._grammars is not None and self.scheduler.masks_late and not batch.chunks:
            self._grammars.settle(LATE_S)
        deltas, finished = self._run(batch)
        if self._grammars is not None and self._grammars.in_use:
            self._after_step(self._grammars, deltas)
        outputs, self._refused = [*map(Output.of, deltas), *self._refused], []
        media = self.scheduler.media
        if media.wanted:
            outputs += [Output(n, [], wants=[i]) for n, i in media.asks()]
        moved = offload is not None and offload.seconds > moving_s
        idle = not (batch.chunks or moved or self.scheduler.masks_late or self.scheduler.encodes)
        self._starved = idle and media.starves and not media.next()
        if offload is not None:
            started += offload.seconds - moving_s  # moving blocks is not part of the step's cost
        seconds = time.perf_counter() - started
        if finished and batch.chunks:
            self.stats.steps += 1
            self.stats.busy_s += seconds
            self.stats.weight_bytes += self._bytes_per_step
            self.stats.barrier_wait_s += self.executor.barrier_wait_s - waited_s
            if not self.scheduler.parked.in_step:
                self.scheduler.cost.observe(self.scheduler.work, seconds)
        self._count(deltas, seconds)
        if self._kv_events is not None:
            self._kv_events.publish()
        return StepOutput(outputs, self.stats)

    def after_sending(self) -> None:
        """Draft tokens and encode media; the tokens of the last step do not wait for it."""
        if self._proposer is not None:
            if (drafter := self.scheduler.drafter) is not None:
                drafter.propose_after_sending(self.scheduler.running)
            if self._grammars is not None and self._grammars.in_use:
                self._fill(self._grammars)
        if self.encoder is not None:
            failed = self.encoder.encode(self.scheduler, self.config.itl_target_ms / 1000)
            self._stale |= failed  # the next step sends the errors
            self.stats.encode_s = self.encoder.seconds

    def tidy(self) -> bool:
        """Write a block to disk or measure rows while the engine is idle; False = all is done."""
        if (self.kv.offload is not None and self.kv.offload.tidy()) or next(self._rows, False):
            return True
        return self._proposer is not None and self._proposer.tidy()

    def _run(self, batch: StepBatch) -> tuple[list[Delta], bool]:
        """Run a step; return (the deltas of its requests, whether a chunk came to its end)."""
        if not batch.chunks:
            return self.scheduler.update([]), True
        were_late, masks = self.scheduler.masks_late, self._masks(batch)
        if self.scheduler.masks_late and not were_late:
            return self.scheduler.rewind(0.0), False
        started = time.perf_counter()
        self.interrupt.begin(self.scheduler.batch_requests, self._ends_for(started))
        try:
            outputs = self.executor.step(arrays := pack(batch, masks))
            results = unpack(outputs, arrays.tops)
        except SourceChanged:  # no later step could be computed: the engine ends
            self.interrupt.end()
            self.scheduler.fail("")  # `close` must not keep the blocks of this step
            raise
        except Exception as error:  # any failure ends only the requests of this step
            reason = self.interrupt.end()
            if reason == "came":
                return self.scheduler.rewind(time.perf_counter() - started), False
            if reason:
                return self.scheduler.fail(""), False
            log.exception("a step of %d sequences failed", len(batch.chunks))
            return self.scheduler.fail(f"the engine failed in this step: {error}"), False
        self.interrupt.end()
        if outputs.parked:
            results = self.scheduler.park(outputs.parked, results)
        if outputs.lost:
            results = self.scheduler.lose(outputs.lost, results, outputs.why)
        return self.scheduler.update(results), len(outputs.parked) < len(batch.chunks)

    def _count(self, deltas: list[Delta], seconds: float) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.kv_usage = self.kv.usage
        stats.preemptions = scheduler.num_preemptions
        blocks, media = scheduler.blocks, scheduler.media
        stats.prefix_queries, stats.prefix_hits = blocks.prefix_queries, blocks.prefix_hits
        stats.media_queries, stats.media_hits = media.queries, media.hits
        stats.prompt_rate = scheduler.cost.prompt_rate
        self._stale, stats.step_s = False, seconds
        stats.damaged = self._damage.see(deltas)
        if self.kv.offload is not None:
            self._count_offload(self.kv.offload)
        stats.count_experts(experts := self.executor.experts)
        scheduler.cost.reads_experts = experts is not None and not experts.fit
        if (drafter := scheduler.drafter) is not None:
            stats.drafts, stats.draft_tokens = drafter.num_drafts, drafter.num_draft_tokens
            stats.accepted_tokens = drafter.num_accepted_tokens
        for delta in deltas:
            stats.generation_tokens += len(delta.tokens)
            request, is_done = delta.request, not (delta.error or delta.processed)
            if is_done and request.num_output == len(delta.tokens) and not request.continues:
                stats.prompt_tokens += request.num_prompt

    def _count_offload(self, offload: Offload) -> None:
        """Update the statistics of offload tiers, which also write blocks in an idle engine."""
        self.stats.tiers = {
            tier.name: TierStats(tier.num_blocks, tier.num_bytes, offload.hits[tier.name])
            for tier in offload.tiers
        }

    @property
    def decodes_only(self) -> bool:
        """Whether the last step had only decode rows, which leaves time before the next step."""
        work = self.scheduler.work
        return work.rows > 0 and not work.tokens

    def prepare(self) -> bool:
        """Let the idle executor prepare a part of its memory; False if all is prepared."""
        return self.executor.prepare()

    # --- reports ------------------------------------------------------------------------------

    def replies(self) -> list[Reply]:
        """Return replies to Ask messages; a roofline is measured while no request is running."""
        changed = self.adapters.replies()
        ready = [a for a in self._asked if a.what != "roofline"]
        if self.probing and not self.has_work and self._probe_part():
            ready = self._asked
        self._asked = [a for a in self._asked if a not in ready]
        return [*changed, *(Reply(ask.id, self._reply(ask.what)) for ask in ready)]

    @property
    def probing(self) -> bool:
        """Whether the limits of this machine are being measured, in parts between requests.

        All parts together take half a second.
        The first requests after a start often come meanwhile.
        """
        return any(ask.what == "roofline" for ask in self._asked)

    def _probe_part(self) -> bool:
        """Measure the next part of the machine's limits; return whether it was the last part."""
        if self._probe is None:
            self._probe = self.executor.roofline()
        try:
            self._limits = next(self._probe)
        except StopIteration:
            self._probe = None
        except Exception as error:  # a report must not end the engine
            log.exception("measuring the roofline failed")
            self._probe, self._limits = None, {"error": str(error)}
        return self._probe is None

    def _reply(self, what: str) -> dict[str, object]:
        reports: dict[str, Callable[[], dict[str, object]]] = {
            "roofline": self.roofline,
            "report": self.report,
            "check": self.check,
            "reset_prefix_cache": self.reset_prefix_cache,
        }
        try:
            return reports[what]() if what in reports else {"error": f"there is no report {what!r}"}
        except Exception as error:  # a report must not end the engine
            log.exception("report %s failed", what)
            return {"error": str(error)}

    def reset_prefix_cache(self) -> dict[str, object]:
        """Remove all cached prefixes of all models; blocks in offload tiers stay."""
        self.kv.published.clear()
        if self._proposer is not None:
            self._proposer.forget_prefixes()
        if self._kv_events is not None:
            self._kv_events.publish()
        return {}

    def roofline(self) -> dict[str, object]:
        """Return the measured limits of this machine; {} if the executor cannot measure them."""
        measured = self._limits
        bandwidth = measured.get("read_bytes_per_s")
        if isinstance(bandwidth, int | float):
            self.stats.roofline_bytes_per_s = float(bandwidth)
        return measured

    def report(self) -> dict[str, object]:
        """Return sizes, placement and counters, for `doctor` and tests."""
        return {
            **self.info(),
            **self.executor.report(),
            "max_rss_bytes": resident_bytes()[1],
            "kv_blocks_free": self.kv.num_free,
            "kv_blocks_cached": self.kv.num_cached,
            "prefix_queries": self.scheduler.blocks.prefix_queries,
            "prefix_hits": self.scheduler.blocks.prefix_hits,
            "roofline_bytes_per_s": self.stats.roofline_bytes_per_s,
            "limits": self._limits.get("limits", []),
            "busy_s": self.stats.busy_s,
            "weight_bytes": self.stats.weight_bytes,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "steps": self.stats.steps,
            **({} if self._proposer is None else self._proposer.report()),
            **(self.kv.offload.report() if self.kv.offload is not None else {}),
        }

    def check(self) -> dict[str, object]:
        """Check all invariants; return {"ok": True}, or {"ok": False, "error": text}."""
        try:
            self.scheduler.check_invariants()
        except AssertionError as error:
            return {"ok": False, "error": str(error)}
        return {"ok": True}

    def info(self) -> dict[str, object]:
        """Return the content of Ready: facts of the model and settings for the front end."""
        config, limits = self.config, self.limits
        return {
            "model": config.model,
            "architecture": config.architecture,
            "executor": config.executor,
            "isa": config.isa,
            "dtype": config.dtype,
            "kv_dtype": config.kv_dtype,
            "threads": config.threads,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "vocab_size": limits.vocab,
            "eos_ids": sorted(self._eos_ids),
            "block_size": config.block_size,
            "prefix_caching": config.enable_prefix_caching,
            "kv_blocks": config.kv_blocks,
            "kv_tokens": limits.kv_tokens,
            "max_top": limits.max_top,
            "media_rows": dict(limits.media_rows),
            "adapters": self.adapters.fingerprints(),
            **self._facts,
        }

    def close(self) -> None:
        """Write KV blocks to the durable offload tiers; free weights and KV cache."""
        grammars, offload, events = self._grammars, self.kv.offload, self._kv_events
        self._rows = iter(())  # it holds the native executor, and so all memory
        for part in (grammars, self._proposer, offload, events, self.executor):
            if part is not None:
                part.close()


def _no_one() -> None:
    """Do nothing, because no thread waits before the engine's loop runs."""
