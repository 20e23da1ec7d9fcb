"""A decoder as a row of a table: what sets a family apart from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_int, read_windows
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import AS_PROGRAM, BuiltTensors, StoredNames
from cpuserve.program.builder import Builder

Config = Mapping[str, Any]
# Whether matrices have biases: always or never, or as a key of the config says, with its default.
Bias = bool | tuple[str, bool]

ATTENTION_BIAS: Bias = ("attention_bias", False)
MLP_BIAS: Bias = ("mlp_bias", False)


def as_it_is(config: Config) -> Config:
    """Return the config."""
    return config


def no_arguments(_config: Config) -> dict[str, Any]:
    """Return no further arguments."""
    return {}


def as_read(spec: ModelSpec, _config: Config) -> ModelSpec:
    """Return the spec."""
    return spec


@dataclass(frozen=True)
class DecoderRow:
    """A family with the config of Llama and layers of a shared builder: a ModelDef.

    about: what sets it apart, for `cpuserve models`, and the source.
    positions: the default of max_position_embeddings.
    layers: appends its operations, such as `build_decoder` with other parts of a layer.
    leave: tensors of its files that nothing reads.
    prepare: checks the config, and returns the one to read.
    defaults: values of keys that the config lacks.
    null_defaults: values of keys that the config lacks, or that are null.
    overrides: values of keys, whatever the config says.
    activation: the only hidden_act, which MLPs of `layers` have; "" = any of `read_decoder`.
    bias: of queries, keys and values; out_bias: after attention, by default as `bias`.
    eps: the key of the epsilon of norms.
    read_arguments: reads further arguments of `read_decoder`.
    finish: changes what `read_decoder` returned.
    stored: how files call its tensors.
    built: returns the tensors that are built from others, for a config; None: there are none.
    """

    about: str
    _: KW_ONLY
    positions: int
    layers: Callable[[Builder, ModelSpec], None] = build_decoder
    leave: tuple[str, ...] = ()
    prepare: Callable[[Config], Config] = as_it_is
    defaults: Config = field(default_factory=dict)
    null_defaults: Config = field(default_factory=dict)
    overrides: Config = field(default_factory=dict)
    activation: str = ""
    bias: Bias = False
    out_bias: Bias | None = None
    mlp_bias: Bias = False
    eps: str = "rms_norm_eps"
    read_arguments: Callable[[Config], dict[str, Any]] = no_arguments
    finish: Callable[[ModelSpec, Config], ModelSpec] = as_read
    stored: StoredNames = AS_PROGRAM
    built: Callable[[Config], BuiltTensors | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)

    def spec(self, config: Config) -> ModelSpec:
        """Return the hyperparameters in a config of the family; ModelError for an invalid value."""
        config = {**self.defaults, **self.prepare(config)}
        config |= {
            key: value for key, value in self.null_defaults.items() if config.get(key) is None
        }
        overrides = dict(self.overrides)
        if self.activation:
            read_choice(config, "hidden_act", self.activation, {self.activation: self.activation})
            overrides["hidden_act"] = "silu"
        spec = read_decoder(
            {**config, **overrides},
            positions=self.positions,
            qkv_bias=_read_bias(config, self.bias),
            out_bias=_read_bias(config, self.bias if self.out_bias is None else self.out_bias),
            mlp_bias=_read_bias(config, self.mlp_bias),
            eps=self.eps,
            **self.read_arguments(config),
        )
        return self.finish(spec, config)

    def build(self, b: Builder, s: ModelSpec) -> None:
        """Append the operations of a model with hyperparameters `s` to its builder `b`."""
        if self.leave:
            b.leave(self.leave)
        self.layers(b, s)


@dataclass(frozen=True)
class FamilyRow:
    """A family with a reader of its own and layers of a shared builder: a ModelDef.

    about: what sets it apart, for `cpuserve models`, and the source.
    spec: returns the hyperparameters in a config of the family; ModelError for an invalid value.
    build: appends its operations.
    stored: how files call its tensors.
    """

    about: str
    spec: Callable[[Config], ModelSpec]
    build: Callable[[Builder, ModelSpec], None]
    stored: StoredNames = AS_PROGRAM

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)


def _read_bias(config: Config, bias: Bias) -> bool:
    return bias if isinstance(bias, bool) else read_bool(config, *bias)


def when_empty(**values: object) -> Callable[[Config], Config]:
    """Return a `prepare` that sets keys that are missing, null or 0 in the config."""
    return lambda config: {**config, **{key: config.get(key) or v for key, v in values.items()}}


def with_head_dim(default: int) -> Callable[[Config], Config]:
    """Return a `prepare` that sets head_dim if it is missing or null, at any width."""
    return lambda config: {**config, "head_dim": read_int(config, "head_dim", default)}


def read_roped_windows(config: Config, window: int, default: Callable[[int], bool]) -> SpecParts:
    """Return the window of each layer (`read_windows`); layers without a window have no RoPE."""
    windows = read_windows(config, window, default)
    return {"windows": windows, "no_rope": tuple(i for i, keys in enumerate(windows) if not keys)}


def without_nulls(config: Config) -> dict[str, Any]:
    """Return the config without the keys that are null, so that they get their defaults."""
    return {key: value for key, value in config.items() if value is not None}
