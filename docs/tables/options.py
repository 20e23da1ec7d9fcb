"""The reference of all options in docs/options.md, from config/fields.py and config/missing.py."""

from __future__ import annotations

from collections.abc import Iterator

from cpuserve.config.field import GROUPS, Alias, Field
from cpuserve.config.fields import FIELDS, NO_OPS
from cpuserve.config.missing import MISSING, UNREAD


def table() -> str:
    """Return Markdown: a table per group of options, then aliases, no-ops and refused flags."""
    lines: list[str] = []
    for group in GROUPS:
        lines += [
            f"**{group}**",
            "",
            "| option | environment | meaning | default |",
            "|---|---|---|---|",
        ]
        lines += [_row(f) for f in FIELDS if f.group == group]
        lines.append("")
    return "\n".join([*lines, *_aliases(), "", *_no_ops(), "", *_missing(), "", *_unread()])


def _row(field: Field) -> str:
    flags = ", ".join(f"`{flag}`" for flag in field.flags)
    env = f"`{field.env}`" if field.env else ""
    help_ = field.help.replace("|", "\\|")
    return f"| {flags} | {env} | {help_} | {field.default} |"


def _aliases() -> Iterator[str]:
    yield "Aliases, which vLLM, llama.cpp and Ollama use for these options:"
    yield ""
    for field in FIELDS:
        if field.aliases:
            names = ", ".join(map(_alias, field.aliases))
            yield f"- {names}: same as `{field.flag or field.env}`"


def _alias(alias: Alias) -> str:
    return f"`{alias.name}`" + (f" ({alias.differs})" if alias.differs else "")


def _no_ops() -> Iterator[str]:
    yield "These flags and variables have no effect, and a note at the start says why:"
    yield ""
    for no_op in NO_OPS:
        yield f"- {', '.join(f'`{name}`' for name in no_op.names)}: no effect; {no_op.why}"


def _missing() -> Iterator[str]:
    yield "These flags are refused, and the message says why and what to do instead:"
    yield ""
    for missing in MISSING:
        yield f"- {', '.join(f'`{name}`' for name in missing.names)}: refused; {missing.why}"


def _unread() -> Iterator[str]:
    yield "These variables are ignored, and a note at the start says what to set instead:"
    yield ""
    for unread in UNREAD:
        yield f"- {', '.join(f'`{name}`' for name in unread.names)}: ignored; {unread.why}"
