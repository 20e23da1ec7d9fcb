"""The fingerprint of a model with its settings: engines with equal ones can share KV blocks.

The front end imports this module as well, so it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.base.version import version
from cpuserve.loader.source_digest import samples_of, weight_files

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig

# Increment this number if a new version stores the same keys and values as different bytes.
KV_FORM = 3
# Settings that can change the bytes of the keys and values of given tokens.
SETTINGS = (
    "architecture",
    "dtype",
    "activation_bits",
    "quantize",
    "tower_quantize",
    "long_rope",
    "kv_dtype",
    "block_size",
    "executor",
    "model_impl",
    "isa",
)

# The ends of the names of the files that a fingerprint follows.
_OF_MODEL = (".safetensors", ".json", ".gguf")
_OF_TOKENIZER = (".json", ".txt", ".gguf", ".model")


def fingerprint(config: EngineConfig, sizes: tuple[int, ...]) -> bytes:
    """Return 32 bytes that differ if engines have other keys, values or states for a token.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    facts = {
        "version": version(),
        "kv_form": KV_FORM,
        "sizes": sizes,
        "groups": [group.layers for group in config.kv_groups],
        "files": _files(Path(config.model_path), config.mmproj),
        **{name: getattr(config, name) for name in SETTINGS},
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).digest()


def head_fingerprint(config: EngineConfig, size: int) -> bytes:
    """Return 32 bytes that differ if heads of a model with this `fingerprint` have other keys.

    size: bytes of a block of the head.
    """
    draft = config.draft
    assert draft is not None, "there is no head"
    facts = {
        "size": size,
        "architecture": draft.architecture,
        "quantize": draft.quantize,
        "layers": draft.layers,
        # The fingerprint of the model covers the files of the model.
        "files": _files(Path(draft.path)) if draft.path != config.model_path else [],
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).digest()


def tokenizer_fingerprint(path: str) -> bytes:
    """Return 32 bytes that differ if tokenizers make other tokens; path: its directory or file.

    The tokenizer may be elsewhere than the model, and a model without tokenizer.json has its
    merges in a .txt file, which `fingerprint` does not read: it is about given tokens.
    """
    found = _files(Path(path).expanduser(), kinds=_OF_TOKENIZER)
    return hashlib.sha256(msgspec.json.encode([path, found])).digest()


def _files(
    path: Path, mmproj: str | None = None, kinds: tuple[str, ...] = _OF_MODEL
) -> list[tuple[str, int, int, str]]:
    """Return (name, bytes, time of change, hash of samples) of each file of the model.

    Name, size and time are not enough: fine-tunes of one model have equal ones if a container image
    or an archive has set all times to one value.

    Raises:
        ModelError: a file cannot be read.
    """
    try:
        fault("fingerprint.read")
        files = sorted(path.glob("*")) if path.is_dir() else weight_files(path, mmproj)
        found = [(file, file.stat()) for file in files if file.suffix in kinds and file.is_file()]
        return [
            (file.name, status.st_size, status.st_mtime_ns, samples_of(file, status.st_size))
            for file, status in found
        ]
    except OSError as error:
        msg = f"{error.filename or path} cannot be read: {error.strerror or error}"
        raise ModelError(msg) from error
