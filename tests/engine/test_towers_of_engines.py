"""The settings of a model with a tower count its memory, and its engine has the tower."""

from __future__ import annotations

import json
import math
import shutil

import msgspec
import numpy as np
import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.cli import main as cli
from cpuserve.config.load import Given, load_options
from cpuserve.engine.build import build_engine
from cpuserve.engine.fingerprint import fingerprint
from cpuserve.loader.load import read_config
from cpuserve.models import build_program, build_tower, spec_from_config
from cpuserve.platforms.memory import MEDIA_ROWS, resident_weight_bytes
from cpuserve.prepare import prepare
from cpuserve.program.operations.attention import Attention
from cpuserve.program.operations.dense import Linear
from cpuserve.runtime.native import make_team
from tests.helpers.mmproj import write_ggufs
from tests.helpers.pictures import (
    GEMMA3,
    GEMMA4,
    LFM2,
    MISTRAL3,
    PATCH,
    patches_of,
    random_grid,
    random_tiles,
    write_grid_model,
    write_tower_model,
)
from tests.helpers.tiny import tiny_model

SIDE, MERGE = 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    write_tower_model("SmolVLMForConditionalGeneration", path, side=SIDE, merge=MERGE)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def prepared(path, **more):
    given = {"model": str(path), "max_model_len": "128", **more}
    flags = {name: Given(f"--{name}", "flag", value) for name, value in given.items()}
    return prepare(load_options(flags, environ={}))


def test_the_settings_say_what_a_page_costs(model, tmp_path):
    found = prepared(model)
    assert found.resolved.config.media_rows == MEDIA_ROWS
    (why,) = [d.why for d in found.resolved.decisions if d.field == "media_rows"]
    tower = found.facts.tower
    assert tower.page_rows == 4 * tower.page_tiles
    assert f"becomes {tower.page_rows} tokens: {tower.page_tiles} tiles with" in why
    texts = shutil.copytree(model, tmp_path / "texts")
    (texts / "preprocessor_config.json").unlink()
    plain = prepared(texts)
    assert plain.resolved.config.media_rows == 0
    assert plain.facts.tower is None
    # The start says so only if pictures are not read.
    assert not [note for note in found.notes if "text model" in note]
    assert [note for note in plain.notes if "text model" in note]


def test_a_model_with_incomplete_settings_of_pictures_starts_as_a_text_model(model, tmp_path):
    texts = shutil.copytree(model, tmp_path / "texts")
    file = texts / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    del settings["size"]
    file.write_text(json.dumps(settings))
    plain = prepared(texts)
    assert plain.facts.tower is None
    config = plain.resolved.config
    assert config.media_rows == 0
    (note,) = [note for note in plain.notes if "text model" in note]
    assert "vision is not read (size is {}: longest_edge is needed" in note
    built = []
    team = make_team(config)
    team.run(lambda: built.append(build_engine(config, None, team).executor.tower))
    assert built == [None]


GRIDS = [GEMMA4, f"{GEMMA4} whole", LFM2, MISTRAL3, "Qwen3VLForConditionalGeneration"]


def grid_model(architecture, to):
    write_grid_model(architecture, to)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, to)
    return to


@pytest.mark.parametrize("architecture", GRIDS)
def test_the_most_tokens_of_a_picture_reach_the_plan_of_the_tower(architecture, tmp_path):
    path, most = grid_model(architecture, tmp_path), 70 if GEMMA4 in architecture else 24
    usual, less = prepared(path), prepared(path, image_max_tokens=str(most))
    assert less.facts.tower.most_rows == min(most, usual.facts.tower.most_rows)
    assert less.facts.tower.page_rows <= most
    if architecture != f"{GEMMA4} whole":  # the files of this one say 70 already
        assert less.facts.tower.most_rows < usual.facts.tower.most_rows
        assert less.facts.tower.step_bytes < usual.facts.tower.step_bytes
    (row,) = [d for d in less.resolved.decisions if d.field == "image_max_tokens"]
    assert (row.asked, row.got) == (most, most)
    assert row.source.startswith("flag")
    assert "a step that encodes a picture has" in row.why
    (row,) = [d for d in usual.resolved.decisions if d.field == "image_max_tokens"]
    assert row.got == 0
    rows = {}

    def use(name, executor):
        tower = executor.tower
        rows[name] = tower.encode(patches_of(grid, 2), [(4, 6)])
        merged = tower.spec.tile_patches // 4 + 1
        wide = np.zeros((merged * 4, 3 * PATCH**2), np.uint8)
        with pytest.raises(ValueError, match="at most"):
            tower.start(wide, [(2, 2 * merged)])
        rows[name, "most"] = tower.spec.tile_patches // 4

    grid = random_grid(4, 6)
    for found in (usual, less):
        on_team(found.resolved.config, lambda made, _, name=found: use(id(name), made))
    assert np.array_equal(rows[id(usual)], rows[id(less)])
    assert rows[id(less), "most"] == less.facts.tower.most_rows


def test_a_number_of_tokens_that_no_picture_can_have_ends_the_start(model, tmp_path):
    with pytest.raises(ConfigError, match="--image-max-tokens 3: max_tokens must be at least 4"):
        prepared(model, image_max_tokens="3")
    assert prepared(model, image_max_tokens="8").facts.tower.page_rows == 4
    with pytest.raises(ConfigError, match="--image-max-tokens 69: max_tokens must be at least 70"):
        prepared(grid_model(GEMMA4, tmp_path), image_max_tokens="69")
    for given, why in (
        ({"image_min_tokens": "5"}, "--image-min-tokens 5: min_tokens is no setting"),
        (
            {"image_min_tokens": "5", "image_max_tokens": "8"},
            "--image-max-tokens 8 and --image-min-tokens 5: min_tokens is no setting",
        ),
        ({"mm_processor_kwargs": '{"size": 7}'}, "--mm-processor-kwargs: size must be"),
    ):
        with pytest.raises(ConfigError, match=why):
            prepared(model, **given)
    texts = prepared(tiny_model("llama"), image_max_tokens="8")
    (row,) = [d for d in texts.resolved.decisions if d.field == "image_max_tokens"]
    assert (row.got, row.why) == (0, "no effect: this model reads no pictures")


def test_the_tower_keeps_its_type_unless_int8_is_asked_for(model):
    tiles, found = random_tiles(2, SIDE), {}

    def use(given, executor):
        tower = executor.tower
        found[given] = tower.encode(patches_of(tiles, MERGE), [(SIDE, SIDE)] * 2)

    choices = {
        "plain": ({}, "none", "int8 loses detail"),
        "text": ({"quantization": "int8"}, "none", "int8 loses detail"),
        "tower": ({"mm_encoder_quantization": "int8"}, "int8", "as requested"),
        "both": ({"quantization": "int4", "mm_encoder_quantization": "int8"}, "int8", "as req"),
        "none": ({"quantization": "int4", "mm_encoder_quantization": "none"}, "none", "as req"),
    }
    for name, (given, got, why) in choices.items():
        made = prepared(model, dtype="bfloat16", **given)
        (row,) = [d for d in made.resolved.decisions if d.field == "mm_encoder_quantization"]
        assert row.got == made.resolved.config.tower_quantize == got
        assert row.why.startswith(why)
        on_team(made.resolved.config, lambda executor, _, name=name: use(name, executor))
    for name, (_, got, _) in choices.items():
        same = "plain" if got == "none" else "tower"
        assert np.array_equal(found[name], found[same]), name
    away = np.abs(found["tower"] - found["plain"]).max()
    assert 0 < away < 0.05 * np.ptp(found["plain"])
    texts = prepared(tiny_model("llama"), mm_encoder_quantization="int8").resolved
    (row,) = [d for d in texts.decisions if d.field == "mm_encoder_quantization"]
    assert (row.got, texts.config.tower_quantize) == ("none", "none")
    assert row.why == "no effect: this model reads no pictures"


def test_the_tower_of_a_gguf_file_becomes_int8_too(model, tmp_path):
    file, _ = write_ggufs(model, tmp_path)
    tiles, found = random_tiles(2, SIDE), {}
    for name, given in {"plain": {}, "int8": {"mm_encoder_quantization": "int8"}}.items():
        config = prepared(file, tokenizer=str(model), dtype="bfloat16", **given).resolved.config

        def use(executor, _, name=name):
            found[name] = executor.tower.encode(patches_of(tiles, MERGE), [(SIDE, SIDE)] * 2)

        on_team(config, use)
    away = np.abs(found["int8"] - found["plain"]).max()
    assert 0 < away < 0.05 * np.ptp(found["plain"])


def test_a_tower_counts_with_the_bytes_that_it_keeps(model):
    facts = prepared(model).facts
    program = build_tower(spec_from_config(read_config(model)).tower)
    weights = sum(math.prod(need.shape) for need in program.weights)
    assert facts.tower.weights == weights
    texts = facts.weight_bytes // 4 - weights
    assert resident_weight_bytes(facts, "bfloat16", "int8") == int(texts * 1.05) + 2 * weights
    assert resident_weight_bytes(facts, "bfloat16") == facts.weight_bytes // 2


def test_engines_with_other_towers_share_no_files(model):
    usual = prepared(model).resolved.config
    other = prepared(model, mm_encoder_quantization="int8").resolved.config
    assert fingerprint(usual, (1,)) != fingerprint(other, (1,))
    assert fingerprint(usual, (1,)) == fingerprint(prepared(model).resolved.config, (1,))


def test_only_the_part_for_text_is_loaded_if_it_is_asked_for(model):
    plain = prepared(model, language_model_only="true")
    config = plain.resolved.config
    assert (plain.facts.tower, config.media_rows) == (None, 0)
    (note,) = [note for note in plain.notes if "text model" in note]
    assert "vision is not read (--language-model-only)" in note
    built = []
    team = make_team(config)
    team.run(lambda: built.append(build_engine(config, None, team).executor.tower))
    assert built == [None]


def test_the_operations_of_a_tile_are_those_of_its_linears_and_attention(model):
    tower = spec_from_config(read_config(model)).tower
    program, total = build_tower(tower), 0
    folds = {value.id: value.fold for value in program.values}
    for op in program.ops:
        rows = tower.tile_patches
        if isinstance(op, Linear):
            total += 2 * rows // folds[op.x] * sum(op.features) * op.in_features
        elif isinstance(op, Attention):
            total += 2 * 2 * rows * rows * op.q_heads * op.head_dim
    assert tower.operations(tower.tile_patches) == total
    facts = prepared(model).facts.tower
    assert facts.page_operations == facts.page_tiles * total


def shown(path, capsys):
    """The settings that `cpuserve config` prints, by name."""
    assert cli.main(["config", str(path), "--json"]) == 0
    return {row["field"]: row for row in json.loads(capsys.readouterr().out)}


class Probe:
    """A machine with a peak of 1e6 operations a second."""

    def dot(self, kind, seconds):
        assert kind in ("f32", "bf16")
        assert 0 < seconds < 0.1
        return 1e6


def test_config_shows_the_tower_its_rate_and_the_time_of_a_page(model, capsys, monkeypatch):
    monkeypatch.setattr("cpuserve.cli.measuring.roofline_of", lambda _: Probe())
    rows = shown(model, capsys)
    facts = prepared(model).facts.tower
    assert rows["tower"]["got"] == "3 layers of 48, patches of 8 x 8 pixels"
    seconds = facts.page_operations / 0.75e6
    end = f"becomes {facts.page_rows} tokens in {seconds:.2g} s"
    assert rows["tower"]["why"].endswith(end)
    assert rows["picture_gap"]["got"] == "none"


def test_config_shows_the_gap_of_a_picture_that_is_seen_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cpuserve.cli.measuring.roofline_of", lambda _: Probe())
    write_tower_model(GEMMA3, tmp_path, side=SIDE, merge=MERGE)
    for file in tiny_model("llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    gap = shown(tmp_path, capsys)["picture_gap"]
    found = prepared(tmp_path)
    program = build_program(found.spec)
    weights = sum(sum(op.features) * op.in_features for op in program.ops if isinstance(op, Linear))
    seconds = 2 * weights * found.facts.tower.span / 0.75e6
    assert gap["got"] == f"{seconds:.2g} s"
    assert "the 4 tokens of a picture" in gap["why"]
    assert "target: 50 ms" in gap["why"]


def test_config_of_a_text_model_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr("cpuserve.cli.measuring.roofline_of", None)
    rows = shown(tiny_model("llama"), capsys)
    assert "tower" not in rows
    assert "picture_gap" not in rows


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_the_engine_encodes_pictures_for_its_media_buffer(model, executor):
    config = msgspec.structs.replace(prepared(model).resolved.config, executor=executor)
    tiles = random_tiles(2, SIDE)
    found = []

    def use(team):
        made = build_engine(config, None, team).executor
        made.tower.start(patches_of(tiles, MERGE), [(SIDE, SIDE)] * 2)
        while not made.tower.advance(0.01):
            pass
        found.append(made.tower.rows())
        made.write_media(MEDIA_ROWS - 8, found[0])
        with pytest.raises(ValueError, match="media"):
            made.write_media(MEDIA_ROWS - 7, found[0])

    team = make_team(config)
    team.run(lambda: use(team))
    assert found[0].shape == (8, 64)
    assert np.isfinite(found[0]).all()


def on_team(config, use):
    team = make_team(config)
    team.run(lambda: use(build_engine(config, None, team).executor, team))


def phases(executor):
    """How many phases of the tower's work have run."""
    return executor.tower.native.progress[0]


def test_an_idle_engine_encodes_before_the_first_picture_comes(model):
    config = prepared(model).resolved.config
    tiles = random_tiles(2, SIDE)
    rows = []

    def use(executor, team):
        assert phases(executor) == 0
        while executor.prepare():
            pass
        assert phases(executor) >= len(build_tower(executor.tower.spec).ops)
        done = phases(executor)
        assert not executor.prepare()
        assert phases(executor) == done, "once is enough"
        rows.append(executor.tower.encode(patches_of(tiles, MERGE), [(SIDE, SIDE)] * 2))
        cold = build_engine(config, None, team).executor
        rows.append(cold.tower.encode(patches_of(tiles, MERGE), [(SIDE, SIDE)] * 2))
        done = phases(cold)
        while cold.prepare():
            pass
        assert phases(cold) == done, "a picture has taken the place of the first encode"

    on_team(config, use)
    assert np.array_equal(*rows)


def test_a_picture_that_comes_during_the_first_encode_takes_its_place(model, monkeypatch):
    monkeypatch.setattr("cpuserve.runtime.tower.WARM_S", 0.0)
    config = prepared(model).resolved.config
    tiles = random_tiles(1, SIDE)

    def use(executor, team):
        tower, cold = executor.tower, build_engine(config, None, team).executor.tower
        while phases(executor) == 0:
            assert executor.prepare()
        tower.start(patches_of(tiles, MERGE), [(SIDE, SIDE)])
        done = tower.advance(0)
        while not done:
            before = phases(executor)
            executor.prepare()
            assert phases(executor) == before, "the memory of KV blocks is all that is left"
            done = tower.advance(0)
        want = cold.encode(patches_of(tiles, MERGE), [(SIDE, SIDE)])
        assert np.array_equal(tower.rows(), want)

    on_team(config, use)
