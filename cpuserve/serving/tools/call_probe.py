"""Tool calls with known names and arguments, from which a format of calls is learned.

A way of writing arguments has a reader: a function that finds the known arguments
in the text of a call. The readers are listed in learn_layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuserve.serving.tools.layout import Writing


@dataclass(frozen=True, slots=True)
class CallProbe:
    """Calls with known names and arguments, as a template writes them.

    one, two: the text of a response with one call, and with two calls
      ("" = the template cannot write two).
    ids: the ids of the two calls.
    """

    one: str
    two: str
    names: Sequence[str]
    ids: Sequence[str]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FoundArguments:
    """The arguments of a call, text[begin:end], and the `Writing` that reads them."""

    begin: int
    end: int
    writing: Writing


# A reader gets the text of a response, the position of the function's name in this text,
# and the probe. The reader returns None if the arguments are written in another way.
CallReader = Callable[[str, int, CallProbe], FoundArguments | None]
