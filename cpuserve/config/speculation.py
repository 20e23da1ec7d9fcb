"""Settings of speculative decoding, with the keys of --speculative-config in vLLM."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.base.registry import imported

# `--speculate auto`: few draft tokens, and small indexes. The logits of a step have no more rows
# than without drafts, because steps with many sequences hardly have drafts that pay.
AUTO, NGRAM, DRAFT_MODEL, MTP, EAGLE3 = "auto", "ngram", "draft_model", "mtp", "eagle3"


class DrafterKind(msgspec.Struct, kw_only=True, frozen=True):
    """A kind of drafter: how options ask for it, and which functions know it ("module:function").

    method: its name in --speculative-config.
    aliases: returns its other names, which vLLM has for heads of some families. "": it has none.
    named: whether `model` there names its checkpoint.
    head: whether it reads hidden states of the model, so it needs the native executor.
    facts: takes the facts of the model, its path, the method and the path of the drafter's
      checkpoint (if `named`); returns the facts with the drafter as `draft`, and notes. "": the
      checkpoint is a model, whose own facts it has; a drafter without a checkpoint is not built.
    build: takes EngineParts (engine/speculation/parts.py), returns the Proposer, or None if a head
      that nobody asked for cannot be used. "": it needs no checkpoint (n-grams).
    """

    method: str
    aliases: str = ""
    named: bool = False
    head: bool = False
    facts: str = ""
    build: str = ""


# All kinds of drafters by name. MTP is a head in the checkpoint of the model, or an assistant in
# a checkpoint of its own.
KINDS = {
    "ngram": DrafterKind(method=NGRAM),
    "draft_model": DrafterKind(
        method=DRAFT_MODEL,
        named=True,
        build="cpuserve.engine.speculation.draft_model:build",
    ),
    "mtp": DrafterKind(
        method=MTP,
        aliases="cpuserve.models:mtp_methods",
        head=True,
        facts="cpuserve.loader.speculation.guess_heads:with_head",
        build="cpuserve.engine.speculation.draft_head:build",
    ),
    "eagle3": DrafterKind(
        method=EAGLE3,
        named=True,
        head=True,
        facts="cpuserve.loader.speculation.eagle_heads:with_eagle",
        build="cpuserve.engine.speculation.draft_head:build",
    ),
    "assistant": DrafterKind(
        method=MTP,
        named=True,
        head=True,
        facts="cpuserve.loader.speculation.assistants:with_assistant",
        build="cpuserve.engine.speculation.assistant:build",
    ),
}
AUTO_TOKENS, AUTO_INDEX_BYTES = 7, 4 << 20
# With more draft tokens than this, a step takes more time than the accepted tokens save.
MOST_TOKENS = 64
MOST_LOOKUP = 32
# The indexes of n-grams of all running requests take at most this memory: with the default sizes
# of n-grams, it is enough for ten texts of 128k tokens.
MOST_INDEX_BYTES = 64 << 20


class DraftModelConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of a draft model, where it does not have the settings of the engine's model.

    kv_blocks: the number of its KV blocks.
    max_tokens: the most tokens of its steps.
    kind: its name in KINDS.
    layers: the layers of the engine's model from which an EAGLE-3 head reads.
    caches: an assistant reads the keys of these layers of the engine's model.
    """

    kind: str
    model: str
    path: str
    tokenizer_path: str
    architecture: str
    quantize: str
    kv_blocks: int
    max_tokens: int
    max_model_len: int
    layers: list[int] = []
    caches: list[int] = []


class Speculation(msgspec.Struct, kw_only=True, frozen=True):
    """Propose up to num_speculative_tokens draft tokens for a sequence in each step.

    method "ngram": find an earlier occurrence of the last prompt_lookup_max tokens
    (or fewer, down to prompt_lookup_min) in the sequence, and propose the tokens after it.
    method AUTO: the same, with less memory (`automatic`).
    method "draft_model": the same as AUTO, and the tokens that `model` generates.
    method "mtp": the same as AUTO, where the checkpoint must have a head for it, or the tokens that
    `model` guesses, an assistant.
    method "eagle3": the same as AUTO, and the tokens that the EAGLE-3 head `model` guesses.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    model: str = ""

    @property
    def rows_of_sequence(self) -> int:
        """The most rows that a step samples for a sequence: one more than draft tokens."""
        return 1 + self.num_speculative_tokens

    @property
    def logit_rows(self) -> int:
        """How many rows of a sequence the memory for logits is made for, if all have drafts."""
        return 1 if self.method == AUTO else self.rows_of_sequence

    def indexed_tokens(self, requests: int, longest: int) -> int:
        """Return how many tokens all indexes of n-grams may have together.

        longest: number of tokens of the longest request.
        """
        most = MOST_INDEX_BYTES if self.method == NGRAM else AUTO_INDEX_BYTES
        return min(requests * longest, most // self._token_bytes)

    def index_bytes(self, requests: int, longest: int) -> int:
        """Return the bytes of all indexes of n-grams (csrc/runtime/ngram_index.h)."""
        return self.indexed_tokens(requests, longest) * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """The most bytes of an index for a token of its text.

        There is an entry of 4 bytes for each size of n-grams, 5 of 8 entries of a full table
        are in use, and the tables and the text have space for as many tokens again.
        """
        sizes = self.prompt_lookup_max - self.prompt_lookup_min + 1
        return 2 * (4 + -(-4 * 8 * sizes // 5))


def automatic() -> Speculation:
    """Return the settings of `--speculate auto`."""
    return Speculation(
        method=AUTO,
        num_speculative_tokens=AUTO_TOKENS,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
    )


def read_speculation(values: Mapping[str, object]) -> Speculation:
    """Return the settings; if only one of prompt_lookup_max and _min is set, it sets both.

    Raises a ValueError for an unknown name or a value that is not supported.
    """
    known = Speculation.__struct_fields__
    if unknown := [name for name in values if name not in known]:
        names = ", ".join(map(repr, unknown[:8]))
        msg = f"unknown setting {names}; supported: {', '.join(known)}"
        raise ValueError(msg)
    model = values.get("model") or ""
    method = values.get("method") or (DRAFT_MODEL if model else None)
    if isinstance(method, str) and not any(kind.method == method for kind in KINDS.values()):
        method = _by_alias(method)
    methods = list(dict.fromkeys(f'"{kind.method}"' for kind in KINDS.values()))
    if f'"{method}"' not in methods:
        msg = f"method must be {', '.join(methods[:-1])} or {methods[-1]}"
        raise ValueError(msg)
    if not isinstance(model, str) or kind_of(method, named=bool(model)) is None:
        msg = f'model must name a draft model, with the method "{DRAFT_MODEL}" or none, '
        msg += f'or a head, with the method "{EAGLE3}" or "{MTP}"'
        raise ValueError(msg)
    tokens = _whole(values, "num_speculative_tokens", MOST_TOKENS) or 5
    most, least = (
        _whole(values, name, MOST_LOOKUP) for name in ("prompt_lookup_max", "prompt_lookup_min")
    )
    most, least = most or least or 4, least or most or 2
    if least > most:
        msg = f"prompt_lookup_min ({least}) must not exceed prompt_lookup_max ({most})"
        raise ValueError(msg)
    return Speculation(
        method=str(method),
        model=model,
        num_speculative_tokens=tokens,
        prompt_lookup_max=most,
        prompt_lookup_min=least,
    )


def _by_alias(name: str) -> str:
    """Return the method that has this other name, or the name itself."""
    kinds = (kind for kind in KINDS.values() if kind.aliases)
    return next((kind.method for kind in kinds if name in imported(kind.aliases)()), name)


def kind_of(method: object, *, named: bool) -> str | None:
    """Return the name in KINDS of a method's drafter; None if there is none.

    named: whether it has a checkpoint of its own.
    """
    asked = MTP if method == AUTO else method
    kinds = (n for n, kind in KINDS.items() if (kind.method, kind.named) == (asked, named))
    return next(kinds, None)


def is_head(method: str) -> bool:
    """Return whether a method's drafters read hidden states of the model."""
    return any(kind.head for kind in KINDS.values() if kind.method == method)


def asked_speculation(
    speculate: str | None,
    config: Mapping[str, object] | None,
    draft_model: str | None,
    draft_max: int | None,
) -> Speculation | None:
    """Return how the options ask for draft tokens; None = `--speculate off`.

    Raises:
        ConfigError: two of the options contradict each other.
    """
    asked: Mapping[str, object] | None = config
    if draft_model is not None:
        if config is not None:
            msg = "model_draft and speculative_config are both set: set one of them"
            raise ConfigError(msg)
        asked = {"model": draft_model}
    if speculate == "off":
        given = {
            "model_draft": draft_model,
            "speculative_config": config,
            "draft_max": draft_max,
        }
        if what := next((name for name, value in given.items() if value is not None), None):
            msg = f"speculate is off, but {what} asks for draft tokens: set one of them"
            raise ConfigError(msg)
        return None
    got = automatic() if asked is None else read_speculation(asked)
    if draft_max is None:
        return got
    if config is not None and "num_speculative_tokens" in config:
        msg = "draft_max and num_speculative_tokens are both set: set one of them"
        raise ConfigError(msg)
    return msgspec.structs.replace(got, num_speculative_tokens=draft_max)


def _whole(values: Mapping[str, object], name: str, most: int) -> int:
    """Return the setting; 0 if it is missing or null."""
    value = values.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        msg = f"{name} must be a whole number from 1 to {most}"
        raise ValueError(msg)
    return value
