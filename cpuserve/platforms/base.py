"""Platform: a pure function from what was asked and what the host is to one frozen EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cpuserve.config.engine import EngineOptions, Resolved
from cpuserve.platforms.host import Host


@dataclass(frozen=True, slots=True)
class KvLayerFacts:
    """KV geometry of one attention layer; window: keys a token sees at most (0 = all)."""

    kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a platform needs to know about a model: numbers and names, no tensors.

    name: as the user called it. dtype: the checkpoint's ("bfloat16", "float16", "float32");
    quantization: its weight format where it has one ("gguf Q4_1"). fixed_positions: a learned table
    holds max_position. weight_bytes: tensor bytes in the files; matrix_weights: how many weights
    the matrices have, a tied one counted once (0 without a program). activation_width: floats of
    scratch one token of a step needs. has_program: cpuserve knows the architecture. generation:
    sampling parameters the model recommends; generation_why: by whom and why.
    """

    name: str
    path: str
    tokenizer_path: str
    architecture: str
    dtype: str
    quantization: str | None
    max_position: int
    kv_layers: tuple[KvLayerFacts, ...]
    weight_bytes: int
    activation_width: int
    has_program: bool = True
    matrix_weights: int = 0
    fixed_positions: bool = False
    generation: Mapping[str, int | float] = field(default_factory=dict)
    generation_why: str = "the model recommends nothing"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a platform can do on one host.

    tier: its performance class in a word, with what that means in a sentence. dtypes: types weights
    may be kept in; quantizations: checkpoint formats and schemes; attention: the default kernel.
    """

    tier: str
    tier_means: str
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    attention: str


@runtime_checkable
class Platform(Protocol):
    """One way to run models on a machine; out-of-tree ones use entry point cpuserve.platforms.

    An entry point names a class without arguments or an object.
    """

    name: str
    device_type: str

    def probe(self) -> tuple[bool, str]:
        """Whether this platform can run here, and the reason either way. Never raises."""

    def host(self) -> Host:
        """The machine, read once."""

    def capabilities(self, host: Host) -> Capabilities:
        """What can be asked for on `host`; pure."""

    def kernels(self, isa: str) -> Mapping[str, str]:
        """Kernel name -> the level that provides it when `isa` is the level."""

    def resolve(
        self, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
    ) -> Resolved:
        """Every setting decided; pure. ConfigError where something asked cannot be honoured."""
