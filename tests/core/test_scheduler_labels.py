"""Rows that score labels: their results, and how many fit into a step."""

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.core.admission import Limits, check_params
from cpuserve.sampling.params import SamplingParams
from tests.core.scheduling import make, request

LABELS = list(range(40, 50))
PROMPT = [7] * 13  # three blocks of four tokens, and one token


def decisions(scheduler, count, **params):
    """Queue requests that sample one token and score ten labels, and return them."""
    made = [
        request(n, 0, 1, prompt=[*PROMPT], label_ids=LABELS, logprobs=0, **params)
        for n in range(count)
    ]
    for each in made:
        scheduler.add(each)
    return made


def run(scheduler, model):
    """Run all steps; return the number of rows of each step, and the deltas."""
    sizes, deltas = [], []
    while scheduler.has_work:
        batch = scheduler.schedule()
        sizes.append(sum(len(chunk.rows) for chunk in batch.chunks))
        deltas += scheduler.update(model.run(batch))
        scheduler.check_invariants()
    return sizes, deltas


@pytest.mark.parametrize("target", [0.0, 0.05])
def test_a_step_has_at_most_as_many_rows_as_tokens(target):
    scheduler, model = make(itl_target_s=target)
    decisions(scheduler, 1)
    run(scheduler, model)
    made = decisions(scheduler, 8)
    sizes, deltas = run(scheduler, model)
    assert sizes == [22] * 4  # of 11 rows each; the prompts have one token that is not cached
    assert sorted(delta.request.id for delta in deltas) == [each.id for each in made]


def test_the_labels_are_the_alternatives_of_the_sampled_token():
    scheduler, model = make()
    decisions(scheduler, 1)
    _, (delta,) = run(scheduler, model)
    (row,) = delta.rows
    assert row.token == delta.tokens[0]
    assert [label for label, _ in row.top] == LABELS
    assert delta.finish == "length"


def test_only_the_first_token_has_labels():
    scheduler, model = make()
    scheduler.add(request(0, 5, 3, label_ids=LABELS, logprobs=0, ignore_eos=True))
    sizes, deltas = run(scheduler, model)
    assert sizes == [11, 1, 1]
    assert [len(delta.rows[0].top) for delta in deltas] == [10, 0, 0]


def test_labels_come_after_the_logprobs_of_the_prompt():
    scheduler, model = make()
    scheduler.add(request(0, 5, 1, label_ids=LABELS, logprobs=0, prompt_logprobs=0))
    sizes, (delta,) = run(scheduler, model)
    assert sizes == [4 + 10 + 1]
    assert [row.token for row in delta.prompt_rows[1:]] == [1] * 4
    assert [label for label, _ in delta.rows[0].top] == LABELS


def test_a_request_with_labels_may_be_preempted():
    scheduler, model = make(num_blocks=8, max_num_seqs=4)
    streams = [request(10 + n, 6, 12, ignore_eos=True) for n in range(2)]
    for each in streams:
        scheduler.add(each)
    decisions(scheduler, 2)
    _, deltas = run(scheduler, model)
    assert scheduler.num_preemptions > 0
    tops = [delta.rows[0].top for delta in deltas if delta.rows is not None]
    assert [[label for label, _ in top] for top in tops] == [LABELS] * 2


@pytest.mark.parametrize(("rows", "ids"), [(10, LABELS), (100, [40, 500])])
def test_too_many_labels_and_unknown_ids_are_refused(rows, ids):
    limits = Limits(100, 100, 500, max_rows=rows)
    with pytest.raises(InvalidRequest, match="label_ids"):
        check_params(SamplingParams(label_ids=ids), limits)
    check_params(SamplingParams(label_ids=LABELS[:9]), limits)


def questions(count, lengths, **params):
    """Decisions after a common beginning of 96 tokens, with so many tokens of their own in turn."""
    state = [7] * 96
    return [
        request(
            n,
            0,
            1,
            prompt=[*state, *[n + 10] * lengths[n % len(lengths)]],
            label_ids=[1, 2],
            **params,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("target", [0.0, 0.05])
@pytest.mark.parametrize("lengths", [[20], [8, 30, 14], [30, 8]])
def test_all_questions_about_a_computed_state_share_a_step(target, lengths):
    scheduler, model = make(
        num_blocks=600, max_num_seqs=64, budget=2048, block_size=32, itl_target_s=target
    )
    scheduler.add(request(99, 0, 0, prompt=[7] * 96))
    run(scheduler, model)
    for each in questions(64, lengths, logprobs=0):
        scheduler.add(each)
    sizes, deltas = run(scheduler, model)
    assert sizes == [64 * 3]
    assert len(deltas) == 64


def test_a_short_prompt_does_not_wait_for_questions_that_are_longer():
    scheduler, model = make(
        num_blocks=600, max_num_seqs=64, budget=2048, block_size=32, itl_target_s=0.05
    )
    for each in questions(40, [100], logprobs=0):
        scheduler.add(each)
    scheduler.add(request(99, 4, 1))
    batch = scheduler.schedule()
    assert 99 in {each.id for each in scheduler.batch_requests}
    assert sum(len(chunk.token_ids) for chunk in batch.chunks) < 40 * 100
    scheduler.update(model.run(batch))


def test_a_step_with_questions_stays_within_its_tokens():
    scheduler, model = make(
        num_blocks=600, max_num_seqs=64, budget=256, block_size=32, itl_target_s=0.05
    )
    for each in questions(64, [20], logprobs=0):
        scheduler.add(each)
    sizes, deltas = run(scheduler, model)
    assert len(sizes) <= 2 + 64 * 20 // 250 + 1
    assert len(deltas) == 64
