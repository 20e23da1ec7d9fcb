"""How drafts are proposed, and the memory that logits, indexes and a draft model take for them."""

from __future__ import annotations

from cpuserve.base.errors import ConfigError
from cpuserve.config.engine import EngineConfig
from cpuserve.config.options import EngineOptions
from cpuserve.config.speculation import (
    AUTO,
    DraftModelConfig,
    Speculation,
    asked_speculation,
    is_head,
)
from cpuserve.platforms.base import ModelFacts

# Bounds for the number of logit rows in memory: there is one row for each of max_num_seqs requests
# and for each of their draft tokens, but not fewer or more rows than these
# (csrc/runtime/executor.h: kLeastLogitRows).
LEAST_LOGIT_ROWS, MOST_LOGIT_ROWS = 32, 128
DRAFT_TOKENS = 512  # the most tokens in a step of a draft model, unless more requests run


def speculation_of(options: EngineOptions, facts: ModelFacts, executor: str) -> Speculation | None:
    """Return how draft tokens are proposed; None = there are no draft tokens.

    Other executors than the native one have no fast index of n-grams, so it must be asked for.
    """
    got = asked_speculation(
        options.speculate, options.speculative_config, options.model_draft, options.draft_max
    )
    if got is not None and is_head(got.method) and executor != "native":
        msg = f"speculative_config: {got.method} needs the native executor, not {executor}"
        raise ConfigError(msg)
    if got is None or got.method != AUTO:
        return got
    return None if facts.whole_prompts or executor != "native" else got


def options_of_draft(options: EngineOptions) -> EngineOptions | None:
    """Return options that name the draft model as their model; None if no option names one."""
    asked = asked_speculation(
        options.speculate, options.speculative_config, options.model_draft, options.draft_max
    )
    if asked is None or not asked.model:
        return None
    return EngineOptions(model=asked.model, mmproj="none", language_model_only=True)


def drafter_method(options: EngineOptions) -> str:
    """Return the method of the drafter that the options ask for; "" = there is none.

    AUTO: if the checkpoint has a head, it is used. Heads need the native executor.
    """
    asked = asked_speculation(
        options.speculate, options.speculative_config, options.model_draft, options.draft_max
    )
    if asked is None:
        return ""
    if asked.model or not (asked.method == AUTO or is_head(asked.method)):
        return asked.method
    return "" if options.executor not in (None, "auto", "native") else asked.method


def checked_draft(draft: ModelFacts) -> ModelFacts:
    """Return `draft` if this model can guess tokens; if not, raise a ConfigError."""
    why, remedy = "", "name another one"
    if not draft.has_program:
        why = f"cpuserve does not implement {draft.architecture}"
    elif draft.pooling != "none":
        why = "it generates no text"
    elif draft.state_bytes:
        why = "it has recurrent layers, and their states cannot drop a rejected token"
    if why:
        msg = f"the draft model {draft.name} cannot be used: {why}; {remedy}"
        raise ConfigError(msg)
    return draft


def rope_bytes(facts: ModelFacts, tokens: int) -> int:
    """Return the bytes of the RoPE tables: one fp32 value per position and rotated column."""
    return facts.rope_columns * tokens * 4


def logit_bytes(facts: ModelFacts, rows: int) -> int:
    """Return the bytes of the fp32 logits that a step has in memory at a time.

    rows: the most logit rows of a step without prompts.
    """
    return max(LEAST_LOGIT_ROWS, min(rows, MOST_LOGIT_ROWS)) * facts.vocab * 4


def decode_bytes(
    options: EngineOptions,
    facts: ModelFacts,
    executor: str,
    requests: int,
    longest: int,
    threads: int,
) -> int:
    """Return the bytes of logits, bitmasks, selected keys, and indexes for draft tokens."""
    asked = speculation_of(options, facts, executor)
    masks = requests * (1 if asked is None else asked.rows_of_sequence)
    fixed = 4 * threads * facts.selected_floats + masks * -(-facts.vocab // 32) * 4
    if asked is None:
        return fixed + logit_bytes(facts, requests)
    rows = requests * asked.logit_rows
    return fixed + logit_bytes(facts, rows) + asked.index_bytes(requests, longest)


def draft_tokens(requests: int, tokens: int) -> int:
    """Return the most tokens in a step of a draft model.

    requests: the most requests that run.
    tokens: the most tokens in a step of the engine's model.
    """
    return max(requests, min(tokens, DRAFT_TOKENS))


def draft_bytes(draft: ModelFacts, requests: int, longest: int) -> int:
    """Return the bytes of a draft model besides its weights and its KV cache."""
    scratch = draft_tokens(requests, DRAFT_TOKENS) * draft.activation_width * 4
    return scratch + logit_bytes(draft, requests) + rope_bytes(draft, longest)


def draft_config(draft: ModelFacts | None, config: EngineConfig) -> DraftModelConfig | None:
    """Return the settings of the draft model of an engine with settings `config`."""
    if draft is None or config.speculation is None:
        return None
    return DraftModelConfig(
        kind=draft.drafter,
        model=draft.name,
        path=draft.path,
        tokenizer_path=draft.tokenizer_path,
        architecture=draft.architecture,
        quantize=config.quantize if draft.quantization is None else "none",
        kv_blocks=config.kv_blocks // max(len(config.kv_groups), 1),
        max_tokens=draft_tokens(config.max_num_seqs, config.max_num_batched_tokens),
        max_model_len=min(config.max_model_len, draft.max_position),
        layers=list(draft.layers),
        caches=list(draft.caches),
    )
