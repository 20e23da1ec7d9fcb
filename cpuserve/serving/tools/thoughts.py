"""Thoughts: the tags between which models write them, and whether a prompt has begun one.

Models of harmony have channels in place of tags (harmony.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The texts that begin and end a thought."""

    open: str
    close: str


THINK = ThinkTags("<think>", "</think>")
# Of other families.
_OTHERS = (
    ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkTags("<|channel>thought", "<channel|>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("<thought>", "</thought>"),
)


def tags_in(source: str) -> ThinkTags | None:
    """Return the first pair of tags that a chat template contains; None if it has none."""
    known = (*_OTHERS, THINK)
    return next((tags for tags in known if tags.open in source or tags.close in source), None)


@dataclass(frozen=True, slots=True)
class ThoughtEnd:
    """The texts of a response at the end of a thought, where the server writes them.

    closed: from the end of the thought to the text. gap: between an ended thought and the text.
    begin: the beginning of the text, unless something else is forced.
    """

    closed: str
    gap: str
    begin: str = ""


TAGS_END = ThoughtEnd("\n</think>\n\n", "\n\n")


@dataclass(frozen=True, slots=True)
class ThoughtUse:
    """How a response treats thoughts: whether it shows them, and how many tokens they may have.

    budget: None = any number. last_words: the end of a thought that has no more.
    """

    told: bool = True
    budget: int | None = None
    last_words: str = ""


USUAL = ThoughtUse()


@dataclass(frozen=True, slots=True)
class Around:
    """The text around the calls of a response.

    gap: the template's text between a text and a call. thinks: the prompt has begun a thought.
    continues: the prompt ends with a text of the response.
    """

    gap: str = ""
    tags: ThinkTags = THINK
    thinks: bool = False
    continues: bool = False


def begins_thought(prompt: str, tags: ThinkTags) -> bool:
    """Return whether a rendered prompt ends with the beginning of a thought."""
    return prompt[-256:].rstrip().endswith(tags.open)


def ends_thought(prompt: str, tags: ThinkTags) -> bool:
    """Return whether a rendered prompt ends with a whole thought: an empty one forbids thinking."""
    return prompt[-256:].rstrip().endswith(tags.close)


def leaves_thought_open(text: str, tags: ThinkTags) -> bool:
    """Return whether the text of a response, which the model continues, ends within a thought."""
    return text.rfind(tags.open) > text.rfind(tags.close)
