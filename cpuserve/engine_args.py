"""EngineArgs: the options of `LLM` as flags of a program, with the interface of vLLM."""

from __future__ import annotations

import argparse
from dataclasses import make_dataclass
from typing import Any, TypeVar

from cpuserve.config.fields import FIELDS, argument_name, no_op_flags
from cpuserve.config.missing import VLLM_MISSING

AnyParser = TypeVar("AnyParser", bound=argparse.ArgumentParser)


def _names() -> list[str]:
    """Return all options, and the options of vLLM that cpuserve ignores or refuses."""
    words = [argument_name(w) for f in FIELDS for w in f.all_flags if w[:2] == "--"]
    flags = [*no_op_flags(), *(name for each in VLLM_MISSING for name in each.names)]
    others = [argument_name(flag) for flag in flags if flag.startswith("--")]
    own = ["model", *(f.name for f in FIELDS)]
    return list(
        dict.fromkeys([*own, *words, "ubatch_size", *(n for n in others if n[:3] != "no_")])
    )


_Options: Any = make_dataclass("_Options", [(name, Any, None) for name in _names()])


class EngineArgs(_Options):  # type: ignore[misc]
    """The options of `LLM`, as a dataclass and as flags of a program; None = not set.

    LLM(**asdict(args)) and LLM.from_engine_args(args) make a model with them. An option of vLLM
    that cpuserve does not have is refused there, with the reason, if it has a value.
    """

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the options among the parsed flags of a program."""
        given = vars(args)
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})

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
