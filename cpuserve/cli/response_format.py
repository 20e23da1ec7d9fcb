"""The lines of `cpuserve config` about the format of a model's tool calls and thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpuserve.config.engine import Decision
from cpuserve.errors import ModelError
from cpuserve.serving.tools.learn import learn_format, parsers_of
from cpuserve.serving.tools.thoughts import NO_THOUGHTS
from cpuserve.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig


def response_decisions(config: EngineConfig, sources: Mapping[str, str]) -> list[Decision]:
    """Return how the model writes tool calls and thoughts; [] for an embedding model.

    sources: the source of the value of each option, such as a flag or the config file.
    """
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
    calls, thoughts = (
        sources.get(option, "default") for option in ("tool_call_parser", "reasoning_parser")
    )
    return [
        Decision("tool_calls", given[0], calls, name, found.why),
        Decision("thoughts", given[1], thoughts, tags, found.why_tags),
    ]
