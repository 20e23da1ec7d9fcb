"""What the native executor refuses: wrong indices, and programs that do not fit together."""

from __future__ import annotations

import native_runs
import numpy as np
import pytest
from native_model import Chunk, Native, blocks_for, greedy, words
from native_runs import good_words, mask_of

from cpuserve import _C
from tests.helpers.levels import LEVELS

model = native_runs.model  # the fixture


def test_work_sizes_that_kernels_cannot_work_with_are_refused(model):
    def use(m):
        before = m.executor.work_sizes
        for wrong in ({"rows": 3}, {"rows": 4096}, {"strip_bytes": -1}, {"panels": 4}):
            with pytest.raises(ValueError, match="work sizes"):
                m.executor.work_sizes = wrong
            with pytest.raises(ValueError, match="work sizes"):
                _C.check_work_sizes(wrong)
        assert m.executor.work_sizes == before

    Native(model).run(use)


def test_masks_that_do_not_fit_are_refused_before_anything_runs(model):
    good = words(Chunk([1, 2, 3], 0, blocks_for(3), [(2, -1, 2)]), row_masks=[1], num_masks=2)
    masks = mask_of([1], [2])

    def use(m):
        m.executor.admit(0, greedy())
        for bad, given, message in (
            (good, None, "masks of the step"),
            (good, masks[:1], "masks of the step"),
            (good_words(), masks, "masks of the step"),
            (good[:-1], masks, "too short"),
            (np.append(good[:-1], np.int32(2)), masks, r"row_mask\[0\] = 2"),
            (np.append(good[:-1], np.int32(-2)), masks, r"row_mask\[0\] = -2"),
        ):
            with pytest.raises(ValueError, match=message):
                m.executor.step(bad, given)
        m.executor.step(good, masks)
        return int(m.executor.tokens[0])

    assert Native(model).run(use) == 2


# offsets in good_words(): header 12, ids 12-14, positions 15-17, query_start 18-19, kv_len 20,
# seq_slot 21, table_first 22, table_start 23-24, table entry 25, row_token 26, row_slot 27,
# row_target 28, row_top 29
@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (12, 101, "token_ids"),
        (13, -1, "token_ids"),
        (17, 5, "positions"),
        (15, -1, "positions"),
        (19, 2, "query_start"),
        (18, 1, "query_start"),
        (20, 2, "kv_len"),
        (20, 1201, "kv_len"),
        (20, 33, "blocks for 33 keys"),
        (21, 8, "seq_slot"),
        (21, -1, "seq_slot"),
        (22, 1, "table_first"),
        (22, -1, "table_first"),
        (23, 1, "table_start"),
        (24, 2, "table_start"),
        (25, 64, "block_tables"),
        (25, -1, "block_tables"),
        (26, 3, "row_token"),
        (27, 8, "row_slot"),
        (27, 1, "has not been admitted"),
        (28, 101, "row_target"),
        (29, 6, "row_top"),
        (0, 0, "tokens"),
        (0, 1201, "tokens"),
        (1, 0, "sequences"),
        (2, -1, "logit rows"),
        (3, -1, "blocks"),
        (3, 2, "too short"),
        (2, 0, "too long"),
        (8, 1, "media rows"),
        (8, 3, "too short"),
        (9, 1, "axes"),
        (10, 1, "header"),
        (11, -1, "header"),
    ],
)
def test_an_index_out_of_range_is_refused_before_anything_runs(model, at, value, message):
    def use(m):
        m.executor.admit(0, greedy())
        bad = good_words()
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            m.executor.step(bad)
        return m.executor.step(good_words())  # and the next step is answered

    assert Native(model).run(use) == 1


def test_words_of_another_type_or_cut_short_are_refused(model):
    def use(m):
        with pytest.raises(TypeError):
            m.executor.step(good_words().astype(np.int64))
        with pytest.raises(ValueError, match="too short"):
            m.executor.step(good_words()[:5])

    Native(model).run(use)


def test_a_released_slot_cannot_be_sampled(model):
    def use(m):
        m.executor.admit(0, greedy())
        m.executor.release(0)
        with pytest.raises(ValueError, match="not been admitted"):
            m.executor.step(good_words())
        with pytest.raises(ValueError, match="no slot 8"):
            m.executor.admit(8, greedy())
        with pytest.raises(ValueError, match="token id 101"):
            m.executor.admit(0, greedy(prompt=[101], presence_penalty=1.0))

    Native(model).run(use)


def test_a_matrix_takes_only_tensors_that_make_it_up(model):
    def use(m):
        matrix = next(i for i, names in m.matrices.items() if names == ["0.o"])
        rows = np.zeros((72, 120 * 4), np.uint8)
        refused = [
            ([(rows[:71], "f32", None)], "71 rows, not 72"),
            ([(np.zeros((72, 7), np.uint8), "f32", None)], "rows of 7 bytes"),
            ([(rows, "f32", None), (rows, "f32", None)], "consists of 1 tensors"),
            ([(np.zeros((72, 34), np.uint8), "gguf_q8_0", None)], "not whole blocks of 32"),
            ([(rows, "f32", np.full(72, 72, np.int32))], "row order has row 72"),
            ([(rows, "f64", None)], "unknown source type 'f64'"),
        ]
        for sources, message in refused:
            with pytest.raises(ValueError, match=message):
                m.executor.load_matrix(matrix, sources)

    Native(model).run(use)


def test_blocks_that_are_not_there_and_bytes_of_another_size_are_refused(model):
    def use(m):
        size = m.executor.kv_block_bytes
        for bad in ([-1], [0, 10**6]):
            ids = np.array(bad, np.int32)
            with pytest.raises(ValueError, match="there is no KV block"):
                m.executor.read_blocks(ids)
            with pytest.raises(ValueError, match="there is no KV block"):
                m.executor.write_blocks(ids, np.zeros((len(bad), size), np.uint8))
        with pytest.raises(ValueError, match="need"):
            m.executor.write_blocks(np.array([0], np.int32), np.zeros((1, size - 1), np.uint8))

    Native(model).run(use)


def test_ops_that_do_not_fit_their_values_are_refused():
    p = _C.Program(LEVELS[0], 4, 1)
    x, h, b = p.value("x", 32, "f32"), p.value("h", 48, "f32"), p.value("b", 32, "bf16")
    w, g = p.matrix("w", "dense_f32", 48, 32, [48], False), p.vector("g", 32)
    assert p.matrix("glu", "dense_f32", 48, 32, [24, 24], True) == 1
    scores, routing = p.value("scores", 2, "f32"), p.value("routing", 4, "f32")
    routed, out = p.value("routed", 32, "f32", 2), p.value("out", 48, "f32", 2)
    codes = p.value("codes", 32, "q8g32", 2)
    more = p.value("more", 32, "bf16", 2)
    p.route(scores, routing, 2, 2, "softmax", False, 1.0, -1)
    two = [p.matrix(f"e{e}", "dense_f32", 48, 32, [48], False) for e in range(2)]
    wide = p.vector("wide", 48)
    three, y = p.value("three", 96, "f32"), p.value("y", 32, "f32")

    def experts(matrices, biases=(), route=routing, then="none"):
        p.expert_linear(routed, route, out, matrices, list(biases), then, False)

    refused = [
        (lambda: p.rms_norm(x, h, g, 1e-5), "differ in width"),
        (lambda: p.rms_norm(b, x, g, 1e-5), "must be f32"),
        (lambda: p.rms_norm(x, x, 7, 1e-5), "no vector 7"),
        (lambda: p.linear(b, h, w, -1, "none", False, False, 0), "not in the format"),
        (lambda: p.linear(x, b, w, -1, "none", False, False, 0), "do not fit"),
        (lambda: p.linear(x, h, w, g, "none", False, False, 0), "32 elements, not 48"),
        (lambda: p.linear(x, h, w, -1, "selu", False, False, 0), "unknown activation 'selu'"),
        (lambda: p.linear(x, h, w, -1, "silu", True, False, 0), "packed as glu"),
        (lambda: p.linear(x, h, 1, -1, "silu", True, False, 25), "do not fit"),
        (lambda: p.matrix("m", "dense_f32", 48, 32, [24, 23], True), "47 rows, not 48"),
        (lambda: p.matrix("m", "dense_f8", 48, 32, [48], False), "unknown weight kind"),
        (lambda: p.value("v", 0, "f32"), "width 0"),
        (lambda: p.attention(x, h, 0, 2, 1.0, 0, 0.0, -1, -1), "no KV layer"),
        (lambda: p.add(h, x), "does not hold 48 columns from column 0 on"),
        (lambda: p.add(x, h, 17), "does not hold 32 columns from column 17 on"),
        (lambda: p.add(x, h, -1), "does not hold 32 columns from column -1 on"),
        (lambda: p.combine(codes, routing, x), "must be f32 or bf16"),
        (lambda: p.combine(more, routing, h), "differ in width"),
        (lambda: p.gate(x, h, 0, 7, False), "no multiple of the 7 columns of a gate"),
        (lambda: p.gate(x, h, 30, 16, False), "does not hold 3 gates from column 30 on"),
        (lambda: p.scale(h, g), "32 elements, not 48"),
        (lambda: p.scale_queries(x, g, 33), "does not hold 33 columns from column 0 on"),
        (lambda: p.scale_queries(x, g, 0), "at least 1 column, not 0"),
        (lambda: p.scale_queries(x, -1, 8), "the factors are missing"),
        (lambda: p.resize_heads(x, h, 0, 2, 16, 8), "do not hold 2 heads of 16 and 8 columns"),
        (lambda: p.resize_heads(x, h, 0, 0, 16, 24), "0 heads of 16 columns after 0"),
        (lambda: p.weigh_rows(x, routing), "rows for each token, not"),
        (lambda: p.add_identities(h, routing, x), "differ in width"),
        (lambda: p.limit(x, 1.0, -1.0), "must be positive"),
        (lambda: p.scale(x, g, wide), "48 elements, not 32"),
        (lambda: p.scale(x, wide), "48 elements, not 32"),
        (lambda: p.clip(x, g, y), "32 elements, not 2"),
        (lambda: p.clip(x, -1, y), "the bounds are missing"),
        (lambda: p.clip(b, g, -1), "must be f32"),
        (lambda: p.clip(x, g, x), "must not be an input"),
        (lambda: p.clip(x, g, h), "differ in width"),
        (lambda: p.clip(x, g, routed), "several rows for each token"),
        (lambda: p.position_embed(x, g, 1, 0, 4), "there is no axis 4"),
        (lambda: p.position_embed(x, g, 1, 0, -2), "there is no axis -2"),
        (lambda: p.grid_conv(x, g, y, 3, 2), "32 elements, not 288"),
        (lambda: p.grid_conv(x, -1, y, 1, 2), "the weight is missing"),
        (lambda: p.grid_conv(x, g, x, 1, 2), "two values of one width"),
        (lambda: p.grid_conv(x, g, h, 1, 2), "two values of one width"),
        (lambda: p.grid_conv(x, g, y, 2, 2), "a size of 2 places"),
        (lambda: p.grid_conv(x, g, y, 1, 0), "in blocks of 0"),
        (lambda: p.wkv6(x, x, x, x, y, 0, 1, 8, 8, g, -1, -1, 1e-5, 1.0), "0 heads of 8 and 8"),
        (lambda: p.wkv6(x, x, x, x, y, 4, 3, 8, 8, g, -1, -1, 1e-5, 1.0), "share 3 heads"),
        (lambda: p.wkv6(x, h, x, x, y, 4, 4, 8, 8, g, -1, -1, 1e-5, 1.0), "width 48, not 32"),
        (lambda: p.wkv6(x, x, x, x, y, 4, 2, 8, 8, g, -1, -1, 1e-5, 1.0), "width 32, not 16"),
        (lambda: p.wkv6(x, x, x, x, x, 4, 4, 8, 8, g, -1, -1, 1e-5, 1.0), "or is out"),
        (lambda: p.wkv6(x, x, x, x, h, 4, 4, 8, 8, g, -1, -1, 1e-5, 1.0), "out has width 48"),
        (lambda: p.wkv6(x, x, x, x, y, 4, 4, 8, 8, g, g, -1, 1e-5, 1.0), "a weight and a bias"),
        (lambda: p.wkv6(x, x, x, x, y, 4, 4, 8, 8, wide, -1, -1, 1e-5, 1.0), "48 elements, not"),
        (lambda: p.xielu(x, g), "32 elements, not 3"),
        (lambda: p.xielu(x, -1), "the factors are missing"),
        (lambda: p.soft_gate(h, x), "32 columns are not equal parts for 48 gates"),
        (lambda: p.rotate(x, 3, 16, 8, g, g), "does not hold 48 columns from column 0 on"),
        (lambda: p.rotate(x, 2, 16, 18, g, g), "cannot rotate 18 of 16 dimensions"),
        (lambda: p.rotate(x, 2, 16, 8, g, -1), "sin is missing"),
        (lambda: p.columns(x, -1, h, 0), "does not hold 48 columns"),
        (lambda: p.columns(h, -1, x, 17), "does not hold 32 columns from column 17 on"),
        (lambda: p.columns(h, scores, x, 19), "does not hold 30 columns from column 19 on"),
        (lambda: p.columns(x, -1, x, 0), "must not be an input"),
        (lambda: p.columns(h, x, x, 0), "no columns for those of x"),
        (lambda: p.columns(x, h, scores, 0), "no columns for those of x"),
        (lambda: p.mix_parts(x, scores, -1, g, 3, 0, 1.0), "cannot form 3 equal parts"),
        (lambda: p.mix_parts(h, scores, -1, g, 16, 0, 1.0), "equal parts, of at most 8"),
        (lambda: p.mix_parts(x, scores, -1, g, 4, 4, 1.0), "there is no part 4"),
        (lambda: p.mix_parts(x, scores, -1, wide, 4, 0, 1.0), "48 elements, not 32"),
        (lambda: p.mix_parts(x, scores, -1, -1, 4, 0, 1.0), "the weight is missing"),
        (lambda: p.mix_parts(h, scores, x, wide, 2, 0, 1.0), "the target has width 32"),
        (lambda: p.mix_parts(x, x, -1, g, 1, 0, 1.0), "must not be another input"),
        (lambda: p.match_rms(h, x, 1e-5), "48 columns are not parts of 32"),
        (lambda: p.match_rms(x, x, 1e-5), "columns are not parts"),
        (lambda: p.match_rms(h, scores, 0.0), "floor must be positive"),
        (lambda: p.limit(x, 0.0), "the limit must be positive"),
        (lambda: p.limit(p.value("odd", 33, "f32"), 1.0), "33 columns do not have equal halves"),
        (lambda: p.rms_norm(x, x, g, 1e-5, 3), "32 columns cannot form 3 equal groups"),
        (lambda: p.part_layer_norm(x, -1, -1, 0, 1, 1e-5), "the weight is missing"),
        (lambda: p.part_layer_norm(x, g, -1, 0, 3, 1e-5), "32 columns cannot form 3 equal parts"),
        (lambda: p.part_layer_norm(x, g, -1, 0, 0, 1e-5), "32 columns cannot form 0 equal parts"),
        (lambda: p.part_layer_norm(x, g, wide, 0, 2, 1e-5), "48 elements, not 32"),
        (lambda: p.part_layer_norm(x, g, -1, 1, 2, 1e-5), "32 columns from column 1 on"),
        (lambda: p.merge_streams(h, -1, x, 1.0), "48 columns are not at most 8 streams of 32"),
        (lambda: p.merge_streams(x, -1, x, 1.0), "out must not be an input"),
        (lambda: p.spread_streams(x, scores, x, False), "x must not be another input"),
        (lambda: p.spread_streams(x, scores, three, False), "scores has fewer than 3 weights"),
        (lambda: p.spread_streams(x, scores, three, True), "scores has fewer than 15 weights"),
        (lambda: p.stream_weights(x, x, g, g, 9, 1, 0.0, 0.0), "9 streams are not between"),
        (lambda: p.stream_weights(x, scores, g, g, 3, 1, 0.0, 0.0), "not consist of 3 streams"),
        (lambda: p.stream_weights(x, scores, g, g, 2, 1, 0.0, 0.0), "has width 2, not 8"),
        (lambda: p.stream_weights(x, scores, g, g, 1, 1, 0.0, 0.0, 4), "4 parts, not 1 to 3"),
        (lambda: p.stream_weights(x, scores, g, g, 1, 1, 0.0, 0.0, 1), "has width 2, not 1"),
        (lambda: p.spread_streams(x, scores, three, False, True), "has fewer than 6 weights"),
        (lambda: p.gate_streams(x, x, x, three), "the width of out, 96"),
        (lambda: p.gate_streams(three, three, x, three), "out must not be an input"),
        (lambda: p.short_conv(x, x, 0, 1, 4, g, -1, False, 6), "out must not be x"),
        (lambda: p.short_conv(x, y, 0, 1, 4, g, -1, False, 6), "reach back more than 16 tokens"),
        (lambda: p.ngram_embed(x, [w], [5], [1, 3, 5], 0), "cannot form 2 equal groups"),
        (lambda: p.ngram_embed(x, [], [5], [1, 3], 0), "there are no matrices"),
        (lambda: p.ngram_embed(h, [w], [5], [1, 3], 0), "out has width 48, not 32"),
        (lambda: p.ngram_embed(x, [w], [49], [1, 3], 0), "a head cannot have 49 rows"),
        (lambda: p.ngram_embed(x, [w], [5], [1, 3], -1), "-1 is no token id"),
        (lambda: p.keep_top(x, 33, 1.0), "does not hold 33 columns"),
        (lambda: p.keep_top(x, 0, 1.0), "at least 1 column, not 0"),
        (lambda: p.embed(h, w, 1.0), "differ in width"),
        (lambda: p.embed(routed, w, 1.0), "several rows for each token"),
        (lambda: p.position_embed(routed, g, 1, 0), "several rows for each token"),
        (lambda: experts([w, w]), "does not follow"),
        (lambda: experts([w]), "1 matrices for 2"),
        (lambda: experts([w, w], route=x), "not the routing"),
        (lambda: experts(two, [g]), "1 biases for 2"),
        (lambda: experts(two, [g, g]), "bias 0 has 32 elements, not 48"),
        (lambda: experts(two, [wide, wide]), "bias 1 does not follow"),
        (lambda: experts(two, then="clamped_swiglu"), "needs a gate and an up"),
        (lambda: p.linear(x, h, w, -1, "clamped_swiglu", False, False, 0), "needs a gate"),
        (lambda: p.activation(x, x, "clamped_swiglu", False), "needs a gate and an up"),
        (lambda: p.adapter(x, 2, g), "an id and a weight"),
        (lambda: p.adapter(scores, 0, g), "0 adapters are not between"),
        (lambda: p.adapter(scores, 2, g), "32 elements, not 2"),
        (lambda: p.adapter(scores, 2, -1), "scales are missing"),
        (lambda: p.convert(x, b, order=wide), "48 elements, not 32"),
        (lambda: p.convert(x, b, routing=routing), "need an order"),
        (lambda: p.convert(x, b, order=g, routing=routing), "1 rows for each token, not 2"),
        (lambda: p.convert(routed, more, order=g, routing=routing), "32 elements, not 64"),
        (lambda: p.hidden(b), "must be f32"),
        (lambda: p.hidden(routed), "several rows for each token"),
    ]
    for add, message in refused:
        with pytest.raises(ValueError, match=message):
            add()


def test_a_level_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match=f"unknown; available levels: {LEVELS[0]}"):
        _C.Program("sse9", 4, 1)
