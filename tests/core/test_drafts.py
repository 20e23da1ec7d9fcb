"""Drafts: which guesses are worth a row, and what becomes of them."""

import functools
import random
from itertools import count

import pytest

from cpuserve.core.budget import PromptBudget
from cpuserve.core.cost import CostModel, RowWork, StepWork
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.core.speculation.budget import DraftBudget, StepLimits
from cpuserve.core.speculation.drafter import learned_rows
from cpuserve.core.speculation.ngram import NgramIndex
from cpuserve.core.speculation.ngram_drafts import SLICE
from cpuserve.core.speculation.proposer import Proposer
from cpuserve.sampling.params import SamplingParams
from tests.helpers.depth import deep_but
from tests.helpers.drafting import make_drafter
from tests.helpers.fake_executor import REPEATS, VOCAB, FakeModel, reference

# --- what is worth a row -----------------------------------------------------------------------


def taken(chances, *, rows=1, step_s=0.01, draft_s=0.002, tokens=100, seconds=1.0):
    """How many of the guesses with these chances a step takes."""

    cost = CostModel()
    cost.draft = draft_s / cost.draft_seconds(rows, 0, 1) * cost.base / 2
    budget = DraftBudget(cost, tokens, seconds, rows, 0, rows, step_s)
    count = budget.take(chances)
    assert budget.num_drafts == count
    assert budget.tokens == tokens - count
    return count


def test_drafts_are_taken_while_they_raise_the_tokens_per_second():
    # A step of 10 ms gives one token; a draft that seems to take 2 ms and may take 2.4 has to give
    # more than 0.24.
    assert taken([0.23]) == 0
    assert taken([0.25]) == 1
    # Two tokens in 12.4 ms: the next draft has to give 0.39.
    assert taken([1.0, 0.38]) == 1
    assert taken([1.0, 0.40]) == 2
    assert taken([1.0] * 40) == 40


def test_a_step_of_many_rows_takes_almost_certain_drafts_only():
    # 30 rows in 40 ms, of which each takes 1.3: a draft has to be better than a row.
    assert taken([1.0], rows=30, step_s=0.04, draft_s=0.0013) == 0
    assert taken([0.88], rows=30, step_s=0.04, draft_s=0.001) == 0
    assert taken([0.92], rows=30, step_s=0.04, draft_s=0.001) == 1


def test_drafts_take_only_the_tokens_and_the_time_that_are_left():
    assert taken([1.0] * 9, tokens=3) == 3
    assert taken([1.0] * 9, tokens=0) == 0
    assert taken([1.0] * 9, seconds=0.0045) == 2


# Kernels that multiply two rows in a pass over the weights, and four in two passes.
PASSES = [(1, 0.010), (2, 0.0102), (3, 0.020), (4, 0.0202), (8, 0.040)]


def test_the_work_of_rows_has_the_steps_of_the_kernels():
    work = RowWork(PASSES)
    assert [round(work.of(1, n), 2) for n in range(4)] == [0.0, 0.02, 1.0, 1.02]
    assert work.of(1, 5) == pytest.approx(1.02 + 2 * 0.495)
    assert work.of(3, 1) == pytest.approx(0.02)
    assert work.of(8, 40) == pytest.approx(40 * (4.0 - 0.02) / 6 / 1, rel=0.3)
    assert RowWork().of(3, 8) == RowWork().of(100, 8) == 1.0
    # A measurement that other programs disturbed never makes more rows cheaper than fewer.
    disturbed = RowWork([(1, 0.010), (2, 0.02), (3, 0.015), (4, 0.021)])
    works = [disturbed.of(1, n) for n in range(6)]
    assert works == sorted(works)
    assert len(set(works)) == 6


@pytest.mark.parametrize(
    ("rows", "chances", "count"),
    [
        (1, [0.1], 1),  # the second row of a pass costs almost nothing
        (1, [0.6, 0.6], 1),  # the third row costs as much as a step
        (1, [1.0, 1.0, 1.0], 1),  # with the fourth one it gives no more than one draft does
        (1, [0.3, 1.0], 1),
        (1, [0.0, 0.99], 0),
        (2, [0.9], 0),
        (2, [0.9, 0.9, 0.9], 0),
        (2, [1.0, 1.0], 0),
        (3, [0.1], 1),
    ],
)
def test_a_step_has_the_drafts_that_give_the_most_tokens_a_second(rows, chances, count):
    cost = CostModel()
    cost.row_work = RowWork(PASSES)
    cost.base = 0.01
    step_s = 0.01 * (1 + cost.row_work.of(1, rows - 1))
    budget = DraftBudget(cost, 100, 1.0, rows, 0, rows, step_s)
    assert budget.take(chances) == count
    assert budget.step_s == pytest.approx(step_s + cost.draft_seconds(rows, 0, count))


def test_the_price_is_learned_for_each_number_of_rows_context_and_way_of_sampling():
    cost, choose = CostModel(), random.Random(0)
    cost.row_work = RowWork(PASSES)
    true = {(2, False): 1.1, (8, False): 1.6, (2, True): 2.0}
    contexts = {300: 1.0, 20_000: 1.5}
    for _ in range(6000):
        rows, keys = choose.choice([2, 8]), choose.choice([300, 20_000])
        slow, drafts = choose.choice([False, True]) and rows == 2, choose.choice([0, 2])
        work = StepWork(rows, keys * rows, drafts=drafts, slow=slow)
        seconds = 0.01 + 0.0001 * rows + 1e-7 * work.keys
        extra = 0.01 * cost.row_work.of(rows, drafts) * true[rows, slow] * contexts[keys]
        cost.observe(work, seconds + extra)
    for (rows, slow), factor in true.items():
        for keys, more in contexts.items():
            seconds = 0.01 * cost.row_work.of(rows, 2) * factor * more
            learned = cost.draft_seconds(rows, keys * rows, 2, slow=slow)
            assert learned == pytest.approx(seconds, rel=0.2)


def test_drafts_are_tried_although_rows_were_measured_on_a_busy_machine():
    cost = CostModel()
    cost.row_work = RowWork([(1, 0.002), (2, 0.006), (4, 0.016), (32, 0.2)])
    after = speculate(cost, 1500, seconds_of, rows=4)
    assert sum(n > 0 for n in after[-300:]) > 250


@pytest.mark.parametrize("seed", [5, 6])
def test_numbers_of_drafts_that_hardly_differ_do_not_hide_their_price(seed):
    """Noise moved the best number by one, so no step had half as many, and `base` took all time."""
    cost, choose = CostModel(), random.Random(seed)

    def noisy(work):
        return (0.005 + 0.0006 * work.drafts) * (1 + 0.05 * abs(choose.gauss(0, 1)))

    speculate(cost, 3000, noisy, rows=4, chance=0.7, most=7)
    assert cost.decode_seconds(4, 1200) == pytest.approx(0.005, rel=0.3)


def test_an_idle_engine_learns_the_work_of_rows_in_parts():
    drafter = make_drafter(KvManager(8, 4), 3, 1, 2)
    parts = learned_rows(drafter, iter([[], [], PASSES]))
    assert [next(parts), drafter.limits.cost.row_work.of(1, 8)] == [True, 1.0]
    assert list(parts) == [True, True]
    assert drafter.limits.cost.row_work.of(1, 1) == pytest.approx(0.02)
    assert list(learned_rows(None, iter([PASSES]))) == []


def test_cost_model_learns_what_a_draft_takes():
    cost, choose = CostModel(), random.Random(0)
    for _ in range(600):
        work = StepWork(rows=1, keys=300, drafts=choose.choice([0, 0, 1, 3, 5]))
        cost.observe(work, 0.006 + 0.0008 * work.drafts)
    assert cost.draft_seconds(1, 300, 5) == pytest.approx(0.004, rel=0.1)
    assert cost.decode_seconds(1, 300) == pytest.approx(0.006, rel=0.1)


def speculate(cost, steps, seconds, *, rows=4, chance=0.9, most=3):
    """Run steps whose rows all have drafts of this chance; return the drafts of each step."""

    drafts = []
    for _ in range(steps):
        work = StepWork(rows=rows, keys=300 * rows)
        budget = DraftBudget.after(work, StepLimits(cost, 64 + rows))
        for _ in range(rows):
            budget.take([chance] * most)
        work.drafts = budget.close()
        drafts.append(work.drafts)
        cost.observe(work, seconds(work))
    return drafts


def seconds_of(work):
    return 0.008 + 0.0005 * work.rows + 0.0006 * work.drafts


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("slow_steps", [20, 200])
def test_drafts_come_back_after_something_else_slowed_steps_down(rows, slow_steps):
    cost = CostModel()
    before = speculate(cost, 400, seconds_of, rows=rows)[-40:]
    assert sum(n > 0 for n in before) >= 38
    speculate(cost, slow_steps, lambda work: seconds_of(work) + 0.02 * bool(work.drafts), rows=rows)
    after = speculate(cost, 1500, seconds_of, rows=rows)
    assert sum(n > 0 for n in after[-300:]) > 250
    count = max(after[-300:])
    assert cost.draft_seconds(rows, 300 * rows, count) == pytest.approx(0.0006 * count, rel=0.5)


def test_drafts_that_do_not_pay_are_hardly_ever_tried():
    cost = CostModel()

    def slow(work):
        return 0.010 + 0.006 * work.drafts

    drafts = speculate(cost, 4000, slow, rows=4)
    # A step of 10 ms generates four tokens, so a draft of 6 ms would have to generate 2.4.
    lost = 0.006 * sum(drafts[400:]) / (0.010 * 3600)
    assert lost < 0.015


def test_only_steps_without_prompts_change_the_price():
    cost = CostModel()
    assert sum(n > 0 for n in speculate(cost, 400, seconds_of, rows=4)[-40:]) >= 38
    before = dict(cost.drafts)
    for n in range(300):
        work = StepWork(rows=4, keys=1200, drafts=1 + n % 3)
        work.add_prompt(0, cost.other_chunk or 64)
        cost.observe(work, 3 * seconds_of(work) + 0.001 * work.tokens)
    assert cost.drafts == before != {}
    assert cost.decode_seconds(4, 1200) != pytest.approx(seconds_of(StepWork(rows=4)), rel=0.01)


def test_unlikely_drafts_do_not_change_the_price():
    cost = CostModel()
    cost.observe(StepWork(rows=4, keys=300, drafts=2), 0.05)
    before = dict(cost.drafts)
    budget = DraftBudget.after(StepWork(rows=4, keys=300), StepLimits(cost, 68))
    assert not budget.take([0.01])
    assert budget.close() == 0
    assert cost.drafts == before != {}


def test_the_time_of_drafts_is_measured_although_all_steps_have_equally_many():
    cost = CostModel()
    drafts = speculate(cost, 4000, lambda work: 0.010 + 0.0005 * work.drafts, rows=1, chance=1.0)
    assert set(drafts[-66:]) == {0, 3}
    assert drafts[-66:].count(0) == 2
    assert cost.draft_seconds(1, 300, 3) == pytest.approx(0.0015, rel=0.2)
    assert cost.decode_seconds(1, 300) == pytest.approx(0.010, rel=0.05)


# --- in the scheduler --------------------------------------------------------------------------


class Engine:
    """A scheduler over a fake model whose drafts always pay, unless `pays` is given."""

    def __init__(self, monkeypatch, *, num_blocks=60, block_size=4, drafts=(5, 1, 3), pays=None,
                 max_num_seqs=8, budget=64, clock=None, **options):  # fmt: skip
        self.model = FakeModel(num_blocks, block_size, max_num_seqs, budget)
        self.kv = KvManager(num_blocks, block_size)
        self.drafter = make_drafter(self.kv, *drafts, clock=clock) if drafts else None
        self.scheduler = Scheduler(
            self.kv, self.model, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            drafter=self.drafter, **options,
        )  # fmt: skip
        if pays is None:
            monkeypatch.setattr(NgramIndex, "chances", lambda _self, count: [1.0] * count)
        self.batches = []
        self.outputs = {}
        self.finished = {}

    def add(self, number, prompt, max_tokens=30, seed=REPEATS + 3, eos=(), **params):
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        request = Request(number, list(prompt), sampling, max_tokens, seed, frozenset(eos))
        self.scheduler.add(request)
        self.outputs[number] = []
        return request

    def step(self):
        batch = self.scheduler.schedule()
        self.batches.append(batch)
        for delta in self.scheduler.update(self.model.run(batch)):
            self.outputs[delta.request.id] += delta.tokens
            if delta.finish:
                self.finished[delta.request.id] = delta.finish
        self.scheduler.check_invariants()
        return batch

    def run(self):
        while self.scheduler.has_work:
            self.step()
        return self


PROMPT = [1, 2, 3, 4, 5] * 3


def test_a_repeating_text_takes_fewer_steps_and_has_the_same_tokens(monkeypatch):
    plain, drafting = Engine(monkeypatch, drafts=None), Engine(monkeypatch)
    for engine in (plain, drafting):
        engine.add(0, PROMPT)
        engine.run()
    assert drafting.outputs == plain.outputs
    assert len(plain.outputs[0]) == 30
    assert len(drafting.batches) < 0.75 * len(plain.batches)
    counts = drafting.drafter
    assert counts.num_accepted_tokens == len(plain.batches) - len(drafting.batches)
    chunks = [chunk for batch in drafting.batches for chunk in batch.chunks if chunk.num_drafts]
    assert counts.num_drafts == len(chunks)
    assert counts.num_draft_tokens == sum(chunk.num_drafts for chunk in chunks)
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert plain.batches[3].chunks[0].num_drafts == 0


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_draft_lies_behind_the_last_token(monkeypatch, max_tokens):
    engine = Engine(monkeypatch)
    request = engine.add(0, PROMPT, max_tokens=max_tokens)
    engine.run()
    want = reference(PROMPT, request.params, request.seed, max_tokens)
    assert engine.outputs[0] == want
    assert engine.finished[0] == "length"
    last = len(PROMPT) + max_tokens
    ends = [c.start + len(c.token_ids) for b in engine.batches for c in b.chunks]
    assert max(ends) < last or max_tokens == 1


def test_an_answer_ends_at_a_stop_token_and_no_draft_holds_one(monkeypatch):
    params = SamplingParams(max_tokens=30, min_tokens=1)
    stopped = 0
    for number in range(40):
        engine = Engine(monkeypatch)
        request = engine.add(0, PROMPT, seed=REPEATS + number, eos=[4], min_tokens=1)
        engine.run()
        want = reference(PROMPT, params, request.seed, 30, [4])
        assert engine.outputs[0] == want
        assert engine.finished[0] == ("stop" if len(want) < 30 else "length")
        drafts = [c.token_ids[1:] for b in engine.batches for c in b.chunks if c.num_drafts]
        assert all(4 not in d for d in drafts)
        stopped += len(want) < 30 and bool(drafts)
    assert stopped > 5


def test_rejected_drafts_give_their_blocks_back_and_none_is_preempted_for_them(monkeypatch):
    engine = Engine(monkeypatch, num_blocks=7, block_size=4, drafts=(12, 1, 1))
    request = engine.add(0, PROMPT[:5], max_tokens=20)
    other = engine.add(1, [9], max_tokens=4, seed=3)
    grown = 0
    while engine.scheduler.has_work:
        batch = engine.step()
        for chunk in batch.chunks:
            grown = max(grown, chunk.start + len(chunk.token_ids))
        for running in engine.scheduler.running:
            assert len(running.tables[0]) == engine.kv.blocks_for(running.num_computed)
    assert grown > 12
    assert (request.num_preemptions, other.num_preemptions) == (0, 0)
    assert engine.outputs[0] == reference(PROMPT[:5], request.params, request.seed, 20)


def test_only_committed_tokens_are_published(monkeypatch):
    engine = Engine(monkeypatch, block_size=2)
    request = engine.add(0, PROMPT, max_tokens=25)
    engine.run()
    answer = engine.outputs[0]
    again = engine.add(1, [*PROMPT, *answer, 7], max_tokens=4)
    engine.run()
    assert again.cached_tokens == (len(PROMPT) + 24) // 2 * 2
    want = reference([*PROMPT, *answer, 7], again.params, again.seed, 4)
    assert engine.outputs[1] == want
    assert request.num_preemptions == 0


def test_decode_rows_come_first_and_drafts_beside_prompts_take_a_share(monkeypatch):
    engine = Engine(monkeypatch, budget=15, max_num_seqs=4, drafts=(7, 1, 2))
    for number in range(3):
        engine.add(number, PROMPT[number:] * (1 + number), max_tokens=60, seed=REPEATS + 7 + number)
    sizes, beside = [], 0
    while engine.scheduler.has_work:
        before = {r.slot for r in engine.scheduler.running if r.num_output}
        batch = engine.step()
        sizes.append(batch.num_tokens)
        assert before <= {c.slot for c in batch.chunks}
        decodes = [c for c in batch.chunks if c.slot in before]
        if len(decodes) < len(batch.chunks):
            drafts = sum(c.num_drafts for c in decodes)
            assert drafts <= (15 - len(decodes)) // 4
            beside += drafts
    assert max(sizes) == 15
    assert beside > 0
    assert engine.drafter.num_accepted_tokens > 20
    for number in range(3):
        prompt = PROMPT[number:] * (1 + number)
        assert engine.outputs[number] == reference(
            prompt, SamplingParams(), REPEATS + 7 + number, 60
        )


def test_drafts_beside_prompts_take_no_blocks(monkeypatch):
    engine = Engine(monkeypatch, budget=20, block_size=2, num_blocks=90, drafts=(7, 1, 2))
    engine.add(0, PROMPT, max_tokens=60, seed=REPEATS + 7)
    beside = 0
    for number in range(1, 40):
        engine.add(number, range(number, number + 25), max_tokens=1)
        decodes = {r.slot for r in engine.scheduler.running if r.num_output}
        batch = engine.scheduler.schedule()
        if len(batch.chunks) > 1:
            for chunk in (c for c in batch.chunks if c.slot in decodes):
                assert len(chunk.tables[0]) == engine.kv.blocks_for(chunk.start + 1)
                beside += chunk.num_drafts
        engine.scheduler.update(engine.model.run(batch))
    assert beside > 0


def test_drafts_take_their_time_from_the_prompts_of_the_step():
    cost = CostModel()
    prompt = Request(0, PROMPT, SamplingParams(), 1, 0)
    seconds = [
        PromptBudget.of_step([prompt], 64, StepWork(2, 30, drafts=n), cost, 0.5).seconds
        for n in (0, 3)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(cost.draft_seconds(2, 30, 3))
    assert cost.draft_seconds(2, 30, 3) > 0


def test_a_row_that_cannot_be_sampled_ends_the_answer_behind_the_tokens_before_it(monkeypatch):
    engine = Engine(monkeypatch)
    engine.add(0, PROMPT, max_tokens=30)
    while True:
        batch = engine.scheduler.schedule()
        results = engine.model.run(batch)
        right = sum(r.token >= 0 for r in results)
        if right > 2:
            break
        engine.scheduler.update(results)
    for row in results[2:]:
        row.token = -1
    (delta,) = engine.scheduler.update(results)
    assert (delta.finish, len(delta.tokens)) == (None, 2)
    results[0].token = -1
    engine.scheduler.schedule()
    (delta,) = engine.scheduler.update([results[0]] * len(engine.scheduler._batch[0].rows))
    assert delta.finish == "error"
    assert engine.kv.num_free == engine.kv.num_blocks


def test_a_text_that_never_repeats_gets_no_drafts(monkeypatch):
    engine = Engine(monkeypatch, pays=True, drafts=(5, 2, 4))
    engine.add(0, range(10, 40), max_tokens=60, seed=5)
    engine.run()
    assert engine.drafter.num_draft_tokens == 0
    assert len(engine.batches) == 60


def drafted_steps(engine, numbers, steps, slow=0.0):
    """Return how many of these steps of four requests had drafts; a draft takes `slow` s more."""
    found = 0
    for _ in range(steps):
        while len(engine.scheduler.requests) < 4:
            engine.add(next(numbers), PROMPT, max_tokens=150)
        engine.step()
        work = engine.scheduler.work
        found += work.drafts > 0
        engine.scheduler.cost.observe(work, seconds_of(work) + slow * work.drafts)
    return found


@pytest.mark.parametrize("slow_steps", deep_but([200], [200, 400]))
def test_drafts_come_back_although_no_draft_seemed_to_pay_for_a_while(monkeypatch, slow_steps):
    engine = Engine(monkeypatch, num_blocks=900, drafts=(3, 1, 3), pays=True, budget=64)
    monkeypatch.setattr(NgramIndex, "chances", lambda _self, count: [0.95] * count)
    run = functools.partial(drafted_steps, engine, count())
    run(200)
    assert run(100) > 60
    run(slow_steps, slow=0.02)
    assert run(20) < 5
    run(900)
    assert run(200) > 120


def test_where_no_draft_can_pay_this_is_asked_rarely_and_after_each_change(monkeypatch):
    asked = []  # the number of rows each time
    never = property(lambda budget: bool(asked.append(budget.rows)))
    monkeypatch.setattr(DraftBudget, "is_worth", never)
    engine = Engine(monkeypatch, num_blocks=900, drafts=(3, 1, 3), pays=True)
    for number, tokens in enumerate((300, 150, 300)):
        engine.add(number, PROMPT, max_tokens=tokens)
    for _ in range(100):
        engine.step()
    assert set(asked) == {3}
    assert len(asked) == 4
    price = engine.scheduler.cost._measured
    assert 0.995 ** len(engine.batches) <= price <= 0.995**64, "it falls by each step left out"
    engine.add(3, PROMPT, max_tokens=300)
    engine.step()
    engine.step()
    assert asked[4:] == [4]
    while 1 not in engine.finished:
        engine.step()
    assert asked[-1] == 3


class Silent(Proposer):
    def propose(self, requests, current):
        return 0


@pytest.mark.parametrize("model", [False, True])
def test_an_index_is_kept_for_a_while_where_no_draft_pays_however_often_this_is_asked(
    monkeypatch, model
):
    monkeypatch.setattr(DraftBudget, "is_worth", property(lambda budget: budget.rows == 1))
    engine = Engine(monkeypatch, num_blocks=900, drafts=(3, 1, 3), pays=True)
    if model:  # then this is asked after each step
        engine.drafter.proposers.append(Silent())
    request = engine.add(0, PROMPT, max_tokens=300)
    for _ in range(10):
        engine.step()
    texts = engine.drafter.proposers[0].source.texts
    index = texts[request.id].index
    for number in range(1, 8):
        engine.add(number, PROMPT, max_tokens=300)  # the number of rows changes
        engine.step()
        engine.step()
    assert request.id in texts
    assert texts[request.id].index is index
    for _ in range(100):
        engine.step()
    assert request.id not in texts


class Clock:
    """A clock of CPU time that a test moves."""

    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("slow", [0.0, 0.02])
def test_time_of_other_programs_is_not_part_of_the_price_of_a_draft(monkeypatch, slow):
    """`slow` seconds more for a draft: of CPU time, after the first part, where steps wait more."""
    clock, numbers = Clock(), count()
    engine = Engine(
        monkeypatch, num_blocks=900, drafts=(3, 1, 3), pays=True, budget=64, clock=clock
    )
    monkeypatch.setattr(NgramIndex, "chances", lambda _self, count: [0.95] * count)
    run_model, extra = engine.model.run, 0.0

    def run(batch):
        clock.now += seconds_of(engine.scheduler.work) + extra * engine.scheduler.work.drafts
        return run_model(batch)

    monkeypatch.setattr(engine.model, "run", run)

    drafted = functools.partial(drafted_steps, engine, numbers)
    drafted(200, 0.0)
    assert drafted(100, 0.0) > 60
    extra = slow
    drafted(200, 0.02)
    assert (drafted(100, 0.02) > 60) == (slow == 0.0)


def test_a_step_that_failed_or_had_prompts_teaches_no_price(monkeypatch):
    clock = Clock()
    engine = Engine(monkeypatch, clock=clock)
    engine.add(0, PROMPT, max_tokens=60)
    engine.step()
    prices = engine.drafter.prices
    learned = []
    monkeypatch.setattr(prices, "observe", lambda *seen: learned.append(seen))
    engine.scheduler.schedule()
    engine.scheduler.rewind(0.0)
    clock.now += 7.0
    engine.add(1, range(40, 70), max_tokens=60)
    assert len(engine.step().chunks) == 2
    assert learned == []
    clock.now += 7.0
    engine.step()
    ((work, seconds),) = learned
    assert (work.rows, seconds) == (2, 0.0)


def test_a_prompt_from_the_prefix_cache_is_indexed_in_slices(monkeypatch):
    sizes, add = [], NgramIndex.add
    monkeypatch.setattr(NgramIndex, "add", lambda *own: (sizes.append(len(own[1])), add(*own))[1])
    engine = Engine(monkeypatch, num_blocks=300, block_size=64, budget=4096)
    prompt = [i * 7919 % VOCAB for i in range(3 * SLICE + 100)]
    for number in range(2):
        sizes.clear()
        request = engine.add(number, prompt, max_tokens=9)
        engine.run()
        assert (request.cached_tokens > 3 * SLICE) == (number == 1)
        first = [9, SLICE - 9] if number else [SLICE]  # 9 are the response of the first request
        assert sizes == [*first, SLICE, SLICE], "the last tokens are learned from"
