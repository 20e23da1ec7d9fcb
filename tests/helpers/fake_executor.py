"""A model without weights: the next token is a hash of the tokens found in the KV cache.

It keeps a token id per KV position, as a real executor keeps keys and values, and reads the history
back through the block table. So any mistake in scheduling (a wrong block, position, slot, chunk, or
sampler state after a preemption) changes the tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cpuserve.config.engine import EngineConfig
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import (
    HIDDEN,
    LogitRow,
    RowResult,
    SeqChunk,
    StepBatch,
    StepResult,
    VectorResult,
)
from cpuserve.program.pictures import KIND
from cpuserve.program.view import MORE_GROUPS, state_slot
from cpuserve.runtime.executor import HEADER, Executor, StepOutputs
from cpuserve.runtime.picture_tower import PictureTower
from cpuserve.runtime.sampler import allowed_by
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

VOCAB = 1000
NOTHING = -1
PICTURED = 1 << 22  # tokens from here on are rows of the media buffer
SlotTables = dict[int, list[list[int]]]  # by slot: for each cache group, the blocks of a sequence
REPEATS = 1 << 20  # seeds from here on: three of four tokens repeat an earlier one


def next_token(history: Sequence[int], seed: int, banned: Collection[int] = ()) -> int:
    """Return the token that the model generates after `history`; -1 if all are banned."""
    if len(banned) >= VOCAB:
        return -1
    digest = hashlib.blake2b(repr((seed, list(history))).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    token = number % VOCAB
    if seed >= REPEATS and number >> 62:
        token = history[-1 - (seed % 5) % len(history)]
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def score(history: Sequence[int], token: int) -> float:
    """The logprob of `token` after `history`."""
    return -next_token([*history, token], 7) / VOCAB


def top(history: Sequence[int], num_top: int) -> list[tuple[int, float]]:
    """`num_top` alternatives after `history`."""
    ids = [next_token(history, 100 + i) for i in range(max(num_top, 0))]
    return [(i, score(history, i)) for i in ids]


def vector_after(history: Sequence[int]) -> list[float]:
    """The vector of the last token of `history`."""
    return [float(next_token(history, 200 + i) + 1) for i in range(4)]


def reference(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    limit: int,
    eos: Sequence[int] = (),
    window: int = 0,
) -> list[int]:
    """Return the output of a request that runs alone."""
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    ids, output = list(prompt), []
    while len(output) < limit:
        banned = sorted(stop) if len(output) < params.min_tokens else ()
        token = next_token(ids[-window:], seed, banned)
        ids.append(token)
        output.append(token)
        if token in stop and len(output) > params.min_tokens:
            break
    return output


def widest(windows: Sequence[int]) -> int:
    """Return the widest of `windows`; 0 means all tokens."""
    return 0 if 0 in windows else max(windows)


def stored(token: int, group: int) -> int:
    """Return the number that a block of cache group `group` holds for `token`."""
    return token + group * 10 * VOCAB


class FakeModel:
    """Runs StepBatches; also the scheduler's SlotHost. Asserts all that an executor would check.

    windows: for each cache group, the most tokens that its layers see (0 = all). Blocks hold the
      results of `stored`, which differ between groups.
    num_states, state_chunk: as in KvManager.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_tokens: int,
        windows: Sequence[int] = (0,),
        num_states: int = 0,
        state_chunk: int = 1,
    ) -> None:
        self.states = FakeStates(num_blocks, block_size, num_states, state_chunk)
        self.block_size = block_size
        self.windows = tuple(windows)
        self.window = widest(windows)
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.kv = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.media: Sequence[float] = ()  # the media buffer: the token of each of its rows
        self.slots: dict[int, SlotRequest] = {}
        self.kept: SlotTables = {}  # the tables that steps have sent, for `unflatten`
        self.steps = 0
        self.largest_step = 0

    def admit(self, slot, request) -> None:
        assert 0 <= slot < self.num_slots
        held, tokens = self.slots.get(slot), (request.prompt_ids, request.output_ids)
        same = held is None or (held.prompt_ids, held.output_ids) == tokens
        assert same, "the slot is another request's"
        self.slots[slot] = replace(request, output_ids=list(request.output_ids))

    def mirostat_mu(self, slot) -> float:
        return float(len(self.slots[slot].output_ids))

    def release(self, slot) -> None:
        del self.slots[slot]
        self.kept.pop(slot, None)

    def run(self, batch: StepBatch, masks=None) -> StepResult:
        assert 0 < batch.num_tokens <= self.max_tokens, "token budget exceeded"
        slots = [chunk.slot for chunk in batch.chunks]
        assert len(set(slots)) == len(slots), "a slot runs twice"
        self.steps += 1
        self.masks = masks
        self.largest_step = max(self.largest_step, batch.num_tokens)
        self._check_places(batch)
        self.states.begin()
        for chunk in batch.chunks:
            self._store(chunk)
            self.states.run(chunk)
        return [result for chunk in batch.chunks for result in self._rows(chunk)]

    def _check_places(self, batch: StepBatch) -> None:
        size = self.block_size
        places = [
            (table[position // size], position % size)
            for chunk in batch.chunks
            for table in self._kv_tables(chunk)
            for position in range(chunk.start, chunk.start + len(chunk.token_ids))
        ]
        assert len(set(places)) == len(places), "two tokens of a step go to one place"

    def _store(self, chunk: SeqChunk) -> None:
        for group, table in enumerate(self._kv_tables(chunk)):
            for position, token in enumerate(self._seen(chunk), chunk.start):
                block = table[position // self.block_size]
                self.kv[block][position % self.block_size] = stored(token, group)

    def _seen(self, chunk: SeqChunk) -> list[int]:
        """The tokens of a chunk; a row of the media buffer replaces the token."""
        if chunk.media is None:
            return chunk.token_ids
        pairs = zip(chunk.token_ids, chunk.media, strict=True)
        return [token if row < 0 else int(self.media[row]) for token, row in pairs]

    def _kv_tables(self, chunk: SeqChunk) -> list[list[int]]:
        assert len(chunk.tables) == len(self.windows) + bool(self.states.slots)
        return chunk.tables[: len(self.windows)]

    def spoil(self, batch: StepBatch) -> None:
        """Write a wrong token to every slot of `batch`, as a step that was cut short may."""
        for chunk in batch.chunks:
            self.states.spoil(chunk)
            for table in self._kv_tables(chunk):
                for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                    block = table[position // self.block_size]
                    self.kv[block][position % self.block_size] = -7

    def _history(self, chunk: SeqChunk, end: int) -> list[int]:
        """Return the tokens before `end` that the model reads from its blocks.

        Asserts that the tokens in the windows of all groups agree.
        """
        seen = [
            [token - stored(0, group) for token in self._read(table, window, end)]
            for group, (table, window) in enumerate(
                zip(self._kv_tables(chunk), self.windows, strict=True)
            )
        ]
        longest = max(seen, key=len)
        self.states.check(chunk, end, longest)
        assert all(tokens == longest[len(longest) - len(tokens) :] for tokens in seen), (
            "the groups of layers see different tokens"
        )
        return longest

    def _read(self, table: Sequence[int], window: int, end: int) -> list[int]:
        size = self.block_size
        first = max(0, end - window) if window else 0
        kept = [self.kv[table[p // size]][p % size] for p in range(first, end)]
        assert NOTHING not in kept, "a position was never computed"
        return kept

    def _rows(self, chunk: SeqChunk) -> StepResult:
        """Return the results of `chunk`; results after the first wrong draft have no token."""
        results: StepResult = []
        drafts = [row.draft for row in chunk.rows if row.draft != -1]
        assert drafts == chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
        for row in chunk.rows:
            before = chunk.rows[len(results) - 1] if results else LogitRow(-1)
            if before.draft not in (-1, results[-1].token if results else -1):
                results.append(RowResult(-1))
                continue
            assert before.draft < 0 or row.index == before.index + 1
            results.append(self._row(chunk, row))
        return results

    def _row(self, chunk: SeqChunk, row: LogitRow) -> RowResult:
        history = self._history(chunk, chunk.start + row.index + 1)
        if row.target == HIDDEN:
            return VectorResult(0, vector=vector_after(history))
        slot, token = self.slots[chunk.slot], row.target
        params, output = slot.params, slot.output_ids
        if token < 0:
            seen = (slot.prompt_ids + output)[-self.window :]
            text = [token for token in history if token < PICTURED]
            if row.mask >= 0 and row is chunk.rows[0]:
                output += text[len(seen) :]  # the only tokens that a grammar allowed
                seen = (slot.prompt_ids + output)[-self.window :]
            assert seen == text, "sampler state and KV cache disagree"
            banned = set(slot.stop_ids if len(output) < params.min_tokens else ())
            if params.allowed_token_ids is not None:
                banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
            if row.mask >= 0:
                places = len(self.masks) // self.num_slots
                assert row.mask // places == chunk.slot, "a row has the mask of another slot"
                banned |= set(np.flatnonzero(~allowed_by(self.masks[row.mask], VOCAB)).tolist())
            token = next_token(history, slot.seed, banned)
            output += [token] * (token >= 0)
        if row.num_top < 0:
            return RowResult(token)
        return RowResult(token, score(history, token), 1, top(history, row.num_top))


class FakeStates:
    """The states of a recurrent layer: all tokens up to the last full state chunk, and later ones.

    A slot is read and written where the kernels read and write it, so a state that a later step
    has changed, or that belongs to other tokens, is noticed. It has no slots for other models.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int, chunk: int) -> None:
        self.gone, self.block_size, self.chunk = num_blocks - 1, block_size, chunk
        self.slots: list[tuple[list[int], list[int]]] = [
            ([NOTHING], [NOTHING] * chunk) for _ in range(num_states)
        ]
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._seen: dict[tuple[int, int], list[int]] = {}
        self._written: dict[int, int] = {}

    def run(self, chunk: SeqChunk) -> None:
        """Take in the tokens of a chunk."""
        if not self.slots:
            return
        table, last = chunk.tables[-1], chunk.start + len(chunk.token_ids) - 1
        for position, token in enumerate(chunk.token_ids, chunk.start):
            begin = position - position % self.chunk
            number = state_slot(table, position // self.block_size, self.gone)
            assert self._written.setdefault(number, chunk.slot) == chunk.slot, "a slot is shared"
            closed, before = self.slots[number], []
            if begin:
                where = state_slot(table, (begin - 1) // self.block_size, self.gone)
                writer = self._written.get(where, chunk.slot)
                assert writer == chunk.slot, "a state is read in the step that computes it"
                before = self.slots[where][0]
            closed[1][position - begin] = token
            history = [*before, *closed[1][: position - begin + 1]]
            self._seen[chunk.slot, position + 1] = history
            if len(history) == begin + self.chunk:
                draft = position > last - chunk.num_drafts
                assert not draft, "a draft fills a chunk, which cannot be undone"
                self.slots[number] = history, closed[1]

    def check(self, chunk: SeqChunk, end: int, seen: Sequence[int]) -> None:
        """Assert that the layer saw `seen`, or more, of the first `end` tokens."""
        if self.slots:
            history = self._seen[chunk.slot, end]
            assert len(history) == end, "a state is of other tokens"
            assert history[end - len(seen) :] == list(seen), "a state is of other tokens"

    def spoil(self, chunk: SeqChunk) -> None:
        """Write wrong tokens to every slot that a chunk may change."""
        if not self.slots:
            return
        for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
            number = state_slot(chunk.tables[-1], position // self.block_size, self.gone)
            self.spoil_slot(number)

    def spoil_slot(self, number: int) -> None:
        """Write wrong tokens to a slot."""
        self.slots[number] = [-7], [-7] * self.chunk


class ModelBlocks:
    """BlockBytes of a FakeModel: the tokens of a block as int32.

    A state has all tokens of its sequence up to `LONGEST`, and before them their number.
    """

    LONGEST = 64

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._groups = len(model.windows)

    @property
    def sizes(self) -> tuple[int, ...]:
        states = (4 * (1 + self.LONGEST),) * bool(self._model.states.slots)
        return (4 * self._model.block_size,) * self._groups + states

    def read(self, block, group) -> bytes:
        if group < self._groups:
            return np.array(self._model.kv[block], np.int32).tobytes()
        closed, _ = self._slots[self._slot(block)]
        padding = [0] * (self.LONGEST - len(closed))
        return np.array([len(closed), *closed, *padding], np.int32).tobytes()

    def write(self, block, group, data) -> None:
        if group < self._groups:
            self._model.kv[block] = np.frombuffer(data, np.int32).tolist()
        else:
            states, slot = self._model.states, self._slot(block)
            states.spoil_slot(slot)  # a snapshot has no open tokens
            states.slots[slot] = tokens_of_state(data), states.slots[slot][1]

    @property
    def _slots(self) -> list[tuple[list[int], list[int]]]:
        return self._model.states.slots

    def _slot(self, block: int) -> int:
        return block - self._model.states.gone - 1


def tokens_of_state(data: bytes) -> list[int]:
    """The tokens that a state of ModelBlocks was computed from."""
    count, *tokens = np.frombuffer(data, np.int32).tolist()
    return tokens[:count]


class FakeExecutor(Executor):
    """FakeModel behind the Executor protocol: reads StepArrays as the C++ executor does.

    `fault` is called with the number of each step (from 1) and the outputs it may spoil.
    """

    def __init__(self, config, fault=None, delay_s: float = 0.0) -> None:
        self.max_tokens = config.max_num_batched_tokens
        self.num_blocks = config.kv_blocks
        self.model = FakeModel(
            config.kv_blocks,
            config.block_size,
            config.max_num_seqs,
            self.max_tokens,
            [group.window for group in config.kv_groups] or [0],
        )
        self.media = np.zeros((config.media_rows, 1), np.float32)
        self.model.media = self.media[:, 0]
        self.closed = False
        self._fault = fault
        self._delay_s = delay_s
        self._steps = 0
        self._cancelled = threading.Event()

    def admit(self, slot, request) -> None:
        self.model.admit(slot, request)

    def mirostat_mu(self, slot) -> float:
        return self.model.mirostat_mu(slot)

    def release(self, slot) -> None:
        self.model.release(slot)

    @property
    def kv_block_bytes(self) -> int:
        return 4 * self.model.block_size

    snapshot_bytes = 0

    def read_blocks(self, blocks, group=0):
        return np.array([self.model.kv[b] for b in blocks], np.int32).view(np.uint8)

    def write_blocks(self, blocks, data, group=0):
        for block, tokens in zip(blocks, data.view(np.int32).tolist(), strict=True):
            self.model.kv[block] = tokens

    def write_media(self, first, rows):
        assert len(rows) <= len(self.media) - first
        self.media[first : first + len(rows)] = rows

    def cancel(self, on: bool = True) -> None:
        if on:
            self._cancelled.set()
        else:
            self._cancelled.clear()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def step(self, arrays):
        batch = unflatten(arrays.words, self.model.kept)
        self._steps += 1
        if self._cancelled.wait(self._delay_s):
            self.model.spoil(batch)
            msg = "the step was cancelled"
            raise RuntimeError(msg)
        rows = self.model.run(batch, arrays.masks)
        tokens = np.array([r.token for r in rows], np.int32)
        logprobs = np.array([r.logprob for r in rows], np.float32)
        ranks = np.array([r.rank for r in rows], np.int32)
        top_ids = np.zeros((len(rows), 20), np.int32)
        top_logprobs = np.zeros((len(rows), 20), np.float32)
        for i, row in enumerate(rows):
            for j, (token, logprob) in enumerate(row.top):
                top_ids[i, j], top_logprobs[i, j] = token, logprob
        outputs = StepOutputs(tokens, logprobs, ranks, top_ids, top_logprobs)
        if self._fault is not None:
            self._fault(self._steps, outputs)
        return outputs

    def tap(self, arrays, op_index):
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def roofline(self):
        yield {}
        yield {"bytes_per_s": 1e9}


def unflatten(words, kept: SlotTables) -> StepBatch:
    """The StepBatch that StepArrays `words` describe, after the changes that they bring to `kept`.

    kept: what earlier steps have sent.
    """
    values = words.tolist()
    num_tokens, num_seqs, num_rows, num_entries, num_masks, num_adapters = values[:6]
    groups, num_drafts, num_media, axes = values[MORE_GROUPS] + 1, *values[7:10]
    assert num_drafts in (0, num_rows)
    sections, start = [], HEADER
    num_tables = num_seqs * groups
    sizes = (num_tokens, num_tokens, num_seqs + 1, num_seqs, num_seqs, num_tables, num_tables + 1)
    sizes += (num_entries, num_adapters, num_adapters, num_media, axes * num_tokens)
    sizes += (*[num_rows] * 4, num_drafts, num_rows if num_masks else 0)
    for size in sizes:
        sections.append(values[start : start + size])
        start += size
    assert start == len(values)
    ids, positions, query, kv_len, slots, firsts, tables, entries, adapters, _, media, *of_rows = (
        sections
    )
    _, token, slot, target, num_top, draft, mask = of_rows
    draft = draft or [-1] * num_rows
    assert len(set(slots)) == num_seqs, "a slot has two sequences"
    chunks, row = [], 0
    for i in range(num_seqs):
        begin, end = query[i], query[i + 1]
        assert positions[begin:end] == list(range(kv_len[i] - (end - begin), kv_len[i]))
        own = kept.setdefault(slots[i], [[] for _ in range(groups)])
        for at, table in enumerate(own, i * groups):
            assert firsts[at] <= len(table), "the slot lacks entries of its table"
            table[firsts[at] :] = entries[tables[at] : tables[at + 1]]
        own = [BlockTable(table) for table in own]
        chunk = SeqChunk(slots[i], ids[begin:end], positions[begin], own)
        chunk.adapter = adapters[i] if adapters else -1
        chunk.media = media[begin:end] if media else None
        while row < num_rows and token[row] < end:
            which = mask[row] if mask else -1
            index = token[row] - begin
            chunk.rows.append(LogitRow(index, target[row], num_top[row], draft[row], which))
            chunk.num_drafts += draft[row] >= 0
            assert slot[row] == slots[i], "a row has the slot of another sequence"
            row += 1
        chunks.append(chunk)
    assert row == num_rows
    return StepBatch(chunks)


def fake_config(**changes) -> EngineConfig:
    """An EngineConfig for a fake engine: 64 blocks of 4 tokens."""
    values = {
        "model": "fake",
        "model_path": "",
        "architecture": "Fake",
        "dtype": "float32",
        "activation_bits": 8,
        "quantize": "none",
        "kv_dtype": "f32",
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "itl_target_ms": 0,
        "long_prefill_token_threshold": 0,
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": True,
        "prefix_cache_dir": None,
        "prefix_cache_bytes": 1 << 20,
        "swap_bytes": 0,
        "block_size": 4,
        "kv_blocks": 64,
        "executor": "torch",
        "model_impl": "cpuserve",
        "isa": "none",
        "threads": 1,
        "rank_threads": [1],
        "core_complexes": [],
        "cpus": None,
        "frontend_cpus": None,
        "passive_waits": False,
        "tensor_parallel_size": 1,
        "interleave_nodes": [],
        "platform": "cpu",
        "seed": 0,
        "default_sampling": {},
        "served_model_names": ["fake"],
        "chat_template": None,
        "tokenizer_path": "",
    }
    return EngineConfig(**{**values, **changes})


def fake_core(
    config=None, *, fault=None, delay_s=0.0, eos_ids=(), adapters=None, tower=None, towers=None
):
    """An EngineCore over a FakeExecutor; its answers end where build_engine would have them end.

    eos_ids: what the config.json of the model would name.
    """
    from cpuserve.engine.core import EngineCore
    from cpuserve.tokenizer.ends import end_ids

    config = config or fake_config()
    if config.tokenizer_path:
        eos_ids = end_ids(eos_ids, Path(config.tokenizer_path), VOCAB)
    executor = FakeExecutor(config, fault, delay_s)
    executor.towers = towers or ({} if tower is None else {KIND: PictureTower(tower)})
    return EngineCore(config, executor, vocab=VOCAB, eos_ids=eos_ids, adapters=adapters)
