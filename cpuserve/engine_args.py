"""EngineArgs: the options of `LLM` as flags of a program, with the interface of vLLM."""

from __future__ import annotations

import argparse
from typing import TypeVar

from cpuserve.config.fields import FIELDS, argument_name, no_op_flags

AnyParser = TypeVar("AnyParser", bound=argparse.ArgumentParser)


class EngineArgs:
    """Adds the options of `LLM` to a parser: LLM(**vars(parser.parse_args()))."""

    @staticmethod
    def add_cli_args(parser: AnyParser) -> AnyParser:
        """Add a flag for each option to `parser`, and return it.

        The parsed value of an option that is not given is None, which LLM ignores.
        """
        group = parser.add_argument_group("Options of the engine")
        for field in FIELDS:
            if field.server or not field.flags:
                continue
            text = field.help.replace("%", "%%")
            flags, name = field.all_flags, field.name
            if field.kind == "flag":
                group.add_argument(*flags, dest=name, action="store_const", const=True, help=text)
                off = [f"--no-{flag[2:]}" for flag in flags if flag.startswith("--")]
                group.add_argument(
                    *off, dest=name, action="store_const", const=False, help=argparse.SUPPRESS
                )
            else:
                many = "+" if field.kind == "list" else None
                group.add_argument(*flags, dest=name, nargs=many, help=text)
        for flag, no_op in no_op_flags().items():
            if flag.startswith("--"):
                action = "store_const" if no_op.takes == "none" else "store"
                more = {"const": True} if no_op.takes == "none" else {}
                group.add_argument(
                    flag,
                    dest=argument_name(flag),
                    action=action,
                    help=argparse.SUPPRESS,
                    **more,  # type: ignore[arg-type]
                )
        return parser
