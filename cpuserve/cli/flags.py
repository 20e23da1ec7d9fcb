"""The command-line parser, built from config/fields.py; its ConfigErrors are one line long."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from cpuserve.base.errors import ConfigError
from cpuserve.cli.dotted import without_dots
from cpuserve.config.field import GROUPS, SERVER, Field
from cpuserve.config.fields import BY_NAME, FIELDS, no_op_flags
from cpuserve.config.load import Asked, Given, flag_given, load_options, no_op_note
from cpuserve.config.missing import why_missing
from cpuserve.config.nearest import nearest
from cpuserve.config.no_op import NoOp
from cpuserve.loader.builtin import BUILTIN, DEFAULT

HELP_POSITION = 34
_ABOUT = "--help-about"  # which --help=TOPIC becomes
MAX_WIDTH = 120
COMMAND = "COMMAND"
# Options that `--help` shows; `--help-all` shows all options of config/fields.py.
FIRST = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "also_serve",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_space",
)
# Commands of other programs, each with the advice for the error message.
ELSEWHERE = {
    "create": "clients create models with POST /api/create of `cpuserve serve --models-dir DIR`",
    "cp": "clients copy models with POST /api/copy of `cpuserve serve --models-dir DIR`",
    "collect-env": "run `cpuserve doctor` for the facts about this machine",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises instead of exiting, and accepts no abbreviated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)
        self.add_argument(
            _ABOUT, action=HelpAbout, dest="_ignored", metavar="TOPIC", help=argparse.SUPPRESS
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for an unknown command; argparse would list all commands instead."""
        commands = action.choices if isinstance(action, argparse._SubParsersAction) else None
        if commands is None or value in commands:
            super()._check_value(action, value)
            return
        what = f"unknown {str(action.metavar).lower()} {value!r}"
        if action.metavar == COMMAND and value in ELSEWHERE:
            msg = f"there is no command {value!r}: {ELSEWHERE[value].format(model='MODEL')}"
            raise ConfigError(msg)
        if action.metavar == COMMAND and _names_model(str(value)):
            msg = f"{what}; to serve this model, run `{self.prog} serve {value}`"
            raise ConfigError(msg)
        msg = f"{what}{nearest(str(value), commands)}; see `{self.prog} --help`"
        raise ConfigError(msg)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with copies of default lists and dicts, because argparse actions modify them.

        So a parser can be used more than once.
        """
        kept = self._defaults
        self._defaults = {
            name: value.copy() if isinstance(value, (list, dict)) else value
            for name, value in kept.items()
        }
        try:
            return super().parse_known_args(args, namespace)
        finally:
            self._defaults = kept

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return [], so that no flag may be abbreviated.

        allow_abbrev does not apply to flags with one dash:
        argparse would take `-t 2` of llama.cpp for `-tp 2`, and `-hf X` for `-h`.
        """
        del option_string
        return []

    def format_help(self) -> str:
        """Return the help text with the options in FIRST, and how to see all options."""
        return self._help(lambda action: not isinstance(action, Collect) or action.is_first)

    def format_all_help(self) -> str:
        """Return the help text with all options."""
        return self._help(lambda _: True)

    def _help(self, shows: Callable[[argparse.Action], bool]) -> str:
        hidden = [(a, a.help) for a in self._actions if not shows(a)]
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in hidden:
                action.help = text

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message that argparse would print after its usage text."""
        raise ConfigError(message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size((MAX_WIDTH - 20, 24)).columns
        width = max(40, min(columns, MAX_WIDTH) - 2)
        super().__init__(prog, max_help_position=min(HELP_POSITION, width // 2), width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap a text of one line; a text with line breaks is left as it is."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap lines only between words, so that no flag is broken at its hyphens."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Collect(argparse.Action):
    """Stores the value of a field as text, together with the flag that set it."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, field: Field, **kwargs: Any
    ) -> None:
        self.field = field
        self.is_first = not option_strings or field.name in FIRST
        super().__init__(option_strings, dest, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the value in `given` of the namespace, under the name of the field."""
        del parser
        if not option_string and values is None:
            return
        flag = option_string or "MODEL"
        if self.field.kind == "flag":
            values = flag in self.field.bare_flags or not flag.startswith("--no-")
        elif flag in self.field.bare_flags:
            values = "true"
        before: Given | None = namespace.given.get(self.field.name)
        given = flag_given(self.field, flag, values, before)
        if self.field.name == "model" and before is not None:
            namespace.two_models = (before, given)
        namespace.given[self.field.name] = given


def refuse_two_models(args: argparse.Namespace) -> None:
    """Raise ConfigError if MODEL and --model differ, because either one may be meant.

    Call refuse_unknown first: the value of an unknown flag looks like a MODEL (-ngl 99).
    """
    if (two := getattr(args, "two_models", None)) is None:
        return
    before, given = two
    if before.name != given.name and before.value != given.value:
        models = {before.name: before.value, given.name: given.value}
        named = " and ".join(f"{name} {value!r:.100}" for name, value in sorted(models.items()))
        msg = f"there are two models: {named}; give one of them"
        raise ConfigError(msg)


class HelpAbout(argparse.Action):
    """Prints the help about a topic (--help=TOPIC), and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Print the help about the topic, and exit."""
        del namespace, option_string
        from cpuserve.cli.option_help import ALL, text_about

        assert isinstance(parser, Parser)
        topic = str(values)
        text = parser.format_all_help() if topic == ALL else text_about(parser, topic)
        parser._print_message(text, sys.stdout)
        parser.exit()


class HelpAll(argparse.Action):
    """Prints the help text with all options, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Print the help text with all options, and exit."""
        del namespace, values, option_string
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_all_help(), sys.stdout)
        parser.exit()


class Ignore(argparse.Action):
    """Accepts a flag of another server that has no effect in cpuserve, and adds a note about it."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, no_op: NoOp, **kwargs: Any
    ) -> None:
        self.no_op = no_op
        super().__init__(option_strings, dest, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Add a note that the flag has no effect."""
        del parser
        value = values if isinstance(values, str) else None
        last = values[-1] if isinstance(values, list) and values else "0"
        if not re.fullmatch(r"[\d\s,]+", last):
            msg = f"{option_string} expects numbers, got {last!r}; put MODEL before it"
            raise ConfigError(msg)
        namespace.notes.append(no_op_note(option_string or "", self.no_op, value))


def add_options(parser: Parser, *, server: bool, model: bool = True) -> None:
    """Add MODEL and the flags of all fields, by group.

    server: whether to include the options of the HTTP server.
    model: False for a command that finds MODEL among its arguments itself (see `take_model`).
    """
    parser.set_defaults(given={}, notes=[], two_models=None)
    text = "show all options and exit; --help=WORD shows those about a word or a group"
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help=text)
    if model:
        parser.usage = f"{parser.prog} [MODEL] [OPTIONS]"
        parser.add_argument(
            "model", nargs="?", action=Collect, field=BY_NAME["model"], help=_MODEL_HELP
        )
    for title in GROUPS:
        if title == SERVER and not server:
            continue
        group = parser.add_argument_group(title)
        for field in FIELDS:
            if field.group == title and field.flags:
                _add_field(group, field)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="Read options from a JSON, YAML or TOML file [env CPUSERVE_CONFIG]",
    )
    for flag, no_op in no_op_flags().items():
        parser.add_argument(
            flag,
            action=Ignore,
            no_op=no_op,
            help=argparse.SUPPRESS,
            dest="_ignored",
            nargs={"none": 0, "one": None, "many": "+"}[no_op.takes],
        )


def take_model(args: argparse.Namespace, name: str) -> None:
    """Set `name` as the MODEL of a parsed command line."""
    args.given["model"] = flag_given(BY_NAME["model"], "MODEL", name)


def take_further_models(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Add the words after MODEL, each of them MODEL or NAME=MODEL, to --also-serve.

    Raises:
        ConfigError: a word is not a model, or there is no MODEL before it.
    """
    for word in words:
        if not _names_model(word.partition("=")[2] or word):
            msg = (
                f"unexpected argument {word}: it is no built-in model, path, or OWNER/MODEL of the "
                "Hugging Face hub; see `cpuserve serve --help`"
            )
            raise ConfigError(msg)
    if words:
        field = BY_NAME["also_serve"]
        pairs = [word if "=" in word else f"{word}={word}" for word in words]
        before = args.given.get(field.name)
        args.given[field.name] = flag_given(field, "MODEL", pairs, before)


_MODEL_HELP = "directory, GGUF file, Hugging Face id or built-in name [default: the built-in model]"


def _add_field(group: argparse._ArgumentGroup, field: Field) -> None:
    env = f"; env {field.env}" if field.env else ""
    text = f"{field.help} [default: {field.default}{env}]".replace("%", "%%")
    flags = list(field.flags)
    hidden = [f for f in field.all_flags if f not in (*flags, *field.bare_flags)]
    options: dict[str, Any] = {"metavar": field.metavar}
    if field.kind == "flag":
        hidden += [f"--no-{f[2:]}" for f in flags]
        options = {"nargs": 0}
    elif field.kind == "list":
        options["nargs"] = "+"
    dest = f"_{field.name}"
    group.add_argument(*flags, action=Collect, field=field, dest=dest, help=text, **options)
    for names, how in ((hidden, options), (field.bare_flags, {"nargs": 0})):
        if names:
            group.add_argument(
                *names, action=Collect, field=field, dest=dest, help=argparse.SUPPRESS, **how
            )


def asked(args: argparse.Namespace) -> Asked:
    """Merge a parsed command line with environment variables and the config file.

    Raises:
        ConfigError: a value does not have its field's type,
            or a flag that takes several values has taken the MODEL after it as one of them.
    """
    given: dict[str, Given] = args.given
    found = load_options(given, config_file=args.config, notes=args.notes)
    if found.options.model is None:
        if "served_model_name" in given:
            _refuse_taken_model(found.options.served_model_name or [])
        if "api_key" in given:
            _refuse_taken_key(cast("list[str]", given["api_key"].value))
    return found


def _refuse_taken_key(keys: Sequence[str]) -> None:
    """Raise ConfigError if there are several API keys, as the last one may be meant as MODEL."""
    if len(keys) > 1:
        flag = BY_NAME["api_key"].flag
        msg = (
            f"flag {flag} has {len(keys)} values, and MODEL is missing: put MODEL before the flag, "
            f"or add `--model {DEFAULT}` to serve the built-in model with {len(keys)} keys"
        )
        raise ConfigError(msg)


def _refuse_taken_model(names: Sequence[str]) -> None:
    """Raise ConfigError if the last --served-model-name is probably meant as MODEL."""
    last, flag = names[-1], BY_NAME["served_model_name"].flag
    hub_id = len(names) > 1 and "/" in last
    if hub_id or last in BUILTIN or _is_model(last):
        others = " ".join(names[:-1]) or "NAME"
        msg = (
            f"flag {flag} takes {last!r} as a name, and MODEL is missing: write "
            f"`{last} {flag} {others}`, or add `--model {DEFAULT}` to serve the built-in model "
            "under these names"
        )
        raise ConfigError(msg)


def _names_model(word: str) -> bool:
    """Return whether a word, which is not a command, is probably meant as MODEL."""
    return word in BUILTIN or "/" in word or word.endswith(".gguf") or _is_model(word)


def _is_model(text: str) -> bool:
    path = Path(text)
    try:
        path = path.expanduser()
        return path.exists() and (
            text in (".", "..")
            or "/" in text
            or path.suffix == ".gguf"
            or (path / "config.json").exists()
        )
    except (OSError, RuntimeError):  # the name is too long, or its ~user does not exist
        return False


def as_arguments(args: argparse.Namespace) -> list[str]:
    """Return the options of a parsed command line as arguments for another command."""
    given: dict[str, Given] = args.given
    arguments = [f"--config={args.config}"] if args.config else []
    for name, value in given.items():
        flag = BY_NAME[name].flag
        if isinstance(value.value, bool):
            arguments.append(flag if value.value else f"--no-{flag[2:]}")
        elif isinstance(value.value, list):
            several = BY_NAME[name].kind == "list"
            arguments += [flag, *(map(str, value.value) if several else [json.dumps(value.value)])]
        else:
            arguments.append(f"{flag}={value.value}")
    return arguments


def normalize(argv: Iterable[str]) -> list[str]:
    """Return arguments as the parser spells them: --max_model_len=8 becomes --max-model-len=8.

    -O3 of vLLM becomes -O=3; other flags with one dash have no values attached to them.
    Dotted keys of a flag become one JSON object (see `without_dots`).

    Raises:
        ConfigError: a dotted key or its value is wrong.
    """
    return [_normal(a) for a in without_dots(argv, _object_flags())]


def _object_flags() -> set[str]:
    """Return the flags that take a JSON object, and those without effect that take a value."""
    fields = (f for f in FIELDS if f.kind == "object" or f.metavar == "JSON")
    ignored = (flag for flag, no_op in no_op_flags().items() if no_op.takes == "one")
    return {*(flag for f in fields for flag in f.all_flags), *ignored}


def _normal(argument: str) -> str:
    if not argument.startswith("--"):
        return f"-O={argument[2:]}" if re.fullmatch(r"-O\d", argument) else argument
    name, equals, value = argument.partition("=")
    if name == "--help" and equals:  # argparse accepts no value here
        return f"{_ABOUT}={value}"
    return name.replace("_", "-") + equals + value


def refuse_unknown(parser: Parser, unknown: Sequence[str]) -> None:
    """Raise ConfigError for the first unknown argument, with the most similar flag."""
    if not unknown:
        return
    flag = next((u for u in unknown if u.startswith("-")), unknown[0])
    name = flag.split("=")[0].split(".")[0]
    why = why_missing(name) if name.startswith("-") else None
    if why is not None:
        msg = f"flag {name} is not supported: {why}"
        raise ConfigError(msg)
    known = [s for a in parser._actions for s in a.option_strings if _is_offered(a, s, name)]
    what = "unknown flag" if name.startswith("-") else "unexpected argument"
    msg = f"{what} {name}{nearest(name, known)}; see `{parser.prog} --help`"
    raise ConfigError(msg)


def _is_offered(action: argparse.Action, flag: str, name: str) -> bool:
    """Return whether `flag` may be suggested for `name`; --no-X is suggested only for --no-Y."""
    if name.startswith("--no-"):
        return flag.startswith("--no-") and not isinstance(action, Ignore)
    return action.help != argparse.SUPPRESS
