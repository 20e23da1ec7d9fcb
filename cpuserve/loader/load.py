"""Opens a model by its path: its config dict and its named tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.base.registry import imported
from cpuserve.loader.gguf.parts import first_part, model_files
from cpuserve.loader.mapped import check_folder, read_small, regular_file
from cpuserve.loader.names import is_ignored
from cpuserve.models.config import read_object
from cpuserve.models.text_parts import THINKER
from cpuserve.models.towers import PICTURES
from cpuserve.program.parts import stored_needs
from cpuserve.program.row_formats import takes_two_terms
from cpuserve.quant.registry import FORMATS

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile
    from cpuserve.loader.safetensors import SafetensorsStore
    from cpuserve.models.spec import TowerSpec
    from cpuserve.program.program import Program, WeightNeed
    from cpuserve.quant.base import Weights

    OpenTensors = Callable[[], SafetensorsStore]

MAX_CONFIG_BYTES = 10_000_000
# The keys of config.json that say that the weights are quantized.
QUANTIZED_BY = ("quantization_config", "compression_config", "quantization")
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
SPECIAL_FLOATS = ("Infinity", "-Infinity", "NaN")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: config, tensors (mapped, not read yet), path, and GGUF file if any."""

    config: dict[str, Any]
    weights: Weights
    path: Path
    gguf: GgufFile | None = None


def open_checkpoint(
    path: Path, mmproj: str | None = None, parts: tuple[str, ...] = ()
) -> Checkpoint:
    """Open a model directory or a .gguf file; ModelError (one line) if it is broken.

    mmproj: the GGUF file with the tower of the model in a .gguf file.
    parts: how the tensors of other parts begin that are read as well.
    """
    path = find_model(path)
    # These modules are imported late: they need numpy, which reading a config.json does not.
    from cpuserve.quant import open_weights

    if path.is_dir():
        from cpuserve.loader.heads import with_own_head
        from cpuserve.loader.safetensors import SafetensorsStore
        from cpuserve.models import fitted, stored_names
        from cpuserve.models.deepseek import with_split_heads

        config = read_config(path)
        method = quant_method(config)
        tower = _tower_of(config)
        names = tower.names if tower else ()
        store = SafetensorsStore(path, tower=(*names, *parts), names=stored_names(config))
        weights = with_divided(open_weights(method, store, config), config)
        config = with_split_heads(with_own_head(config, weights), weights.names())
        config = fitted(config, weights.names())
        return Checkpoint(config, with_built(weights, config), path)
    from cpuserve.loader.gguf.model import GgufStore, gguf_config
    from cpuserve.loader.gguf.parts import open_gguf

    file = open_gguf(path)
    config = gguf_config(file)
    text = GgufStore(file, config, heads=bool(parts))
    if mmproj is None:
        weights = with_built(open_weights("gguf", text, config), config, gguf=True)
        return Checkpoint(config, weights, path, file)
    from cpuserve.loader.gguf.mmproj import WholeStore, with_mmproj

    pictures = open_gguf(Path(mmproj))
    config = with_mmproj(config, pictures)
    weights = open_weights("gguf", WholeStore(text, pictures), config)
    return Checkpoint(config, with_built(weights, config), path, file)


def with_divided(weights: Weights, config: dict[str, Any]) -> Weights:
    """Return the weights with tensors that the files divide in another way than the Program."""
    from cpuserve.models import spec_from_config, stored_names
    from cpuserve.models.stored_names import AS_PROGRAM

    if (names := stored_names(config)) is AS_PROGRAM:
        return weights
    shares = names.cut(spec_from_config(config))
    if not (names.joined or shares or names.turned):
        return weights
    from cpuserve.quant.parts import PartWeights
    from cpuserve.quant.recut import CutWeights, JoinedWeights

    return PartWeights(CutWeights(JoinedWeights(weights, names.joined), shares, names.turned))


def with_built(weights: Weights, config: dict[str, Any], *, gguf: bool = False) -> Weights:
    """Return the weights for a Program of this config, with tensors that are built from others.

    Such tensors are the first matrix of a tower, and those of the family of a text (BuiltTensors).

    gguf: whether they are of a GGUF file without its tower.
    """
    from cpuserve.models import built

    if not gguf and (tower := _tower_of(config)) is not None:
        if not tower.patch_weight:
            return weights
        from cpuserve.quant.patches import PatchWeights

        names = tower.patch_weight, tower.merge_weight
        axes, block = tower.patch_axes, tower.merge
        return PatchWeights(weights, *names, tower.pixels, tower.patch, axes, block)
    built_tensors = built(config)
    if built_tensors is None or (gguf and not built_tensors.gguf):
        return weights
    built_weights: Weights = imported(built_tensors.weights)(weights, *built_tensors.arguments)
    if not built_tensors.parts:
        return built_weights
    from cpuserve.quant.parts import PartWeights

    return PartWeights(built_weights)


def read_config(path: Path, mmproj: str | None = None) -> dict[str, Any]:
    """Return the config.json of a model as a dict, or its equivalent for a GGUF file.

    mmproj: the GGUF file with the tower of the model in a GGUF file.
    No tensor data is read. The dict includes the eos_token_id of generation_config.json.
    auto_map and custom code are treated as plain data and never executed.
    """
    path = find_model(path)
    if path.is_dir():
        return _directory_config(path)
    from cpuserve.loader.gguf.model import gguf_config
    from cpuserve.loader.gguf.parts import open_gguf

    config = gguf_config(open_gguf(path))
    if mmproj is None:
        return config
    from cpuserve.loader.gguf.mmproj import with_mmproj

    return with_mmproj(config, open_gguf(Path(mmproj)))


def find_model(path: Path) -> Path:
    """Return the directory with config.json, or the .gguf file, at `path`; ModelError if none.

    Of a model in several GGUF files, the first file is returned.
    """
    path = path.expanduser()
    if path.is_dir():
        check_folder(path, "model directory")
        found = model_files(file.name for file in path.glob("*.gguf"))
        # Repositories of GGUF files often have the config.json of the original, without weights.
        original = (path / "config.json").exists() and any(path.glob("*.safetensors"))
        if original or not found:
            return path
        if len(found) > 1:
            msg = f"{path} holds {len(found)} GGUF models; give the path of one: "
            msg += ", ".join(found)[:500]
            raise ModelError(msg)
        return path / found[0]
    regular_file(path, "model")
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        msg = (
            f"{path} is a pickle, which can run any code when loaded, and is never read; "
            "give a directory with safetensors, or a .gguf file"
        )
        raise ModelError(msg)
    if path.suffix == ".safetensors":
        msg = f"{path} is only a weight file; give the directory that holds it and its config.json"
        raise ModelError(msg)
    return first_part(path)


def packed_size(
    path: Path,
    config: dict[str, Any],
    tensors: OpenTensors | None = None,
    weights: Weights | None = None,
) -> int:
    """Return the bytes of a directory's tensors after packing, without quantization at load.

    Formats without kernels count with their size after conversion.
    For an unknown format, the size of the files is returned.

    tensors: a function that returns the opened tensors of the directory.
    weights: its `quantized_weights`, if they are open.
    """
    weights = weights or quantized_weights(path, config, tensors)
    if weights is not None:
        from cpuserve.quant.packed import PackedWeights

        if isinstance(weights, PackedWeights):
            return weights.packed_bytes()
    files = sum(regular_file(file, "model file").st_size for file in path.glob("*.safetensors"))
    return files + _typed_bytes(path, config, tensors)


def quantized_weights(
    path: Path, config: dict[str, Any], tensors: OpenTensors | None = None
) -> Weights | None:
    """Return the weights of a directory; None if they are not quantized or the format is unknown.

    tensors: a function that returns the opened tensors of the directory.
    """
    method = quant_method(config)
    if method == "dense" or (open_format := FORMATS.get(method)) is None:
        return None
    from cpuserve.loader.safetensors import SafetensorsStore

    return open_format(tensors() if tensors else SafetensorsStore(path), config)


def quantization_of(config: dict[str, Any], weights: Weights | None) -> tuple[str | None, bool]:
    """Return (quantization, two_terms) of a directory, as in `ModelFacts`.

    weights: its `quantized_weights`.
    """
    method = quant_method(config)
    if weights is None:
        return None if method == "dense" else method, False
    kinds = (weights.kind(name, "float32") for name in weights.names())
    return method, any(map(takes_two_terms, kinds))


def _typed_bytes(path: Path, config: dict[str, Any], tensors: OpenTensors | None) -> int:
    """Return the size of the table of word embeddings if it is packed twice (TypedWeights)."""
    from cpuserve.models.bert import WORDS, reads_types

    if not reads_types(config):
        return 0
    from cpuserve.loader.safetensors import SafetensorsStore

    store = tensors() if tensors else SafetensorsStore(path)
    words = f"{WORDS}.weight"
    return store.get(words).data.nbytes if words in store.names() else 0


def check_weights(program: Program, weights: Weights, tower: Program | None = None) -> None:
    """Raise a ModelError if tensors are missing, have a wrong shape, or are not used.

    The message has their numbers and a few examples: files of another model may have thousands.

    tower: the program that encodes pictures; None = the model reads none, and its tensors for
      pictures are not used.
    """
    wanted = program.weights if tower is None else (*program.weights, *tower.weights)
    needs, names = {need.name for need in stored_needs(wanted)}, weights.names()
    # The last layers may be for multi-token prediction (DeepSeek). These layers, which have an
    # eh_proj, are not reported as unused.
    last = ".eh_proj.weight"
    unread = program.unread if tower is None else program.unread | tower.unread
    guessers = tuple(n.removesuffix(last) + "." for n in names if n.endswith(last))
    unused = sorted(
        n
        for n in names - needs
        if (tower is not None or not is_ignored(n))
        and n not in unread
        and not n.startswith(guessers)
    )
    if found := unmet(wanted, weights, unused):
        msg = f"the tensors of the checkpoint do not match its config; {found}"
        raise ModelError(msg)


def unmet(weight_needs: Iterable[WeightNeed], weights: Weights, unused: Sequence[str] = ()) -> str:
    """Return which needed tensors are missing or have a wrong shape, and some of `unused`.

    The text has the numbers of these tensors and a few of them; it is "" if there are none.
    """
    needs = {need.name: need.shape for need in stored_needs(weight_needs)}
    names = weights.names()
    missing = sorted(needs.keys() - names)
    misshapen = [
        f"{name} {list(weights.get(name).shape)} instead of {list(shape)}"
        for name, shape in sorted(needs.items())
        if name in names and weights.get(name).shape != shape
    ]
    groups = (("missing", missing), ("wrong shape", misshapen), ("unused", unused))
    found = [f"{what} ({len(items)}): {_some(items)}" for what, items in groups if items]
    return "; ".join(found)


def _some(items: Sequence[str]) -> str:
    return ", ".join([*items[:5], "..."] if len(items) > 5 else items)


def read_json(
    path: Path,
    what: str,
    max_bytes: int = MAX_CONFIG_BYTES,
    *,
    hook: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Return the JSON object in a regular file; ModelError if the file contains anything else.

    hook: a function that is called with each JSON object in the file and returns its value.
    """
    value = read_any_json(path, what, max_bytes, hook=hook)
    if not isinstance(value, dict):
        msg = f"{what} {path} is not a JSON object"
        raise ModelError(msg)
    return value


def read_any_json(
    path: Path,
    what: str,
    max_bytes: int = MAX_CONFIG_BYTES,
    *,
    hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Return the JSON value in a regular file; ModelError if there is none.

    hook: a function that is called with each JSON object in the file and returns its value.
    """
    try:
        return json.loads(read_small(path, what, max_bytes), object_hook=hook)
    except (ValueError, RecursionError) as error:
        msg = f"{what} {path} is not valid JSON: {error}"
        raise ModelError(msg) from error


def token_ids(value: Any) -> list[int]:
    """Return the token ids in a config field (an id, a list of ids or null) as a list."""
    listed = value if isinstance(value, list) else [value]
    return [v for v in listed if type(v) is int and v >= 0]


def no_model(path: Path, name: str) -> ModelError:
    """Return the error for a directory without config.json; name: how the user called it."""
    if (path / "model_index.json").exists():
        what = "is a pipeline of diffusers, which makes images: cpuserve reads and writes texts"
        return ModelError(f"{name} {what}")
    return ModelError(f"{name} holds no config.json and no .gguf file, so it is not a model")


def _directory_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        raise no_model(path, str(path))
    config = read_json(path / "config.json", "config", hook=_special_float)
    modelopt = path / "hf_quant_config.json"
    if modelopt.exists() and not any(config.get(key) for key in QUANTIZED_BY):
        found = read_json(modelopt, "quantization config").get("quantization")
        settings = found if isinstance(found, dict) else {}
        config["quantization_config"] = {**settings, "quant_method": "modelopt"}
    config = _with_settings(config)
    generation = path / "generation_config.json"
    if generation.exists():
        more = token_ids(read_json(generation, "generation config").get("eos_token_id"))
        eos = list(dict.fromkeys(token_ids(config.get("eos_token_id")) + more))
        if eos:
            config["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    return {**config, **_read_pictures(path, config)}


def _tower_of(config: Mapping[str, Any]) -> TowerSpec | None:
    """Return the tower of the model with this config, or None."""
    from cpuserve.models import spec_from_config

    return spec_from_config(config).tower if config.get(PICTURES) else None


def _read_pictures(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the image processor of a model of images; {} if it has none.

    They are in processor_config.json of newer files, else in preprocessor_config.json.
    """
    if "vision_config" not in {**config, **read_object(config, THINKER)}:
        return {}
    found = None
    if (path / "processor_config.json").exists():
        found = read_json(path / "processor_config.json", "processor config").get(PICTURES)
    if isinstance(found, dict) and found:
        return {PICTURES: found}
    if not (path / "preprocessor_config.json").exists():
        return {}
    found = read_json(path / "preprocessor_config.json", "image processor config")
    return {PICTURES: found} if found else {}


def _special_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers 5 stores as an object, as JSON cannot express it."""
    if value.keys() == {"__float__"} and value["__float__"] in SPECIAL_FLOATS:
        return float(value["__float__"])
    return value


def _quantized_by(config: Mapping[str, Any]) -> Any:
    """Return the settings of quantization in a config; None if it has none."""
    return next((config[key] for key in QUANTIZED_BY if config.get(key)), None)


def _with_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with quantization_config, or with what its text part has of such settings.

    Models of pictures often have them in text_config (or llm_config), because the tower is plain.
    """
    if not config.get("quantization_config") and config.get("compression_config"):
        # compressed-tensors' first name for the same settings
        return {**config, "quantization_config": config["compression_config"]}
    if _quantized_by(config) is not None:
        return config
    inner = [config[key] for key in TEXT_PARTS if isinstance(config.get(key), Mapping)]
    found = [{k: part[k] for k in QUANTIZED_BY if part.get(k)} for part in inner]
    return {**config, **next(filter(None, found), {})}


def quant_method(config: dict[str, Any]) -> str:
    """Return the name of the weight format in a config; "dense" if it has none.

    A config with settings of an unknown form has a format that no reader has, and is refused:
    its matrices are not plain weights.
    """
    quant = _quantized_by(config)
    if quant is None:
        return "dense"
    if not isinstance(quant, dict):
        return str(quant)[:40]
    method = quant.get("quant_method")
    if method is None and {"bits", "group_size"} <= quant.keys():
        return "mlx"
    return str(method)[:40]
