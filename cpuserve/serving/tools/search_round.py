"""The part of a response up to a search for tools, after which the response goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.serving.calls.events import (
    Event,
    Finish,
    Text,
    Thought,
    ToolCallDelta,
    ToolSearched,
    WholeToolCall,
)
from cpuserve.serving.calls.tool_catalog import ToolSearch, described

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall

# The most rounds of one response. A model that goes on searching would find nothing more.
MOST_ROUNDS = 8


@dataclass(slots=True)
class SearchRound:
    """Reads the events of one round: one response of the engine to the conversation so far.

    num_calls: how many tool calls for the client the model has made so far, in all rounds.
    num_searches: how many searches the model made in earlier rounds.
    searches: the calls of the search function in this round.
    finish: the Finish event of the round; None until the round has ended.
    """

    search: ToolSearch
    num_calls: int = 0
    num_searches: int = 0
    finish: Finish | None = None
    searches: list[WholeToolCall] = field(default_factory=list)
    has_calls: bool = False
    _text: list[str] = field(default_factory=list)
    _thought: list[str] = field(default_factory=list)
    _is_search: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the model has searched, and the response goes on after that."""
        ended = self.finish is not None and self.finish.reason == "tool_calls"
        return ended and bool(self.searches)

    def read(self, events: list[Event]) -> list[Event]:
        """Return the events without calls of the search function, and without the Finish."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, Finish):
                self.finish = event
            elif isinstance(event, ToolCallDelta):
                found += self._call(event)
            else:
                found.append(event)
                if isinstance(event, Text):
                    self._text.append(event.text)
                elif isinstance(event, Thought):
                    self._thought.append(event.text)
        return found

    def _call(self, event: ToolCallDelta) -> list[Event]:
        if event.id is not None and event.name is not None:
            self._is_search = event.name == self.search.name
            if self._is_search:
                self.searches.append(WholeToolCall(event.id, event.name))
            else:
                self.num_calls += 1
                self.has_calls = True
        if self._is_search:
            self.searches[-1].arguments.append(event.arguments)
            return []
        event.call = self.num_calls - 1
        return [event]

    def run(self) -> list[ToolSearched]:
        """Run the searches, and return their results; a search beyond the limit finds nothing."""
        found, most = [], self.search.most
        for number, call in enumerate(self.searches, self.num_searches + 1):
            arguments = "".join(call.arguments)
            if most is None or number <= most:
                names, error = self.search.run(arguments)
            else:
                names, error = [], f"the request allows {most} searches at most: go on without one"
            found.append(ToolSearched(0, call.id, call.name, arguments, names, error))
        return found

    def messages(self, results: list[ToolSearched]) -> list[dict[str, Any]]:
        """Return the messages of the round: the assistant's message, and its search results."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in self.searches
        ]
        message = {"role": "assistant", "content": "".join(self._text), "tool_calls": calls}
        if thought := "".join(self._thought):
            message["reasoning_content"] = thought
        found = [message]
        for call, result in zip(self.searches, results, strict=True):
            shown = described(self.search.functions(result.found))
            said = f"The search failed: {result.error}." if result.error else shown
            found.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return found


def after_search(
    call: GenerateCall, part: SearchRound, results: list[ToolSearched], used: int
) -> GenerateCall | Finish:
    """Return the GenerateCall of the next round; a Finish if the response ends with the search.

    used: the number of tokens of this round.
    """
    if part.has_calls:  # the client runs these calls, and sends the results in its next request
        return Finish(0, "tool_calls")
    left = None if call.max_tokens is None else call.max_tokens - used
    if left is not None and left < 1:
        return Finish(0, "length")
    messages, written = list(call.messages or ()), part.messages(results)
    if call.continue_final_message:  # the round continued the last message of the call
        begun = messages.pop()
        said = [begun["content"]] if isinstance(begun["content"], str) else begun["content"]
        written[0] = {**begun, **written[0], "content": [*said, written[0]["content"]]}
    known = {tool["function"]["name"] for tool in call.callable_tools}
    names = dict.fromkeys(name for result in results for name in result.found if name not in known)
    forced_other = call.tool_name not in (None, part.search.name)
    return msgspec.structs.replace(
        call,
        messages=[*messages, *written],
        found_tools=[*(call.found_tools or ()), *part.search.functions(names)],
        max_tokens=left,
        continue_final_message=None,
        tool_choice=call.tool_choice if forced_other else "auto",
        tool_name=call.tool_name if forced_other else None,
    )
