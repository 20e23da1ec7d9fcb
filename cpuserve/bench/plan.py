"""The plan of `cpuserve bench step`, and its check against the limits of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import ConfigError
from cpuserve.config.cache_groups import CacheUse, cache_use

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig

OVERHEAD_BATCHES = (1, 64)
OVERHEAD_CONTEXT = 32  # tokens; overheads do not depend on the context, so short prompts suffice
OVERHEAD_STEPS = 10  # decode steps in each round (repetition) of the benchmark


@dataclass(slots=True)
class Plan:
    """The batch, context and prompt sizes to measure, in sequences and tokens.

    dot: a type of dot products ("bf16", "int8", "int4" or "f32"). Their measured peak rate is
      the limit for prefill, and reports state the rate of prompts as a share of it.
      "" = the type that the model's linear layers use.
    """

    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    leaves: Sequence[int]
    rounds: int
    dot: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits that an engine sets for the sizes of a benchmark.

    batch: the maximum number of running sequences.
    sequence: the maximum tokens of a sequence, prompt and output together.
    blocks: the number of KV blocks.
    use: computes how many KV blocks a sequence takes.
    budget: the maximum number of tokens in a step.
    chunk: the maximum number of prompt tokens in a step, if time does not limit them further.
    """

    batch: int
    sequence: int
    blocks: int
    use: CacheUse
    budget: int
    chunk: int

    @classmethod
    def of(cls, config: EngineConfig) -> Capacity:
        """Return the limits of an engine with this configuration."""
        windows = [group.window for group in config.kv_groups] or [0]
        spare = any(windows) or config.state_slots > 0
        blocks, budget = config.kv_blocks - spare, config.max_num_batched_tokens
        use = cache_use(windows, budget, config.block_size, config.media_span)
        return cls(
            batch=min(config.max_num_seqs, budget),
            sequence=min(config.max_model_len, use.most_tokens(blocks, config.max_model_len) + 1),
            blocks=blocks,
            use=use,
            budget=budget,
            chunk=min(
                config.long_prefill_token_threshold or budget,
                use.ahead if any(windows) else budget,
            ),
        )

    @property
    def longest_prompt(self) -> int:
        """The number of tokens of the longest prompt that leaves space for one output token."""
        return self.sequence - 1

    def output(self, batch: int, context: int, steps: int) -> int:
        """Return the max_tokens that all sequences need to decode `steps` steps at the same time.

        The first sequences already decode while the prompts of the others are computed. A step
        computes a full chunk of prompt tokens, or up to an eighth less when the scheduler rounds.
        """
        chunk = min(self.chunk, self.budget - batch + 1)
        least = max(1, chunk - chunk // 8)
        return steps + -(-batch * context // least) + 2

    def holds(self, batch: int, context: int, steps: int) -> bool:
        """Return whether `batch` sequences of `context` tokens can decode `steps` steps at once."""
        if batch > self.batch:
            return False
        tokens = context + self.output(batch, context, steps)
        # The scheduler keeps one block of each cache group free per running sequence.
        each = self.use.needs(tokens) + len(self.use.windows)
        return tokens <= self.sequence and batch * each <= self.blocks


def overhead_batches(config: EngineConfig) -> list[int]:
    """Return the batch sizes at which overheads are measured, up to the engine's limit."""
    return [b for b in OVERHEAD_BATCHES if b <= Capacity.of(config).batch]


def check_plan(config: EngineConfig, plan: Plan, overheads: bool) -> None:
    """Raise ConfigError if the plan exceeds the engine's limits; the message has a valid value."""
    limits = Capacity.of(config)
    if overheads:
        for batch in overhead_batches(config):
            _check_overheads(limits, batch, plan.rounds)
        return
    for flag, prompts in (("--prefill", plan.prompts), ("--leave", plan.leaves)):
        for tokens in prompts:
            if tokens > limits.longest_prompt:
                msg = (
                    f"flag {flag}={tokens}: a prompt has at most {limits.longest_prompt} tokens "
                    f"under this --max-model-len and --kv-cache-memory; give at most that"
                )
                raise ConfigError(msg)
    for batch in plan.batches:
        for context in plan.contexts:
            _check_decode(limits, batch, context, plan.rounds)


def _check_decode(limits: Capacity, batch: int, context: int, rounds: int) -> None:
    if batch > limits.batch:
        msg = (
            f"flag --batch={batch}: at most {limits.batch} sequences run at the same time "
            f"under this --max-num-seqs and --max-num-batched-tokens; give at most that"
        )
        raise ConfigError(msg)
    if limits.holds(batch, context, rounds):
        return
    why = (
        f"flag --context={context}: {batch} sequences of that many tokens, plus {rounds} tokens "
        f"each for --rounds, exceed --max-model-len or --kv-cache-memory"
    )
    if most := _most(lambda c: limits.holds(batch, c, rounds), context):
        hint = f"with --batch {batch} give at most {most}"
    elif most := _most(lambda b: limits.holds(b, context, rounds), batch):
        hint = f"with this --context give at most --batch {most}"
    else:
        hint = "give fewer --rounds"
    msg = f"{why}; {hint}"
    raise ConfigError(msg)


def _check_overheads(limits: Capacity, batch: int, rounds: int) -> None:
    def holds(rounds: int) -> bool:
        return limits.holds(batch, OVERHEAD_CONTEXT, 2 * OVERHEAD_STEPS * rounds)

    if not holds(rounds):
        most = _most(holds, rounds)
        hint = f"give at most {most}" if most else "raise one of these two flags"
        msg = (
            f"flag --rounds={rounds}: {batch} sequences that run 2 x {OVERHEAD_STEPS} steps per "
            f"round exceed --max-model-len or --kv-cache-memory; {hint}"
        )
        raise ConfigError(msg)


def _most(works: Callable[[int], bool], asked: int) -> int:
    """Return the largest n in 1 .. `asked` with works(n), or 0; all smaller n must work as well."""
    return bisect_left(range(1, asked + 1), True, key=lambda n: not works(n))
