"""The executor seam: StepArrays in, StepOutputs out. Two executors: native, and the torch floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cpuserve.sampling.params import SamplingParams

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

HEADER = 8  # int32 words before the first section


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step as a flat int32 block; the C++ executor reads it as it is.

    words[0:8] = num_tokens T, num_seqs S, num_rows R, num_blocks B (sum of table lengths), 0...
    then, in order: token_ids [T], positions [T], query_start [S + 1], kv_len [S] (keys after this
    step), table_start [S + 1], block_tables [B], row_token [R] (index into T), row_slot [R],
    row_target [R] (-1 = sample), row_top [R] (-1 = no logprobs).
    """

    words: Int32

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.words[0])

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.words[2])


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Results per logit row: token, logprob, rank [R]; top_ids, top_logprobs [R, max_top]."""

    tokens: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


class Executor(Protocol):
    """Runs forward steps; owns weights, KV cache and sampler state. Called from one thread."""

    max_tokens: int
    num_blocks: int

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""

    def read_blocks(self, blocks: Int32) -> Bytes:
        """Between steps: what these KV blocks hold, [n, kv_block_bytes]."""

    def write_blocks(self, blocks: Int32, data: Bytes) -> None:
        """Between steps: fill these KV blocks with bytes an executor of the same model and settings
        gave."""

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt: list[int],
        output: list[int],
        stop_ids: list[int],
    ) -> None:
        """(Re)set the sampler state of `slot`.

        `output`: tokens already generated (after preemption); `stop_ids`: ids banned until
        params.min_tokens outputs exist.
        """

    def release(self, slot: int) -> None:
        """Forget `slot`."""

    def step(self, arrays: StepArrays) -> StepOutputs:
        """Run one step. The arrays of the result are valid until the next step. ValueError when an
        index is out of range (nothing has run then), RuntimeError when it was cancelled (keys and
        values of the step's tokens may have been written, outputs are not valid)."""

    def cancel(self, on: bool = True) -> None:
        """From any thread: end the running step, or else the next, as soon as possible. Between
        steps, on=False takes that back."""

    def tap(self, arrays: StepArrays, op_index: int) -> tuple[list[Float32], Float32]:
        """Run ops up to `op_index`: (its inputs [T, width] before it, its output after it)."""

    def close(self) -> None:
        """Free everything."""
