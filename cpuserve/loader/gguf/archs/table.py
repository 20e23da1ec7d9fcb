"""The architectures of GGUF files: for each its model family, tensors and metadata.

To add an architecture, add an entry to ARCHS in the file of its family.
Tensors and keys follow the gguf package and the llama.cpp converters.
tests/loader/test_gguf_archs.py writes a file of each architecture and reads it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.config.nearest import nearest_and_all
from cpuserve.errors import ModelError
from cpuserve.loader.gguf.archs import (
    deepseek,
    encoders,
    falcon_h1,
    gemma,
    gpt,
    granite,
    lfm2,
    llama,
    llama_like,
    mistral,
    nemotron_h,
    qwen,
)
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.archs.refused import why_refused
from cpuserve.loader.gguf.keys import Keys

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile

ARCHS = {
    **encoders.ARCHS,
    **llama.ARCHS,
    **qwen.ARCHS,
    **gemma.ARCHS,
    **granite.ARCHS,
    **lfm2.ARCHS,
    **deepseek.ARCHS,
    **gpt.ARCHS,
    **llama_like.ARCHS,
    **mistral.ARCHS,
    **nemotron_h.ARCHS,
    **falcon_h1.ARCHS,
}


def arch_of(file: GgufFile) -> tuple[Keys, GgufArch]:
    """Return the metadata of a file, and the entry of its architecture.

    Raises:
        ModelError: the architecture has no entry; the message lists what runs instead.
    """
    name = file.value("general.architecture")
    if isinstance(name, str) and (why := why_refused(name)) is not None:
        msg = f"GGUF {file.path}: architecture {name!r} is not supported: {why}"
        raise ModelError(msg)
    if not isinstance(name, str) or name not in ARCHS:
        names = {known: known for known in ARCHS}
        others = nearest_and_all(str(name)[:60].lower(), names, "cpuserve models --supported")
        msg = f"GGUF {file.path}: architecture {name!r:.60} is not supported; {others}"
        raise ModelError(msg)
    if name == "llama" and file.value("llama.expert_count"):
        return Keys(file, name), llama.MIXTRAL
    if name == "falcon" and "blk.0.attn_norm_2.weight" in file.tensors:
        return Keys(file, name), gpt.FALCON_TWO_NORMS
    return Keys(file, name, mixed=ARCHS[name].mixed), ARCHS[name]
