"""The reference table of all options, made from config/fields.py.

`python -m cpuserve.config.reference README.md` writes it between the file's two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpuserve.config.fields import FIELDS, GROUPS, NO_OPS, Alias, Field

BEGIN = "<!-- options: made by python -m cpuserve.config.reference README.md -->"
END = "<!-- end of options -->"


def table() -> str:
    """Markdown: a table for each group, then what is accepted without effect."""
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
    return "\n".join([*lines, *_aliases(), "", *_no_ops()])


def replaced(text: str) -> str:
    """`text` with what stands between the marks made anew.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        msg = f"the marks {BEGIN!r} and {END!r} are missing"
        raise ValueError(msg)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _row(field: Field) -> str:
    flags = ", ".join(f"`{flag}`" for flag in field.flags)
    env = f"`{field.env}`" if field.env else ""
    help_ = field.help.replace("|", "\\|")
    return f"| {flags} | {env} | {help_} | {field.default} |"


def _aliases() -> Iterator[str]:
    yield "Read as the option beside it:"
    yield ""
    for field in FIELDS:
        if field.aliases:
            names = ", ".join(map(_alias, field.aliases))
            yield f"- {names}: `{field.flag or field.env}`"


def _alias(alias: Alias) -> str:
    return f"`{alias.name}`" + (f" ({alias.differs})" if alias.differs else "")


def _no_ops() -> Iterator[str]:
    yield "Accepted, and answered with a line that says why it has no effect here:"
    yield ""
    for no_op in NO_OPS:
        yield f"- {', '.join(f'`{name}`' for name in no_op.names)}: {no_op.why}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite each file named."""
    for name in sys.argv[1:] if argv is None else argv:
        path = Path(name)
        path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
