"""The tiers behind the KV cache of one engine: further memory, and files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cpuserve.config.engine import PREFIX_CACHE_QUEUE_BYTES
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.swap import Data, SwapSpace
from cpuserve.core.kv.tiers import Tiers
from cpuserve.ids import BlockId
from cpuserve.log import get_logger
from cpuserve.version import version

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.runtime.executor import Executor

# Raised where a version comes to store the same keys and values as other bytes.
KV_FORM = 2
# What can change the bytes of the keys and values of given tokens.
SETTINGS = (
    "architecture",
    "dtype",
    "activation_bits",
    "quantize",
    "kv_dtype",
    "block_size",
    "executor",
    "model_impl",
    "isa",
)

# Half a mebibyte of each file, in under a millisecond once it has been loaded.
SAMPLES, SAMPLE_BYTES = 32, 16 << 10

log = get_logger("engine")


class ExecutorBlocks:
    """BlockBytes of an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._executor.kv_block_bytes

    def read(self, block: BlockId) -> Data:
        """A copy of what `block` holds."""
        return self._executor.read_blocks(np.array([block], np.int32)).reshape(-1).data

    def write(self, block: BlockId, data: Data) -> None:
        """Fill `block`."""
        rows = np.frombuffer(data, np.uint8).reshape(1, -1)
        self._executor.write_blocks(np.array([block], np.int32), rows)


def make_tiers(config: EngineConfig, executor: Executor) -> Tiers | None:
    """What `config` asks for; None if that is nothing. A directory that fails costs a warning."""
    if not config.enable_prefix_caching:
        return None
    blocks = ExecutorBlocks(executor)
    swap = disk = None
    if swapped := config.swap_bytes // blocks.block_bytes:
        swap = SwapSpace(swapped)
    if config.prefix_cache_dir is not None:
        directory = Path(config.prefix_cache_dir).expanduser()
        try:
            disk = DiskCache(
                directory,
                fingerprint(config, blocks.block_bytes),
                blocks.block_bytes,
                config.prefix_cache_bytes,
                PREFIX_CACHE_QUEUE_BYTES,
                config.frontend_cpus or config.cpus or (),
            )
        except OSError as error:
            log.warning("the prefix cache directory cannot be used: %s", error)
    return Tiers(blocks, swap, disk) if swap is not None or disk is not None else None


def fingerprint(config: EngineConfig, block_bytes: int) -> bytes:
    """32 bytes that differ wherever equal tokens could have other keys and values."""
    facts = {
        "version": version(),
        "kv_form": KV_FORM,
        "block_bytes": block_bytes,
        "files": _files(Path(config.model_path)),
        **{name: getattr(config, name) for name in SETTINGS},
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).digest()


def _files(path: Path) -> list[tuple[str, int, int, str]]:
    """(name, bytes, time of change, hash of samples) of what the model is read from.

    Name, size and time alone are the same for fine-tunes of one model where an image or an archive
    has set all times to one.
    """
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    kinds = (".safetensors", ".json", ".gguf")
    found = [(file, file.stat()) for file in files if file.suffix in kinds and file.is_file()]
    return [
        (file.name, status.st_size, status.st_mtime_ns, _sampled(file, status.st_size))
        for file, status in found
    ]


def _sampled(file: Path, size: int) -> str:
    """A hash of the first bytes of `file`, of its last, and of places between, close enough to have
    some in every layer: a fine-tune may leave most of a model as it was."""
    hashed, last = hashlib.sha256(), max(0, size - SAMPLE_BYTES)
    with file.open("rb", buffering=0) as stream:
        for index in range(SAMPLES + 1):
            stream.seek(last * index // SAMPLES)
            hashed.update(stream.read(SAMPLE_BYTES))
    return hashed.hexdigest()
