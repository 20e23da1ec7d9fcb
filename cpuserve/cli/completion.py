"""`cpuserve completion SHELL`: print a shell script that completes commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from cpuserve.cli.main import build_parser
from cpuserve.cli.terminal import say


@dataclass(frozen=True, slots=True)
class CompletedFlag:
    """A flag with a one-line help text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A command with its help, its flags and its subcommands, such as the kinds of `bench`."""

    name: str
    text: str
    flags: tuple[CompletedFlag, ...]
    commands: tuple[CompletedCommand, ...]


def completion(args: argparse.Namespace) -> int:
    """Print the completion script for the chosen shell."""
    scripts = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    say(scripts[args.shell](command_tree("cpuserve", "", build_parser())))
    return 0


def command_tree(name: str, text: str, parser: argparse.ArgumentParser) -> CompletedCommand:
    """Return the commands and flags of a parser that its --help shows."""
    flags, commands = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands += [
                command_tree(word, _line(texts.get(word, "")), sub)
                for word, sub in action.choices.items()
            ]
        elif action.help != argparse.SUPPRESS:
            flags += [CompletedFlag(flag, _line(action.help)) for flag in action.option_strings]
    return CompletedCommand(name, text, tuple(flags), tuple(commands))


def _line(text: str | None) -> str:
    """Return the first sentence of a help text as one line."""
    line = " ".join((text or "").replace("%%", "%").split()).partition(" [default")[0]
    return line.partition(". ")[0].rstrip(".")


def _leaves(root: CompletedCommand) -> Iterator[tuple[tuple[str, ...], CompletedCommand]]:
    """Yield each command with the words that select it; subcommands come before their command."""
    for command in root.commands:
        for kind in command.commands:
            yield (command.name, kind.name), kind
        yield (command.name,), command


def _pattern(path: tuple[str, ...]) -> str:
    """Return a shell pattern of "CURSOR:WORD1:WORD2" that matches the command `path`."""
    return ":".join(["*", *path, *["*"] * (2 - len(path))])


def _words(command: CompletedCommand) -> str:
    return " ".join([*(c.name for c in command.commands), *(f.name for f in command.flags)])


def bash_script(root: CompletedCommand) -> str:
    """Return the completion script for bash."""
    lines = [
        "# Completion of cpuserve for bash: source <(cpuserve completion bash)",
        "_cpuserve() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" words=""',
        '    case "$COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]}" in',
        f'        1:*) words="{_words(root)}" ;;',
    ]
    for path, command in _leaves(root):
        lines.append(f'        {_pattern(path)}) words="{_words(command)}" ;;')
    lines += [
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _cpuserve cpuserve",
    ]
    return "\n".join(lines)


def zsh_script(root: CompletedCommand) -> str:
    """Return the completion script for zsh."""

    def listed(items: tuple[CompletedCommand | CompletedFlag, ...]) -> str:
        return " ".join(_quoted(f"{item.name}:{item.text}") for item in items)

    lines = [
        "#compdef cpuserve",
        '# Completion of cpuserve for zsh: cpuserve completion zsh > "${fpath[1]}/_cpuserve"',
        "_cpuserve() {",
        "    local -a found flags",
        '    case "$CURRENT:$words[2]:$words[3]" in',
        f"        2:*) found=({listed(root.commands)}); flags=({listed(root.flags)}) ;;",
    ]
    for path, command in _leaves(root):
        found, flags = listed(command.commands), listed(command.flags)
        lines.append(f"        {_pattern(path)}) found=({found}); flags=({flags}) ;;")
    lines += [
        "    esac",
        "    (( $#found )) && _describe command found",
        '    if [[ "$PREFIX" == -* ]]; then _describe -o option flags; else _files; fi',
        "}",
        'if [ "$funcstack[1]" = "_cpuserve" ]; then _cpuserve; else compdef _cpuserve cpuserve; fi',
    ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text in single quotes for a shell of the Bourne family."""
    return "'" + text.replace("'", "'\\''") + "'"


def fish_script(root: CompletedCommand) -> str:
    """Return the completion script for fish."""

    def entry(condition: str, kind: str, item: CompletedCommand | CompletedFlag) -> str:
        text = item.text.replace("\\", "\\\\").replace("'", "\\'")
        return f"complete -c cpuserve -n '{condition}' {kind} -d '{text}'"

    def flag(condition: str, item: CompletedFlag) -> str:
        name = item.name
        kind = f"-l {name[2:]}" if name.startswith("--") else f"-{'so'[len(name) > 2]} {name[1:]}"
        return entry(condition, kind, item)

    first = "__fish_use_subcommand"
    lines = ["# Completion of cpuserve for fish: cpuserve completion fish | source"]
    lines += [entry(first, f"-a {c.name}", c) for c in root.commands]
    lines += [flag(first, f) for f in root.flags]
    for path, command in _leaves(root):
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path)
        lines += [entry(seen, f"-a {c.name}", c) for c in command.commands]
        lines += [flag(seen, f) for f in command.flags]
    return "\n".join(lines)
