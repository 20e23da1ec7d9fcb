"""The lines of `cpuserve config` on a model's responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.config.engine import Decision
from cpuserve.errors import ModelError
from cpuserve.serving.tools.learn import learn_format
from cpuserve.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig


def tool_call_decisions(config: EngineConfig) -> list[Decision]:
    """Return the format of tool calls that was found, and how; nothing for an embedding model."""
    if config.pooling != "none":
        return []
    try:
        found = learn_format(load_tokenizer(config.tokenizer_path, config.chat_template)[1])
    except ModelError as error:
        return [Decision("tool_calls", None, "default", None, str(error))]
    name = None if found.calls is None else found.calls.name
    return [Decision("tool_calls", None, "default", name, found.why)]
