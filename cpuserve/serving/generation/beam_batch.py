"""Run beam searches with an engine in this process, for `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.core.admission import output_limit
from cpuserve.core.exclusion import stop_ids
from cpuserve.serving.generation.batch import BatchItem, run_batch
from cpuserve.serving.generation.beam_search import BeamSearch, step_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.engine.inline import InlineClient
    from cpuserve.sampling.beams import BeamRules
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.generation.beam_search import Beam
    from cpuserve.serving.models.context import ModelContext


def search_batch(
    client: InlineClient,
    context: ModelContext,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    rules: BeamRules,
) -> list[list[Beam]]:
    """Return the best responses to each prompt; a step computes the beams of all prompts.

    params: only max_tokens, ignore_eos and stop_token_ids have an effect; nothing is sampled.

    Raises:
        InvalidRequest: a prompt is empty, or too long for the context.
        RequestError, EngineDead: see `run_batch`.
    """
    own, ends = step_params(params, rules), stop_ids(params, context.bounds.eos_ids)
    searches = []
    for ids in prompts:
        most = max(1, output_limit(len(ids), params, context.bounds))
        searches.append((ids, BeamSearch(len(ids), rules, ends, most)))
    while going := [(ids, search) for ids, search in searches if not search.done]:
        steps = [
            [BatchItem.of([*ids, *beam.tokens], own) for beam in search.running]
            for ids, search in going
        ]
        run_batch(client, context, [item for of_prompt in steps for item in of_prompt], _ended)
        for (_, search), of_prompt in zip(going, steps, strict=True):
            search.take([item.choices[0].logprobs[0] for item in of_prompt])
    return [search.best(rules.width) for _, search in searches]


def _ended(position: int, choice: object) -> None:
    """Do nothing, because `run_batch` stores the choices in the items."""
