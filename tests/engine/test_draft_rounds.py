"""DraftModel over a fake model: what it computes, which texts get guesses, and what they cost."""

import math
from types import SimpleNamespace

import pytest

from cpuserve.core.cost import RowWork
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.core.step import RowResult
from cpuserve.engine.speculation.draft_model import DraftModel
from cpuserve.engine.speculation.model_proposer import ModelProposer
from cpuserve.engine.speculation.prices import TRIALS, TRY_AFTER
from cpuserve.engine.speculation.texts import SHARED_GAIN, Chances
from cpuserve.sampling.params import SamplingParams
from tests.core.test_drafts import Engine
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import REPEATS, VOCAB, FakeExecutor, next_token, reference

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5] * 3


class Guesser(FakeExecutor):
    """Guesses as the fake model does, from the tokens in its own blocks, but for `wrong` seeds.

    right: the share of guesses that are right.
    steps: the number of tokens of each sequence in each step.
    """

    right = 1.0

    def __init__(self, num_blocks=60, max_tokens=64):
        sizes = SimpleNamespace(
            max_num_batched_tokens=max_tokens, kv_blocks=num_blocks, block_size=BLOCK,
            max_num_seqs=8, kv_groups=[], media_rows=0,
        )  # fmt: skip
        super().__init__(sizes)
        self.steps, self.wrong = [], set()
        run, self.model._row = self.model.run, self.row

        def counted(batch, masks=None):
            self.steps.append([len(chunk.token_ids) for chunk in batch.chunks])
            return run(batch, masks)

        self.model.run = counted

    def probability(self, wrong):
        return 0.2 if wrong and self.right == 1 else 0.8

    def row(self, chunk, row):
        history = self.model._history(chunk, chunk.start + row.index + 1)
        seed = self.model.slots[chunk.slot].seed
        token = next_token(history, seed)
        wrong = seed in self.wrong or next_token(history, 1234) >= self.right * VOCAB
        return RowResult((token + 1) % VOCAB if wrong else token, math.log(self.probability(wrong)))


class Drafting(Engine):
    """An engine with a draft model. A step takes 10 ms, and a draft 0.2 ms.

    draft_s, token_s: seconds of a step of the draft model, and of a token of a prompt.
    """

    def __init__(self, monkeypatch, draft_s=0.001, token_s=0.00005, num_blocks=60, **options):
        options = {"drafts": (4, 1, 3), "pays": True, "num_blocks": 200, **options}
        super().__init__(monkeypatch, **options)
        monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))
        self.guesser = Guesser(num_blocks)
        kv = KvManager(num_blocks, BLOCK)
        self.drafts = ModelProposer(DraftModel(self.guesser, kv), VOCAB, longest=150)
        self.texts = self.drafts.texts
        self.texts.num_steps = TRIALS
        self.drafter.proposers.append(self.drafts)
        for cost, base in ((self.scheduler.cost, 0.01), (self.texts.cost, draft_s)):
            cost.base, cost.row, cost.key = base, 0.0, 0.0
            cost.token, cost.pair = token_s * 256, 0.0
            cost.row_work = RowWork(((1, base), (33, base + 32 * 0.0002)))
            cost.observe = lambda *_: None

    def step(self):
        batch = super().step()
        self.drafter.propose_after_sending(self.scheduler.running)
        self.texts.kv.check_invariants(t.tables for t in self.texts.by_request.values())
        return batch


def test_an_equal_model_guesses_all_tokens_and_computes_each_of_them_once(monkeypatch):
    engine = Drafting(monkeypatch)
    request = engine.add(0, PROMPT, max_tokens=30, seed=11)
    engine.run()
    assert engine.outputs[0] == reference(PROMPT, request.params, 11, 30)
    counts = engine.drafter
    assert counts.num_accepted_tokens == counts.num_draft_tokens == 30 - len(engine.batches)
    assert len(engine.batches) == 7  # 1 token after the prompt, then 5 a step
    assert engine.guesser.steps[0] == [len(PROMPT) + 1]
    # Of five tokens that a step accepted, the draft model has computed three.
    assert engine.guesser.steps[4] == [2]
    assert max(map(max, engine.guesser.steps[1:])) == 2
    assert not engine.texts.by_request


def test_wrong_guesses_change_no_token_and_leave_no_keys(monkeypatch):
    engine = Drafting(monkeypatch)
    engine.guesser.wrong = {REPEATS + 1}
    for number in range(4):
        engine.add(number, PROMPT[number:], max_tokens=25, seed=REPEATS + number)
    engine.run()
    for number in range(4):
        want = reference(PROMPT[number:], SamplingParams(), REPEATS + number, 25)
        assert engine.outputs[number] == want
    right = engine.drafter.num_accepted_tokens / engine.drafter.num_draft_tokens
    assert 0.6 < right < 1


@pytest.mark.parametrize(("draft_s", "guesses"), [(0.001, 4), (0.0065, 1), (0.012, 0)])
def test_a_guess_has_to_be_worth_its_time(monkeypatch, draft_s, guesses):
    # A step gives 1 token in 10 ms, so a first guess may take up to FIRST * 10 ms.
    engine = Drafting(monkeypatch, draft_s)
    request = engine.add(0, PROMPT[:4], max_tokens=40, seed=5)
    engine.step()
    assert len(request.drafts) == guesses


def test_a_row_that_begins_a_pass_gets_the_rows_after_it(monkeypatch):
    """The second row costs 6 ms, and the next ones nothing: one guess does not pay, three do."""
    engine = Drafting(monkeypatch, draft_s=0.0005)
    passes = ((1, 0.01), (2, 0.0177), (3, 0.0178), (4, 0.0179), (5, 0.018), (6, 0.0181))
    engine.scheduler.cost.row_work = RowWork(passes)
    request = engine.add(0, PROMPT[:4], max_tokens=40, seed=5)
    engine.step()
    assert len(request.drafts) == 4


def test_an_unsure_draft_model_that_is_right_soon_counts_as_likely():
    chances = Chances()
    assert chances.classes[1] == pytest.approx(0.19, abs=0.01)
    for _ in range(6):
        chances.learn(1, SHARED_GAIN, is_right=True)
    assert chances.classes[1] > 0.7
    assert chances.classes[2] < 0.4
    for _ in range(200):
        chances.learn(1, SHARED_GAIN, is_right=False)
    assert chances.classes[1] < 0.15
    assert chances.copy() == chances


def test_where_no_guess_pays_one_is_tried_now_and_then(monkeypatch):
    engine = Drafting(monkeypatch, draft_s=0.012)
    engine.add(0, PROMPT[:4], max_tokens=100, seed=5)
    tried = []
    while engine.scheduler.has_work:
        engine.step()
        tried.append(sum(map(len, engine.guesser.steps)))
        engine.guesser.steps.clear()
    assert [i for i, count in enumerate(tried) if count] == [TRY_AFTER - 1]


def test_a_text_with_wrong_guesses_gets_fewer_of_them(monkeypatch):
    engine = Drafting(monkeypatch, draft_s=0.002)
    engine.guesser.wrong = {3}
    requests = [
        engine.add(n, PROMPT[n:], max_tokens=120, seed=seed) for n, seed in ((0, 2), (1, 3))
    ]
    for _ in range(20):
        engine.step()
    assert len(requests[0].drafts) == 4
    assert len(requests[1].drafts) < 2


def test_a_long_prompt_is_computed_in_chunks_if_the_response_is_worth_it(monkeypatch):
    for max_tokens, begins in ((4, False), (60, True)):
        engine = Drafting(monkeypatch, token_s=0.0005)
        engine.add(0, range(80), max_tokens=max_tokens, seed=5)
        engine.run()
        assert bool(engine.guesser.steps) == begins
        assert engine.outputs[0] == reference(list(range(80)), SamplingParams(), 5, max_tokens)
    assert engine.guesser.steps[:2] == [[32], [32]]
    assert sum(map(sum, engine.guesser.steps)) <= 80 + 60


def test_texts_that_do_not_fit_have_no_guesses(monkeypatch):
    few = Drafting(monkeypatch, num_blocks=5)  # 20 tokens
    few.add(0, PROMPT[:10], max_tokens=60, seed=5)
    few.run()
    assert few.outputs[0] == reference(PROMPT[:10], SamplingParams(), 5, 60)
    assert 0 < few.drafter.num_accepted_tokens < 12
    long = Drafting(monkeypatch)
    long.add(0, range(120), max_tokens=60, seed=5)
    long.run()
    accepted = long.drafter.num_accepted_tokens
    assert long.outputs[0] == reference(list(range(120)), SamplingParams(), 5, 60)
    assert 0 < accepted < 30  # 30 tokens fit below `longest`


def test_a_prefix_is_computed_once_for_texts_of_one_salt(monkeypatch):
    engine = Drafting(monkeypatch)
    sums = []
    for number, salt in enumerate(({}, {}, {"cache_salt": "other"})):
        engine.add(number, PROMPT, max_tokens=12, seed=11, **salt)
        engine.run()
        sums.append(sum(map(sum, engine.guesser.steps)))
        engine.guesser.steps.clear()
    assert sums[1] < sums[0] - 8
    assert sums[2] == sums[0]


def test_a_preempted_request_finds_its_blocks_again(monkeypatch):
    engine = Drafting(monkeypatch)
    request = engine.add(0, PROMPT, max_tokens=60, seed=11)
    for _ in range(5):
        engine.step()
    engine.scheduler._preempt(request)
    engine.drafter.propose_after_sending(engine.scheduler.running)
    assert not engine.texts.by_request
    assert engine.texts.kv.num_free == engine.texts.kv.num_blocks
    engine.guesser.steps.clear()
    engine.run()
    assert engine.outputs[0] == reference(PROMPT, request.params, 11, 60)
    assert max(engine.guesser.steps[0]) <= BLOCK + 2


def test_drafts_stay_as_they_are_until_the_text_grows(monkeypatch):
    """A grammar's bitmasks belong to the drafts of the last round."""
    engine = Drafting(monkeypatch)
    request = engine.add(0, PROMPT, max_tokens=30, seed=11)
    engine.step()
    before, steps = [*request.drafts], len(engine.guesser.steps)
    assert before
    engine.drafter.propose_after_sending(engine.scheduler.running)
    assert request.drafts == before
    assert len(engine.guesser.steps) == steps


def test_no_guess_is_a_token_that_ends_the_text(monkeypatch):
    want = reference(PROMPT, SamplingParams(), 11, 30)
    engine = Drafting(monkeypatch)
    engine.add(0, PROMPT, max_tokens=30, seed=11, eos=[want[12]])
    drafts = []
    while engine.scheduler.has_work:
        batch = engine.step()
        drafts += [t for c in batch.chunks if c.num_drafts for t in c.token_ids[-c.num_drafts :]]
    assert engine.outputs[0] == want[:13]
    assert engine.finished[0] == "stop"
    assert drafts
    assert want[12] not in drafts


def seconds_of(engine):
    """The seconds of all steps of both models."""
    drafts = sum(chunk.num_drafts for batch in engine.batches for chunk in batch.chunks)
    plain = len(engine.batches) * 0.01 + drafts * 0.0002
    return plain + len(engine.guesser.steps) * engine.texts.cost.base


@pytest.mark.parametrize("draft_s", deep_but([0.001], [0.0005, 0.001, 0.003]))
@pytest.mark.parametrize("right", deep_but([0.1, 0.8], [0.1, 0.4, 0.6, 0.8, 0.95]))
def test_the_gain_is_what_the_prices_allow(monkeypatch, right, draft_s):
    """The best constant number of guesses is the yardstick; the model does not know it."""
    engine = Drafting(monkeypatch, draft_s, num_blocks=400, drafts=(7, 1, 3))
    engine.drafts._longest, engine.guesser.right = 2000, right
    for number in range(6):
        engine.add(number, [number, 7], max_tokens=200, seed=number)
        engine.run()
    tokens, seconds = 1200, seconds_of(engine)
    each = draft_s + 0.0002
    best = max(
        sum(right**i for i in range(count + 1)) / (0.01 + count * each) for count in range(8)
    )
    assert tokens / seconds > 0.9 * best
    assert tokens / seconds > 0.985 / 0.01  # the rate without guesses
