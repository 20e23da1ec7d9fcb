"""The executor interface: a step goes in as StepArrays, results come back as StepOutputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cpuserve.core.media import MediaItem
from cpuserve.core.speculation.ngram import MakeIndex, in_python
from cpuserve.quant.base import QuantTensor
from cpuserve.sampling.slot import SlotRequest

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

HEADER = 12  # int32 words before the first section


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step as one flat array of int32, which the C++ executor reads without conversion.

    First comes the header, which has HEADER words:

        T           number of tokens
        S           number of sequences
        R           number of logit rows
        B           number of new entries of all block tables
        M           number of bitmasks
        A           S, or 0 if no sequence has an adapter
        G - 1       number of cache groups - 1
        D           R, or 0 if no row has a draft token
        P           T, or 0 if no token has a row of the media buffer
        X           number of axes of angles, or 0 if all angles follow from positions
        0, 0        words without a meaning yet

    The following sections come after the header:

        token_ids, positions    [T]
        query_start             [S + 1]
        kv_len                  [S] keys that a sequence has after this step
        seq_slot                [S] the request slot of each sequence, all different
        table_first             [S, G] number of old entries that each block table keeps
        table_start             [S * G + 1] index of each table's new entries in table_entries
        table_entries           [B] new entries of all block tables
        adapters                [A] the adapter of each sequence, -1 = none
        adapter_scales          [A] the scale of each sequence's adapter, the bits of a float
        media_rows              [P] the row of the media buffer that replaces the token's embedding;
                                -1 = none
        angles                  [X, T] the place of each token on each axis, which the RoPE turns by
        row_token               [R] index of the row's token in token_ids
        row_slot                [R] the request slot with the row's sampler state
        row_target              [R] the id to score, -1 = sample, -2 = return the row's vector
        row_top                 [R] number of alternatives with logprobs, -1 = no logprobs
        row_draft               [D] the draft token after this row, which the next row belongs to;
                                -1 = none
        row_mask                [R], if M > 0: index of the row's bitmask, -1 = none

    An executor keeps the block tables of each request slot until `release`. A step sends only
    changes: table i = sequence * G + group keeps its first table_first[i] entries,
    and its later entries become table_entries[table_start[i] : table_start[i + 1]].
    A step that the executor refuses with ValueError changes no table.

    Rows that verify draft tokens are sampled in order, each with the sampler state after the tokens
    before it, until one row samples another token than its draft token.

    masks: [M, mask_words(vocab)], None if M is 0.
      Bit i % 32 of word i / 32 is 1 if a row with this bitmask may sample id i.
      The step reads this memory; its owner changes it only between steps.

    tops: row_top as a list of Python integers, which `unpack` uses to read the results.
    """

    words: Int32
    masks: Int32 | None = None
    tops: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, T."""
        return int(self.words[0])

    @property
    def num_rows(self) -> int:
        """Return the number of logit rows, R."""
        return int(self.words[2])


class StepRows(NamedTuple):
    """The tokens of a sequence in a step: position and row of the first one, and their number."""

    position: int
    row: int
    tokens: int


def rows_by_slot(words: Int32) -> dict[int, StepRows]:
    """Return the rows of each sequence of a step by request slot; words: StepArrays.words."""
    tokens, seqs = words[:2].tolist()
    positions = words[HEADER + tokens : HEADER + 2 * tokens]
    starts, _, slots = np.split(
        words[HEADER + 2 * tokens : HEADER + 2 * tokens + 3 * seqs + 1], [seqs + 1, 2 * seqs + 1]
    )
    counts = np.diff(starts).tolist()
    firsts = positions[starts[:-1]].tolist()
    found = zip(slots.tolist(), firsts, starts.tolist(), counts, strict=False)
    return {slot: StepRows(first, row, count) for slot, first, row, count in found}


def mask_words(vocab: int) -> int:
    """Return the number of int32 words of a bitmask, which has one bit for each token id."""
    return (vocab + 31) // 32


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of each logit row: token, logprob, rank [R]; top_ids, top_logprobs [R, max_top].

    A token of -1 means that no token could be sampled, or that an earlier row did not sample its
    draft token. vectors [R, width]: the results of an embedding model, None for other models.
    With vectors, the other arrays have no meaning.
    parked: the numbers of the sequences without results yet, because experts are being read
      that they need. They go on when the same chunks are in a later step.
    lost: the numbers of the sequences without results, because something could not be read (`why`).
      The numbers leave out parked sequences.
    """

    tokens: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32
    vectors: Float32 | None = None
    lost: Sequence[int] = ()
    why: str = ""
    parked: Sequence[int] = ()


class ExpertCounts(NamedTuple):
    """Counts of a pool of experts since the start.

    hits, misses: matrices of experts that steps needed and that were in memory, or were not.
    bytes: bytes read from the disk. wait_s: seconds that compute threads waited for them, summed.
    errors: reads that failed. guessed: matrices that were read because of a guess
    (program/operations/mixture.py Guess). right: guessed matrices that their layer then used.
    fit: whether the pool has room for all matrices.
    """

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    errors: int = 0
    guessed: int = 0
    right: int = 0
    fit: bool = True


class MediaTower(Protocol):
    """Encodes media items of one kind in slices, between the steps of its executor."""

    @property
    def turns(self) -> bool:
        """Whether RoPE turns tokens of items by their rows and columns (`grid`)."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row; equal for all towers of an executor."""

    @property
    def together(self) -> int:
        """Return the most work of items that are encoded in one step of the tower."""

    def grid(self, item: MediaItem) -> tuple[int, int] | None:
        """Return (rows, columns) of the tokens of an item; None = RoPE turns them as a text."""

    def start(self, items: Sequence[MediaItem], payloads: Sequence[bytes]) -> None:
        """Begin to encode items; ValueError: the tower cannot encode one, or a payload is wrong."""

    def advance(self, budget_s: float) -> bool:
        """Compute for about `budget_s` seconds; return whether all items are encoded."""

    def rows(self, index: int, begin: int, end: int) -> Float32:
        """Return rows begin .. end - 1 of an item, for `write_media`.

        index: the number of the item in `start`.

        Raises ValueError if the tower has made another number of rows than the items have.
        """


class Executor(Protocol):
    """Runs forward steps; owns weights, KV cache and sampler states.

    One thread calls the methods; any thread may call `cancel` and `progress`.
    """

    max_tokens: int
    num_blocks: int
    towers: Mapping[str, MediaTower] = MappingProxyType({})  # by the kind of media

    @property
    def kv_block_bytes(self) -> int:
        """Return the bytes of a KV block: keys and values of all layers of the largest group."""

    def read_blocks(self, blocks: Int32, group: int = 0) -> Bytes:
        """Return the contents of KV blocks of a group, [n, kv_block_bytes]; call between steps."""

    def write_blocks(self, blocks: Int32, data: Bytes, group: int = 0) -> None:
        """Overwrite KV blocks with a result of read_blocks; call between steps.

        The bytes must come from an executor of the same model and settings.
        """

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of the recurrent states of a block; 0 for a model without them."""

    def read_snapshot(self, slot: int) -> Bytes:
        """Return the states of a state slot at the end of its block; call between steps.

        The array is [snapshot_bytes].
        """

    def write_snapshot(self, slot: int, data: Bytes) -> None:
        """Overwrite the states in a state slot with a result of read_snapshot; call between steps.

        The bytes must come from an executor of the same model and settings.
        """

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Set or reset the sampler state of request slot `slot`."""

    def release(self, slot: int) -> None:
        """Discard the sampler state and the block tables of request slot `slot`."""

    def mirostat_mu(self, slot: int) -> float:
        """Return mu of mirostat for `slot`, which depends on earlier logits; 0 without mirostat.

        A request that continues in another slot is admitted with this value (params.mirostat_mu).
        """

    def step(self, arrays: StepArrays) -> StepOutputs:
        """Run one step. The arrays of the result are valid until the next step.

        Raises:
            ValueError: an index is out of range; nothing has run or changed.
            RuntimeError: the step was cancelled; it may have written keys and values of its tokens,
                and request slots that verify draft tokens have to be admitted again.
        """

    def step_rows(self) -> dict[int, StepRows]:
        """Return the rows of the last step by request slot; {} if it failed, or was asked for."""
        msg = "this executor keeps no rows"
        raise NotImplementedError(msg)

    def read_hidden(self, rows: Int32) -> Float32:
        """Return the inputs of the logits, [n, width], for these rows of the last step."""
        msg = "this executor keeps no rows"
        raise NotImplementedError(msg)

    def cancel(self, on: bool = True) -> None:
        """End the running step (or the next one) as soon as possible; any thread may call this.

        on=False, called between steps, revokes a cancellation that came after its step had ended.
        """

    def tap(self, arrays: StepArrays, op_index: int) -> tuple[list[Float32], Float32]:
        """Run the ops up to `op_index`, inclusive; return (its inputs [T, width], its output)."""

    def close(self) -> None:
        """Free all memory of the executor."""

    # Executors that lack one of the following methods derive from this class to inherit a default.

    def write_media(self, first: int, rows: Float32) -> None:
        """Overwrite rows [n, width] of the media buffer from row `first` on, between steps.

        A token with such a row (`media_rows`) has it instead of the embedding of its id.
        """
        msg = "this executor has no media buffer"
        raise NotImplementedError(msg)

    def load_adapter(
        self, slot: int, scale: float, get: Callable[[str], QuantTensor]
    ) -> Iterator[None]:
        """Overwrite the matrices of adapter number `slot` of the Program, one in each iteration.

        Steps that do not use the adapter may run between iterations.
        The adapter is complete after the last iteration.

        get: a function that returns the matrix for a name in the Program.
        """
        msg = "this executor has no adapters"
        raise NotImplementedError(msg)

    def text_indexes(self, least: int, most: int) -> MakeIndex:
        """Return a function that makes indexes of n-grams of `least` to `most` tokens."""
        return in_python(least, most)

    @property
    def bytes_per_step(self) -> int:
        """Return the bytes of weights that a step reads; 0 = unknown."""
        return 0

    @property
    def experts(self) -> ExpertCounts | None:
        """Return the counts of the pool of experts; None without a pool."""
        return None

    @property
    def barrier_wait_s(self) -> float:
        """Return how long threads have waited for others so far, in seconds summed over them."""
        return 0.0

    def prepare(self) -> bool:
        """Prepare some memory for later steps while there is no work; False = all is prepared."""
        return False

    def progress(self) -> object:
        """Return a value that differs between two calls if a step has advanced between them.

        None: the executor does not count progress. Any thread may call this method during a step.
        """
        return None

    def row_times(self) -> Iterator[list[tuple[int, float]]]:
        """Measure matrix products in parts of about 20 ms, with other work between them.

        Yields [] after each part, and at the end (the number of rows, the seconds of these rows),
        ascending from one row; nothing if they cannot be measured.
        """
        yield from ()

    def roofline(self) -> Iterator[dict[str, object]]:
        """Measure the limits of this machine in parts of about 50 ms, with other work between them.

        Yields {} after each part, and the limits at the end; only {} if they cannot be measured.
        """
        yield {}

    def placement(self) -> dict[str, object]:
        """Return where threads run and memory is bound. Each start asks for it, so it is cheap."""
        return {}

    def report(self) -> dict[str, object]:
        """Return sizes and placement of memory and threads, for `doctor` and tests.

        It may read all mappings of the process, which takes tens of milliseconds.
        """
        return {}
