"""What `cpuserve bench step` measures, checked against what the engine can hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.errors import ConfigError

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig

OVERHEAD_BATCHES = (1, 64)
OVERHEAD_CONTEXT = 32  # what is measured does not depend on it, and prompts take time
OVERHEAD_STEPS = 10  # a round


@dataclass(slots=True)
class Plan:
    """What is measured. dot: the peak that prompts are held against ("bf16", "int8", "f32")."""

    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    leaves: Sequence[int]
    rounds: int
    dot: str


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine holds. blocks: of KV cache; slides: windows free some of them on the way.

    sequence: most tokens of one, prompt and output. chunk: least prompt tokens of a step while any
    are left, when nothing but the number of tokens bounds it.
    """

    batch: int
    sequence: int
    blocks: int
    block_size: int
    slides: bool
    budget: int
    chunk: int

    @classmethod
    def of(cls, config: EngineConfig) -> Room:
        """The room of an engine with this configuration."""
        blocks, budget = config.kv_blocks - bool(config.kv_window), config.max_num_batched_tokens
        return cls(
            batch=min(config.max_num_seqs, budget),
            sequence=min(config.max_model_len, blocks * config.block_size + 1),
            blocks=blocks,
            block_size=config.block_size,
            slides=bool(config.kv_window),
            budget=budget,
            chunk=config.long_prefill_token_threshold or budget,
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that gets a token."""
        return self.sequence - 1

    def output(self, batch: int, context: int, steps: int) -> int:
        """Tokens each of `batch` sequences must be allowed, so that all decode `steps` together.

        The first ones decode while the prompts of the others are computed, of which a step takes
        all it may, or up to an eighth less where the scheduler rounds.
        """
        chunk = min(self.chunk, self.budget - batch + 1)
        least = max(1, chunk - chunk // 8)
        return steps + -(-batch * context // least) + 2

    def holds(self, batch: int, context: int, steps: int) -> bool:
        """`batch` sequences can have their prompts computed and decode `steps` steps together."""
        if batch > self.batch:
            return False
        tokens = context + self.output(batch, context, steps)
        each = -(-tokens // self.block_size) + 1  # one is kept free for each that runs
        return tokens <= self.sequence and (self.slides or batch * each <= self.blocks)


def overhead_batches(config: EngineConfig) -> list[int]:
    """The batches of the overheads that the engine runs."""
    return [b for b in OVERHEAD_BATCHES if b <= Room.of(config).batch]


def check_plan(config: EngineConfig, plan: Plan, overheads: bool) -> None:
    """Raise ConfigError, with the nearest value that works, for what the engine cannot hold."""
    room = Room.of(config)
    if overheads:
        for batch in overhead_batches(config):
            _check_overheads(room, batch, plan.rounds)
        return
    for flag, prompts in (("--prefill", plan.prompts), ("--leave", plan.leaves)):
        for tokens in prompts:
            if tokens > room.longest_prompt:
                msg = (
                    f"flag {flag}={tokens}: the longest prompt here has {room.longest_prompt} "
                    f"tokens (--max-model-len, --kv-cache-memory); give at most that"
                )
                raise ConfigError(msg)
    for batch in plan.batches:
        for context in plan.contexts:
            _check_decode(room, batch, context, plan.rounds)


def _check_decode(room: Room, batch: int, context: int, rounds: int) -> None:
    if batch > room.batch:
        msg = (
            f"flag --batch={batch}: at most {room.batch} sequences run at the same time "
            f"(--max-num-seqs, --max-num-batched-tokens); give at most that"
        )
        raise ConfigError(msg)
    if room.holds(batch, context, rounds):
        return
    why = (
        f"flag --context={context}: {batch} sequences of that many tokens and {rounds} more of "
        f"--rounds do not fit (--max-model-len, --kv-cache-memory)"
    )
    if most := _most(lambda c: room.holds(batch, c, rounds), context):
        hint = f"with --batch {batch} give at most {most}"
    elif most := _most(lambda b: room.holds(b, context, rounds), batch):
        hint = f"with it give at most --batch {most}"
    else:
        hint = "give fewer --rounds"
    msg = f"{why}; {hint}"
    raise ConfigError(msg)


def _check_overheads(room: Room, batch: int, rounds: int) -> None:
    def holds(rounds: int) -> bool:
        return room.holds(batch, OVERHEAD_CONTEXT, 2 * OVERHEAD_STEPS * rounds)

    if not holds(rounds):
        most = _most(holds, rounds)
        hint = f"give at most {most}" if most else "give them more"
        msg = (
            f"flag --rounds={rounds}: {batch} sequences do not fit for {OVERHEAD_STEPS} steps a "
            f"round, twice (--max-model-len, --kv-cache-memory); {hint}"
        )
        raise ConfigError(msg)


def _most(works: Callable[[int], bool], asked: int) -> int:
    """The largest number from 1 to `asked` that works, where all below it do; 0 if none does."""
    return bisect_left(range(1, asked + 1), True, key=lambda n: not works(n))
