"""make_drafter: the drafter that the settings of speculative decoding ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.core.drafts import Drafter
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.ngram_drafts import NgramDrafts

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.runtime.executor import Executor


def make_drafter(config: EngineConfig, kv: KvManager, executor: Executor) -> Drafter | None:
    """Return the drafter of an engine; None if there are no draft tokens."""
    asked = config.speculation
    if asked is None:
        return None
    make_index = executor.text_indexes(asked.prompt_lookup_min, asked.prompt_lookup_max)
    tokens = asked.indexed_tokens(config.max_num_seqs, config.max_model_len)
    return Drafter(kv, asked.num_speculative_tokens, NgramDrafts(make_index, tokens))
