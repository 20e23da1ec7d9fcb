"""The mmproj files of llama.cpp: found, checked against the model, and read at any type."""

from __future__ import annotations

import shutil

import msgspec
import numpy as np
import pytest
import torch

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.config.load import Given, load_options
from cpuserve.engine.build import build_engine
from cpuserve.engine.fingerprint import fingerprint
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.gguf.mmproj import find_projector, mmproj_config, projector_kinds
from cpuserve.loader.gguf.parts import find_mmproj, mmproj_files
from cpuserve.loader.load import open_checkpoint
from cpuserve.media.pictures.families.checkpoint import family_of, family_with
from cpuserve.models import spec_from_config
from cpuserve.models.families import FAMILIES
from cpuserve.models.text_parts import text_type
from cpuserve.prepare import prepare
from cpuserve.runtime.native import make_team
from tests.helpers.mmproj import GGUF_TEXTS, GGUF_TOWERS, TEXTS, write_ggufs
from tests.helpers.pictures import (
    GEMMA3,
    GEMMA4,
    GRID_MODELS,
    JANUS,
    LLAVA,
    LLAVA_NEXT,
    PIXTRAL_12B,
    patches_of,
    pixels_of,
    random_tiles,
    write_grid_model,
    write_pixtral_12b,
    write_tower_model,
)

SIDE, MERGE = 4, 2
MODELS = ["a-Q4_K_M.gguf", "a-Q8_0.gguf"]
QWEN = "Qwen3VLForConditionalGeneration"
QWEN2 = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    return path, write_tower_model("SmolVLMForConditionalGeneration", path, side=SIDE, merge=MERGE)


@pytest.fixture(scope="module")
def files(source, tmp_path_factory):
    return write_ggufs(source[0], tmp_path_factory.mktemp("gguf"))


def write_model(name, to):
    """Write the model of another tower, of the kind that GGUF files can have."""
    if name == PIXTRAL_12B:
        return write_pixtral_12b(to, GGUF_TEXTS[name])
    if name not in GRID_MODELS:
        merge = 1 if name in (LLAVA, LLAVA_NEXT, JANUS) else MERGE
        return write_tower_model(name, to, side=SIDE, merge=merge, text=GGUF_TEXTS.get(name))
    return write_grid_model(name, to, text=GGUF_TEXTS.get(name), tower=GGUF_TOWERS.get(name))


def prepared(path, **given):
    given = {"model": str(path), "max_model_len": "128", **given}
    flags = {name: Given(f"--{name}", "flag", value) for name, value in given.items()}
    return prepare(load_options(flags, environ={}))


def rows_of(config, tiles):
    found = []

    def use(team):
        tower = build_engine(config, None, team).executor.tower
        found.append(tower.encode(patches_of(tiles, MERGE), [(SIDE, SIDE)] * len(tiles)))

    team = make_team(config)
    team.run(lambda: use(team))
    return found[0]


def error_of(path, theirs):
    """How far the rows of a tower of this type are from those of transformers, and its facts."""
    tiles = random_tiles(8, SIDE)
    with torch.inference_mode():
        want = torch.cat(list(theirs.model.get_image_features(**pixels_of(tiles)).pooler_output))
    found = prepared(path, dtype="float32")
    got = rows_of(found.resolved.config, tiles)
    return np.sqrt(np.mean((got - want.numpy()) ** 2) / want.numpy().var()), found


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("F32", 0, 1e-5), ("F16", 1e-5, 1e-3), ("BF16", 1e-4, 0.01), ("Q8_0", 1e-3, 0.03)],
)
def test_rows_are_those_of_transformers(tmp_path, kind, least, most):
    wide, name = tmp_path / "wide", "SmolVLMForConditionalGeneration"
    theirs = write_tower_model(name, wide, side=SIDE, merge=MERGE, width=96)
    files = write_ggufs(wide, tmp_path, kind)
    error, found = error_of(files[0], theirs)
    assert least <= error < most
    assert found.facts.mmproj == str(files[1])
    assert found.facts.tower.page_tiles > 1


def test_the_family_of_an_mmproj_file_is_that_of_the_safetensors(source, files, tmp_path):
    assert family_with(mmproj_config(GgufFile(files[1]))) == family_of(source[0])
    old = write_ggufs(source[0], tmp_path, **{"clip.vision.preproc_image_size": None})[1]
    layout = family_with(mmproj_config(GgufFile(old))).layout(900, 300)
    assert layout.tiles == ((SIDE, SIDE),)


# What files do not say, and is that of published models.
UNSAID = {
    "budget",  # Gemma 4
    "least",
    "limit",  # Kimi-VL as well
    "most",
    "resample",
    "tile",  # LFM2-VL
}


@pytest.mark.parametrize("name", [name for name in TEXTS if "SmolVLM" not in name])
def test_the_family_has_what_files_say(tmp_path, name):
    write_model(name, tmp_path)
    found, want = (
        msgspec.to_builtins(family)
        for family in (
            family_with(mmproj_config(GgufFile(write_ggufs(tmp_path, tmp_path / "gguf")[1]))),
            family_of(tmp_path),
        )
    )
    assert {key for key in want if found[key] != want[key]} <= UNSAID


def numbers_of(family):
    return {name: getattr(family, name) for name in ("patch", "merge", "resample", "marker")}


@pytest.mark.parametrize("name", [GEMMA3, QWEN])
def test_the_family_of_other_towers_has_the_numbers_of_the_safetensors(tmp_path, name):
    write_model(name, tmp_path)
    found = family_with(mmproj_config(GgufFile(write_ggufs(tmp_path, tmp_path / "gguf")[1])))
    want = family_of(tmp_path)
    if name == GEMMA3:
        assert found == want
        return
    assert numbers_of(found) == numbers_of(want)
    # The file has no numbers of pixels: these are 64 to 16,384 tokens, as in published models.
    assert (found.least, found.most) == (64 * found.block**2, 16384 * found.block**2)


@pytest.mark.parametrize("name", [*(name for name in TEXTS if "SmolVLM" not in name), GEMMA4])
def test_towers_in_half_precision_are_near_those_of_safetensors(tmp_path, name):
    """The small Gemma 4 has limits of its linears."""
    write_model(name, tmp_path)
    tiles = random_tiles(1, SIDE)
    want = rows_of(prepared(tmp_path, dtype="float32").resolved.config, tiles)
    files = write_ggufs(tmp_path, tmp_path / "gguf", "F16")
    found = prepared(files[0], dtype="float32")
    got = rows_of(found.resolved.config, tiles)
    assert got.shape == want.shape
    assert 1e-6 < np.abs(got - want).max() / np.ptp(want) < 1e-3
    assert found.facts.mmproj == str(files[1])


def test_older_files_swap_the_matrices_of_the_mlp(source, files, tmp_path):
    tiles = random_tiles(1, SIDE)
    old = write_ggufs(source[0], tmp_path, swapped=True)
    want, got = (
        rows_of(prepared(path, dtype="float32").resolved.config, tiles)
        for path in (files[0], old[0])
    )
    assert np.array_equal(got, want)


WRONG = [
    ({"clip.vision.projection_dim": 32}, "of another model: its rows have 32 numbers, and the emb"),
    (
        {"clip.projector_type": "ultravox"},
        "has no tower for clip.projector_type 'ultravox'; it has",
    ),
    ({"clip.projector_type": None}, "has no tower for clip.projector_type None"),
    ({"arch": "llama"}, "is no mmproj file"),
    ({"clip.vision.projector.scale_factor": None}, "projector.scale_factor is missing"),
    ({"clip.vision.block_count": 0}, "block_count is 0"),
    ({"clip.vision.image_std": None}, "image_std"),
    ({"clip.vision.image_std": [float("nan")] * 3}, "nan, nan, nan"),
    ({"clip.vision.image_mean": [0.5, 0.5, float("inf")]}, "image_mean is"),
]
UNPADDED = {"clip.vision.mm_patch_merge_type": "spatial_unpad"}
# The same of LLaVA 1.5.
WRONG_LLAVA = [
    ({"clip.vision.image_grid_pinpoints": [64, 32]}, "mm_patch_merge_type is missing"),
    ({"clip.vision.image_grid_pinpoints": [64], **UNPADDED}, r"image_grid_pinpoints is \[64\]"),
    (UNPADDED, "mm_patch_merge_type is 'spatial_unpad'"),
    ({"clip.vision.feature_layer": [1, 2]}, r"feature_layer is \[1, 2\]; it must be \[2\]"),
]
# The same of Qwen3-VL.
WRONG_GRIDS = [
    ({"clip.vision.is_deepstack_layers": 3}, "is_deepstack_layers is 3; it must be a list of bool"),
    ({"clip.vision.spatial_merge_size": 0}, "spatial_merge_size is 0"),
    ({"clip.projector_type": "gemma3"}, "its text part is Gemma3ForCausalLM, and this model is Qw"),
]


@pytest.mark.parametrize(
    ("changes", "activation"),
    [({}, "gelu_tanh"), ({"clip.use_gelu": None}, "quick_gelu")],
)
def test_the_activation_is_that_of_the_mmproj_file(source, tmp_path, changes, activation):
    model, mmproj = write_ggufs(source[0], tmp_path, **changes)
    config = open_checkpoint(model, str(mmproj)).config
    assert spec_from_config(config).tower.activation == activation


@pytest.mark.parametrize(("changes", "why"), WRONG)
def test_an_mmproj_file_that_does_not_fit_is_named(source, tmp_path, changes, why):
    model, mmproj = write_ggufs(source[0], tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"--mmproj .*{why}"):
        prepared(model, mmproj=str(mmproj))
    found = prepared(model)  # the file was only found next to it
    assert (found.facts.mmproj, found.facts.tower) == (None, None)
    assert found.resolved.config.media_rows == 0
    (note,) = [note for note in found.notes if "text model" in note]
    assert why in note


@pytest.mark.parametrize(("changes", "why"), WRONG_GRIDS)
def test_numbers_of_a_grid_that_do_not_fit_are_named(tmp_path, changes, why):
    write_model(QWEN, tmp_path)
    model, mmproj = write_ggufs(tmp_path, tmp_path / "gguf", **changes)
    with pytest.raises(ConfigError, match=f"--mmproj .*{why}"):
        prepared(model, mmproj=str(mmproj))


@pytest.mark.parametrize(("changes", "why"), WRONG_LLAVA)
def test_other_kinds_of_llava_are_named(tmp_path, changes, why):
    write_model(LLAVA, tmp_path)
    model, mmproj = write_ggufs(tmp_path, tmp_path / "gguf", **changes)
    with pytest.raises(ConfigError, match=f"--mmproj .*{why}"):
        prepared(model, mmproj=str(mmproj))


def test_a_table_of_places_of_another_form_is_named(tmp_path):
    write_model("PaddleOCRVLForConditionalGeneration", tmp_path)
    model, mmproj = write_ggufs(tmp_path, tmp_path / "gguf", dropped="v.position_embd.weight")
    with pytest.raises(ConfigError, match=r"v.position_embd.weight is missing; it must have 2 dim"):
        prepared(model, mmproj=str(mmproj))


@pytest.mark.parametrize(("width", "whole"), [(1536, None), (2560, None), (3840, "vision")])
def test_tokens_of_a_picture_see_all_of_it_in_the_large_gemma_4(tmp_path, width, whole):
    write_model(GEMMA4, tmp_path)
    changed = {"clip.vision.projection_dim": width}
    _, mmproj = write_ggufs(tmp_path, tmp_path / "gguf", **changed)
    found = mmproj_config(GgufFile(mmproj))
    assert found["text_config"] == {"use_bidirectional_attention": whole}


@pytest.mark.parametrize("kind", projector_kinds())
def test_text_parts_of_mmproj_files_are_those_of_the_whole_model(kind):
    for part, whole in find_projector(kind).wholes.items():
        assert FAMILIES.text_types[text_type(whole, part)][0].name == part, kind


def test_frames_that_cannot_be_joined_are_named(tmp_path):
    write_model(QWEN, tmp_path)
    model, mmproj = write_ggufs(tmp_path, tmp_path / "gguf", halved="v.patch_embd.weight.1")
    with pytest.raises(ModelError, match=r"v.patch_embd.weight.1 has type F16 and shape"):
        open_checkpoint(model, str(mmproj))


def test_the_file_of_another_architecture_is_named(files, tmp_path):
    from tests.helpers.gguf_convert import convert

    convert("qwen2", tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="text part is LlamaForCausalLM, and this model is Qwen2"):
        prepared(tmp_path / "other.gguf", mmproj=str(files[1]))


def test_a_file_that_is_not_there_or_not_wanted(source, files, tmp_path):
    with pytest.raises(ConfigError, match=r"--mmproj .*there is no such file"):
        prepared(files[0], mmproj=str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match=r"--mmproj .* has no GGUF file"):
        prepared(source[0], mmproj=str(files[1]))
    plain = prepared(files[0], mmproj="none")
    assert (plain.facts.tower, plain.resolved.config.mmproj) == (None, None)


def test_a_template_with_pictures_needs_an_mmproj_file(source, tmp_path):
    from gguf import GGUFReader, GGUFWriter

    model, mmproj = write_ggufs(source[0], tmp_path)
    mmproj.unlink()
    assert not [note for note in prepared(model).notes if "text model" in note]
    reader, told = GGUFReader(model), tmp_path / "told.gguf"
    writer = GGUFWriter(told, "llama")
    writer.add_chat_template("{% if part['type'] == 'image' %}<image>{% endif %}")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (note,) = [note for note in prepared(told).notes if "text model" in note]
    assert "there is no mmproj file next to it" in note


@pytest.mark.parametrize(
    ("names", "model", "wanted"),
    [
        ([*MODELS, "mmproj-F16.gguf"], "a-Q8_0.gguf", "mmproj-F16.gguf"),
        ([*MODELS, "mmproj-a-f32.gguf", "mmproj-a-bf16.gguf"], "a-Q8_0.gguf", "mmproj-a-bf16.gguf"),
        ([*MODELS, "b.gguf", "mmproj-a-f16.gguf"], "a-Q8_0.gguf", "mmproj-a-f16.gguf"),
        ([*MODELS, "b.gguf", "mmproj-a-f16.gguf"], "b.gguf", None),
        (["a.gguf", "a.mmproj-f16.gguf", "mmproj-b-f16.gguf"], "a.gguf", "a.mmproj-f16.gguf"),
        (["a-Q8_0-00001-of-00002.gguf", "mmproj-a.gguf", "b.gguf"], None, "mmproj-a.gguf"),
        (["x/a-UD-Q4_K_XL.gguf", "mmproj-F16.gguf"], None, None),
        (MODELS, "a-Q8_0.gguf", None),
    ],
)
def test_the_file_beside_a_model_is_found(tmp_path, names, model, wanted):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_mmproj(tmp_path / (model or names[0]))
    assert (found and found.name) == wanted


def test_the_file_at_the_top_of_a_repository_is_found(tmp_path):
    snapshot = tmp_path / "snapshots" / "0123"
    (snapshot / "Q4_0").mkdir(parents=True)
    (snapshot / "mmproj-F16.gguf").touch()
    assert find_mmproj(snapshot / "Q4_0" / "a-Q4_0.gguf") == snapshot / "mmproj-F16.gguf"
    assert mmproj_files(["mmproj-f32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "a.gguf"]) == [
        "mmproj-F16.gguf",
        "mmproj-BF16.gguf",
        "mmproj-f32.gguf",
    ]


def test_the_tower_is_part_of_the_model_for_caches(files, tmp_path):
    copies = [shutil.copy(file, tmp_path / file.name) for file in files]
    config = prepared(copies[0]).resolved.config
    assert {source.path for source in config.sources} >= {str(file) for file in copies}
    before = fingerprint(config, (1,))
    assert fingerprint(config, (1,)) == before
    data = bytearray(copies[1].read_bytes())
    data[-1] ^= 1
    copies[1].write_bytes(data)
    assert fingerprint(config, (1,)) != before
