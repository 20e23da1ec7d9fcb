"""A scheduler with a fake model, requests for it, and runs of its steps."""

from cpuserve.core.cost import StepWork
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import FakeModel


def make(num_blocks=64, max_num_seqs=8, budget=32, block_size=4, **options):
    model = FakeModel(num_blocks, block_size, max_num_seqs, budget)
    kv = KvManager(num_blocks, block_size)
    scheduler = Scheduler(
        kv, model, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **options
    )
    return scheduler, model


def request(number, num_prompt, max_tokens=20, *, arrival=0.0, priority=0, prompt=None, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    prompt = prompt or [number + 1] * num_prompt
    return Request(
        number, prompt, sampling, max_tokens, seed=number, arrival=arrival, priority=priority
    )


def step(scheduler, model):
    """Run one step; return (tokens per slot in batch order, deltas)."""
    batch = scheduler.schedule()
    sizes = [len(c.token_ids) for c in batch.chunks]
    return sizes, scheduler.update(model.run(batch) if batch.chunks else [])


def computed_in(scheduler, model, most=1000):
    """Run until all requests have ended; return (prompt tokens computed, deltas)."""
    total, deltas = 0, []
    for _ in range(most):
        if not scheduler.has_work:
            return total, deltas
        batch = scheduler.schedule()
        total += sum(len(c.token_ids) for c in batch.chunks if c.start < 12)
        deltas += scheduler.update(model.run(batch) if batch.chunks else [])
        scheduler.check_invariants()
    raise AssertionError("it does not end")


def big(**options):
    return make(num_blocks=600, budget=2048, block_size=32, **options)


def first_tokens(requests, seconds_of, scheduler, model, trained=True, until=None):
    """Seconds from arrival to the first token of each; `requests`: (arrival, request), sorted.

    until: the id of a request, after whose first token nothing more runs.
    Time is what `seconds_of` says that steps take. A step is ended for a request as EngineCore
    ends it.
    """
    if trained:  # as after a prompt or two
        for tokens in (64, 256, 256):
            for _ in range(12):
                work = StepWork()
                work.add_prompt(1000, tokens)
                scheduler.cost.observe(work, seconds_of(work))
    now, coming, arrived, took = 0.0, list(requests), {}, {}
    while (coming or scheduler.has_work) and until not in took:
        while coming and (coming[0][0] <= now or not scheduler.has_work):
            now = max(now, coming[0][0])
            arrival, one = coming.pop(0)
            arrived[one.id] = arrival
            scheduler.add(one)
        batch = scheduler.schedule()
        seconds = seconds_of(scheduler.work)
        for arrival, one in coming:
            elapsed = arrival - now
            if elapsed < seconds and scheduler.ends_for(one, elapsed):
                model.spoil(batch)
                scheduler.rewind(elapsed)
                now = arrival
                break
        else:
            now += seconds
            for delta in scheduler.update(model.run(batch)):
                if delta.tokens:
                    took.setdefault(delta.request.id, now - arrived[delta.request.id])
            scheduler.cost.observe(scheduler.work, seconds)
        scheduler.check_invariants()
    return took


def prompt_seconds(work):
    """A machine whose prompts hide the reading of the weights; a row costs what it computes."""
    linear = max(0.01, 0.002 * (work.rows + work.tokens))
    return linear + 0.002 + 1e-7 * work.keys + 2e-7 * work.pairs
