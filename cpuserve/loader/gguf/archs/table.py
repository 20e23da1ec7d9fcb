"""The architectures of GGUF files: for each its model family, tensors and metadata.

To add an architecture, add an entry to ARCHS in the file of its family, or to the record (`gguf`)
of a family with a folder.
Tensors and keys follow the gguf package and the llama.cpp converters.
tests/loader/test_gguf_archs.py writes a file of each architecture and reads it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.base.registry import imported
from cpuserve.config.nearest import nearest_and_all
from cpuserve.loader.gguf.archs import (
    baichuan,
    deepseek,
    encoders,
    gemma,
    gpt,
    granite,
    hybrids,
    llama_like,
    minimax,
    qwen,
    qwen4,
)
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys
from cpuserve.models import FAMILIES, gguf_of_plugin

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile

# The model_type in transformers that can run the safetensors of the same model, but slowly.
THROUGH_TRANSFORMERS = {
    "hrm_text": "hrm_text",
}
_DIFFUSION = "it generates by diffusion, not token by token. Qwen3 and Llama run"
_PICTURES = "it is for images or sound, and cpuserve reads texts. Gemma 3, Qwen3 and Qwen3.5 run"
_PAIR = "it is of an encoder-decoder. Decoders such as Qwen3 and encoders such as EuroBERT run"
_SPEECH = "it makes or reads speech: use a server for speech"
REASONS = {
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("clip", "chameleon", "cogvlm", "deepseek2-ocr", "hunyuan_vl"), _PICTURES),
    **dict.fromkeys(("pockettts", "qwen3tts", "wavtokenizer-dec"), _SPEECH),
    "eagle3": (
        "it is an EAGLE-3 head, which guesses tokens for another model: give that model, and the "
        "safetensors of the head with "
        """--speculative-config '{"method": "eagle3", "model": HEAD}'"""
    ),
    "dflash": (
        "it guesses tokens for another model: give that model. Its own head, an EAGLE-3 head or a "
        "draft model can guess for it (--speculative-config)"
    ),
    "t5": _PAIR,
    "neo-bert": "transformers has nothing to compare it with. ModernBERT and EuroBERT run",
    "gptj": "give the safetensors of the model, which run",
    "dots3note": "of its kind, dots.llm1, DeepSeek V3.2 and GLM-5 run",
    "graniteswitch": (
        "its tokens choose among adapters in the file. Granite 3, 4 and SWA run, and a request can "
        "choose an adapter of its own (--lora-modules)"
    ),
    "jais": "of its kind, GPT-2 runs",
    "qwen": "of its kind, Qwen2, Qwen3 and Qwen3.5 run",
    **dict.fromkeys(
        (
            *("arctic", "codeshell", "deci", "grok", "grovemoe", "maincoder"),
            *("openelm", "plamo", "plamo2", "plamo3", "plm"),
            *("refact", "smallthinker", "maple", "spark2_5", "talkie"),
        ),
        "transformers has no such family. Dense models such as Llama and Qwen3, mixtures such as "
        "Qwen3-MoE, and hybrids such as Falcon-H1 run",
    ),
}


def why_refused(name: str) -> str | None:
    """Return why files of this architecture are refused; None if the architecture is unknown."""
    if name in THROUGH_TRANSFORMERS:
        return (
            "give the safetensors of the model, which run through transformers, slowly "
            "(pip install 'cpuserve[torch]')"
        )
    return REASONS.get(name) or FAMILIES.refused_gguf.get(name)


ARCHS: dict[str, GgufArch] = {
    **encoders.ARCHS,
    **llama_like.ARCHS,
    **baichuan.ARCHS,
    **minimax.ARCHS,
    **qwen.ARCHS,
    **qwen4.ARCHS,
    **gemma.ARCHS,
    **granite.ARCHS,
    **deepseek.ARCHS,
    **gpt.ARCHS,
    **hybrids.ARCHS,
    **{name: imported(place) for name, place in FAMILIES.gguf.items()},
}


def find(name: str) -> GgufArch | None:
    """Return the entry of an architecture: built-in or of a plug-in; else None.

    Raises ModelError if plug-ins claim the architecture but none of them can serve it.
    """
    if name not in ARCHS and why_refused(name) is None:
        place = gguf_of_plugin(name)
        if place is not None:
            ARCHS[name] = imported(place)
    return ARCHS.get(name)


def arch_of(file: GgufFile) -> tuple[Keys, GgufArch]:
    """Return the metadata of a file, and the entry of its architecture.

    Raises:
        ModelError: the architecture has no entry; the message lists what runs instead.
    """
    name = file.value("general.architecture")
    if isinstance(name, str) and (reason := why_refused(name)) is not None:
        msg = f"GGUF {file.path}: architecture {name!r} is not supported: {reason}"
        raise ModelError(msg)
    arch = find(name) if isinstance(name, str) else None
    if arch is None:
        names = {known: known for known in ARCHS}
        others = nearest_and_all(str(name)[:60].lower(), names, "cpuserve models --supported")
        msg = f"GGUF {file.path}: architecture {name!r:.60} is not supported; {others}"
        raise ModelError(msg)
    keys = Keys(file, str(name), mixed=arch.mixed, guesses=arch.guesses)
    return keys, arch.variant(arch, keys)
