"""Find the headers of messages in templates that write a header before each text and each call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cpuserve.serving.tools.atoms import atoms
from cpuserve.serving.tools.thoughts import ThinkTags, Turns

_LONGEST, _LONGEST_TAG = 120, 64


def turns_of(prompt: str, before: str, behind: Sequence[str]) -> Turns | None:
    """Return the headers that the template writes before messages of a response.

    Returns None if a response is always one message.

    prompt: the rendered text before any response.
    before: the rendered text before a response without calls, which includes the header.
    behind: the rendered texts that come after one message and before the next one.
    """
    begun = next(filter(None, (_begun(prompt, text) for text in behind)), "")
    if not begun or not before.startswith(prompt):
        return None
    return Turns(begun, before[len(prompt) :])


def tags_around(before: str, close: str, other: str) -> ThinkTags | None:
    """Return the tags around a thought, or None.

    before, close: the rendered texts before and after the thought.
    other: the rest of the rendered text, which must not contain the first tag.
    """
    found = ""
    for atom in reversed(atoms(before.rstrip()[-_LONGEST_TAG:])):
        if atom == "\n":
            break
        found = atom + found
        if len(atom) > 1 and atom[0] in "<[" and found not in other:
            break
    is_new = len(found) > 1 and found not in other
    return (
        ThinkTags(found.strip(), close.strip()) if is_new and len(close) <= _LONGEST_TAG else None
    )


def end_of(rendered: str, said: str, turns: Turns) -> str:
    """Return the text of `rendered` between `said` and the next message, stripped on the right."""
    _, _, rest = rendered.partition(said)
    at = rest.find(turns.begun)
    return rest[:at].rstrip() if at >= 0 else ""


def _begun(prompt: str, after: str) -> str:
    """Return the end of `prompt` that begins a header, as it is in `after` too; "" if none."""
    found = ""
    for atom in reversed(atoms(prompt[-_LONGEST:])):
        if atom + found not in after:
            break
        found = atom + found
        if len(atom) > 1 and atom[0] in "<[":  # a header has only one tag, at its beginning
            return found if after.count(found) == 1 else ""
    return found if len(found) > 1 and not re.search(r"[\w\s]", found) else ""
