"""One option: its texts, its names and checks, and how its value is parsed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from cpuserve.base.registry import imported
from cpuserve.config.values import SIZE_EXAMPLES, parse_count, parse_size

MODEL, SERVER, MEMORY, CPU = "Model", "Server", "Memory and batching", "CPU and threads"
GROUPS = (MODEL, SERVER, MEMORY, CPU)

# A "size" is a number of bytes, and takes units. A "list" flag takes several values.
# A "names" flag takes one value: a JSON list, or names that are separated by commas.
Kind = Literal["text", "count", "size", "flag", "list", "names", "object"]
# The kind of an option by the type of its attribute; all others are texts.
KINDS: Mapping[Any, Kind] = {
    bool: "flag",
    int: "count",
    float: "count",
    list: "list",
    dict: "object",
}
PREFIX = "CPUSERVE_"
FROM_NAME = ("--",)
TRUE = {"1": True, "true": True, "yes": True, "on": True}
FALSE = {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Alias:
    """The name that another server has for an option; `convert` translates a value of that server.

    differs: how the meaning of the value differs from the other server, or "".
    bare: whether it is a flag without a value; `convert` then gets "true".
    """

    name: str
    convert: Callable[[str], str] | None = None
    differs: str = ""
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One option.

    default: a text that describes the value if the option is not set.
    flags, env: its flags, and its variable in the environment; `fields_of` derives them
      from the name of the attribute (FROM_NAME, None).
    more_choices: "module:function" that returns further choices, from a table of another package;
      it is imported only if a value is none of `choices`.
    synonyms: other spellings for the choices of the option.
    words: texts that are accepted besides values of the type `kind`.
    read(value): converts a value that `kind` cannot describe; raises a ValueError as `parse` does.
    check(value): raises a ValueError that lists the expected values.
    secret: whether error messages must not show the value.
    server: whether the option belongs to ServerOptions.
    """

    name: str
    help: str
    default: str
    group: str
    kind: Kind = "text"
    flags: tuple[str, ...] = FROM_NAME
    env: str | None = None
    aliases: tuple[Alias, ...] = ()
    choices: tuple[str, ...] = ()
    more_choices: str = ""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    secret: bool = False
    read: Callable[[object], Any] | None = None
    check: Callable[[Any], object] | None = None
    metavar: str | None = None
    server: bool = False

    @property
    def flag(self) -> str:
        """The main name on the command line (the first of `flags`), or ""."""
        return self.flags[0] if self.flags else ""

    @property
    def all_flags(self) -> tuple[str, ...]:
        """The flags of this option, and its aliases that are flags."""
        return self.flags + tuple(a.name for a in self.aliases if a.name.startswith("-"))

    @property
    def env_aliases(self) -> tuple[Alias, ...]:
        """The aliases of this option that are environment variables."""
        return tuple(a for a in self.aliases if not a.name.startswith("-"))

    @property
    def bare_flags(self) -> tuple[str, ...]:
        """The aliases of this option that are flags without a value."""
        return tuple(a.name for a in self.aliases if a.bare)

    @property
    def all_choices(self) -> tuple[str, ...]:
        """The values that the option accepts; () = any value of its kind."""
        if not self.more_choices:
            return self.choices
        return (*self.choices, *imported(self.more_choices)())

    def convert(self, name: str, text: str) -> str:
        """Translate `text` from the alias `name` to the text that the main flag accepts.

        Raises a ValueError with the expected values; the caller adds the alias to the message.
        """
        for alias in self.aliases:
            if alias.name == name and alias.convert is not None:
                return alias.convert(text)
        return text

    def parse(self, value: object) -> Any:
        """Convert a text (flag, environment) or plain value (file, `LLM(...)`) to this type.

        Raises a ValueError with the expected values; the caller adds the name of the field.
        """
        if self.words and str(value).strip().lower() in self.words:
            return str(value).strip().lower()
        parsed = self._typed(value)
        if self.choices and parsed not in self.choices and parsed not in self.all_choices:
            msg = f"choose one of {', '.join(self.all_choices)}"
            raise ValueError(msg)
        if self.check is not None:
            self.check(parsed)
        return parsed

    def _typed(self, value: object) -> Any:
        if self.read is not None:
            return self.read(value)
        if self.kind == "flag":
            return parse_flag(value)
        if self.kind == "count":
            return _count(value)
        if self.kind == "size":
            return _size(value)
        if self.kind == "list":
            items = value if isinstance(value, list | tuple) else str(value).split(",")
            return [str(item).strip() for item in items]
        if self.kind == "names":
            return _names(value)
        if self.kind == "object":
            return _object(value)
        if isinstance(value, bool | list | tuple | dict) or value is None:
            msg = "must be text"
            raise ValueError(msg)
        text = str(value).strip()
        lowered = text.lower()
        if self.choices or self.synonyms:
            return self.synonyms.get(lowered, lowered if self.choices else text)
        return text


def parse_flag(value: object) -> bool:
    """Return whether a value means "on"; a ValueError if it means neither on nor off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    msg = "must be 1 or 0 (true or false)"
    raise ValueError(msg)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        msg = "must be a whole number"
        raise ValueError(msg)
    return value if isinstance(value, int) else parse_count(value)


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(SIZE_EXAMPLES)
    return value if isinstance(value, int) else parse_size(value)


def _names(value: object) -> list[str]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        msg = """must be names separated by commas, or a JSON list such as '["a", "b"]'"""
        raise ValueError(msg)
    return [item.strip() for item in items]


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        msg = """must be a JSON object, such as '{"name": 0.7}'"""
        raise ValueError(msg)
    return {str(key): item for key, item in value.items()}


def at_least(least: int, most: int = 2**31 - 1) -> Callable[[int], None]:
    """Return a check that a number is between `least` and `most`."""

    def check(value: int) -> None:
        if not least <= value <= most:
            top = f" and at most {most}" if most < 2**31 - 1 else ""
            msg = f"must be at least {least}{top}"
            raise ValueError(msg)

    return check


def not_empty(value: str) -> None:
    """Raise a ValueError for an empty text."""
    if not value:
        msg = "must not be empty"
        raise ValueError(msg)


def a_path(value: str) -> None:
    """Raise a ValueError for a text that is no path, or one below ~ of an unknown user."""
    not_empty(value)
    if "\0" in value:
        msg = "must be a path, without null characters"
        raise ValueError(msg)
    try:
        Path(value).expanduser()
    except RuntimeError:
        msg = f"begins with {Path(value).parts[0]}, and this system knows no such home directory"
        raise ValueError(msg) from None


def named(value: list[str], what: str) -> None:
    """Raise a ValueError unless the items are NAME=VALUE, each with another name."""
    names = [name for name, _, named in (item.partition("=") for item in value) if named]
    if len(names) < len(value) or not all(names) or len({*names}) < len(names):
        msg = f"must be pairs NAME={what}, each with a name of its own"
        raise ValueError(msg)


def option(
    group: str,
    text: str,
    default: str = "",
    *,
    aliases: str | tuple[Alias, ...] = (),
    **more: Any,
) -> Field:
    """Return an option for the annotation of an attribute; `fields_of` completes it.

    text: the help text. default: the text about the default value; "" = the attribute's value.
    aliases: those without differences may be a text, separated by spaces.
    """
    if isinstance(aliases, str):
        aliases = tuple(map(Alias, aliases.split()))
    return Field("", text, default, group, aliases=aliases, **more)


def fields_of(options: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the options in the annotations of a record, in the order of its attributes."""
    hints = get_type_hints(options, include_extras=True)
    return tuple(
        _completed(hints[known.name], known.name, known.default)
        for known in msgspec.structs.fields(options)
    )


def _completed(annotation: Any, name: str, default: object) -> Field:
    """Return the option of an attribute, with all that follows from the attribute."""
    found: Field = annotation.__metadata__[0]
    kind = annotation.__origin__
    kind = get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind
    flags = (f"--{name.replace('_', '-')}",) if found.flags == FROM_NAME else found.flags
    return replace(
        found,
        name=name,
        default=found.default or _shown(default),
        kind=KINDS.get(get_origin(kind) or kind, "text") if found.kind == "text" else found.kind,
        flags=flags,
        env=found.env or PREFIX + flags[0].removeprefix("--").replace("-", "_").upper(),
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value)
