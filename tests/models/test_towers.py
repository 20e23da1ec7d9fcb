"""Towers encode pictures as transformers does, in both executors, however the work is divided."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.vision_utils import get_vision_window_index

import cpuserve.runtime.native
from cpuserve import _C
from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, build_tower, spec_from_config
from cpuserve.models.towers import tower_spec
from cpuserve.program.lower import Lowering
from cpuserve.program.operations.norms import LayerNorm
from cpuserve.quant import quantize_online
from cpuserve.runtime.native import NativeExecutor
from cpuserve.runtime.torch_executor import TorchTower
from cpuserve.runtime.tower import tower_config, window_order
from tests.helpers.dots_ocr import DOTS_OCR
from tests.helpers.fake_executor import fake_config
from tests.helpers.pictures import (
    AYA,
    DEEPSEEK_VL,
    GEMMA3,
    GEMMA4,
    GRANITE,
    GRANITE_FINE,
    GRID_MODELS,
    INTERNVL,
    JANUS,
    LFM2,
    LLAVA,
    MISTRAL3,
    PATCH,
    QIANFAN,
    UNIFIED,
    grid_inputs,
    patches_of,
    random_grid,
    random_tiles,
    tile_rows,
    write_grid_model,
    write_pixtral_12b,
    write_tower_model,
)

# Each with (patches of a side, patches of a merged side, places of a side of the learned table).
SHAPES = {
    "smolvlm": (4, 2, 4),
    "threes": (6, 3, 6),
    "larger table": (4, 2, 7),
    "whole": (4, 4, 4),
    "gemma 3": (8, 4, 8),
    "granite": (8, 2, 8),
    "granite fine": (8, 2, 8),
    "internvl": (8, 2, 8),
    "llava": (6, 1, 6),
    "aya vision": (6, 3, 6),
    "deepseek vl": (6, 1, 6),
    "janus": (6, 1, 6),
    "qianfan": (8, 2, 8),
}
SMOLVLM = "SmolVLMForConditionalGeneration"
OTHERS = {
    "gemma 3": GEMMA3,
    "granite": GRANITE,
    "granite fine": GRANITE_FINE,
    "internvl": INTERNVL,
    "llava": LLAVA,
    "aya vision": AYA,
    "deepseek vl": DEEPSEEK_VL,
    "janus": JANUS,
    "qianfan": QIANFAN,
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request, tmp_path_factory):
    architecture = OTHERS.get(request.param, SMOLVLM)
    return written(tmp_path_factory.mktemp("tower"), *SHAPES[request.param], architecture)


def written(path, side, merge, table, architecture=SMOLVLM):
    theirs = write_tower_model(architecture, path, side=side, merge=merge, table=table)
    return path, theirs, side, merge


def opened(path):
    checkpoint = open_checkpoint(Path(path))
    return spec_from_config(checkpoint.config), checkpoint.weights


def settings(dtype="float32", **changes):
    given = {"isa": _C.isa_levels()[-1], "block_size": 32, **changes}
    return fake_config(dtype=dtype, **given)


def with_team(threads, ranks, use):
    team, found = _C.Team(threads, None, False, ranks), []
    team.run(lambda: found.append(use(team)))
    return found[0]


def tower_of(config, spec, weights, team):
    return NativeExecutor(config, build_program(spec), weights, team, tower=spec.tower).tower


def native(
    path,
    tiles,
    merge,
    dtype="float32",
    threads=1,
    ranks=(),
    scheme="none",
    budget=None,
    text="none",
    **more,
):
    """The rows of tiles; `budget`: seconds of each slice, None = all at once.

    scheme, text: how the matrices of the tower, and of the text part, are quantized.
    """
    spec, weights = opened(path)
    patches, side = patches_of(tiles, merge), spec.tower.side

    def use(team):
        schemes = {"quantize": text, "tower_quantize": scheme}
        config = settings(dtype, threads=threads, **schemes, **more)
        made = quantize_online(weights, build_program(spec), text, spec.tower.names, scheme)
        tower = tower_of(config, spec, made, team)
        tower.start(patches, [(side, side)] * len(tiles))
        slices = 1
        while not tower.advance(1e9 if budget is None else budget):
            slices += 1
        assert budget is None or slices >= len(build_tower(spec.tower).ops)
        return tower.rows()

    return with_team(threads, list(ranks), use)


def test_rows_are_those_of_transformers(model):
    path, theirs, side, merge = model
    tiles = random_tiles(3, side)
    want = tile_rows(theirs, tiles).numpy()
    spec, weights = opened(path)
    oracle = TorchTower(settings(), spec.tower, weights)
    got = oracle.encode(patches_of(tiles, merge), [(side, side)] * 3)
    width = 64 * (3 if spec.tower.levels else 1)
    assert got.shape == want.shape == (3 * (side // merge) ** 2, width)
    bound = 1e-3 * np.ptp(want)
    assert np.abs(got - want).max() < bound / 100
    assert np.abs(native(path, tiles, merge) - want).max() < bound / 100
    assert np.abs(np.roll(want, 1, axis=0) - want).max() > 10 * bound


GRIDS = ((4, 6), (2, 2), (10, 4))
# Threads, ranks, and seconds of a slice (None = all at once).
DIVISIONS = tuple(
    (threads, ranks, budget)
    for threads, ranks in ((1, ()), (2, ()), (3, ()), (5, ()), (2, (1, 1)), (5, (2, 3)))
    for budget in (None, 0)
)


def encoded_grids(path, kind, grids, dtype="float32", threads=1, ranks=(), budget=None, merge=2):
    """The rows of pictures of any size."""
    spec, weights = opened(path)
    patches = np.concatenate([patches_of(grid, merge) for grid in grids])
    tiles = [(grid.shape[1] // PATCH, grid.shape[2] // PATCH) for grid in grids]
    if kind == "torch":
        return TorchTower(settings(), spec.tower, weights).encode(patches, tiles)

    def use(team):
        config = settings(dtype, threads=threads, state_slots=2)
        tower = tower_of(config, spec, weights, team)
        tower.start(patches, tiles)
        while not tower.advance(1e9 if budget is None else budget):
            pass
        return tower.rows()

    return with_team(threads, list(ranks), use)


@pytest.mark.parametrize("architecture", GRID_MODELS)
def test_rows_of_pictures_of_any_size_are_those_of_transformers(architecture, tmp_path):
    theirs, merge = write_grid_model(architecture, tmp_path), 1 if architecture == UNIFIED else 2
    grids = [random_grid(*size, seed=i) for i, size in enumerate(GRIDS)]
    with torch.inference_mode():
        found = theirs.model.get_image_features(**grid_inputs(grids, architecture))
        levels = getattr(found, "deepstack_features", None) or []
        parts = [torch.cat(list(each)) for each in (found.pooler_output, *levels)]
    want = torch.cat(parts, dim=1).numpy()
    assert want.shape == (
        (6 + 1 + 10) * (4 if merge == 1 else 1),
        64 * (3 if architecture.startswith(("Qwen3VL", "Qwen3Omni")) else 1),
    )
    bound = 1e-3 * np.ptp(want)
    for kind in ("torch", "native"):
        assert np.abs(encoded_grids(tmp_path, kind, grids, merge=merge) - want).max() < bound / 20
    assert np.abs(np.roll(want, 1, axis=0) - want).max() > 10 * bound
    for dtype in ("float32", "bfloat16"):
        bits = encoded_grids(tmp_path, "native", grids, dtype, merge=merge)
        error = np.sqrt(np.mean((bits - want) ** 2) / np.var(want))
        assert error < 0.03
        for each in DIVISIONS:
            more = encoded_grids(tmp_path, "native", grids, dtype, *each, merge=merge)
            assert np.array_equal(more, bits)
        alone = [encoded_grids(tmp_path, "native", [grid], dtype, merge=merge) for grid in grids]
        assert np.array_equal(np.concatenate(alone), bits)


def slices_of(tower, rows, columns):
    """How many slices a picture of zeros takes that have no time, so that each has one part."""
    tower.start(np.zeros((rows * columns, tower.spec.patch_width), np.uint8), [(rows, columns)])
    slices, done, claimed = 0, False, 0
    while not done:
        done = tower.advance(0)
        before, claimed = claimed, tower.native.progress[1]
        assert claimed <= before + 1, "the thread claims one task of a linear or of attention"
        slices += 1
    return slices


def test_rows_of_pixtral_12b_are_those_of_transformers(tmp_path):
    theirs = write_pixtral_12b(tmp_path)
    grids = [random_grid(*size, seed=i) for i, size in enumerate(((3, 5), (1, 1), (8, 2)))]
    sizes = torch.tensor([grid.shape[1:3] for grid in grids])
    given = grid_inputs(grids, MISTRAL3)
    with torch.inference_mode():
        found = theirs.model.get_image_features(
            given["pixel_values"],
            image_sizes=sizes,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            output_hidden_states=True,
        )
    want = torch.cat(list(found.pooler_output)).numpy()
    assert want.shape == (15 + 1 + 16, 64)
    bound = 1e-3 * np.ptp(want)
    for kind in ("torch", "native"):
        got = encoded_grids(tmp_path, kind, grids, merge=1)
        assert np.abs(got - want).max() < bound / 20
    for dtype in ("float32", "bfloat16"):
        bits = encoded_grids(tmp_path, "native", grids, dtype, merge=1)
        for threads, ranks, budget in DIVISIONS:
            more = encoded_grids(tmp_path, "native", grids, dtype, threads, ranks, budget, merge=1)
            assert np.array_equal(more, bits)


def test_a_pixtral_with_other_features_reads_texts_only(tmp_path):
    write_pixtral_12b(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    pictures = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert tower_spec({**config, "image_processor": pictures}, 64) is not None
    for more in ({"vision_feature_layer": -2}, {"vision_feature_select_strategy": "default"}):
        assert tower_spec({**config, "image_processor": pictures, **more}, 64) is None


def test_a_slice_is_a_part_of_an_operation_however_large_the_picture_is(tmp_path):
    write_grid_model("Qwen3VLForConditionalGeneration", tmp_path)
    spec, weights = opened(tmp_path)

    def use(team):
        tower = tower_of(settings("bfloat16", state_slots=2), spec, weights, team)
        return slices_of(tower, 24, 24), slices_of(tower, 64, 64)

    few, many = with_team(1, [], use)
    ops = build_tower(spec.tower).ops
    norms = sum(isinstance(op, LayerNorm) for op in ops)
    assert norms > 2
    assert few >= len(ops)
    assert many >= few + 6 * norms  # 512 patches at a time, so 8 parts instead of 2


def test_the_tower_of_idefics3_is_the_same(tmp_path):
    path, theirs, side, merge = written(tmp_path, 6, 3, 6, "Idefics3ForConditionalGeneration")
    tiles = random_tiles(2, side)
    want = tile_rows(theirs, tiles).numpy()
    assert np.abs(native(path, tiles, merge) - want).max() < 1e-5 * np.ptp(want)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tower"), 4, 2, 4)


@pytest.mark.parametrize("level", _C.isa_levels())
@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_rows_of_shorter_types_are_near(smolvlm, scheme, level):
    path, theirs, side, merge = smolvlm
    tiles = random_tiles(8, side)
    want = tile_rows(theirs, tiles).numpy()
    got = native(path, tiles, merge, "bfloat16", scheme=scheme, isa=level)
    error = np.sqrt(np.mean((got - want) ** 2) / np.var(want))
    assert 1e-4 < error < (0.02 if scheme == "none" else 0.04)
    for budget in (None, 0):
        more = native(path, tiles, merge, "bfloat16", 2, scheme=scheme, budget=budget, isa=level)
        assert np.array_equal(more, got)
    for text in ("int8_fine", "int4"):
        more = native(path, tiles, merge, "bfloat16", scheme=scheme, text=text, isa=level)
        assert np.array_equal(more, got), "the tower has a scheme of its own"


@pytest.mark.parametrize("architecture", [SMOLVLM, GEMMA3, GRANITE, INTERNVL, AYA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_the_same_bits_however_they_are_computed(tmp_path, dtype, architecture):
    path, _, side, merge = written(tmp_path, 4, 2, 4, architecture)
    tiles = random_tiles(5, side)
    want = native(path, tiles, merge, dtype)
    for threads, ranks, budget in DIVISIONS:
        more = native(path, tiles, merge, dtype, threads, ranks, budget=budget)
        assert np.array_equal(more, want)
    alone = [native(path, tiles[i : i + 1], merge, dtype) for i in range(5)]
    assert np.array_equal(np.concatenate(alone), want)


def test_more_tiles_than_a_step_has_are_several_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.models.spec.STEP_PATCHES", 40)
    path, _, side, merge = written(tmp_path, 4, 2, 4)
    spec, weights = opened(path)
    assert spec.tower.tiles_a_step == 2
    tiles = random_tiles(5, side)
    patches, shapes = patches_of(tiles, merge), [(side, side)] * 5
    with_team(1, [], lambda team: check_steps(team, spec, weights, patches, shapes))


def check_steps(team, spec, weights, patches, shapes):
    tower = tower_of(settings(), spec, weights, team)
    whole = tower.encode(patches, shapes)
    tower.start(patches, shapes)
    tower.advance(0)
    tower.start(patches[:16], shapes[:1])  # what was begun before is dropped
    assert tower.advance(1e9)
    assert np.array_equal(tower.rows(), whole[: len(tower.rows())])
    tower.start(patches[:0], [])
    assert tower.advance(0)
    assert tower.rows().shape == (0, 64)
    tower.start(patches, shapes)
    tower.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        tower.advance(1e9)
    assert np.array_equal(tower.encode(patches, shapes), whole)


def test_patches_that_are_no_tiles_of_the_tower_are_refused(tmp_path):
    path, _, side, _ = written(tmp_path, 4, 2, 4)
    spec, weights = opened(path)
    tower = TorchTower(settings(), spec.tower, weights)
    width = spec.tower.patch_width
    good = np.zeros((side * side, width), np.uint8)
    for patches, tiles in (
        (good, [(side, side + 2)]),
        (good[:-1], [(side, side)]),
        (good, [(side, side)] * 2),
        (good[:, :-1], [(side, side)]),
        (good.astype(np.float32), [(side, side)]),
    ):
        with pytest.raises(ValueError, match="tile"):
            tower.start(patches, tiles)


def test_a_model_without_the_settings_of_pixels_reads_texts_only(tmp_path):
    path, *_ = written(tmp_path, 4, 2, 4)
    settings_of = path / "preprocessor_config.json"
    whole = json.loads(settings_of.read_text())
    settings_of.unlink()
    spec, weights = opened(path)
    assert spec.tower is None
    check_weights(build_program(spec), weights)
    (path / "processor_config.json").write_text(json.dumps({"image_processor": whole}))
    assert opened(path)[0].tower is not None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_std", [0.5, 0, 0.5], "image_std"),
        ("image_mean", 0.5, "image_mean"),
        ("image_mean", [0.5, 0.5], "image_mean"),
        ("image_std", [1e200] * 3, "image_std"),
        ("rescale_factor", -1, "rescale_factor"),
        ("rescale_factor", 1e-308, "rescale_factor"),
        ("max_image_size", {"longest_edge": 24}, "scale_factor"),
    ],
)
def test_bad_settings_of_pixels_are_named(tmp_path, key, value, message):
    path, *_ = written(tmp_path, 4, 2, 4)
    found = path / "preprocessor_config.json"
    found.write_text(json.dumps({**json.loads(found.read_text()), key: value}))
    with pytest.raises(ModelError, match=message):
        opened(path)


def test_a_tensor_of_the_tower_that_is_missing_or_unused_is_named(tmp_path):
    from safetensors.numpy import load_file, save_file

    path, *_ = written(tmp_path, 4, 2, 4)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.vision_model.strange"] = tensors.pop("model.vision_model.post_layernorm.bias")
    save_file(tensors, file, {"format": "pt"})
    spec, weights = opened(path)
    with pytest.raises(ModelError, match=r"post_layernorm\.bias.*unused.*vision_model\.strange"):
        check_weights(build_program(spec), weights, build_tower(spec.tower))


def test_the_packed_file_has_the_tower_too(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr("cpuserve.runtime.packed_cache.cache_dir", lambda: cache)
    path, _, side, merge = written(tmp_path / "model", 4, 2, 4)
    tiles = random_tiles(2, side)
    want = native(path, tiles, merge)
    spec, weights = opened(path)
    mapped = settings(model_path=str(path), weights_on_disk=True, weight_cache_bytes=1 << 30)
    found, packed = [], []
    pack = cpuserve.runtime.native.pack_matrices

    def count(native, lowered, *others, **more):
        packed.append(lowered)
        pack(native, lowered, *others, **more)

    monkeypatch.setattr(cpuserve.runtime.native, "pack_matrices", count)

    def use(team):
        executor = NativeExecutor(mapped, build_program(spec), weights, team, tower=spec.tower)
        encoded = executor.tower.encode(patches_of(tiles, merge), [(side, side)] * 2)
        assert executor.report()["memory"]["weights_mapped"] > 0
        (file,) = cache.rglob("*.weights")
        found.append(encoded)
        executor.close()
        return file

    file = with_team(1, [], use)
    with_team(1, [], use)
    assert np.array_equal(found[0], want)
    assert np.array_equal(found[1], want)
    assert len(packed) == 2  # text and tower, in the first start only
    with file.open("r+b") as data:  # the last matrix is the tower's
        content = file.read_bytes()
        data.seek(len(content.rstrip(b"\0")) - 1)
        data.write(b"\x55")
    with_team(1, [], use)
    assert np.array_equal(found[2], want)
    assert len(packed) == 4


def test_windows_are_those_of_transformers():
    for rows, columns in ((2, 3), (4, 4), (5, 9), (1, 13), (8, 6)):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        index, ends = get_vision_window_index(
            grid, spatial_merge_size=2, window_size=4 * 2 * PATCH, patch_size=PATCH
        )
        order, sizes = window_order(rows, columns, 4)
        assert order.tolist() == index.tolist()
        assert [4 * size for size in sizes] == torch.diff(ends).tolist()


def test_a_patch_sees_only_its_window(tmp_path):
    write_grid_model("Qwen2_5_VLForConditionalGeneration", tmp_path)
    file, grid = tmp_path / "config.json", random_grid(8, 8)
    config = json.loads(file.read_text())
    config["vision_config"]["fullatt_block_indexes"] = []
    file.write_text(json.dumps(config))
    other = grid.copy()
    other[:, 4 * PATCH :, 4 * PATCH :] = 255 - other[:, 4 * PATCH :, 4 * PATCH :]
    for kind in ("torch", "native"):
        rows, changed = (encoded_grids(tmp_path, kind, [g]) for g in (grid, other))
        same = np.all(rows == changed, axis=1).reshape(4, 4)
        assert same.tolist() == [[y < 2 or x < 2 for x in range(4)] for y in range(4)]


def test_a_step_has_room_for_the_windows_of_every_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.models.spec.MOST_PATCHES", 240)
    write_grid_model("Qwen2_5_VLForConditionalGeneration", tmp_path)
    spec, _ = opened(tmp_path)
    config = tower_config(settings(), spec.tower)
    tiles = [(2 * r, 2 * c) for r in range(1, 61) for c in range(1, 61) if r * c <= 60]
    for step in [[tile] for tile in tiles] + [[(2, 2)] * 15, [(6, 10)] * 4, [(2, 6)] * 10]:
        sizes = [n for r, c in step for n in window_order(r // 2, c // 2, spec.tower.window)[1]]
        assert len(sizes) <= config.max_num_seqs
        assert sum(-(-4 * n // 32) for n in sizes) <= config.kv_blocks


def test_a_part_of_a_step_that_does_not_exist_is_refused(tmp_path):
    write_grid_model("Qwen2_5_VLForConditionalGeneration", tmp_path)
    spec, weights = opened(tmp_path)

    def use(team):
        tower = tower_of(settings(), spec, weights, team)
        tower.start(patches_of(random_grid(4, 4), 2), [(4, 4)])
        assert not tower.advance(0)
        native, count = tower.native, tower.native.num_ops()
        words = tower._words([(4, 4)]).whole.words
        for first in (-1, count):
            with pytest.raises(ValueError, match="no operation"):
                native.start(words, first)
        native.start(words)
        assert not native.advance(0)
        for last in (0, 1, count + 1):
            with pytest.raises(ValueError, match="is not later"):
                native.advance(0, last)
        assert native.advance(1e9, 5)

    with_team(1, [], use)


def test_a_ratio_of_internvl_that_is_almost_zero_is_refused():
    pictures = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    config = {"architectures": ["InternVLChatModel"], "vision_config": {}}
    with pytest.raises(ModelError, match="downsample_ratio is 1e-320"):
        tower_spec({**config, "downsample_ratio": 1e-320, "image_processor": pictures}, 64)


def test_a_fine_route_that_a_model_does_not_have_is_refused(tmp_path):
    path, *_ = written(tmp_path, 8, 2, 8, GRANITE_FINE)
    assert opened(path)[0].tower.merge == 2
    file = path / "config.json"
    config = json.loads(file.read_text())
    for changes in ({"use_fine_route": False}, {"scale_factor": 5}, {"image_size": 48}):
        vision = {**config["vision_config"], **changes}
        file.write_text(json.dumps({**config, "vision_config": vision}))
        with pytest.raises(ModelError, match=r"fine_route is True, .* has no fine connector"):
            opened(path)


def test_a_llava_with_other_features_reads_texts_only(tmp_path):
    path, *_ = written(tmp_path, 6, 1, 6, LLAVA)
    assert opened(path)[0].tower is not None
    file = path / "config.json"
    config = json.loads(file.read_text())
    others = {"vision_feature_layer": [-2, -3]}, {"vision_feature_select_strategy": "full"}
    for changes in (*others, {"vision_config": {"model_type": "siglip_vision_model"}}):
        file.write_text(json.dumps({**config, **changes}))
        assert opened(path)[0].tower is None


# Towers of published sizes, with the width of the text part.
PUBLISHED = {
    "gemma 4 e2b": (
        GEMMA4,
        1536,
        {"hidden_size": 768, "intermediate_size": 3072, "use_clipped_linears": True},
    ),
    "gemma 4 26b": (
        GEMMA4,
        2816,
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "standardize": True,
        },
    ),
    "lfm2-vl": (LFM2, 1024, {"hidden_size": 768, "num_attention_heads": 12}),
    "lfm3-vl": ("Lfm3VlForConditionalGeneration", 2048, {"hidden_size": 1024}),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        2048,
        {"hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "dots.ocr": (DOTS_OCR, 1536, {}),
    "paddleocr-vl": ("PaddleOCRVLForConditionalGeneration", 1024, {"hidden_size": 1152}),
}


class Counted(Lowering):
    """A Lowering that adds up the bytes of its buffers for each patch."""

    def take(self, width, fmt, rows=(1, 1)):
        buffer = super().take(width, fmt, rows)
        self.__dict__.setdefault("sizes", {})[buffer] = (
            width * {"f32": 4, "bf16": 2}[fmt] * rows[0] / rows[1]
        )
        return buffer


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_has_the_memory_of_a_step(name):
    architecture, width, own = PUBLISHED[name]
    pictures = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    config = {"architectures": [architecture], "vision_config": own, "image_processor": pictures}
    spec = tower_spec(config, width)
    program = build_tower(spec)
    lowering = Counted(
        program,
        lambda _: "dense_bf16",
        isa=_C.isa_levels()[-1],
        max_tokens=spec.step_patches,
        max_seqs=spec.tiles_a_step,
        max_position=spec.tile_patches,
        kv_type="bf16",
    )
    lowering.run()
    cache = 2 * 2 * sum(layer.heads * layer.key_width for layer in program.cache)
    results = 4 * spec.row_width / spec.merge**2
    used = sum(lowering.sizes.values()) + cache + results + spec.patch_width
    assert used < spec.step_bytes / spec.step_patches < 2.5 * used


def test_sections_without_an_angle_of_columns_are_refused(tmp_path):
    write_grid_model("Qwen2VLForConditionalGeneration", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [4, 4, 0]
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mrope_section is \[4, 4, 0\], .* the last above 0"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("projection_dim", 32), ("use_qk_norm", True), ("attention_bias", False)]
)
def test_numbers_of_janus_that_do_not_fit_are_named(key, value):
    vision = {"image_size": 16, "projection_dim": 64, "hidden_size": 32, "num_attention_heads": 2}
    pictures = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    config = {"architectures": [JANUS], "vision_config": vision, "image_processor": pictures}
    assert tower_spec(config, 64).intermediate == 128
    with pytest.raises(ModelError, match=f"vision_config.{key}"):
        tower_spec({**config, "vision_config": {**vision, key: value}}, 64)
