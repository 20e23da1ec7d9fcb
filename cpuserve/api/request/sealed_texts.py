"""Open the sealed thoughts of a request, within a limit on all of them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.request.sealed import packed_texts, thought_of
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.threads import run_waiting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpuserve.api.request.context import RequestContext


async def opened(request: RequestContext, texts: Sequence[str], field: str) -> Mapping[str, str]:
    """Return the thought of each sealed text that this server wrote, by the sealed text.

    All thoughts together may have as many bytes as the body of a request to this model,
    which follow from the length of its context. They are counted before the first is expanded,
    their memory is reserved, and other threads check and expand them.

    texts: sealed texts; each counts as often as it occurs.
    field: the body field that an error names.

    Raises:
      InvalidRequest: the thoughts are larger together.
      ServerBusy: other requests used the memory for longer than limits.body_wait_s.
    """
    if not texts:
        return {}
    seal = request.state.seal
    packed, num_bytes = await run_waiting(lambda: packed_texts(seal, texts))
    limits = request.context.limits
    if num_bytes > limits.max_body_bytes:
        msg = (
            f"{field} has sealed thoughts of {num_bytes} bytes together, and this server reads at "
            f"most {limits.max_body_bytes} bytes: leave out the oldest ones, or start the server "
            "with a larger --max-body-size"
        )
        raise InvalidRequest(msg, param=field)
    await request.held.take(num_bytes, limits.body_wait_s)
    return await run_waiting(lambda: {text: thought_of(each) for text, each in packed.items()})
