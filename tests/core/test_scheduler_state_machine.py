"""Scheduler + KvManager under random sequences of calls: no schedule may ever change a token."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from cpuserve.core.admission import Limits, check_request, output_limit
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import VOCAB, FakeModel, next_token, reference, score, top

EOS = frozenset(range(0, VOCAB, 40))


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order; everything that finishes equals the plain reference."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 4, 32]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget):
        self.kv = KvManager(num_blocks, block_size)
        self.model = FakeModel(num_blocks, block_size, max_num_seqs, budget)
        self.scheduler = Scheduler(
            self.kv, self.model, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.limits = Limits(60, num_blocks * block_size, VOCAB)
        self.added: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.finished: dict[int, str] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list] = {}

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50),
        max_tokens=st.one_of(st.none(), st.integers(0, 20)),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        logprobs=st.sampled_from([None, 0, 3]),
    )
    def add(self, prompt, max_tokens, min_tokens, ignore_eos, prompt_logprobs, logprobs):
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or 0),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
            logprobs=logprobs,
            stop_token_ids=[3, 5, 7],
        )
        number = len(self.added)
        limit = output_limit(len(prompt), params, self.limits)
        request = Request(number, list(prompt), params, limit, number + 11, EOS)
        self.added[number] = request
        self.outputs[number] = []
        try:
            check_request(prompt, params, self.limits)
        except InvalidRequest:
            self.aborted.add(number)
            return number
        self.scheduler.add(request)
        return number

    @rule(number=requests)
    def abort(self, number):
        known = number not in self.finished and number not in self.aborted
        assert self.scheduler.abort(number) == known
        if known:
            self.aborted.add(number)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.run_step()

    def run_step(self):
        batch = self.scheduler.schedule()
        assert bool(batch.chunks) == self.scheduler.has_work, "work waits and nothing runs"
        self.check_order(batch)
        results = self.model.run(batch) if batch.chunks else []
        for delta in self.scheduler.update(results):
            self.take(delta)

    def check_order(self, batch):
        oldest = min(self.scheduler.running, key=lambda r: r.order, default=None)
        if oldest is not None:
            assert oldest.slot in {c.slot for c in batch.chunks}, "the oldest stands still"
        by_slot = {r.slot: r for r in self.scheduler.running}
        kinds = [
            c.start >= by_slot[c.slot].num_prompt and len(c.token_ids) == 1 for c in batch.chunks
        ]
        first_prompt = kinds.index(False) if False in kinds else len(kinds)
        decoding = [
            r
            for r in self.scheduler.running
            if len(r.token_ids) - r.num_computed == 1 and r.num_computed >= r.num_prompt
        ]
        assert first_prompt >= len(decoding), "a decode row waits behind a prompt"

    def take(self, delta):
        number = delta.request.id
        assert number not in self.finished
        assert number not in self.aborted
        history = delta.request.token_ids[: delta.request.num_prompt] + self.outputs[number]
        self.outputs[number] += delta.tokens
        if delta.prompt_rows is not None:
            assert number not in self.scored, "prompt scores are sent once"
            self.scored[number] = delta.prompt_rows
        if delta.request.params.logprobs is not None and delta.tokens:
            (row,) = delta.rows
            assert row.logprob == score(history, row.token)
            assert row.top == top(history, delta.request.params.logprobs)
        if delta.finish:
            self.finished[number] = delta.finish
            self.check_finished(delta)

    def check_finished(self, delta):
        request, number = delta.request, delta.request.id
        prompt = request.token_ids[: request.num_prompt]
        limit = output_limit(len(prompt), request.params, self.limits)
        want = reference(prompt, request.params, request.seed, limit, EOS)
        assert self.outputs[number] == want, "scheduling changed the tokens"
        stopped = bool(want) and want[-1] in request.stop_ids
        stopped = stopped and len(want) > request.params.min_tokens
        assert delta.finish == ("stop" if stopped else "length")
        assert delta.stop_id == (want[-1] if stopped and want[-1] in (3, 5, 7) else None)
        if request.params.prompt_logprobs is not None:
            self.check_scores(prompt, self.scored[number], request.params.prompt_logprobs)

    def check_scores(self, prompt, rows, num_top):
        assert len(rows) == len(prompt)
        assert rows[0] is None
        for i, row in enumerate(rows[1:], 1):
            assert row.token == prompt[i]
            assert row.logprob == score(prompt[:i], prompt[i])
            assert row.top == top(prompt[:i], num_top)

    @invariant()
    def consistent(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            assert set(self.model.slots) == {r.slot for r in self.scheduler.running}

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100_000):
            if not self.scheduler.has_work:
                break
            self.run_step()
        assert set(self.added) == set(self.finished) | self.aborted, "a request never ended"
        assert self.kv.num_free == self.kv.num_blocks, "blocks leak"
        assert not self.model.slots, "slots leak"


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_next_token_depends_on_every_token_of_the_history():
    history = [1, 2, 3, 4]
    changed = [[*history[:i], 9, *history[i + 1 :]] for i in range(4)]
    assert all(next_token(c, 1) != next_token(history, 1) for c in changed)
