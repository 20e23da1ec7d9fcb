"""Compute the beginning of a conversation's next prompt while no request runs.

The beginning ends before the user's next text, or before the result of the first tool call: it is
the conversation with the response, as the client will send it back. The engine
computes it like a prompt without a response, and later finds it in the prefix cache. The work ends
as soon as any request arrives. The blocks that it has computed by then stay in the cache.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import CpuserveError
from cpuserve.base.log import get_logger
from cpuserve.engine.ipc import AddRequest
from cpuserve.serving.calls.events import (
    Choice,
    Event,
    Text,
    Thought,
    ToolCallDelta,
    WholeToolCall,
)
from cpuserve.serving.models.next_turns import TurnAhead
from cpuserve.serving.models.recent_prompts import bytes_of, common_tokens
from cpuserve.serving.prompts.prompts import prompts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.generation.plan import SequencePlan
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.next_turns import NextTurns
    from cpuserve.tokenizer.conversation import ConversationMessage

# If the cache lacks fewer tokens than this, the work is not worth a step: blocks have 32 tokens,
# and the last tokens before the user's text may depend on this text.
_LEAST_TOKENS = 64
_LAST_PRIORITY = 2**31 - 1

log = get_logger("serve")


class TurnReader:
    """Collects the response to a call, and then adds the work for the next turn to NextTurns."""

    def __init__(
        self, context: ModelContext, turns: NextTurns, number: int, sequence: SequencePlan
    ) -> None:
        """number: the conversation in `turns`."""
        self._context, self._turns, self._number = context, turns, number
        self._sequence = sequence
        self._response = Choice(0, sequence.prompt, 0)

    @classmethod
    def of(
        cls,
        context: ModelContext,
        call: GenerateCall,
        num_bytes: int,
        sequences: Sequence[SequencePlan],
    ) -> TurnReader | None:
        """Return a reader of the response; None = its next prompt is not computed in advance."""
        turns = context.turns
        if turns is None or len(sequences) != 1 or not _is_followed(call):
            return None
        number = turns.keep(TurnAhead(msgspec.structs.replace(call), num_bytes))
        return None if number is None else cls(context, turns, number, sequences[0])

    def add(self, events: Sequence[Event]) -> None:
        """Read the next events of the response."""
        for event in events:
            if isinstance(event, Text):
                if event.text:
                    self._response.text.append(event.text)
            elif isinstance(event, Thought | ToolCallDelta):
                self._response.add(event)

    def end(self, *, whole: bool) -> None:
        """Let the next prompt be computed; if the response is not whole, forget it."""
        turn, recent = self._turns.get(self._number), self._sequence.tally.recent
        if turn is None:
            return
        if not whole or recent is None:
            self._turns.forget(self._number)
            return
        messages = turn.call.messages or []
        calls = [
            msgspec.structs.replace(
                turn.call,
                messages=[*messages, *following],
                continue_final_message=True,
                add_generation_prompt=None,
            )
            for following in _followings(messages, self._response)
        ]
        params, size = self._sequence.params, turn.num_bytes
        work = partial(_compute, self._context, calls, size, params, recent.ids)
        self._turns.answered(self._number, work)


def _is_followed(call: GenerateCall) -> bool:
    """Whether a call is a chat that continues with its messages, the response and more."""
    if call.messages is None or call.embed or call.continue_final_message:
        return False
    is_cut = call.truncate_prompt_tokens is not None
    rounds = call.decisions or call.tool_search or call.beams or call.earlier
    return not (is_cut or rounds is not None)


def _followings(
    messages: Sequence[ConversationMessage], response: Choice
) -> list[list[ConversationMessage]]:
    """Return the response as a message, and an empty message of who speaks next.

    The response has its thoughts if the client has sent back the thoughts of earlier responses.
    At the first response this is not known, so there are two results.
    """
    said: ConversationMessage = {"role": "assistant", "content": "".join(response.text)}
    next_message: ConversationMessage = {"role": "user", "content": ""}
    if response.calls:
        first = response.calls[0]
        next_message = {"role": "tool", "tool_call_id": first.id, "name": first.name, "content": ""}
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for call in response.calls
        ]
    if not response.thoughts:
        return [[said, next_message]]
    whole_message = {**said, "reasoning_content": response.reasoning}
    earlier_messages = [message for message in messages if message.get("role") == "assistant"]
    if not earlier_messages:
        return [[said, next_message], [whole_message, next_message]]
    has_reasoning = any("reasoning_content" in message for message in earlier_messages)
    return [[whole_message if has_reasoning else said, next_message]]


def _arguments(call: WholeToolCall) -> Any:
    """Return the arguments of a call as clients send them back."""
    text = "".join(call.arguments)
    return {"input": text} if call.custom else text


async def _compute(
    context: ModelContext,
    calls: Sequence[GenerateCall],
    num_bytes: int,
    params: SamplingParams,
    known_bytes: bytes,
) -> None:
    """Compute the prompts of calls. known: the tokens of the last prompt and its response."""
    if context.unavailable() is not None:
        return
    params = msgspec.structs.replace(
        params,
        max_tokens=0,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        structured_outputs=None,
    )
    computed = [known_bytes]
    for call in calls:
        (prompt,) = await prompts_of(context, call, num_bytes)
        ids = bytes_of(prompt.ids)
        num_missing = len(prompt.ids) - max(
            common_tokens(computed_ids, ids) for computed_ids in computed
        )
        if num_missing < _LEAST_TOKENS:
            continue
        computed.append(ids)
        request = AddRequest.of(
            prompt.ids,
            params,
            _LAST_PRIORITY,
            continues=True,  # no client has sent this prompt, so it does not count as one
            media=prompt.media,
        )
        stream = context.client.generate(request, payload_of=prompt.payload_of)
        async with aclosing(stream) as outputs:
            async for _ in outputs:
                context.metrics.computed_ahead += num_missing


async def compute_next_turn(turns: NextTurns, number: int) -> None:
    """Do the work for a conversation, and forget it; do nothing if it is forgotten."""
    turn = turns.get(number)
    if turn is None or turn.work is None:
        return
    try:
        await turn.work()
    except CpuserveError as error:  # for example, the template refuses the conversation
        log.debug("the next prompt of a conversation is not computed in advance: %s", error)
    turns.forget(number)


async def compute_next_turns(turns: NextTurns) -> None:
    """Compute next prompts while no request runs, until this task is cancelled."""
    while True:
        number = await turns.wait_idle()
        work = asyncio.ensure_future(compute_next_turn(turns, number))
        busy = asyncio.ensure_future(turns.wait_busy())
        try:
            await asyncio.wait((work, busy), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            busy.cancel()
            results = await asyncio.gather(work, busy, return_exceptions=True)
        if isinstance(results[0], Exception):
            turns.forget(number)
            raise results[0]
