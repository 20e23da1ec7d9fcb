"""StepBatch to StepArrays, its sections, and outputs back to rows."""

from __future__ import annotations

import numpy as np
import pytest

from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, RowResult, SeqChunk, StepBatch
from cpuserve.program.view import HEADER, KeptTables, check_step, key_slots, token_slots, view
from cpuserve.runtime import executor
from cpuserve.runtime.executor import StepArrays, StepOutputs
from cpuserve.runtime.pack import pack, unpack


def chunk(slot, ids, start, tables, rows):
    return SeqChunk(slot, ids, start, [BlockTable(blocks) for blocks in tables], rows)


def batch():
    return StepBatch(
        [
            chunk(5, [11], 40, [[3, 8]], [LogitRow(0, num_top=2)]),
            chunk(2, [21, 22, 23], 0, [[6]], []),
            chunk(0, [31, 32], 31, [[1, 4]], [LogitRow(0, target=32), LogitRow(1, num_top=0)]),
        ]
    )


def test_sections_are_laid_out_as_the_executors_read_them():
    arrays = pack(batch())
    assert arrays.words.dtype == np.int32
    assert arrays.words[:HEADER].tolist() == [6, 3, 3, 5, *[0] * 8]
    assert (arrays.num_tokens, arrays.num_rows) == (6, 3)
    step = view(arrays)
    assert step.token_ids.tolist() == [11, 21, 22, 23, 31, 32]
    assert step.positions.tolist() == [40, 0, 1, 2, 31, 32]
    assert step.query_start.tolist() == [0, 1, 4, 6]
    assert step.kv_len.tolist() == [41, 3, 33]
    assert step.seq_slot.tolist() == [5, 2, 0]
    assert step.table_first.tolist() == [0, 0, 0]
    assert step.table_start.tolist() == [0, 2, 3, 5]
    assert step.table_entries.tolist() == [3, 8, 6, 1, 4]
    assert step.row_token.tolist() == [0, 4, 5]
    assert step.row_slot.tolist() == [5, 0, 0]
    assert step.row_target.tolist() == [-1, 32, -1]
    assert step.row_top.tolist() == [2, -1, 0]


def test_rows_that_are_masked_name_the_mask_of_their_slot():
    masks = np.zeros((6, 2, 4), np.int32)
    chunks = [
        chunk(5, [11], 40, [[3, 8]], [LogitRow(0, mask=1)]),
        chunk(0, [31], 0, [[1]], [LogitRow(0, num_top=0)]),
    ]
    arrays = pack(StepBatch(chunks), masks)
    assert arrays.masks.base is masks
    assert arrays.words[:HEADER].tolist() == [2, 2, 2, 3, 12, *[0] * 7]
    assert view(arrays).row_mask.tolist() == [11, -1]
    assert view(arrays).row_top.tolist() == [-1, 0]
    assert len(view(pack(batch())).row_mask) == 0


def test_a_step_has_angles_only_if_a_chunk_has_them():
    assert view(pack(batch())).token_angles is None
    plain = batch()
    plain.chunks[1].angles = [[4, 4, 4], [4, 4, 5], [4, 5, 4]]
    arrays = pack(plain)
    assert arrays.words[:HEADER].tolist() == [6, 3, 3, 5, *[0] * 5, 3, 0, 0]
    assert view(arrays).token_angles.tolist() == [
        [40, 4, 4, 4, 31, 32],
        [40, 4, 4, 5, 31, 32],
        [40, 4, 5, 4, 31, 32],
    ]
    check_step(view(arrays), vocab=100, num_blocks=9, block=32, axes=3, max_position=41)
    for wrong in ({"axes": 2}, {"axes": 3, "max_position": 40}, {}):
        with pytest.raises(ValueError, match="angle"):
            check_step(view(arrays), vocab=100, num_blocks=9, block=32, **wrong)


def test_slots_follow_the_block_tables():
    step = view(pack(batch()))
    assert token_slots(step, 32).tolist() == [8 * 32 + 8, 192, 193, 194, 1 * 32 + 31, 4 * 32]
    assert key_slots(step, 2, 32).tolist() == [*range(32, 64), 128]


def test_a_step_without_rows_or_sequences_still_has_its_sections():
    step = view(pack(StepBatch([])))
    assert step.num_tokens == step.num_seqs == 0
    assert step.query_start.tolist() == [0]


def test_both_sides_agree_on_the_header():
    assert HEADER == executor.HEADER


def test_a_block_of_another_length_than_its_header_says_is_refused():
    words = pack(batch()).words
    for bad in (words[:-1], np.append(words, np.int32(0))):
        with pytest.raises(ValueError, match="does not match its header"):
            view(StepArrays(bad))
    bad = words.copy()
    bad[:2] = (-1, 10)
    with pytest.raises(ValueError, match="does not match its header"):
        view(StepArrays(bad))


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("token_ids", 2, -1, "token id"),
        ("token_ids", 2, 100, "token id"),
        ("positions", 5, 33, "positions of sequence 2"),
        ("kv_len", 0, 40, "positions of sequence 0"),
        ("table_entries", 4, 9, "block id"),
        ("table_first", 1, 1, "table 0 of sequence 1 goes on after 1 entries, but slot 2 has 0"),
        ("table_first", 1, -1, "goes on after -1 entries"),
        ("table_start", 1, 4, "not in their order"),
        ("table_start", 3, 4, "not in their order"),
        ("seq_slot", 1, 5, "two sequences of the step have the same slot"),
        ("row_token", 0, 6, "row token"),
        ("row_target", 0, 100, "row target"),
    ],
)
def test_an_index_out_of_range_is_named(field, index, value, message):
    step = view(StepArrays(pack(batch()).words.copy()))
    check_step(step, vocab=100, num_blocks=9, block=32)
    getattr(step, field)[index] = value
    with pytest.raises(ValueError, match=message):
        check_step(step, vocab=100, num_blocks=9, block=32)


def test_outputs_become_rows_with_only_what_was_asked():
    outputs = StepOutputs(
        tokens=np.array([7, 32, 9, 99], np.int32),
        logprobs=np.array([-1.5, -2.5, -3.5, 0], np.float32),
        ranks=np.array([1, 4, 2, 0], np.int32),
        top_ids=np.array([[7, 8, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0]], np.int32),
        top_logprobs=np.array([[-1.5, -1.75, 0], [0] * 3, [0] * 3, [0] * 3], np.float32),
    )
    assert unpack(outputs, pack(batch()).tops) == [
        RowResult(7, -1.5, 1, [(7, -1.5), (8, -1.75)]),
        RowResult(32),
        RowResult(9, -3.5, 2),
    ]
    quiet = pack(StepBatch([chunk(0, [1], 0, [[0]], [LogitRow(0)])])).tops
    assert unpack(outputs, quiet) == [RowResult(7)]
    assert type(unpack(outputs, quiet)[0].token) is int


def test_every_group_has_its_tables():
    chunks = [
        chunk(5, [11], 40, [[3, 8], [0, 1, 2]], [LogitRow(0)]),
        chunk(2, [21, 22, 23], 0, [[6, 7], [9]], []),
    ]
    step = view(pack(StepBatch(chunks)))
    assert step.num_groups == 2
    tables = [[step.table(seq, group).tolist() for seq in (0, 1)] for group in (0, 1)]
    assert tables == [[[3, 8], [6, 7]], [[0, 1, 2], [9]]]
    assert token_slots(step, 32).tolist() == [8 * 32 + 8, 6 * 32, 6 * 32 + 1, 6 * 32 + 2]
    assert token_slots(step, 32, 1).tolist() == [32 + 8, 9 * 32, 9 * 32 + 1, 9 * 32 + 2]
    assert key_slots(step, 1, 32, 1).tolist() == [9 * 32, 9 * 32 + 1, 9 * 32 + 2]
    check_step(step, vocab=100, num_blocks=10, block=32, groups=2)
    with pytest.raises(ValueError, match="block tables for 2 cache groups, not 1"):
        check_step(step, vocab=100, num_blocks=10, block=32)
    step.table_entries[3] = 10  # of the second group
    with pytest.raises(ValueError, match="block id"):
        check_step(step, vocab=100, num_blocks=10, block=32, groups=2)


GONE = 99


@pytest.mark.parametrize(
    ("change", "first", "entries"),
    [
        (lambda _: None, 3, []),
        (lambda table: table.extend([5, 6]), 3, [5, 6]),
        (lambda table: table.put(1, 7), 1, [7, 2]),
        (lambda table: table.cut(2), 2, []),
        (lambda table: (table.cut(1), table.append(8)), 1, [8]),
        (lambda table: table.leave(2, GONE), 0, [GONE, GONE, 2]),
        (lambda table: (table.put(2, 4), table.append(9), table.cut(3)), 2, [4]),
        (lambda table: (table.cut(0), table.extend([9, 8])), 0, [9, 8]),
    ],
)
def test_a_step_brings_what_has_changed_since_the_last_one(change, first, entries):
    one = chunk(1, [11], 3, [[0, 1, 2]], [])
    kept = KeptTables()
    kept.keep(view(pack(StepBatch([one])), kept))
    change(one.tables[0])
    step = view(pack(StepBatch([one])), kept)
    assert step.table_first.tolist() == [first]
    assert step.table_entries.tolist() == entries
    assert step.table(0).tolist() == one.tables[0]
    kept.keep(step)
    assert kept.table(1, 0).tolist() == one.tables[0]


def test_a_table_leaves_each_block_once():
    table = BlockTable([GONE, 4, GONE, 6, 7])
    assert table.leave(3, GONE) == [4]
    assert table == [GONE, GONE, GONE, 6, 7]
    table.sent = len(table)
    assert table.leave(3, GONE) == []
    assert table.sent == len(table)
    table.put(1, 5)
    table.sent = len(table)
    assert table.leave(4, GONE) == [5, 6]
    assert table == [GONE] * 4 + [7]
    assert table.sent <= 1


def test_a_slot_has_no_tables_after_its_release():
    one, kept = chunk(1, [11], 3, [[0, 1, 2]], []), KeptTables()
    kept.keep(view(pack(StepBatch([one])), kept))
    step = view(pack(StepBatch([one])), kept)
    check_step(step, vocab=100, num_blocks=9, block=32)
    kept.release(1)
    with pytest.raises(ValueError, match="goes on after 3 entries, but slot 1 has 0"):
        check_step(step, vocab=100, num_blocks=9, block=32)
