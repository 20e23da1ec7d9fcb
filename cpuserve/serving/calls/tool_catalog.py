"""A search among the tools of a request, for requests with more tools than a prompt should have.

The model gets a function that searches. The server runs the search in the middle of the response,
and the model goes on with the definitions of the found tools (tools/search_round.py).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpuserve.base.errors import brief

MOST_FOUND = 5
_LONGEST_PATTERN = 200
_LONGEST_TEXT = 8192  # only this many characters of a description are searched
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_]+")
# The usual constants of BM25: the weight of repeated words, and of the length of a text.
_K1, _B = 1.2, 0.75
_BY_PATTERN = (
    "Search for further tools, which you can call after that. The query is a regular expression "
    "for their names and descriptions, such as `(?i)mail` or `get_.*_data`."
)
_BY_WORDS = (
    "Search for further tools, which you can call after that. The query is some words about what "
    "the tools should do."
)


class FoundTools(NamedTuple):
    """The name of each tool that a search has found, the best first, or why the search failed."""

    names: list[str]
    error: str = ""


@dataclass(frozen=True, slots=True)
class ToolSearch:
    """A search among `tools`, functions in the format of chat completions.

    name: the function that the model calls.
    by_pattern: whether a query is a regular expression; False = a query is a list of words.
    about: further text for the model about the tools.
    most: how many searches one response may make; None = any number.
    """

    name: str
    by_pattern: bool
    tools: list[dict[str, Any]]
    about: str = ""
    most: int | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The definition of the search function that the model calls."""
        described = _BY_PATTERN if self.by_pattern else _BY_WORDS
        shown = "\n".join(filter(None, (described, self.about)))
        query = {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": shown, "parameters": query},
        }

    @property
    def num_chars(self) -> int:
        """The number of characters that a search reads."""
        return sum(len(text) for tool in self.tools for text in _texts_of(tool))

    def run(self, arguments: str) -> FoundTools:
        """Return the tools that a call of the search function with these arguments finds."""
        query = _query(arguments)
        if query is None:
            return FoundTools([], "it needs a query, which is a text")
        if not self.by_pattern:
            return FoundTools(self._by_words(query))
        if len(query) > _LONGEST_PATTERN:
            return FoundTools([], f"the pattern has more than {_LONGEST_PATTERN} characters")
        try:
            return FoundTools(self._by_pattern(query))
        except ValueError as error:
            return FoundTools([], f"the pattern is not valid: {error}")

    def functions(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return the tools with these names, in this order."""
        by_name = {tool["function"]["name"]: tool for tool in self.tools}
        return [by_name[name] for name in names if name in by_name]

    def _by_pattern(self, pattern: str) -> list[str]:
        matches = _matcher(pattern)
        found = (
            tool["function"]["name"] for tool in self.tools if any(map(matches, _texts_of(tool)))
        )
        return [name for name, _ in zip(found, range(MOST_FOUND), strict=False)]

    def _by_words(self, query: str) -> list[str]:
        """Return the names of the best tools for the words of a query, ranked by BM25."""
        counts = [Counter(_words(" ".join(_texts_of(tool)))) for tool in self.tools]
        mean = sum(count.total() for count in counts) / max(len(counts), 1) or 1.0
        scores = [0.0] * len(counts)
        for word in set(_words(query)):
            having = sum(word in count for count in counts)
            weight = math.log(1 + (len(counts) - having + 0.5) / (having + 0.5))
            for i, count in enumerate(counts):
                length = 1 - _B + _B * count.total() / mean
                scores[i] += weight * count[word] * (_K1 + 1) / (count[word] + _K1 * length)
        best = sorted(range(len(counts)), key=lambda i: -scores[i])[:MOST_FOUND]
        return [self.tools[i]["function"]["name"] for i in best if scores[i] > 0]


def described(functions: Iterable[Any]) -> str:
    """Return the text that describes functions to the model, in the middle of a conversation."""
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    if not lines:
        return "No tools were found."
    return "\n".join(["You can call these functions now:", *lines])


def missing_note(tools: str) -> str:
    """Return the text that informs the model of tools that this server cannot run."""
    return f"These tools are not available here: {tools}. Say so instead of guessing."


def _query(arguments: str) -> str | None:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    query = given.get("query") if isinstance(given, dict) else None
    return query if isinstance(query, str) else None


def _matcher(pattern: str) -> Any:
    """Return a function that searches a text for the pattern, in linear time.

    Raises:
      ValueError: the pattern is not valid.
    """
    # pydantic has the regular expressions of Rust. In contrast to Python, Rust searches in linear
    # time for any text and pattern. The import is here since few requests need pydantic.
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python
    except SchemaError as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error


def _texts_of(tool: dict[str, Any]) -> Iterator[str]:
    """Yield the name and description of a tool and of its parameters, up to _LONGEST_TEXT."""
    function = tool["function"]
    yield function["name"]
    yield brief(function.get("description") or "", _LONGEST_TEXT)
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        yield name[:_LONGEST_TEXT]
        if isinstance(schema, dict):
            yield brief(schema.get("description") or "", _LONGEST_TEXT)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
