"""Platform: the interface that turns requested options and the host into one EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cpuserve.config.engine import Resolved
from cpuserve.config.options import EngineOptions
from cpuserve.platforms.host import Host


@dataclass(frozen=True, slots=True)
class KvLayerFacts:
    """The shape of keys and values of one attention layer.

    window: the most keys that a token sees (0 = all keys).
    latent: whether the stored keys serve as the values as well (MLA).
    joined: whether the layer is in the cache group of the layer before it.
    """

    kv_heads: int
    head_dim: int
    window: int = 0
    latent: bool = False
    joined: bool = False


NOUN = "picture"  # an item that towers encode, in texts for users


@dataclass(frozen=True, slots=True)
class TowerFacts:
    """The numbers of a tower, which encodes the media of a model.

    row_bytes: bytes of a row of an encoded item.
    step_bytes: bytes of memory that a step of the tower needs besides the weights.
    most_rows: the most rows that a tile becomes.
    page_rows, page_tiles, page_operations: the rows, the tiles, and the additions and
      multiplications of a page of 1275 x 1650 pixels.
    span: the tokens of an item that see each other in both directions, so that one step has them;
      0 = a token sees no later token.
    most_tokens: the most tokens of an item, as requested; 0 = as the model says.
    weights: the number of weights in all tensors.
    """

    row_bytes: int
    step_bytes: int
    most_rows: int
    page_rows: int
    page_tiles: int
    page_operations: int
    span: int = 0
    most_tokens: int = 0
    weights: int = 0

    @property
    def span_note(self) -> str:
        """The meaning of a span for other streams, for the decision on the media buffer."""
        if not self.span:
            return ""
        return (
            f"; the {self.span} tokens of a {NOUN} see each other, so one step computes them, and "
            "other streams wait for this step"
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that a platform needs: numbers and texts, no tensors.

    name: the model as the user requested it.
    dtype: the type of the checkpoint ("bfloat16", "float16", "float32").
    quantization: the weight format of a quantized checkpoint ("gguf Q4_1"); None = not quantized.
    two_terms: whether matrices of the checkpoint can multiply activations of two int8 terms.
    fixed_positions: whether no request can be longer than max_position,
      for example because positions are a learned table.
    weight_bytes: bytes of all tensors in the files.
    table_bytes: bytes of tables that are not packed, because their rows are looked up in the files.
    matrix_weights: number of weights in all matrices,
      a tied matrix counted once (0 without a Program).
    expert_weights: number of weights in all experts of a mixture.
    chosen_weights: number of weights in the experts that one token is routed to.
    largest_expert: number of weights in the largest expert: all of its matrices.
    expert_misses: the shares of their uses of experts that earlier requests would have missed if
      0, 1 .. 100 % of the experts were in memory; () = the model was not run with a pool of them.
    expert_rate: bytes/s at which the disk gave experts at the last start.
    activation_width: floats of scratch memory for each token of a step.
    selected_floats: floats of the keys and values that a thread copies, if tokens read only some.
    has_program: whether cpuserve implements the architecture.
    generation: sampling parameters that the model recommends.
    generation_why: the source of `generation`.
    state_bytes: bytes that recurrent layers store for a sequence.
    adapters, adapter_slots, adapter_rank, pooling, whole_prompts: the fields of EngineConfig.
    adapter_weights: number of weights in the matrices of all adapters or adapter slots.
    usual_length: the number of tokens that sentence-transformers truncates texts to;
      None = the number of positions.
    own_head: whether the output matrix differs from the embeddings, although the config ties them.
    rope_original: the longest sequence for the short factors of a LongRoPE or dynamic NTK; else 0.
    rope_columns: number of rotated columns of all RoPE tables together.
    vocab: the number of logits; 0 = no logits.
    barriers: number of thread barriers in a step of one token (0 without a Program).
    family: `model_type` of the config.
    parameters: number of weights in all tensors, without adapters (0 without a Program).
      Lists of models show `family` and `parameters` to clients.
    unserved: the parts of the model that cpuserve does not run, such as "vision and audio".
    unread_why: why media are not read, although the model has a tower; "" = another reason.
    mmproj: the file with the tower of a model in a GGUF file.
    tower: the tower of a model that reads media.
    draft: the model that guesses tokens for this one; None = there is no such model.
    drafter: the kind of drafter that this is for its model (config.speculation.KINDS); "" = none.
    layers: the layers of the model that the head reads the inputs of (EAGLE-3).
    caches: the KV layers of the model that the head reads (assistants).
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
    two_terms: bool = False
    expert_weights: int = 0
    chosen_weights: int = 0
    largest_expert: int = 0
    expert_misses: tuple[float, ...] = ()
    expert_rate: float = 0.0
    fixed_positions: bool = False
    selected_floats: int = 0
    generation: Mapping[str, int | float] = field(default_factory=dict)
    generation_why: str = "the model recommends nothing"
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_slots: int = 0
    adapter_rank: int = 0
    adapter_weights: int = 0
    state_bytes: int = 0
    pooling: str = "none"
    pooling_why: str = "the model generates text"
    whole_prompts: bool = False
    usual_length: int | None = None
    rope_original: int = 0
    own_head: bool = False
    table_bytes: int = 0
    rope_columns: int = 0
    vocab: int = 0
    barriers: int = 0
    family: str = ""
    parameters: int = 0
    unserved: str | None = None
    unread_why: str = ""
    mmproj: str | None = None
    tower: TowerFacts | None = None
    draft: ModelFacts | None = None
    drafter: str = ""
    layers: tuple[int, ...] = ()
    caches: tuple[int, ...] = ()

    @property
    def media_span(self) -> int:
        """The most tokens of an item that one step must have; 0 = a step may cut an item."""
        return 0 if self.tower is None else self.tower.span

    @property
    def media_tokens(self) -> int:
        """The most tokens of an item, as requested; 0 = as the model says."""
        return 0 if self.tower is None else self.tower.most_tokens


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a platform on one host.

    isa_level: the ISA level that models run at.
    isa_level_means: a sentence about this level.
    dtypes: the possible types of weights.
    quantizations: the possible formats of checkpoints, and schemes for quantization at load.
    attention: the default attention kernel.
    """

    isa_level: str
    isa_level_means: str
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    attention: str


@runtime_checkable
class Platform(Protocol):
    """A way to run models on a machine; plug-ins use the entry point cpuserve.platforms.

    The entry point refers to an object, or to a class that needs no arguments.
    """

    name: str
    device_type: str

    def probe(self) -> tuple[bool, str]:
        """Return (whether this platform can run here, the reason for it). Never raises."""

    def host(self) -> Host:
        """Return the description of the machine, which is read once."""

    def capabilities(self, host: Host) -> Capabilities:
        """Return the abilities of the platform on `host`. A pure function."""

    def kernels(self, isa: str) -> Mapping[str, str]:
        """Return kernel name -> ISA level of its code, for an engine at the level `isa`."""

    def resolve(
        self, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
    ) -> Resolved:
        """Decide every setting. Pure. Raises ConfigError if a requested value is not possible."""
