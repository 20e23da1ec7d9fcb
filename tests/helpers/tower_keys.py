"""The keys of a config.json that concern pictures, and the effect of a change in both towers.

A `TowerWalk` has a tiny model that reads pictures. `changes()` yields its config with one key of
the whole or of the tower changed; `outcome()` says whether the rows of both towers change alike.
"""

from __future__ import annotations

import atexit
import copy
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.initialization import no_init_weights

from cpuserve import _C
from cpuserve.base.errors import CpuserveError
from cpuserve.loader.load import open_checkpoint
from cpuserve.media.pictures.families.checkpoint import reader_of
from cpuserve.media.pictures.families.preprocessing import PictureFiles
from cpuserve.models import build_tower, spec_from_config
from cpuserve.models.towers import PICTURES
from cpuserve.runtime.torch_executor import TorchTower
from tests.helpers.config_keys import (
    GENERAL,
    MISSING,
    TRAINING,
    other_values,
    recorded_reads,
    text_of,
    without_messages,
)
from tests.helpers.fake_executor import fake_config
from tests.helpers.pictures import (
    BORDERED,
    CANVAS_MODELS,
    GRID_MODELS,
    KIMI_K25,
    LLAVAS,
    PIXTRAL_12B,
    PIXTRALS,
    canvas_inputs,
    grid_inputs,
    patches_of,
    random_grid,
    random_tiles,
    tile_rows,
    write_grid_model,
    write_pixtral_12b,
    write_tower_model,
)

SIDE, MERGE = 12, 2  # of the tiles of models with tiles of one size, in patches
# Sides of pictures in patches. A change makes blocks of up to 4 x 4 patches of 2 x 2, or of 3 x 3.
GRIDS, IN_THREES = ((8, 16), (8, 8)), ((12, 24), (12, 12))
FEWER = ((4, 8), (4, 4))  # for towers that read at most 280 patches
LARGE = 500_000  # elements of the weights of a tower; the tiny ones have up to 300,000
VISION = "vision_config"
# Keys of other models that are in the whole config, and those of its parts.
_PARTS = {"audio_config", "high_res_vision_config", "adapter_config", "vq_config"}
_ABOUT_PICTURES = {"vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"}
# Keys that transformers asks any config for; only the whole has them.
_OF_WHOLES = {*_ABOUT_PICTURES, "tie_word_embeddings", "vocab_size", "is_encoder_decoder"}
_LEFT = (GENERAL - _ABOUT_PICTURES) | _PARTS | {VISION, "text_config", PICTURES}
UNMERGED_TILES = (*BORDERED, *LLAVAS)
_OTHER_CONFIG = {KIMI_K25: "Kimi_K25ForConditionalGeneration"}


# Values of keys that take few.
_VALUES: dict[str, list[Any]] = {
    "vision_feature_select_strategy": ["default", "full"],
    "vision_feature_layer": [-1, -2, 0, 2, 9, [-1], [-2, -1]],
    "layer_types": [["full_attention"] * 3, ["full_attention"] * 2],
}


class TowerWalk:
    """A tiny model of images and text, here and in transformers, whose keys can be changed."""

    def __init__(self, architecture: str) -> None:
        self.name, self.path = architecture, _folder()
        self.model = _written(architecture, self.path)
        self.state = self.model.state_dict()
        checkpoint = open_checkpoint(self.path)
        self.config, self.weights = dict(checkpoint.config), checkpoint.weights
        if other := _OTHER_CONFIG.get(architecture):
            # The form of transformers; published files have other keys.
            pictures = self.config[PICTURES]
            self.config = {**self.model.config.to_dict(), "architectures": [other]}
            self.config |= {PICTURES: pictures, "model_type": "kimi_k25"}
        self.spec, self.text = self._ours_of(self.config)
        self.read: dict[str, set[str]] = {"": set(), VISION: set()}
        with (
            recorded_reads(self.read[""], type(self.model.config)),
            recorded_reads(self.read[VISION], type(self.model.config.vision_config)),
        ):
            model = self._built(self.config)
            model.load_state_dict(self.state)
            self.theirs = self._rows_of(model, self.spec)
        for part, object_ in (("", self.model.config), (VISION, self.model.config.vision_config)):
            self.read[part] |= object_.attribute_map.keys()
        self.ours = self._run(self.spec, self.weights)

    def base(self) -> str:
        """Return the outcome of the config without a change; "no effect" if both are equal."""
        return self._compared(self.ours, self.theirs)

    def changes(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield (key, value, config) with one key changed."""
        whole = self.model.config
        for part, object_ in (("", whole), (VISION, whole.vision_config)):
            config = self.config[part] if part else self.config
            names = {*self.read[part], *vars(object_), *config, *object_.attribute_map} - _LEFT
            names -= _OF_WHOLES if part else set()
            for key in sorted(n for n in names if n[0] != "_" and not TRAINING.search(n)):
                shown = f"{part}.{key}" if part else key
                for more, value, own in _changed(config, object_, key):
                    yield shown + more, value, {**self.config, part: own} if part else own

    def outcome(self, key: str, config: dict[str, Any]) -> str:
        """Return the effect of a change: a word, or "DIFFERENT ..."."""
        try:
            spec, text = self._ours_of(config)
        except CpuserveError as error:
            return f"refused: {error}"[:200]
        if spec is None:
            return "texts only"
        part = VISION if key.startswith(VISION) else ""
        name = key.removeprefix(f"{part}.")
        if text == self.text:
            if problem := self._media_problem(config):
                return f"refused: {problem}"[:200]
            if name.partition(".")[0] not in self.read[part]:
                return "not read there"
        if self._has_large_default(spec, text, part, name, config):
            return "alike: the default"
        try:
            model = self._theirs_of(config)
        except Exception as error:  # transformers takes no such value
            return f"theirs refuses: {type(error).__name__} {error}"[:160].replace("\n", " ")
        weights, same = self.weights, self._has_shapes(model)
        if not same:
            model, weights = self._whole(config)
            if model is None:
                return f"DIFFERENT: {weights}" if "DIFFERENT" in weights else weights
        try:
            theirs = self._rows_of(model, spec)
        except Exception as error:
            if problem := self._media_problem(config):
                return f"refused: {problem}"[:200]
            told = f"{type(error).__name__} {error}"[:160].replace("\n", " ")
            return f"DIFFERENT: theirs fails: {told}"
        try:
            unchanged = text == self.text and weights is self.weights
            ours = self.ours if unchanged else self._run(spec, weights)
        except Exception as error:
            told = f"{type(error).__name__} {error}"[:160].replace("\n", " ")
            return f"DIFFERENT: ours fails: {told}"
        return self._compared(ours, theirs)

    def _ours_of(self, config: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the hyperparameters of the tower, and all of it and its Program as a text."""
        spec = spec_from_config(config).tower
        return spec, "" if spec is None else f"{spec} {text_of(build_tower(spec))}"

    def _has_large_default(
        self, spec: Any, text: str, part: str, name: str, config: dict[str, Any]
    ) -> bool:
        """Whether a key is left out, its default here is that of transformers, and makes a tower
        that would take seconds. Other values of such keys are computed.
        """
        own = config[part] if part else config
        if name in own or _size_of(spec) < LARGE:
            return False
        try:
            object_ = self._config_of(config)
            default = getattr(object_.vision_config if part else object_, name)
            filled = {**own, name: default}
            return self._ours_of({**config, part: filled} if part else filled)[1] == text
        except Exception:  # then the outcome says what is wrong
            return False

    def _media_problem(self, config: Mapping[str, Any]) -> str:
        """Return why the preprocessing of pictures refuses the config; "" if it does not."""
        reader = reader_of(config)
        processor = self.path / "processor_config.json"
        whole = json.loads(processor.read_text()) if processor.exists() else {}
        try:
            reader(PictureFiles(config, config[PICTURES], whole, {}))
        except CpuserveError as error:
            return str(error)
        return ""

    def _theirs_of(self, config: Mapping[str, Any]) -> Any:
        with without_messages(), no_init_weights():  # all weights come from the first model
            return self._built(config)

    def _built(self, config: Mapping[str, Any]) -> Any:
        return type(self.model)(self._config_of(config)).float().eval()

    def _config_of(self, config: Mapping[str, Any]) -> Any:
        own = copy.deepcopy({k: v for k, v in config.items() if k != PICTURES})
        return type(self.model).config_class.from_dict(own)

    def _has_shapes(self, model: Any) -> bool:
        new = model.state_dict()
        if {n: t.shape for n, t in new.items()} != {n: t.shape for n, t in self.state.items()}:
            return False
        model.load_state_dict(self.state, assign=True)
        return True

    def _whole(self, config: dict[str, Any]) -> tuple[Any, Any]:
        """Write the model, which has other tensors, and return it with the weights of its files.

        (None, the outcome) if that is not possible.
        """
        if self.name in _OTHER_CONFIG or self.name.startswith("Qianfan"):
            return None, "other tensors"
        torch.manual_seed(7)
        with without_messages():
            model = self._built(config)  # some buffers get their values with the weights
        with torch.no_grad():
            for values in model.parameters():
                values.copy_(torch.randn(values.shape) * 0.1 + (values.ndim < 2) * 0.5)
        path = _folder()
        model.save_pretrained(path)
        shutil.copy(self.path / "preprocessor_config.json", path)
        (path / "config.json").write_text(
            json.dumps({k: v for k, v in config.items() if k != PICTURES})
        )
        try:
            return model, open_checkpoint(path).weights
        except CpuserveError as error:
            return None, f"refused: {error}"[:200]

    def _pictures(self, spec: Any) -> list[np.ndarray]:
        """Return pictures of random bytes for a tower: uint8 [1, height, width, 3] each."""
        if spec.side:
            count = 3 if self.name in CANVAS_MODELS else 2
            return [random_tiles(count, spec.side, patch=spec.patch)]
        sizes = IN_THREES if spec.merge % 3 == 0 else GRIDS
        sizes = sizes if spec.tile_patches >= max(map(math.prod, sizes)) else FEWER
        return [random_grid(*size, seed=i, patch=spec.patch) for i, size in enumerate(sizes)]

    def _run(self, spec: Any, weights: Any) -> np.ndarray:
        settings = fake_config(dtype="float32", isa=_C.isa_levels()[-1], block_size=32)
        pictures = self._pictures(spec)
        tower = TorchTower(settings, spec, weights)
        patches = np.concatenate([patches_of(p, spec.merge, spec.patch) for p in pictures])
        sides = [(p.shape[1] // spec.patch, p.shape[2] // spec.patch) for p in pictures]
        rows = tower.encode(patches, sides * (len(pictures[0]) if spec.side else 1))
        return _lines(rows, spec, tower.line_end) if self.name in CANVAS_MODELS else rows

    def _rows_of(self, model: Any, spec: Any) -> np.ndarray:
        pictures, name = self._pictures(spec), self.name
        if spec.side and name not in CANVAS_MODELS:
            return tile_rows(model, pictures[0]).numpy()
        if name in CANVAS_MODELS:
            side = spec.side * spec.patch
            given = canvas_inputs(pictures, [(2 * side, side)])
        elif name in PIXTRALS:
            given = grid_inputs(pictures, name)
        else:
            frames = vars(model.config.vision_config).get("temporal_patch_size", 1)
            given = grid_inputs(pictures, name, spec.patch, spec.merge, frames)
        with torch.inference_mode():
            found = model.model.get_image_features(**given)
        levels = getattr(found, "deepstack_features", None) or []
        parts = [torch.cat(list(each)) for each in (found.pooler_output, *levels)]
        return torch.cat(parts, dim=1).numpy()

    def _compared(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        if ours.shape != theirs.shape:
            return f"DIFFERENT shapes {ours.shape} {theirs.shape}"
        if not np.isfinite(theirs).all():
            return "theirs refuses: not finite"
        spread = float(np.ptp(theirs)) or 1.0
        same = theirs.shape == self.theirs.shape
        error, moved, mine = (
            float(np.abs(one - other).max()) / spread
            for one, other in (
                (ours, theirs),
                (theirs, self.theirs if same else theirs * 0),
                (ours, self.ours if same else ours * 0),
            )
        )
        if not error < 5e-5:  # the bound of test_towers.py
            return f"DIFFERENT by {error:.2g}, theirs moved {moved:.2g}, ours {mine:.2g}"
        return "alike" if moved > 1e-6 or mine > 1e-6 else "no effect"


def _changed(
    config: Mapping[str, Any], object_: Any, key: str
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (the rest of the name of the changed key, its value, the config)."""
    if key in config:
        yield "", MISSING, {k: v for k, v in config.items() if k != key}
    value = config.get(key, getattr(object_, key, None))
    value = value.to_dict() if hasattr(value, "to_dict") else value
    if isinstance(value, Mapping):
        for inner, before in value.items():
            for new in other_values(before):
                yield f".{inner}", new, {**config, key: {**value, inner: new}}
        return
    value = list(value) if isinstance(value, tuple) else value
    if key in _VALUES:
        for new in _VALUES[key]:
            yield "", new, {**config, key: new}
        return
    fields = getattr(type(object_), "__dataclass_fields__", {})
    for new in other_values(value, str(fields[key].type) if key in fields else ""):
        yield "", new, {**config, key: new}


def _size_of(spec: Any) -> int:
    """Return the number of elements of a tower's weights."""
    return sum(math.prod(need.shape) for need in build_tower(spec).weights)


def _lines(rows: np.ndarray, spec: Any, end: np.ndarray) -> np.ndarray:
    """Return the rows of the picture of two tiles that follow each other in lines."""
    first, *tiles = rows.reshape(3, spec.side, spec.side, -1)
    ends = np.broadcast_to(end, (spec.side, 1, rows.shape[1]))
    lines = np.concatenate([*tiles, ends], axis=1)
    return np.concatenate([each.reshape(-1, rows.shape[1]) for each in (first, lines)])


def _folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="cpuserve-towers-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _written(architecture: str, path: Path) -> torch.nn.Module:
    if architecture == PIXTRAL_12B:
        return write_pixtral_12b(path)
    if architecture in GRID_MODELS:
        return write_grid_model(architecture, path)
    merge = 1 if architecture in UNMERGED_TILES else MERGE
    return write_tower_model(architecture, path, side=SIDE, merge=merge)
