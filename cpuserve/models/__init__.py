"""Model families: from an architecture of config.json to hyperparameters and a Program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from cpuserve.base import plugins
from cpuserve.base.errors import ModelError
from cpuserve.config.nearest import nearest_and_all
from cpuserve.models.base import MODELS, definition
from cpuserve.models.config import read_architectures, read_object, refuse
from cpuserve.models.families import FAMILIES, names_in_files
from cpuserve.models.family import ModelFamily, Whole
from cpuserve.models.rope import axes_of
from cpuserve.models.rotations import read_rotation
from cpuserve.models.stored_names import AS_PROGRAM
from cpuserve.models.text_parts import text_config, text_part
from cpuserve.models.towers import TOWERS, build_tower, tower_spec

if TYPE_CHECKING:
    from cpuserve.models.base import ModelDef
    from cpuserve.models.spec import ModelSpec, TowerSpec
    from cpuserve.models.stored_names import BuiltTensors, StoredNames
    from cpuserve.program.program import Program

__all__ = [
    "FAMILIES",
    "MODELS",
    "add_plugins",
    "architecture_of",
    "build_program",
    "build_tower",
    "built",
    "find_model",
    "fitted",
    "gguf_of_plugin",
    "has_no_head",
    "media_reader",
    "mtp_methods",
    "names_of",
    "plugin_notes",
    "projector_of",
    "spec_from_config",
    "stored_names",
    "unknown",
]

ENTRY_POINTS = "cpuserve.models"


def find_model(architecture: str) -> ModelDef | None:
    """Return the family of `architecture`: built-in, registered, or of a plug-in; else None.

    Raises ModelError if plug-ins claim the architecture but none of them can serve it.
    """
    model = MODELS.get(_with_head(architecture) if has_no_head(architecture) else architecture)
    if model is None:
        _look_up(architecture)
    return MODELS.get(architecture) if model is None else model


def _look_up(name: str) -> None:
    """Add the family of the plug-in that claims `name`, if there is one.

    A plug-in offers a family by entry points of group "cpuserve.models", one for each name that
    config.json, GGUF and mmproj files have for it. The object is a ModelFamily, a Whole, or the
    class of a text model (ModelDef). Reading entry points is slow, so it happens only for unknown
    names.

    Raises ModelError if plug-ins claim the name but none of them can serve it.
    """
    claims = _claims()
    reason = claims.refused.get(name)
    if name in claims.accepted:
        family, reason = plugins.load(claims.accepted[name], _faults)
        if family is not None:
            _add(name, family)
    if reason:
        msg = f"architecture {name}: {reason}"
        raise ModelError(msg)


def gguf_of_plugin(name: str) -> str | None:
    """Return where the plug-in has its entry that claims a GGUF architecture; None if none does.

    Raises ModelError if plug-ins claim the name but none of them can serve it.
    """
    if name not in FAMILIES.gguf:
        _look_up(name)
    return FAMILIES.gguf.get(name)


def mtp_methods() -> set[str]:
    """Return the names of vLLM for heads and assistants of all families, as methods."""
    add_plugins()
    return {name for family in FAMILIES.texts.values() for name in family.mtp_methods}


def projector_of(kind: str) -> str | None:
    """Return where a record has its projector for a kind of mmproj files; None if none has.

    Raises ModelError if plug-ins claim the kind but none of them can serve it.
    """
    if kind not in FAMILIES.projectors:
        _look_up(kind)
    return FAMILIES.projectors.get(kind)


def media_reader(config: Mapping[str, Any]) -> str | None:
    """Return where the reader of pictures of the model with this config is; None if it has none.

    Raises ModelError if plug-ins claim the model but none of them can serve it.
    """
    kind, names = str(config.get("model_type")), read_architectures(config)
    if kind not in FAMILIES.media and names and names[0] not in FAMILIES.builtin:
        _look_up(names[0])
    return FAMILIES.media.get(kind)


@cache
def add_plugins() -> None:
    """Add the families of all plug-ins, for a name that no entry point has.

    This is for tool formats and tokenizers. A plug-in that does not load is left out here:
    `find_model` says why.
    """
    for name, entry_point in _claims().accepted.items():
        family, _ = plugins.load(entry_point, _faults)
        if family is not None:
            _add(name, family)


def _claims() -> plugins.Claims:
    return plugins.claims(plugins.installed(ENTRY_POINTS), FAMILIES.builtin)


def _add(name: str, family: ModelFamily | Whole | ModelDef) -> None:
    if not isinstance(family, ModelFamily | Whole):
        MODELS.register(name)(family)
        return
    FAMILIES.add(family)
    wholes = (family,) if isinstance(family, Whole) else family.wholes
    for whole in wholes:
        TOWERS.declare(dict.fromkeys(whole.architectures, whole.tower) if whole.tower else {})
    if isinstance(family, ModelFamily):
        MODELS.declare(dict.fromkeys(family.architectures, partial(definition, family)))


def has_no_head(architecture: str) -> bool:
    """Return whether it is a known architecture without its output head, such as "Qwen3Model"."""
    return MODELS.get(architecture) is None and MODELS.get(_with_head(architecture)) is not None


def _with_head(architecture: str) -> str:
    return f"{architecture.removesuffix('Model')}ForCausalLM"


def plugin_notes() -> list[str]:
    """Return a line for each plug-in refused because its name is taken; imports no plug-in."""
    return [f"architecture {name}: {reason}" for name, reason in _claims().refused.items()]


def _supported(architecture: str = "") -> str:
    """Return the end of an error: architectures almost like this one, and where all are listed."""
    ending = "ForCausalLM"
    names: dict[str, str] = {}
    # Some have two ways of writing (PhiMoE). The usual one is shown.
    for name in sorted(MODELS.names(), key=lambda name: FAMILIES.shown(name) != name):
        key = name.removesuffix(ending).lower()
        names[name if key in names else key] = name
    return nearest_and_all(architecture.removesuffix(ending).lower(), names, "cpuserve models")


def _faults(family: object) -> str:
    if not isinstance(family, ModelFamily | Whole):
        return plugins.lacking(family, ("spec", "build"))
    builtin_names = sorted(names_in_files(family) & FAMILIES.builtin)
    return f"has names of built-in families: {', '.join(builtin_names)}" if builtin_names else ""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first entry of "architectures" in a config.json; ModelError if there is none.

    For a model of images and text, returns the architecture of the text part.
    For a model with a head (a reranker), returns the architecture of the model below the head.
    A family that runs in another family's class of transformers is found by its model_type.
    In the published config of jina-embeddings v3 the first entry is RoBERTa.
    """
    names = read_architectures(config)
    if not names:
        msg = (
            'config.json names no architecture (key "architectures") that could be supported; '
            + _supported()
        )
        raise ModelError(msg)
    if names[0] not in FAMILIES.builtin and names[0] not in MODELS and not has_no_head(names[0]):
        _look_up(names[0])
    if names[0] in FAMILIES.wholes:
        return text_part(names[0], config)[0].name
    if names[0] in ("XLMRobertaModel", "XLMRobertaLoRA") and config.get("lora_adaptations"):
        return "JinaEmbeddingsV3Model"
    if saved := FAMILIES.saved_as.get((names[0], str(config.get("model_type")))):
        return saved
    return FAMILIES.heads().get(names[0], names[0])


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the hyperparameters of the model that a Hugging Face style config describes.

    Raises ModelError for an unknown architecture (the message has the supported ones),
    and for a value that is missing or out of range.
    """
    architecture, whole_config = architecture_of(config), config
    if (name := read_architectures(config)[0]) in FAMILIES.wholes:
        config = text_config(name, config)
    spec = _family(architecture).spec(config)
    _check_shared(config, architecture, spec)
    if name in FAMILIES.wholes:
        spec = with_tower(spec, tower_spec(whole_config, spec.width))
    name = _with_head(architecture) if has_no_head(architecture) else architecture
    shown = spec.architecture or FAMILIES.shown(name)
    return replace(spec, architecture=shown, rotation=read_rotation(config))


def stored_names(config: Mapping[str, Any]) -> StoredNames:
    """Return how files call and divide the tensors of the model with this config."""
    if not (architectures := read_architectures(config)):
        return AS_PROGRAM
    names, whole_family = names_of(architecture_of(config)), FAMILIES.wholes.get(architectures[0])
    if whole_family is None:
        return names
    of_tower: StoredNames = getattr(TOWERS.get(architectures[0]), "stored", AS_PROGRAM)
    if of_tower is AS_PROGRAM and not whole_family.published and not whole_family.unread:
        return names
    return replace(
        names,
        renamed={**names.renamed, **of_tower.renamed},
        published={**whole_family.published, **names.published},
        unread=(*names.unread, *of_tower.unread, *whole_family.unread),
    )


def names_of(architecture: str) -> StoredNames:
    """Return how files call and divide the tensors of a family.

    A model without a family runs through transformers, which reads its files itself.
    """
    return getattr(find_model(architecture), "stored", AS_PROGRAM)


def built(config: Mapping[str, Any]) -> BuiltTensors | None:
    """Return what builds tensors of the model with this config from others; None if none are."""
    family = find_model(architecture_of(config)) if read_architectures(config) else None
    hook: Callable[[Mapping[str, Any]], BuiltTensors | None] | None = getattr(family, "built", None)
    return None if hook is None else hook(config)


def fitted(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the config with keys that follow from the names of the tensors in a checkpoint."""
    family = find_model(architecture_of(config)) if read_architectures(config) else None
    hook: Callable[..., dict[str, Any]] | None = getattr(family, "fitted", None)
    return config if hook is None else hook(config, names)


def _check_shared(config: Mapping[str, Any], architecture: str, spec: ModelSpec) -> None:
    """Raise ModelError for a key that transformers reads in all families, and the family does not.

    Such a key would change the results of the model without notice.
    """
    if config.get("is_causal") is False and not spec.encoder:
        refuse("is_causal", False, "true: tokens attend to no later tokens in this family")
    if config.get("use_bidirectional_attention") is True and not spec.encoder:
        refuse("use_bidirectional_attention", True, "false in this family")
    top_k = config.get("moe_topk")
    if type(top_k) is int and config.get("num_experts_per_tok", top_k) != top_k:
        refuse("num_experts_per_tok", config["num_experts_per_tok"], f"{top_k}, as moe_topk says")
    family = FAMILIES.texts.get(architecture)
    own_keys = () if family is None else family.own_keys
    if config.get("per_layer_config") and "per_layer_config" not in own_keys:
        refuse("per_layer_config", config["per_layer_config"], "null in this family")
    heads = config.get("num_attention_heads", spec.q_heads)
    for key in ("n_head", "n_heads", "num_heads", "attention_heads"):
        if config.get(key) == spec.q_heads != heads:  # another name of it, which goes before
            refuse("num_attention_heads", heads, f"{spec.q_heads}, as {key} says")
    _check_ropes(config)


def _check_ropes(config: Mapping[str, Any]) -> None:
    """Raise ModelError if rope_scaling, which goes before, and rope_parameters say other things."""
    scaling, parameters = (read_object(config, key) for key in ("rope_scaling", "rope_parameters"))
    # Configs of GGUF files have parameters by kind of layer, or some beside those of rope_scaling.
    is_one_rope = "rope_type" in parameters or "type" in parameters
    if not scaling or not is_one_rope or any(isinstance(v, Mapping) for v in parameters.values()):
        return
    kinds = {rope.get("rope_type", rope.get("type", "default")) for rope in (scaling, parameters)}
    outside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    ropes = {k: v for k, v in parameters.items() if k not in ("rope_type", "type")}
    if len(kinds) > 1 or any({**outside, **scaling}.get(k) != v for k, v in ropes.items()):
        refuse("rope_scaling", dict(scaling), "absent, or equal to rope_parameters")


def with_tower(spec: ModelSpec, tower: TowerSpec | None) -> ModelSpec:
    """Return the spec of a text part with its tower, and with a RoPE on the tower's axes.

    Raises ModelError if the RoPE has another number of frequencies than the axes are for.
    """
    rope = spec.rope
    if rope is not None and tower is not None and tower.sections:
        count = len(rope.inv_freq)
        axes = axes_of(tower.sections, count, interleaved=tower.interleaved)
        if len(axes) != count:
            refuse("mrope_section", list(tower.sections), f"numbers with the sum {count}")
        rope = structs.replace(rope, axes=axes)
    return replace(spec, tower=tower, rope=rope)


def build_program(spec: ModelSpec) -> Program:
    """Return the Program of a model with the hyperparameters `spec`."""
    from cpuserve.program.builder import Builder

    builder = Builder(spec)
    _family(spec.architecture).build(builder, spec)
    return builder.finish()


def _family(architecture: str) -> ModelDef:
    model = find_model(architecture)
    if model is None:
        raise unknown(architecture)
    return model


def unknown(architecture: str, ways_out: str = "") -> ModelError:
    """Return the error for an architecture that is not implemented.

    ways_out: how the model could run.
    """
    msg = f"architecture {architecture} is not implemented in cpuserve; {_supported(architecture)}"
    return ModelError(f"{msg}. {ways_out[:1].upper()}{ways_out[1:]}" if ways_out else msg)
