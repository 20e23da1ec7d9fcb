"""Turn the results of a step for a request into the message that the front end gets."""

from __future__ import annotations

from cpuserve.core.request import Delta
from cpuserve.core.step import RowResult
from cpuserve.engine.ipc import Output, TokenLogprob


def output_of(delta: Delta) -> Output:
    """Return the message with the results of one step for one request."""
    request = delta.request
    output = Output(request.id, delta.tokens, delta.finish, delta.stop_id, error=delta.error)
    output.processed, output.vector = delta.processed, delta.vector
    output.fault, output.unavailable = delta.fault, delta.unavailable
    output.drafts = delta.drafts
    if request.num_output == len(delta.tokens):
        output.scheduled = request.scheduled
        output.cached_tokens = request.cached_tokens
    if delta.rows is not None:
        output.logprobs = [_logprob(row) for row in delta.rows]
    if delta.prompt_rows is not None:
        output.prompt_logprobs = [
            None if row is None else _logprob(row) for row in delta.prompt_rows
        ]
    return output


def _logprob(row: RowResult) -> TokenLogprob:
    return TokenLogprob(row.token, row.logprob, row.rank, row.top)
