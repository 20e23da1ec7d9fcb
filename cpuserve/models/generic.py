"""Hyperparameters of models without a family in cpuserve, for the fallback to transformers.

For models of other kinds (speech, images, encoder-decoders), errors say what runs them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.config.nearest import nearest_and_all
from cpuserve.config.speculation import EAGLE3, MTP
from cpuserve.models import FAMILIES, architecture_of, find_model, spec_from_config, unknown
from cpuserve.models.config import (
    read_architectures,
    read_bool,
    read_dtype,
    read_heads,
    read_ids,
    read_int,
    read_object,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.models.text_parts import THINKER

TORCH = "cpuserve[torch] (pip install 'cpuserve[torch]')"

# Current config.json keys, each with the names that older model types have for the same value.
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len"),
}


def read_spec(config: Mapping[str, Any]) -> tuple[ModelSpec, bool]:
    """Return (hyperparameters of the model, whether cpuserve has a Program for it).

    Raises ModelError, which lists the supported architectures, if neither cpuserve
    nor an installed transformers implements the model.
    """
    if runs_through_transformers(config):
        return generic_spec(config), False
    return spec_from_config(config), True


def runs_through_transformers(config: Mapping[str, Any]) -> bool:
    """Return whether only transformers can run a model; False = cpuserve has a Program for it.

    Raises:
        ModelError: neither can run it; the message has the kind of the model, and the ways out.
    """
    architecture = architecture_of(config)
    if find_model(architecture) is not None:
        return False
    other = other_kind(config, architecture)
    if other is not None:
        msg = f"{architecture} {other}"
        raise ModelError(msg)
    if not transformers_knows(config):
        raise unknown(architecture, _ways_out(config))
    if _keeps_states(config):
        raise unknown(architecture, _states())
    return True


def _states() -> str:
    """Return the end of an error: why transformers cannot run the model, and others that run."""
    families = FAMILIES.texts.values()
    *names, last_label = sorted(
        {f.label for f in families if f.example_of == "states"}, key=str.lower
    )
    return (
        "its layers keep more than keys and values, so it cannot run through transformers "
        f"either. Of such models, {', '.join(names)} and {last_label} run"
    )


def _ways_out(config: Mapping[str, Any]) -> str:
    """Return how a model could run that cpuserve does not implement."""
    parts = parts_beside_text(config)
    if parts is not None:
        return (
            f"it has a part for {parts}. The text parts of some such models are implemented, of "
            f"{USUAL} and others; {_near_whole(architecture_of(config))}. "
            "A GGUF file of its text part may run: give its path"
        )
    if same_head := _same_head(architecture_of(config)):
        return f"models with its head run: {', '.join(same_head)}"
    package = find_spec("transformers")
    slowly = (
        f"install {TORCH}, with which it may run through transformers, slowly"
        if package is None
        else "a newer transformers may run it, slowly: the installed one does not have it as a "
        "causal language model"
    )
    return f"{slowly}; or give a GGUF file of the same model, if llama.cpp has its architecture"


USUAL = ", ".join(f"{name}ForConditionalGeneration" for name in ("Gemma3", "Llava", "Qwen3VL"))


def _near_whole(architecture: str) -> str:
    """Return the end of an error: models of images and text almost like this, and who lists all."""
    ending = "ForConditionalGeneration"
    classes: dict[str, str] = {}
    for name in sorted(FAMILIES.wholes):  # LightOnOCR is there in two ways of writing
        key = name.removesuffix(ending).lower()
        classes[name if key in classes else key] = name
    stem = architecture.removesuffix(ending).lower()
    return nearest_and_all(stem, classes, "cpuserve models --supported")


def _same_head(architecture: str) -> list[str]:
    """Return the classifiers, or the models for masked tokens, with the head of `architecture`."""
    end = architecture.rpartition("For")[2]
    return sorted({name for name in FAMILIES.heads() if name.rpartition("For")[2] == end})


def transformers_knows(config: Mapping[str, Any]) -> bool:
    """Return whether an installed transformers has a causal language model for `config`.

    The model type must be in the table of such models, and the architecture must be the class
    in the table or another causal language model: in transformers, a classifier or an encoder of
    the same type would get a random head. The table is read as text, because importing transformers
    is slow.
    """
    classes = _decoders(_table_file())
    kind = str(config.get("model_type") or "")
    class_name = classes.get(kind) or classes.get(kind.replace("-", "_"))
    names = read_architectures(config)
    return class_name is not None and (
        not names or names[0] == class_name or names[0].endswith(_DECODERS)
    )


_DECODERS = ("ForCausalLM", "LMHeadModel")


def _table_file() -> Path | None:
    """Return the file of transformers with the table of causal language models."""
    package = find_spec("transformers")
    places = package.submodule_search_locations if package else None
    return Path(places[0]) / "models" / "auto" / "modeling_auto.py" if places else None


@cache
def _decoders(file: Path | None) -> Mapping[str, str]:
    """Return {model type: class} of the causal language models of transformers; {} if unknown."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return {}
    for node in tree.body:
        names = [
            target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)
        ]
        if isinstance(node, ast.Assign) and names == ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]:
            pairs = [
                target.elts for target in ast.walk(node.value) if isinstance(target, ast.Tuple)
            ]
            texts = [[e.value for e in pair if isinstance(e, ast.Constant)] for pair in pairs]
            return {str(pair[0]): str(pair[1]) for pair in texts if len(pair) == 2}
    return {}


def _keeps_states(config: Mapping[str, Any]) -> bool:
    """Return whether layers of the model keep a state besides keys and values, in transformers."""
    kind = str(config.get("model_type") or "").replace("-", "_").removesuffix("_text")
    table = _table_file()
    if table is None or not kind.isidentifier():
        return False
    file = table.parents[1] / kind / f"modeling_{kind}.py"
    try:
        return _STATEFUL.search(file.read_text(encoding="utf-8")) is not None
    except OSError:
        return False


# Caches of transformers that keep recurrent states, convolutions or the keys of an indexer.
_STATEFUL = re.compile(
    r"_is_stateful = True"
    r"|(?:cache|past_key_values)\.(?:update_indexer|get_conv_state|get_linear_cache)\("
)


def generic_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return hyperparameters for the KV cache and for checks; they cannot build a Program.

    Raises ModelError for a value that is missing or out of range.
    """
    text = config.get("text_config")
    numbers = dict(text if isinstance(text, Mapping) else config)
    for key, aliases in ALIASES.items():
        values = [numbers[k] for k in (key, *aliases) if numbers.get(k) is not None]
        numbers[key] = values[0] if values else None
    vocab = read_int(numbers, "vocab_size")
    width = read_int(numbers, "hidden_size", high=1 << 20)
    q_heads, kv_heads, head_dim = read_heads(numbers, width)
    return ModelSpec(
        architecture=architecture_of(config),
        vocab=vocab,
        width=width,
        layers=read_int(numbers, "num_hidden_layers", high=4096),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read_int(numbers, "intermediate_size", 4 * width, high=1 << 24),
        max_position=read_int(numbers, "max_position_embeddings", 2048),
        norm_eps=1e-6,
        tied=read_bool(numbers, "tie_word_embeddings", False),
        dtype=read_dtype({**numbers, **config}),
        bos_ids=read_ids({**numbers, **config}, "bos_token_id", vocab),
        eos_ids=read_ids({**numbers, **config}, "eos_token_id", vocab),
    )


_SPEECH = frozenset([
    "audio_flamingo", "bark", "clap", "clvp", "csm", "dac", "data2vec-audio", "dia", "encodec",
    "fastspeech2_conformer", "granite_speech", "hubert", "jukebox", "kyutai_speech_to_text",
    "mctct", "mimi", "moonshine", "moshi", "musicgen", "musicgen_melody", "parakeet",
    "parakeet_ctc", "pop2piano", "seamless_m4t", "seamless_m4t_v2", "sew", "sew-d",
    "speech-encoder-decoder", "speech_to_text", "speecht5", "unispeech", "unispeech-sat",
    "univnet", "vits", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm", "whisper",
    "xcodec", "audio-spectrogram-transformer", "qwen2_audio", "qwen3_asr", "ultravox", "voxtral",
])  # fmt: skip
_PICTURES = frozenset([
    "align", "altclip", "beit", "bit", "blip-2", "chinese_clip", "clip", "clipseg",
    "conditional_detr", "convnext", "convnextv2", "cvt", "d_fine", "dab-detr", "data2vec-vision",
    "deformable_detr", "deit", "depth_anything", "detr", "dinat", "dinov2",
    "dinov2_with_registers", "dinov3_convnext", "dinov3_vit", "dpt", "efficientnet", "focalnet",
    "glpn", "grounding-dino", "hiera", "ijepa", "imagegpt", "levit", "mask2former", "maskformer",
    "mgp-str", "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "nat", "oneformer",
    "owlv2", "owlvit", "poolformer", "pvt", "pvt_v2", "regnet", "resnet", "rt_detr", "rt_detr_v2",
    "sam", "sam2", "segformer", "seggpt", "siglip", "siglip2", "superpoint", "swiftformer", "swin",
    "swin2sr", "swinv2", "table-transformer", "timm_wrapper", "timesformer", "upernet", "videomae",
    "vit", "vit_mae", "vit_msn", "vitdet", "vitmatte", "vitpose", "vivit", "x_clip", "xclip",
    "yolos", "zoedepth",
])  # fmt: skip
_ENCODER_DECODERS = frozenset([
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "flan-t5",
    "fsmt", "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus",
    "pegasus_x", "plbart", "prophetnet", "switch_transformers", "t5", "t5gemma", "t5gemma2",
    "udop", "umt5", "xlm-prophetnet", "xlnet-prophetnet",
])  # fmt: skip
# The tokens of a picture and of the prompt see each other, and only the answer is causal.
_BOTH_DIRECTIONS = frozenset(["colpali", "paligemma", "pi0"])
# Ends of architectures, for model types that the lists lack.
_SPEECH_ENDS = (
    *("ForCTC", "ForSpeechSeq2Seq", "ForAudioClassification", "ForTextToSpeech"),
    *("ForTextToWaveform", "ForAudioFrameClassification", "ForSpeechToText", "ForXVector"),
)
_PICTURE_ENDS = (
    *("ForImageClassification", "ForObjectDetection", "ForImageSegmentation"),
    *("ForSemanticSegmentation", "ForInstanceSegmentation", "ForUniversalSegmentation"),
    *(
        "ForDepthEstimation",
        "ForMaskedImageModeling",
        "ForVideoClassification",
        "ForKeypointDetection",
    ),
)
_PARTS = ("vision_config", "audio_config", "sound_config")


def head_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of a checkpoint that only guesses tokens for a model, and the way out.

    None: by its config.json it is none. Some EAGLE-3 heads are called like decoders there.
    """
    names = read_architectures(config)
    if FAMILIES.assistants.keys() & set(names):
        head, method, value = "an assistant", MTP, "ASSISTANT"
    elif any("eagle3" in name.lower() for name in names):
        head, method, value = "an EAGLE-3 head", EAGLE3, "HEAD"
    else:
        return None
    option = f"""--speculative-config '{{"method": "{method}", "model": {value}}}'"""
    return f"is {head}, which guesses tokens for another model: give that model, and {option}"


def other_kind(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return the kind of a model that generates no text as a decoder, and the way out.

    None: its config.json shows no such kind.
    """
    if (head := head_kind(config)) is not None:
        return head
    kind = str(config.get("model_type") or "").lower()
    if kind in _SPEECH or architecture.endswith(_SPEECH_ENDS):
        return (
            "is a model of speech or sound, and cpuserve reads and writes texts: use a server for "
            "speech, such as whisper.cpp or speaches"
        )
    if kind in _ENCODER_DECODERS or config.get("is_encoder_decoder") is True:
        return (
            "is an encoder-decoder, which reads with one part and writes with another: serve a "
            "decoder such as Qwen3 or Gemma 3, or an encoder such as BGE-M3; transformers and "
            "CTranslate2 run this model"
        )
    if kind in _BOTH_DIRECTIONS:
        return (
            "is a model that reads its prompt in both directions, and cpuserve reads it in one: "
            "serve Gemma 3 or Qwen3-VL, which read pictures too; transformers runs this model"
        )
    if kind in _PICTURES or architecture.endswith(_PICTURE_ENDS):
        return (
            "is a model of images, and cpuserve reads and writes texts: transformers, or a server "
            "such as Infinity, runs it"
        )
    return None


def parts_beside_text(config: Mapping[str, Any], *, pictures: bool = False) -> str | None:
    """Return a text about the parts of a model for images or sound; None if it has only text.

    pictures: whether cpuserve runs the part for images, which the text then leaves out.
    """
    config = read_object(config, THINKER) or config
    parts = [part for part in _PARTS if not (pictures and part == "vision_config")]
    names = [part.removesuffix("_config") for part in parts if config.get(part)]
    return " and ".join(names) if names else None


def unserved_notes(
    name: str, parts: str | None, cause: str = "", tower: object = None
) -> list[str]:
    """Return a line for the start about the parts that `parts_beside_text` found in a model.

    cause: the reason why the parts are not read.
    tower: its tower for pictures; None = it reads texts only.
    """
    if parts is None:
        return []
    if tower is not None:
        return [
            f"{name} reads texts and pictures: its part for {parts} is not read, and requests with "
            "sound are refused"
        ]
    reason = f" ({cause})" if cause else ""
    return [
        f"{name} is served as a text model: its part for {parts} is not read{reason}, and requests "
        "with pictures or sound are refused"
    ]
