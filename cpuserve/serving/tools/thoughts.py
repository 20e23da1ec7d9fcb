"""Thoughts: the tags around them in responses, and how a response treats them.

Models with the harmony format have channels in place of tags (harmony.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.models import FAMILIES, add_plugins


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The texts that begin and end a thought."""

    open: str
    close: str


THINK = ThinkTags("<think>", "</think>")
# Tags that no response contains, for models without thoughts.
NO_THOUGHTS = ThinkTags("\0think\0", "\0/think\0")
# The tags around thoughts, for reasoning parsers of vLLM; records of families have further ones.
_TAGS: dict[str, ThinkTags] = {
    "apriel": ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
}
_MORE_TAGS = (
    ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("<thought>", "</thought>"),
    THINK,
)
_THINKERS = (
    *("deepseek_r1", "deepseek_v3", "glm45", "granite", "hunyuan_a13b", "minimax_m2"),
    *("nemotron_v3", "olmo3", "qwen3", "step3"),
)


def reasoning_tags() -> dict[str, ThinkTags]:
    """Return the tags around thoughts by reasoning parser, with those of families."""
    own = {name: ThinkTags(*tags) for name, tags in FAMILIES.tools.thoughts.items()}
    return {**_TAGS, **own, **dict.fromkeys(_THINKERS, THINK)}


def tags_of(parser: str) -> ThinkTags | None:
    """Return the tags of a reasoning parser; None if it has none, or is unknown."""
    if parser not in reasoning_tags():
        add_plugins()
    return reasoning_tags().get(parser)


def names() -> list[str]:
    """Return the values of --reasoning-parser besides auto and none."""
    add_plugins()
    return sorted([*reasoning_tags(), "openai_gptoss"])  # harmony has channels instead of tags


def known_tags() -> tuple[ThinkTags, ...]:
    """Return all tags: a template has the first ones that it contains."""
    named = (tags for tags in reasoning_tags().values() if tags != THINK)
    return (*named, *_MORE_TAGS)


def tags_in(source: str) -> ThinkTags | None:
    """Return the first pair of tags that a chat template contains; None if it has none."""
    pairs = known_tags()
    return next((tags for tags in pairs if tags.open in source or tags.close in source), None)


@dataclass(frozen=True, slots=True)
class ThoughtEnd:
    """The texts that the server adds to a response at the end of a thought.

    closed: the end of an open thought, up to the beginning of the text after it.
    gap: the text that the server adds after a thought that the model itself has ended.
    begin: the beginning of the text, unless a tool call or structured output is forced.
    """

    closed: str
    gap: str
    begin: str = ""


TAGS_END = ThoughtEnd("\n</think>\n\n", "\n\n")


@dataclass(frozen=True, slots=True)
class ThoughtUse:
    """How a response treats thoughts.

    told: whether the client gets the thoughts.
    budget: the most tokens of thoughts, None = any number.
    last_words: the text that the server adds when it ends a thought at its budget.
    """

    told: bool = True
    budget: int | None = None
    last_words: str = ""


USUAL = ThoughtUse()


@dataclass(frozen=True, slots=True)
class Turns:
    """The headers of the messages in a response, for models that write a header before each.

    Functionary writes `>>>all` before a text and `>>>NAME` before arguments, for example,
    and the prompt ends with the first `>>>`.

    begun: the beginning of every header, which is the end of the prompt;
      "" if only texts have a header.
    text: the part of the header after `begun`, if a text follows the header.
    ends: the texts at the end of a message.
    """

    begun: str
    text: str
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of the format that the client must not see: header and end of a text."""
        return tuple(mark for mark in (self.begun + self.text, *self.ends) if mark)


@dataclass(frozen=True, slots=True)
class Around:
    """The texts around the calls of a response, for its parser.

    gap: the white space that the template writes between a text and a tool call.
    tags: the tags around thoughts.
    thinks: whether the prompt has begun a thought.
    continues: whether the prompt ends with the beginning of the response.
    turns: the headers of messages, if there are any.
    functions: the names of the functions that may be called, if they are known.
    formed: whether the response may be a structured output in place of calls.
    """

    gap: str = ""
    tags: ThinkTags = THINK
    thinks: bool = False
    continues: bool = False
    turns: Turns | None = None
    functions: frozenset[str] = frozenset()
    formed: bool = False
