"""Models of other kinds than cpuserve serves, by their config.json: their kind, and the ways out.

The lists have model types of transformers and architectures outside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
_PARTS = ("vision_config", "audio_config")


def other_kind(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return the kind of a model that generates no text as a decoder, and the way out.

    None: its config.json shows no such kind.
    """
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
    if kind in _PICTURES or architecture.endswith(_PICTURE_ENDS):
        return (
            "is a model of images, and cpuserve reads and writes texts: transformers, or a server "
            "such as Infinity, runs it"
        )
    return None


def parts_beside_text(config: Mapping[str, Any]) -> str | None:
    """Return a text about the parts of a model for images or sound; None if it has only text."""
    found = [part.removesuffix("_config") for part in _PARTS if config.get(part)]
    return " and ".join(found) if found else None
