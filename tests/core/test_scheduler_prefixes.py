"""Scheduler: blocks of common prefixes are computed once, and never found after a failed step."""

import math

import pytest
from msgspec.structs import replace

from cpuserve.core.budget import PromptBudget
from tests.core.scheduling import computed_in, make, request, step
from tests.helpers.fake_executor import reference

PREFIX = list(range(100, 112))


def test_requests_of_one_step_compute_their_common_prefix_once():
    scheduler, model = make(budget=64)
    for number in range(4):
        scheduler.add(request(number, 0, max_tokens=3, prompt=[*PREFIX, number, 9]))
    sizes, _ = step(scheduler, model)
    assert sizes == [14, 2, 2, 2]
    assert [r.cached_tokens for r in scheduler.running] == [0, 12, 12, 12]
    assert (scheduler.blocks.prefix_queries, scheduler.blocks.prefix_hits) == (4 * 14, 3 * 12)
    scheduler.check_invariants()


def test_equal_prompts_share_all_full_blocks_but_the_last_token():
    scheduler, model = make(budget=64)
    for number in range(3):
        scheduler.add(request(number, 0, max_tokens=3, prompt=list(PREFIX)))
    assert step(scheduler, model)[0] == [12, 4, 4]
    tables = [r.tables for r in scheduler.running]
    assert tables[0] == tables[1] == tables[2], "equal blocks were kept more than once"
    scheduler.check_invariants()


def test_next_turn_computes_only_what_is_new():
    scheduler, model = make()
    first = request(0, 0, max_tokens=9, prompt=list(PREFIX))
    scheduler.add(first)
    computed_in(scheduler, model)
    second = request(1, 0, max_tokens=2, prompt=[*first.token_ids, 7, 7])
    scheduler.add(second)
    assert step(scheduler, model)[0] == [3]  # 12 + 9 tokens, the last was never computed
    assert second.cached_tokens == 20


def test_scored_prompt_is_computed_whole_and_published():
    scheduler, model = make(budget=64)
    scheduler.add(request(0, 0, max_tokens=1, prompt=list(PREFIX)))
    computed_in(scheduler, model)
    scored = request(1, 0, max_tokens=1, prompt=list(PREFIX), prompt_logprobs=0)
    scheduler.add(scored)
    sizes, deltas = step(scheduler, model)
    assert sizes == [12]
    assert scored.cached_tokens == 0
    assert len(deltas[0].prompt_rows) == 12
    assert (scheduler.blocks.prefix_queries, scheduler.blocks.prefix_hits) == (12, 0)
    scheduler, model = make(budget=64)
    scheduler.add(request(0, 0, max_tokens=1, prompt=list(PREFIX), prompt_logprobs=0))
    computed_in(scheduler, model)
    reader = request(1, 0, max_tokens=1, prompt=list(PREFIX))
    scheduler.add(reader)
    assert step(scheduler, model)[0] == [4]


def test_later_chunks_of_a_prompt_use_what_another_request_has_published():
    scheduler, model = make(budget=8, num_blocks=64)
    prompt = list(range(200, 240))
    scheduler.add(request(0, 0, max_tokens=2, prompt=prompt, prompt_logprobs=0))
    reader = request(1, 0, max_tokens=2, prompt=[*prompt, 1])
    scheduler.add(reader)
    computed_in(scheduler, model)
    assert reader.cached_tokens == 40


def test_preempted_request_finds_its_own_blocks_and_reports_no_hits():
    scheduler, model = make(num_blocks=10, max_num_seqs=4)
    requests = [request(number, 7, max_tokens=25) for number in range(3)]
    for one in requests:
        scheduler.add(one)
    readmitted = []
    while scheduler.has_work:
        waiting = {r.id: r for r in scheduler.waiting if r.num_preemptions}
        step(scheduler, model)
        readmitted += [r.num_computed for r in scheduler.running if r.id in waiting]
    assert scheduler.num_preemptions
    assert all(r.cached_tokens == 0 for r in requests)
    assert scheduler.blocks.prefix_hits == 0
    assert any(computed > 20 for computed in readmitted)


def test_prefixes_of_a_failed_step_are_not_found():
    scheduler, model = make(budget=64)
    scheduler.add(request(0, 0, max_tokens=3, prompt=list(PREFIX)))
    scheduler.schedule()
    scheduler.fail("broken")
    scheduler.check_invariants()
    scheduler.add(request(1, 0, max_tokens=3, prompt=list(PREFIX)))
    assert step(scheduler, model)[0] == [12]


def test_prompt_that_skipped_what_a_failed_step_was_to_compute_starts_again():
    """The request shares blocks that the step computes, but is not part of the step itself."""
    scheduler, model = make(num_blocks=400, budget=64, itl_target_s=0.05)
    text = [n % 90 for n in range(300)]
    oldest, reader = request(0, 400, max_tokens=1), request(1, 0, max_tokens=3, prompt=[*text])
    scheduler.add(oldest)
    scheduler.add(reader)
    step(scheduler, model)
    computed = reader.num_computed
    scheduler.add(request(2, 0, max_tokens=1, prompt=text[: computed + 12]))
    batch = scheduler.schedule()
    assert {r.id for r in scheduler.batch_requests} == {0, 2}
    assert reader.num_computed > computed
    model.spoil(batch)
    scheduler.fail("broken")
    assert not reader.is_running
    assert reader.num_preemptions == 1
    computed_in(scheduler, model)
    assert reader.token_ids[300:] == reference(text, reader.params, reader.seed, 3)


BANS = {"allowed_token_ids": [3], "min_tokens": 1}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (BANS, len(PREFIX)),
        ({**BANS, "prompt_logprobs": 0}, len(PREFIX)),
        *(
            (alone, len(PREFIX))
            for alone in (
                {"allowed_token_ids": [3]},
                {"min_tokens": 1},
                {"logit_bias": {3: -100.0}},
                {"repetition_penalty": 1.1},
                {"presence_penalty": 0.1},
                {"frequency_penalty": 0.1},
            )
        ),
        ({}, 0),
    ],
    ids=lambda case: ",".join(case) or "broken" if isinstance(case, dict) else "",
)
def test_request_that_bars_all_its_tokens_takes_no_prefix_from_others(params, kept):
    scheduler, model = make(budget=64)
    scheduler.add(request(0, 0, max_tokens=1, prompt=[*PREFIX, 1]))
    computed_in(scheduler, model)
    prompt = [*PREFIX, 7, 7, 7, 7, 7]
    scheduler.add(request(1, 0, max_tokens=3, prompt=prompt, **params))
    results = model.run(scheduler.schedule())
    (delta,) = scheduler.update([*results[:-1], replace(results[-1], token=-1)])
    assert delta.error
    scheduler.check_invariants()
    reader = request(2, 0, max_tokens=3, prompt=prompt)
    scheduler.add(reader)
    step(scheduler, model)
    # What the request itself computed is not trusted, nor, if it barred nothing, what it found.
    assert reader.cached_tokens == kept


def test_request_that_skipped_what_a_rewound_step_was_to_compute_starts_again():
    scheduler, model = make(num_blocks=64, budget=64, itl_target_s=0.05)
    for number in range(2):
        scheduler.add(request(number, 0, 3, prompt=[*PREFIX, number]))
    model.spoil(scheduler.schedule())
    scheduler.rewind(1e-3)
    scheduler.check_invariants()
    assert [r.id for r in scheduler.running] == [0]
    assert [r.id for r in scheduler.waiting] == [1]
    assert step(scheduler, model)[0] == [13, 1]


def test_a_request_that_skipped_tokens_of_a_parked_one_computes_them():
    scheduler, model = make(budget=64)
    scheduler.add(first := request(0, 0, max_tokens=3, prompt=[*PREFIX, 1, 9]))
    scheduler.schedule()
    scheduler.add(second := request(1, 0, max_tokens=3, prompt=[*PREFIX, 2, 9]))
    # A step without tokens left for the second request has given it the blocks of the first one.
    budget = PromptBudget(1, math.inf, 0, 64, 64, alone=False)
    assert scheduler._start(second, budget)
    assert second.num_computed == len(PREFIX)
    assert scheduler.park([0], []) == []
    assert second.num_computed == 0
    scheduler.update([])
    scheduler.check_invariants()
    scheduler.abort(first.id)
    computed_in(scheduler, model)
    assert second.token_ids[-3:] == reference([*PREFIX, 2, 9], second.params, 1, 3)


def test_a_parked_chunk_that_fills_a_block_and_ends_behind_it_is_found_later():
    scheduler, model = make(budget=16)
    prompts = [[number + 1] * 9 for number in range(2)]
    for number, prompt in enumerate(prompts):
        scheduler.add(request(number, 0, max_tokens=1, prompt=prompt))
    assert step(scheduler, model)[0] == [9, 7]
    (last,) = scheduler.schedule().chunks
    assert (last.start, len(last.token_ids)) == (7, 2)  # token 7 fills a block of 4
    assert scheduler.park([0], []) == []
    scheduler.update([])
    assert step(scheduler, model)[0] == [2]
    for number, prompt in enumerate(prompts, 2):
        scheduler.add(later := request(number, 0, max_tokens=1, prompt=prompt))
        step(scheduler, model)
        assert later.cached_tokens == 8
    scheduler.check_invariants()
