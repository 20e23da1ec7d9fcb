"""The help about a group of options, or about those with a word in their names or texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence

from cpuserve.base.errors import ConfigError
from cpuserve.config.field import CPU, MEMORY, MODEL, SERVER
from cpuserve.config.nearest import nearest

ALL, GROUPS = "all", "groups"
# Groups of options in vLLM, and the group here that has most of their options.
_OF_VLLM = {
    "frontend": SERVER,
    "modelconfig": MODEL,
    "loadconfig": MODEL,
    "loraconfig": MODEL,
    "multimodalconfig": MODEL,
    "structuredoutputsconfig": MODEL,
    "speculativeconfig": MODEL,
    "cacheconfig": MEMORY,
    "schedulerconfig": MEMORY,
    "parallelconfig": CPU,
    "deviceconfig": CPU,
    "observabilityconfig": SERVER,
    "vllmconfig": MODEL,
}


def text_about(parser: argparse.ArgumentParser, topic: str) -> str:
    """Return the help of `parser` about a topic: a group, or a word of options and commands.

    Raises:
        ConfigError: neither a group nor an option has this name or word.
    """
    titled = {str(group.title): group._group_actions for group in parser._action_groups}
    groups = {title: actions for title, actions in titled.items() if _options(actions)}
    if _plain(topic) == GROUPS:
        return "".join(f"{title}: --help={_plain(title.split()[0])}\n" for title in groups)
    if (title := _group_named(topic, groups)) is not None:
        return _section(parser, title, _options(groups[title]))
    found = [action for action in _every_option(parser) if _is_about(action, topic)]
    if not found:
        names = [*map(_plain, groups), *(flag[2:] for flag in _flags(_every_option(parser)))]
        msg = (
            f"--help={topic}: no option of `{parser.prog}` has this word in its name or text"
            f"{nearest(topic, names) or ';'} --help=all shows all options, --help=groups the groups"
        )
        raise ConfigError(msg)
    found.sort(key=lambda action: not _names(action, topic))
    return _section(parser, f"Options about {topic!r}", found)


def _section(
    parser: argparse.ArgumentParser, title: str, actions: Iterable[argparse.Action]
) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def _options(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [a for a in actions if a.option_strings and a.help != argparse.SUPPRESS]


def _every_option(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a command; for all commands together those of `serve`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _options(action.choices["serve"]._actions)
    return _options(parser._actions)


def _flags(actions: Iterable[argparse.Action]) -> Iterator[str]:
    for action in actions:
        yield from action.option_strings


def _group_named(topic: str, groups: Iterable[str]) -> str | None:
    wanted = _OF_VLLM.get(_plain(topic), topic)
    for title in groups:
        first = title.split()[0]
        if _plain(wanted) in (_plain(title), _plain(first)):
            return title
    return None


def _is_about(action: argparse.Action, topic: str) -> bool:
    text = str(action.help or "").lower().replace("_", "-")
    return _names(action, topic) or topic.lower().replace("_", "-") in text


def _names(action: argparse.Action, topic: str) -> bool:
    """Return whether a name of the option has the word: also those of other servers."""
    names: Sequence[str] = action.option_strings
    if (field := getattr(action, "field", None)) is not None:
        names = [*field.all_flags, field.env or "", *(each.name for each in field.env_aliases)]
    return any(_plain(topic) in _plain(name) for name in names)


def _plain(text: str) -> str:
    """Return a text without case and signs, so that max_model_len finds --max-model-len."""
    return re.sub(r"[\W_]+", "", text).lower()
