"""Scheduler: embeddings, and prompts that run whole."""

import numpy as np
import pytest

from cpuserve.loader.dense_module import Head
from cpuserve.runtime.pooling import make_pooler
from tests.core.scheduling import make, request, step
from tests.helpers.fake_executor import vector_after


def unit(vectors):
    total = np.sum(vectors, axis=0, dtype=np.float64)
    return (total / np.linalg.norm(total)).astype(np.float32)


@pytest.mark.parametrize("kind", ["last", "first", "mean"])
@pytest.mark.parametrize("budget", [3, 8, 64])
def test_embeddings_pool_each_token_once_beside_streams_and_after_preemption(kind, budget):
    scheduler, model = make(budget=budget, num_blocks=12)
    prompts = [[7 * n + i for i in range(5 + 9 * n)] for n in range(3)]
    scheduler.add(request(9, 3, max_tokens=12))
    for number, prompt in enumerate(prompts):
        pooled = request(number, 0, max_tokens=0, prompt=prompt)
        pooled.pooler = make_pooler(Head(kind))
        scheduler.add(pooled)
    found, preempted = {}, False
    while scheduler.has_work:
        for delta in step(scheduler, model)[1]:
            if delta.vector is not None:
                assert (delta.tokens, delta.finish) == ([], "stop")
                found[delta.request.id] = np.frombuffer(delta.vector, "<f4")
        scheduler.check_invariants()
        last = scheduler.running[-1] if scheduler.running else None
        if not preempted and last is not None and last.pooler is not None and last.num_computed:
            scheduler._preempt(last)
            preempted = True
    for number, prompt in enumerate(prompts):
        rows = [vector_after(prompt[: i + 1]) for i in range(len(prompt))]
        wanted = {"last": rows[-1:], "first": rows[:1], "mean": rows}[kind]
        assert np.array_equal(found[number], unit(wanted))


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_a_vector_that_cannot_be_normalized_ends_its_request_alone(broken):
    scheduler, model = make()
    for number in (0, 1):
        pooled = request(number, 4, max_tokens=0)
        pooled.pooler = make_pooler(Head("last"))
        scheduler.add(pooled)
    results = model.run(scheduler.schedule())
    results[0].vector = [broken] * 4
    deltas = scheduler.update(results)
    assert [(d.request.id, d.finish, d.vector is None) for d in deltas] == [
        (0, "error", True),
        (1, "stop", False),
    ]
    assert "no embedding" in deltas[0].error
    scheduler.check_invariants()
    assert not scheduler.has_work


def embed(number, num_prompt):
    pooled = request(number, num_prompt, max_tokens=0)
    pooled.pooler = make_pooler(Head("mean"))
    return pooled


@pytest.mark.parametrize("threshold", [0, 5])
def test_whole_prompts_go_in_their_order_and_pass_one_that_does_not_fit(threshold):
    options = {"itl_target_s": 0.05, "long_prefill_token_threshold": threshold}
    scheduler, model = make(budget=32, whole_prompts=True, **options)
    for number, length in enumerate([20, 30, 5, 7, 32, 2]):
        scheduler.add(embed(number, length))
    sizes = [step(scheduler, model)[0] for _ in range(3)]
    assert sizes == [[20, 5, 7], [30, 2], [32]]
    scheduler.check_invariants()
    assert not scheduler.has_work


def test_a_long_whole_prompt_is_not_passed_forever():
    scheduler, model = make(budget=32, num_blocks=40, whole_prompts=True)
    scheduler.add(embed(0, 20))
    scheduler.add(embed(1, 32))
    for number in range(2, 12):
        scheduler.add(embed(number, 6))
    first = [d.request.id for d in step(scheduler, model)[1]]
    assert first == [0, 2, 3]
    assert [d.request.id for d in step(scheduler, model)[1]] == [1]


def test_whole_prompts_wait_for_blocks_and_take_none_before():
    scheduler, model = make(budget=64, num_blocks=10, whole_prompts=True)
    for number in range(3):
        scheduler.add(embed(number, 16))
    assert step(scheduler, model)[0] == [16, 16]
    assert scheduler.kv.num_free == 10
    assert step(scheduler, model)[0] == [16]


def test_a_step_of_whole_prompts_is_not_ended_for_a_short_one():
    scheduler, _ = make(budget=3000, num_blocks=900, whole_prompts=True, itl_target_s=0.05)
    scheduler.add(embed(0, 3000))
    scheduler.schedule()
    assert not scheduler.ends_for(embed(1, 2), 1e-6)
