"""Batch invariance at the executor: a row's logits depend on its own tokens only, bit for bit.

Whatever the rows in the step, the threads, the chunks and the neighbours, at every ISA level this
CPU has and for every weight kind, with activations in one term and in two.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cpuserve import _C
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.runtime.pack import pack
from tests.helpers.depth import deep_but
from tests.helpers.levels import LEVELS, each_level_and_threads, each_level_of_vectors
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.matrix

KINDS = [
    ("dense_bf16", 8),
    ("dense_f16", 8),
    ("dense_f32", 8),
    ("w8_g32", 8),
    ("w4_g32", 8),
    ("w4m_g32", 8),
    ("w4m_g128", 8),
    ("w8_channel", 8),
    ("w8_channel_g128", 8),
    ("w8_g32", 16),
    ("w4_g32", 16),
    ("w4m_g32", 16),
]
KV = {"dense_f32": "f32", "dense_f16": "f16"}
ROWS = [1, 2, 5, 6, 7, 13, 64, 512]
HYBRIDS = ("qwen3-next", "granite4-hybrid", "lfm2")
# tokens read 64 keys, or pools of these
INDEXED = ("deepseek-v3.2", "glm5-next", "qwen4-exp", "hy-v4", "deepseek-v4")
STREAMS = ("glm5-next", "qwen4-exp")  # hybrids with several residual streams
LIGHTNING = ("minimax",)
TOKENS = [(i * 37 + i * i * 5) % 250 for i in range(290)]  # the last one is in the second chunk
BLOCKS = 64  # of the KV cache
OTHERS = [(i * 11 + 7) % 250 for i in range(512)]


def run(isa, kind, bits, threads, use, kv=None, ranks=(), family="llama", **changes):
    """`use(step)` with a fresh executor; step(chunks) gives the logits of all wanted rows.

    changes: entries of the model's config.
    """
    from cpuserve.program.lower import Lowering
    from cpuserve.runtime.native import fill_vectors, pack_matrices

    config = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    config |= {"o_groups": 3, **changes} if family == "deepseek-v4" else changes
    checkpoint = open_checkpoint(tiny_model(family, head_dim=32, **config))
    program = build_program(spec_from_config(checkpoint.config))
    kv_type = kv or KV.get(kind, "bf16")
    out = []

    def main():
        lowered = Lowering(
            program,
            lambda _: kind,
            isa=isa,
            max_tokens=520,
            max_seqs=8,
            max_position=1024,
            kv_type=kv_type,
            activation_bits=bits,
        ).run()
        executor = _C.Executor(team, lowered.native, BLOCKS, kv_type, 8, num_states=BLOCKS)
        pack_matrices(executor, lowered, checkpoint.weights, None)
        fill_vectors(executor, lowered, checkpoint.weights)

        def step(*chunks):
            for slot, c in enumerate(chunks):
                c.slot = slot
                if program.states:  # each block has a state slot
                    c.tables.append(BlockTable(BLOCKS + block for block in c.tables[0]))
            return executor.step_logits(pack(StepBatch(list(chunks))).words)

        out.append(use(step))

    team = _C.Team(threads, ranks=ranks)
    team.run(main)
    return out[0]


def chunk(tokens, start, first_block, *, rows=()):
    """Tokens from `start` of a sequence in blocks from `first_block`; every row is scored."""
    table = BlockTable(range(first_block, first_block + -(-(start + len(tokens)) // 32)))
    return SeqChunk(0, list(tokens), start, [table], [LogitRow(r, target=1) for r in rows])


def last_row_among(step, rows):
    """The last token's logits in a step of `rows` rows, its neighbours another sequence's."""
    target = chunk(TOKENS[-1:], len(TOKENS) - 1, 0, rows=[0])
    if rows == 1:
        return step(target)[0]
    neighbours = chunk(OTHERS[: rows - 1], 0, 16, rows=[rows - 2])
    return step(neighbours, target)[-1]


@each_level_and_threads(1, 2, 3, 5)
@pytest.mark.parametrize(("kind", "bits"), KINDS, ids=lambda x: str(x))
def test_a_row_has_the_same_bits_however_it_is_computed(isa, kind, bits, threads):
    """Compare decoding with any number of rows, the whole prompt, and uneven chunks."""
    check_every_way(isa, kind, bits, threads)


@each_level_and_threads(1, 3)
@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int8_v4"])
def test_a_row_has_the_same_bits_over_a_kv_cache_of_codes(isa, kv, threads):
    check_every_way(isa, "dense_bf16", 8, threads, kv)


@each_level_and_threads(1, 2, 3, 5)
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("dense_bf16", 8), ("w8_g32", 16), ("w4m_g128", 8), ("w8_channel", 8)],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("family", ["qwen3-moe", "mellum"])
def test_a_row_of_a_mixture_has_the_same_bits_however_it_is_computed(
    isa, family, kind, bits, threads
):
    """Its experts multiply rows of whichever other tokens have chosen them."""
    check_every_way(isa, kind, bits, threads, family=family)


@each_level_and_threads(1, 2, 3, 5)
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("dense_bf16", 8), ("dense_f32", 8), ("w8_g32", 16), ("w4m_g128", 8)],
    ids=lambda x: str(x),
)
def test_a_row_of_latent_attention_has_the_same_bits_however_it_is_computed(
    isa, kind, bits, threads
):
    """Its heads share one row of each token, which is key and value."""
    check_every_way(isa, kind, bits, threads, family="deepseek-v2")


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int8_v4"])
@each_level_of_vectors
def test_a_row_has_the_same_bits_over_latent_rows_of_eight_bits(isa, kv):
    check_every_way(isa, "dense_bf16", 8, 3, kv, family="deepseek-v2")


@each_level_and_threads(1, 2, 3)
@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("family", INDEXED)
def test_a_row_of_selected_keys_has_the_same_bits_however_it_is_computed(isa, family, kv, threads):
    check_every_way(isa, "dense_bf16", 8, threads, kv, family=family)


@each_level_and_threads(1, 2, 3, 5)
@pytest.mark.parametrize("family", deep_but(HYBRIDS, (*HYBRIDS, *STREAMS, *LIGHTNING)))
def test_a_row_of_a_hybrid_has_the_same_bits_however_it_is_computed(isa, family, threads):
    """Its states are read, and closed, wherever a step happens to begin."""
    check_every_way(isa, "dense_bf16", 8, threads, family=family)


@pytest.mark.parametrize("threads", [2, 3, 5], ids=lambda t: f"{t}-threads")
@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("deepseek-v3.2", {"num_attention_heads": 40, "index_topk": 264}),
        ("glm5-next", {"num_attention_heads": 20, "index_topk": 264}),
        ("qwen4-exp", {"num_attention_heads": 6, "num_key_value_heads": 2, "indexer_budget": 264}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_row_has_the_same_bits_if_its_two_chunks_of_selected_keys_are_tasks(
    family, sizes, kv, threads
):
    """A token reads two chunks of keys. With fewer tokens than threads, each chunk is a task."""
    check_every_way(LEVELS[-1], "dense_bf16", 8, threads, kv, family=family, **sizes)


@functools.lru_cache(maxsize=8)
def on_one_thread(isa, kind, bits, kv, family, **changes):
    """The last token's logits in a step of its own, with one thread; do not change them."""

    def one_way(step):
        step(chunk(TOKENS[:-1], 0, 0, rows=[0]))
        return last_row_among(step, 1)

    return run(isa, kind, bits, 1, one_way, kv, family=family, **changes)


def check_every_way(isa, kind, bits, threads, kv=None, family="llama", **changes):
    def every_way(step):
        found = {"whole prompt": step(chunk(TOKENS, 0, 0, rows=[len(TOKENS) - 1]))[0]}
        for sizes in ([64, 7, 1, 200, 18], [255, 2, 33]):
            start = 0
            for size in sizes:
                part = TOKENS[start : start + size]
                logits = step(chunk(part, start, 40, rows=[size - 1]))[0]
                start += size
            found[f"chunks {sizes}"] = logits
        for rows in ROWS:
            found[f"{rows} rows"] = last_row_among(step, rows)
        return found

    want = on_one_thread(isa, kind, bits, kv, family, **changes)
    assert np.isfinite(want).all()
    assert want.std() > 0
    for how, got in run(isa, kind, bits, threads, every_way, kv, family=family, **changes).items():
        assert np.array_equal(got, want), how


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6], ids=lambda r: f"{r}-ranks")
@pytest.mark.parametrize(("kind", "bits"), KINDS, ids=lambda x: str(x))
def test_ranks_change_no_bit_of_any_weight_kind(kind, bits, ranks):
    check_ranks(kind, bits, ranks, "llama")


@pytest.mark.parametrize("ranks", [2, 3], ids=lambda r: f"{r}-ranks")
@pytest.mark.parametrize(("kind", "bits"), [("dense_bf16", 8), ("w4_g32", 16)])
def test_ranks_change_no_bit_of_a_mixture(kind, bits, ranks):
    check_ranks(kind, bits, ranks, "qwen3-moe")


@pytest.mark.parametrize("ranks", [2, 3, 6], ids=lambda r: f"{r}-ranks")
@pytest.mark.parametrize(("kind", "bits"), [("dense_bf16", 8), ("dense_f32", 8), ("w4_g32", 16)])
def test_ranks_change_no_bit_of_latent_attention(kind, bits, ranks):
    check_ranks(kind, bits, ranks, "deepseek-v2")


@pytest.mark.parametrize("family", INDEXED)
def test_ranks_change_no_bit_of_attention_to_selected_keys(family):
    check_ranks("dense_bf16", 8, 2, family)


@pytest.mark.parametrize("ranks", [2, 3], ids=lambda r: f"{r}-ranks")
@pytest.mark.parametrize("family", deep_but(HYBRIDS, (*HYBRIDS, *STREAMS)))
def test_ranks_change_no_bit_of_a_hybrid(family, ranks):
    check_ranks("dense_bf16", 8, ranks, family)


def check_ranks(kind, bits, ranks, family):
    def both(step):
        whole = step(chunk(TOKENS[:-1], 0, 0, rows=[3, 64, len(TOKENS) - 2]))
        return np.concatenate([whole, last_row_among(step, 1)[None], last_row_among(step, 7)[None]])

    isa = LEVELS[-1]
    want = run(isa, kind, bits, 1, both, family=family)
    assert np.isfinite(want).all()
    got = run(isa, kind, bits, ranks, both, ranks=[1] * ranks, family=family)
    assert np.array_equal(got, want)
