"""Write the response of /v1/systemone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.systemone.schema import DecisionUsage, SystemOneAnswer
from cpuserve.serving.decisions.results import results_of

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.systemone.schema import SystemOneRequest
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation


class DecisionWriter:
    """Writes the response to a request to /v1/systemone."""

    def __init__(
        self, received: RequestContext, _asked: SystemOneRequest, generation: Generation
    ) -> None:
        assert generation.call.decisions is not None
        self._received = received
        self._questions = generation.call.decisions.questions

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        received, used = self._received, response.usage
        found, diagnostics = results_of(
            self._questions, [(each.prompt.labels, each.logprobs[0]) for each in response.choices]
        )
        whole = SystemOneAnswer(
            received.id,
            "structured_decision",
            received.created,
            received.served.name,
            found,
            DecisionUsage(used.prompt, used.completion, used.cached),
            diagnostics,
        )
        return msgspec.json.encode(whole)
