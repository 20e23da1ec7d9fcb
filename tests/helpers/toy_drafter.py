"""A kind of drafter that a test adds: it knows the responses, and guesses every fifth token wrong.

Its rows in the table are all that cpuserve learns about it (config.speculation.KINDS).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from cpuserve.config.speculation import DrafterKind
from cpuserve.core.speculation.proposer import Proposer

KIND = DrafterKind(
    method="toy",
    facts="tests.helpers.toy_drafter:with_toy",
    build="tests.helpers.toy_drafter:build",
)
CHANCE = 0.8


def with_toy(facts, path, _method):
    """The facts of a model with the toy as its drafter, which needs no memory."""
    toy = replace(
        facts, drafter="toy", name="toy", path=str(path), weight_bytes=0, table_bytes=0,
        kv_layers=(), state_bytes=0, activation_width=0, tower=None, draft=None,
    )  # fmt: skip
    return replace(facts, draft=toy), []


def build(_parts):
    return Toy()


class Toy(Proposer):
    """Proposes the rest of the response of the text in `responses` that a request continues.

    responses: the tokens after each prompt.
    """

    responses: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self):
        self.num_rounds, self.ended = 0, []

    def propose(self, requests, current):
        self.num_rounds += 1
        for request in requests:
            prompt, ids = request.token_ids[: request.num_prompt], request.token_ids
            known = self.responses.get(tuple(prompt), [])
            start = len(ids) - len(prompt)
            tokens = known[start : start + request.most_drafts]
            tokens = [t if (start + i) % 5 else t + 1 for i, t in enumerate(tokens)]
            if tokens and not request.computes_prompt:
                count = current.budget().count([CHANCE] * len(tokens))
                request.drafts, request.chances = tokens[:count], [CHANCE] * count
        return 0

    def finish(self, request):
        self.ended.append(request.id)

    def report(self):
        return {"toy_rounds": self.num_rounds, "toy_ended": len(self.ended)}
