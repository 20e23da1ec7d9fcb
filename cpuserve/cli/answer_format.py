"""The lines of `cpuserve config` on a model's responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.config.engine import Decision
from cpuserve.errors import ModelError
from cpuserve.serving.tools.families import NO_THOUGHTS
from cpuserve.serving.tools.learn import learn_format, parsers_of
from cpuserve.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig


def answer_decisions(config: EngineConfig) -> list[Decision]:
    """Return the format of tool calls that was found, and how; nothing for an embedding model."""
    if config.pooling != "none":
        return []
    try:
        template = load_tokenizer(config.tokenizer_path, config.chat_template)[1]
        found = learn_format(template, *parsers_of(config))
    except ModelError as error:
        return [Decision("tool_calls", None, "default", None, str(error))]
    name = None if found.calls is None else found.calls.name
    tags = None if found.tags in (None, NO_THOUGHTS) else f"{found.tags.open} {found.tags.close}"
    given = [None if name == "auto" else name for name in parsers_of(config)]
    sources = ["default" if one is None else "flag" for one in given]
    return [
        Decision("tool_calls", given[0], sources[0], name, found.why),
        Decision("thoughts", given[1], sources[1], tags, found.why_tags),
    ]
