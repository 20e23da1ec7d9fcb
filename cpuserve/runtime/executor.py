"""The executor interface: StepArrays in, StepOutputs out. Executors are native or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cpuserve.quant.base import QuantTensor
from cpuserve.sampling.params import SamplingParams

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

HEADER = 8  # int32 words before the first section


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step as one flat int32 array, which the C++ executor reads without conversion.

    The words are first the header, HEADER numbers:

        T           tokens
        S           sequences
        R           logit rows
        B           new entries of all block tables
        M           bitmasks
        A           S, or 0 if no sequence has an adapter
        G - 1       cache groups less one
        D           R, or 0 if no row has a draft

    Then these sections follow one another:

        token_ids, positions    [T]
        query_start             [S + 1]
        kv_len                  [S] keys that the sequence has after this step
        seq_slot                [S] the slot of each sequence, all different
        table_first             [S, G]
        table_start             [S * G + 1]
        table_entries           [B]
        adapters                [A] -1 = none
        adapter_scales          [A] factors of their changes, the bits of floats
        row_token               [R] index into the tokens
        row_slot                [R] the slot with the row's sampler state
        row_target              [R] the id to score, -1 = sample, -2 = return the row's vector
        row_top                 [R] -1 = no logprobs
        row_draft               [D] the draft token after this row, which the next row belongs to;
                                -1 = none
        row_mask                [R], if M > 0: index of a bitmask, -1 = none

    An executor keeps the block tables of a sequence by its slot, until `release`. A step sends only
    the changes: table i = sequence * G + group keeps its first table_first[i] entries, and its
    later entries become table_entries[table_start[i] : table_start[i + 1]]. A step that the
    executor refuses with ValueError changes no table.

    Rows that verify drafts are sampled in order, each with the sampler state after the tokens
    before it, until one rejects its draft.

    masks: [M, mask_words(vocab)], None if M is 0. Bit i % 32 of word i / 32 says whether a row that
    refers to the bitmask may sample id i. The step reads this memory, which its owner fills between
    steps.

    tops: row_top as a list of Python numbers, which `unpack` uses to read the results.
    """

    words: Int32
    masks: Int32 | None = None
    tops: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return int(self.words[0])

    @property
    def num_rows(self) -> int:
        """Number of logit rows, R."""
        return int(self.words[2])


def mask_words(vocab: int) -> int:
    """Return the number of int32 words of a bitmask, which has one bit for each token id."""
    return (vocab + 31) // 32


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Results per row: token, logprob, rank [R]; top_ids, top_logprobs [R, max_top].

    token -1: no token could be sampled, or an earlier row rejected its draft. vectors [R, width]:
    the results of an embedding model, where the other arrays mean nothing; None for other models.
    """

    tokens: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32
    vectors: Float32 | None = None


class Executor(Protocol):
    """Runs forward steps; owns weights, KV cache and sampler state. Called from one thread."""

    max_tokens: int
    num_blocks: int

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block: keys and values in all layers of the largest cache group."""

    def read_blocks(self, blocks: Int32, group: int = 0) -> Bytes:
        """Return the content of KV blocks of a cache group, [n, kv_block_bytes]; between steps."""

    def write_blocks(self, blocks: Int32, data: Bytes, group: int = 0) -> None:
        """Overwrite these KV blocks, between steps, with the result of read_blocks.

        The bytes must come from an executor of the same model and settings.
        """

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the recurrent states at the end of a block; 0 without recurrent layers."""

    def read_snapshot(self, slot: int) -> Bytes:
        """Return the states of a slot at the end of its block, [snapshot_bytes]; between steps."""

    def write_snapshot(self, slot: int, data: Bytes) -> None:
        """Overwrite the states in a slot, between steps, with the result of read_snapshot.

        The bytes must come from an executor of the same model and settings.
        """

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
        """Discard the sampler state and the block tables of `slot`."""

    def mirostat_mu(self, slot: int) -> float:
        """Return the state of mirostat for `slot`, which depends on earlier logits; 0 without it.

        A request that goes on in another slot is admitted with it (params.mirostat_mu).
        """

    def step(self, arrays: StepArrays) -> StepOutputs:
        """Run one step. The arrays of the result are valid until the next step.

        Raises:
            ValueError: an index is out of range; nothing has run or changed.
            RuntimeError: the step was cancelled; keys and values of its tokens may be written, and
                slots that verify drafts have to be admitted again.
        """

    def cancel(self, on: bool = True) -> None:
        """End the running step (or the next one) as soon as possible; from any thread.

        on=False, between steps, revokes a call that came after the end of the step.
        """

    def tap(self, arrays: StepArrays, op_index: int) -> tuple[list[Float32], Float32]:
        """Run the ops before `op_index` and this op; return (its inputs [T, width], its output)."""

    def close(self) -> None:
        """Free all memory."""

    # Executors without the following abilities derive from this class and inherit the defaults.

    def load_adapter(
        self, slot: int, scale: float, get: Callable[[str], QuantTensor]
    ) -> Iterator[None]:
        """Overwrite the matrices of adapter `slot` of the Program, one in each iteration.

        get: returns the matrix for a name in the Program. Steps that do not use the adapter may run
        between iterations; the adapter is complete after the last one.
        """
        msg = "this executor has no adapters"
        raise NotImplementedError(msg)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads; 0 = unknown."""
        return 0

    def prepare(self) -> bool:
        """Prepare some memory for the next step while there is no work; False = nothing left."""
        return False

    def progress(self) -> object:
        """Return a value that differs between two calls if a step has advanced between them.

        None: the executor does not count progress. Any thread may call this, during a step.
        """
        return None

    def roofline(self) -> Iterator[dict[str, object]]:
        """Measure the limits of this machine in parts of about 50 ms, between other work.

        Yields {} after each part, and the limits at the end; {} if they cannot be measured.
        """
        yield {}

    def report(self) -> dict[str, object]:
        """Return sizes and placement, for `doctor` and tests."""
        return {}
