"""ModelContext: one served model, and whether it can serve requests now."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cpuserve.base.version import version
from cpuserve.config.engine import EMBEDDINGS
from cpuserve.core.admission import ANY_ROWS, Limits
from cpuserve.serving.calls.call import MAX_LOGPROBS
from cpuserve.serving.media.reader import MediaReader, MediaRules
from cpuserve.serving.models.details import ModelDetails
from cpuserve.serving.models.kept_responses import KeptResponses
from cpuserve.serving.models.limits import Backlog, ClientLimits
from cpuserve.serving.models.load_progress import LoadProgress, load_message
from cpuserve.serving.models.next_turns import NextTurns
from cpuserve.serving.models.recent_prompts import Decode, RecentPrompts
from cpuserve.serving.models.tasks import Task
from cpuserve.serving.tools.learn import NO_TEMPLATE, LearnedFormat, learn_format
from cpuserve.serving.tools.thoughts import USUAL, ThoughtUse
from cpuserve.tokenizer.infill import InfillTokens
from cpuserve.tokenizer.pairs import PairEncoder

if TYPE_CHECKING:
    from cpuserve.engine.client import EngineClient
    from cpuserve.metrics.server import ServerMetrics
    from cpuserve.serving.models.preset import Preset
    from cpuserve.serving.tools.base import ToolFormat
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class ActiveCount:
    """The sequences that run or wait, for a model and the created models that share its engine."""

    sequences: int = 0


@dataclass(slots=True)
class ModelContext:
    """One served model: its engine's client, tokenizer, template, limits, backlog and defaults.

    default_sampling: the sampling parameters of requests that do not set them.
    tokenizer: None until it is loaded.
    loading, failed: the progress of loading, and the reason why the engine is gone;
      see `unavailable`.
    learned_format: how the model writes tool calls and thoughts.
    shown_ids: the special tokens around tool calls and thoughts, which the parser needs as text.
    own_marks: the texts of all control tokens around tool calls and thoughts.
    fills_in: whether the model has tokens for fill-in-the-middle.
    kv_bytes: the most bytes of memory that the KV cache may take.
    pooling: how the model makes embeddings (see EngineConfig.pooling).
    vector_width: the number of values in an embedding.
    adapters: the path of each LoRA adapter, by the name that requests use as their model.
    adapters_change: whether clients may load and unload adapters, which needs `adapter_lock`.
    default_adapter, default_scale: the adapter of requests that select none, and its scale.
    tasks: the tasks that have adapters in the checkpoint.
    any_name: whether requests may use any name for this model.
    details: facts about the model's files.
    media: reads the media of requests; None = the model reads text only.
    media_rules: the rules of the server for media.
    recent: the prompts of the last requests; None = prefixes are not cached.
    kept: has the tokens of responses in files; None = they are not kept after a restart.
    turns: computes next turns of conversations in advance; None = nobody does.
    preset: the texts and parameters of a created model.
    files_fingerprint: differs if the model's files or settings differ; "" = not computed.
    """

    client: EngineClient
    metrics: ServerMetrics
    model_names: tuple[str, ...]
    max_model_len: int
    limits: ClientLimits = field(default_factory=ClientLimits)
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    learned_format: LearnedFormat = NO_TEMPLATE
    shown_ids: frozenset[int] = frozenset()
    own_marks: frozenset[str] = frozenset()
    fills_in: bool = False
    bounds: Limits = field(default_factory=lambda: Limits(0, 0, 0))
    build: str = ""
    loading: LoadProgress = field(default_factory=LoadProgress)
    ready: bool = False
    failed: str | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    begun: float = field(default_factory=time.monotonic)
    load_s: float = 0.0
    active: ActiveCount = field(default_factory=ActiveCount)
    kv_bytes: int = 0
    pooling: str = "none"
    adapters: dict[str, str] = field(default_factory=dict)
    default_adapter: str | None = None
    default_scale: float = 1.0
    tasks: dict[str, Task] = field(default_factory=dict)
    adapters_change: bool = False
    thoughts: ThoughtUse = USUAL
    adapter_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    vector_width: int = 0
    any_name: bool = False
    details: ModelDetails = field(default_factory=ModelDetails)
    pairs: PairEncoder | None = None
    media: MediaReader | None = None
    media_rules: MediaRules = field(default_factory=MediaRules)
    recent: RecentPrompts | None = None
    kept: KeptResponses | None = None
    turns: NextTurns | None = None
    preset: Preset | None = None
    files_fingerprint: str = ""
    backlog: Backlog = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.backlog = Backlog(
            limits.max_queued_requests,
            limits.max_queued_tokens,
            lambda: self.client.stats.prompt_rate,
            slots=limits.slots,
        )

    def set_ready(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        learned_format: LearnedFormat | None = None,
    ) -> None:
        """Make the endpoints available, after tokenizer and engine are loaded.

        learned_format: how the template writes thoughts and tool calls; None = find it out now.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.learned_format = learned_format or learn_format(chat_template)
        self.shown_ids = self.learned_format.shown_ids(tokenizer)
        self.own_marks = self.learned_format.own_marks(tokenizer)
        self.fills_in = InfillTokens.of(tokenizer) is not None
        info = self.client.info

        def number(name: str, otherwise: int) -> int:
            value = info.get(name)
            return value if isinstance(value, int) else otherwise

        ends, media_rows = info.get("eos_ids"), info.get("media_rows")
        # The model's vocabulary may be larger than the tokenizer's; all of its ids are valid.
        self.bounds = Limits(
            self.max_model_len,
            number("kv_tokens", self.max_model_len),
            number("vocab_size", tokenizer.vocab_size),
            number("max_top", MAX_LOGPROBS),
            frozenset(ends if isinstance(ends, list) else ()),
            number("max_num_batched_tokens", ANY_ROWS),
            media_rows if isinstance(media_rows, dict) else {},
        )
        if info.get("prefix_caching", True) and self.pooling == "none":
            self.recent = RecentPrompts()
        if self.bounds.media_rows and (self.pooling == "none" or self.embeds):
            self.media = MediaReader.of(
                self.details.path, self.details.mmproj, tokenizer, self.media_rules
            )
        self.vector_width = number("width", 0)
        self.load_s = time.monotonic() - self.begun
        self.ready = True

    async def close(self) -> None:
        """End the engines and processes, and write the responses that wait for the disk."""
        await self.client.close()
        if self.tokenizer is not None:  # it may have processes of its own (tokenizer/limited)
            await asyncio.to_thread(self.tokenizer.unload)
        if self.kept is not None:
            await self.kept.close()

    def unavailable(self) -> str | None:
        """Return why requests cannot be answered now, or None if they can."""
        if self.failed is not None:
            return self.failed
        if not self.ready:
            return load_message(self.loading)
        if not self.client.alive:
            return self.client.trouble
        return None

    @property
    def active_sequences(self) -> int:
        """How many sequences of requests run or wait."""
        return self.active.sequences

    @active_sequences.setter
    def active_sequences(self, count: int) -> None:
        if self.turns is not None:
            self.turns.count(count - self.active.sequences)
        self.active.sequences = count

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None = no or an unknown format."""
        return self.learned_format.calls

    @property
    def sees(self) -> bool:
        """Whether the model reads images, and so the pages of documents."""
        return self.media is not None and "image" in self.media.kinds

    @property
    def embeds(self) -> bool:
        """Whether the model makes embeddings."""
        return self.pooling in EMBEDDINGS

    @property
    def labels(self) -> list[str]:
        """The labels of a classifier, in the order of its outputs; [] for other models."""
        found = self.client.info.get("labels")
        return found if isinstance(found, list) else []

    @property
    def class_activation(self) -> str:
        """The activation of the logits of a classifier; see class_activation in loader."""
        return str(self.client.info.get("activation", "none"))

    @property
    def token_widths(self) -> dict[str, int]:
        """How many numbers each head of BGE-M3 computes for a token, by the head's name.

        The head "weights" computes one number for a token, and the head "multi" a vector.
        """
        found = self.client.info.get("token_widths")
        return found if isinstance(found, dict) else {}

    @property
    def abilities(self) -> list[str]:
        """The model's capabilities in Ollama's words; [] if Ollama has no word for them."""
        if self.pooling != "none":
            return ["embedding"] if self.embeds else []
        able = {
            "insert": self.fills_in,
            "tools": self.tool_format is not None,
            "thinking": self.learned_format.thinks,
            "vision": self.sees,
        }
        return ["completion", *(word for word, can in able.items() if can)]

    @property
    def reads_effort(self) -> bool:
        """Whether the chat template reads reasoning_effort."""
        source = self.chat_template.tool_source if self.chat_template is not None else None
        return "reasoning_effort" in (source or "")

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint: equal for servers with equal seeded responses."""
        facts = "|".join((version(), self.model_names[0], self.build))
        return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10]

    def get_chat_template(self) -> ChatTemplate:
        """Return the model's chat template; call check_available first."""
        assert self.chat_template is not None
        return self.chat_template

    def get_pairs(self) -> PairEncoder:
        """Return the encoder of pairs of texts; call check_available first."""
        if self.pairs is None:
            mask = self.get_chat_template().mask
            self.pairs = PairEncoder.of(self.get_tokenizer(), self.client.info, mask)
        return self.pairs

    @property
    def decoder(self) -> Decode:
        """A function that decodes tokens to text, with the texts of special tokens."""
        return partial(self.get_tokenizer().decode, skip_special_tokens=False)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; call check_available first."""
        assert self.tokenizer is not None
        return self.tokenizer
