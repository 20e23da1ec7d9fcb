"""Scheduler + KvManager under random sequences of calls: no schedule may ever change a token.

CPUSERVE_STATE_MACHINE_EXAMPLES raises the number of examples.
"""

import os
import random
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, invariant, precondition, rule

from cpuserve.base.errors import InvalidRequest
from cpuserve.core.admission import check_request, output_limit
from cpuserve.core.kv.prefix import FORGOTTEN, PrefixChain
from cpuserve.core.request import Request
from cpuserve.core.step import RowResult, StepBatch
from cpuserve.runtime.pack import pack
from cpuserve.sampling.params import SamplingParams
from tests.core.scheduler_machine import EOS, PROMPTS, SALTS, TEXT, SchedulerUnderTest, tokens_of
from tests.helpers.fake_executor import (
    NOTHING,
    REPEATS,
    next_token,
    reference,
    score,
    stored,
    tokens_of_state,
    top,
    unflatten,
)

EXAMPLES = int(os.environ.get("CPUSERVE_STATE_MACHINE_EXAMPLES", "250"))


def search_afresh(kv, chain, most):
    """Return (the entries of the first `most` blocks of `chain`, how many every group serves)."""
    entries, parent, served = [], None, 0
    while len(entries) < min(most, len(chain.keys)):
        parent = kv.index.find(chain, len(entries), parent)
        if parent is None:
            break
        entries.append(parent)
    held_from = [0] * len(kv.windows)  # every group has all blocks from here on
    for end, entry in enumerate(entries, 1):
        for group, block in enumerate(entry.blocks):
            if block == FORGOTTEN:
                held_from[group] = end
        firsts = [
            max(0, end * kv.block_size - window + 1) // kv.block_size if window else 0
            for window in kv.windows
        ]
        if all(held <= first for held, first in zip(held_from, firsts, strict=True)):
            served = end
    return entries, served


class SchedulerMachine(SchedulerUnderTest):
    """Adds, aborts and steps in any order; every finished output equals the reference's."""

    requests = Bundle("requests")

    @rule(
        target=requests,
        prompt=PROMPTS,
        max_tokens=st.one_of(st.none(), st.integers(0, 20)),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        logprobs=st.sampled_from([None, 0, 3]),
        salt=st.sampled_from([None, None, *SALTS]),
        priority=st.integers(-2, 2),
        seed=st.sampled_from([None, 11, REPEATS, REPEATS + 1, REPEATS + 4]),
        ready=st.sampled_from([True, True, True, False]),
    )
    def add(
        self,
        prompt,
        max_tokens,
        min_tokens,
        ignore_eos,
        prompt_logprobs,
        logprobs,
        salt,
        priority,
        seed,
        ready=True,
    ):
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or 0),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
            logprobs=logprobs,
            stop_token_ids=[3, 5, 7],
            cache_salt=salt,
            caller=str(len(self.added) % 3),
        )
        number = len(self.added)
        limit = output_limit(len(prompt), params, self.limits)
        request = Request(
            number,
            list(prompt),
            params,
            limit,
            seed or number + 11,
            EOS,
            arrival=float(number),
            priority=priority,
            ready=ready,
        )
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

    @rule(number=requests)
    def make_ready(self, number):
        """Let a request start that was not ready, if it still waits."""
        if number in self.scheduler.requests and not self.added[number].ready:
            self.scheduler.make_ready(self.added[number])

    @rule(number=requests, more=st.integers(1, 5), salt=st.sampled_from([None, *SALTS]))
    def next_turn(self, number, more, salt):
        """The conversation so far, and a few tokens."""
        request = self.added[number]
        self.add([*request.token_ids, *range(more)][:50], 5, 0, True, None, None, salt, 0, None)

    @rule(number=requests, count=st.integers(2, 4))
    def fork(self, number, count):
        """Add several requests with the same prompt, as a request with n > 1 does."""
        request = self.added[number]
        salt = request.params.cache_salt
        for k in range(count):
            prompt = request.token_ids[: request.num_prompt]
            seed = 100 + k + (request.seed if request.seed >= REPEATS else 0)
            self.add(prompt, 8, 0, False, None, None, salt, request.priority, seed)

    @rule(count=st.integers(1, 3))
    def preempt(self, count):
        """Preempt the last requests, whether or not another one needs their blocks."""
        for request in self.scheduler.running[: -count - 1 : -1]:
            self.scheduler._preempt(request)

    @rule(count=st.integers(2, 8), seed=st.integers(0, 10**6))
    def burst(self, count, seed):
        """Add many requests at once, most with a common prefix, some with equal prompts."""
        choose = random.Random(seed)
        for _ in range(count):
            kept = choose.choice([8, 16, 32, choose.randint(1, 50)])
            prompt = TEXT[:kept] + [choose.randint(0, 2)] * choose.choice([0, 0, 1, 9])
            prompt_logprobs = choose.choice([None, None, None, 1])
            prompt[0] = choose.choice([TEXT[0], TEXT[0], choose.randint(0, 9)])
            salt, priority = choose.choice([None, None, *SALTS]), choose.choice([0, 0, 1])
            self.add(
                prompt[:50],
                choose.randint(0, 20),
                0,
                choose.random() < 0.8,
                prompt_logprobs,
                None,
                salt,
                priority,
                choose.choice([None, 11, REPEATS + choose.randint(0, 9)]),
            )

    @rule(
        count=st.integers(1, 8),
        seconds=st.sampled_from([1e-4, 0.02, 0.3, 5.0]),
        then=st.sampled_from([*[None] * 6, "fail", "fail", "abandon"]),
        parks=st.one_of(st.none(), st.none(), st.integers(0, 10**6)),
    )
    def step(self, count, seconds, then, parks):
        choose = random.Random(parks) if parks is not None else None
        for _ in range(count):
            if choose is not None and not self.kv.has_states:
                self.park_some(choose)
            self.run_step(seconds)
        if then == "fail":
            self.fail_step()
        elif then == "abandon":
            self.abandon_step()

    @rule()
    def clear(self):
        """Forget all prefixes, whether or not sequences use their blocks."""
        self.kv.published.clear()
        assert len(self.kv.index) == self.kv.num_cached == self.kv.states.num_cached == 0

    @rule(count=st.integers(1, 30))
    def evict(self, count):
        """Evict cached blocks, as another sequence that needs them would."""
        free = self.kv.num_free - self.kv.num_cached
        taken = self.kv.pool.take(min(free + count, self.kv.num_free))
        for block in taken:
            self.model.kv[block] = [-7] * self.kv.block_size
        self.kv.pool.release(taken)
        states = self.kv.states
        free = states.num_free - states.num_cached
        taken = states.take(min(free + count, states.num_free))
        for slot in taken:
            self.model.states.spoil_slot(slot - self.kv.gone - 1)
        states.release(taken)

    @precondition(lambda self: self.disk is not None)
    @rule(count=st.integers(1, 20))
    def tidy(self, count):
        """Save cached blocks to disk, as the engine does between steps."""
        for _ in range(count):
            self.kv.offload.tidy()

    @precondition(lambda self: self.disk is not None)
    @rule(
        which=st.integers(0, 99),
        at=st.integers(0, 999),
        how=st.sampled_from(["flip", "cut", "gone"]),
    )
    def damage(self, which, at, how):
        self.spoil_file(which, at, how)

    def spoil_file(self, which, at, how):
        """Damage a file."""
        files = sorted(Path(self.directory.name).glob("**/*.kv"))
        if not files:
            return
        path = files[which % len(files)]
        data = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
        elif not data:  # cut to nothing before
            return
        elif how == "cut":
            path.write_bytes(data[: at % len(data)])
        else:
            data[-1 - at % len(data)] ^= 1
            path.write_bytes(data)

    @precondition(lambda self: self.disk is not None)
    @rule(
        number=requests,
        damages=st.lists(
            st.tuples(st.integers(0, 99), st.integers(0, 999), st.sampled_from(["flip", "cut"])),
            max_size=3,
        ),
    )
    def restart(self, number, damages):
        """Restart the engine on its files, some damaged, and repeat a prompt."""
        for other in set(self.added) - set(self.finished) - self.aborted:
            self.scheduler.abort(other)
            self.aborted.add(other)
        self.kv.offload.close()
        self.watching.clear()
        for which, at, how in damages:
            self.spoil_file(which, at, how)
        self.start_engine()
        request = self.added[number]
        self.add(request.token_ids[:50], 5, 0, True, None, None, request.params.cache_salt, 0, None)
        self.run_step()

    def fail_step(self):
        """Let the executor raise after it has overwritten all blocks of the step with garbage."""
        self.model.spoil(self.sent(self.scheduler.schedule()))
        for delta in self.scheduler.fail("broken"):
            assert delta.finish == "error"
            self.aborted.add(delta.request.id)

    def abandon_step(self):
        """Abort all requests of the step while it runs, so that it ends incomplete."""
        self.model.spoil(self.sent(self.scheduler.schedule()))
        gone = {request.id for request in self.scheduler.batch_requests}
        assert not self.scheduler.fail("")
        assert not any(self.scheduler.abort(number) for number in gone)
        self.aborted |= gone

    @precondition(lambda self: self.options["snapshots"] is None)
    @rule(prompts=st.lists(PROMPTS, max_size=4), prompt_logprobs=st.sampled_from([None, None, 1]))
    def rewind(self, prompts, prompt_logprobs):
        """End a step without decode rows early, because a new request has arrived."""
        for prompt in prompts:
            self.add(prompt, 3, 0, False, prompt_logprobs, None, None, 0, None)
        batch = self.scheduler.schedule()
        if not batch.chunks or self.scheduler.work.rows:
            self.finish_step(batch, 0.02)
            return
        requests = self.scheduler.batch_requests
        chunks = [(r, c.start) for r, c in zip(requests, batch.chunks, strict=True)]
        self.model.spoil(self.sent(batch))
        for delta in self.scheduler.rewind(1e-3):
            self.take(delta)
        # A later chunk may rely on blocks that an earlier one of the same step was to compute; such
        # a request is preempted. The first chunk relies on none.
        for request, start in chunks[:1] if self.kv.prefix_caching else chunks:
            assert request.is_running
            assert request.num_computed == start, "tokens computed before the step were lost"

    @rule(prompts=st.lists(PROMPTS, max_size=2), times=st.integers(1, 3))
    def put_off(self, prompts, times):
        """Undo a step before it begins, because its masks are late: it may have any rows."""
        for prompt in prompts:
            self.add(prompt, 3, 0, False, None, None, None, 0, None)
        for _ in range(times):
            batch = self.scheduler.schedule()
            if not batch.chunks:
                self.finish_step(batch, 0.02)
                return
            rows = self.scheduler.batch_requests[: self.scheduler.work.rows]
            before = [(r, r.num_computed, list(r.token_ids)) for r in rows]
            for delta in self.scheduler.rewind(0.0):
                self.take(delta)
            for request, computed, ids in before:
                assert request.is_running
                assert (request.num_computed, request.token_ids) == (computed, ids)
            self.scheduler.check_invariants()

    def run_step(self, seconds=0.02):
        decoding = {
            r: r.num_preemptions
            for r in self.scheduler.running
            if len(r.token_ids) - r.num_computed == 1 and r.num_computed >= r.num_prompt
            if r.id not in self.scheduler.parked.ids
        }
        before = {r.id: r.num_computed for r in self.scheduler.running}
        parked = self.scheduler.parked.num_tokens
        moved, preempted = self.num_moved, self.scheduler.num_preemptions
        batch = self.scheduler.schedule()
        runs = bool(batch.chunks) or self.num_moved > moved
        # What a tier had may be gone, so that a request has to start again.
        runs |= self.scheduler.num_preemptions > preempted
        assert runs == self.scheduler.has_work, "requests wait, but no step was scheduled"
        self.check_order(batch, decoding, before, parked)
        self.finish_step(batch, seconds)

    def park_some(self, choose):
        """Run a step in which some sequences wait for experts, as an executor may park them."""
        batch = self.sent(self.scheduler.schedule())
        numbers = [i for i in range(len(batch.chunks)) if choose.random() < 0.5]
        if not batch.chunks or self.shares_new_blocks(batch):
            return self.finish_step(batch, 0.02)
        parked = StepBatch([batch.chunks[i] for i in numbers])
        others = StepBatch([c for i, c in enumerate(batch.chunks) if i not in numbers])
        self.model.spoil(parked)
        results = iter(self.model.run(others) if others.chunks else [])
        every = [
            RowResult(NOTHING) if i in numbers else next(results)
            for i, chunk in enumerate(batch.chunks)
            for _ in chunk.rows
        ]
        for delta in self.scheduler.update(self.scheduler.park(numbers, every)):
            self.take(delta)
        return None

    def shares_new_blocks(self, batch):
        """Return whether a sequence reads a block that another one fills in this step."""
        size = self.kv.block_size
        filled = {
            block
            for c in batch.chunks
            for table in c.tables
            for block in table[c.start // size : (c.start + len(c.token_ids)) // size]
        }
        return any(
            block in filled
            for c in batch.chunks
            if c.start % size == 0
            for table in c.tables
            for block in table[: c.start // size]
        )

    def finish_step(self, batch, seconds):
        """Run what has been scheduled."""
        results = self.model.run(self.sent(batch)) if batch.chunks else []
        for delta in self.scheduler.update(results):
            self.take(delta)
        self.scheduler.cost.observe(self.scheduler.work, seconds)

    def sent(self, batch):
        """Return the batch as an executor gets it: with the tables that steps have sent so far."""
        if not batch.chunks:
            return batch
        received = unflatten(pack(batch).words, self.model.kept)
        for chunk, other in zip(batch.chunks, received.chunks, strict=True):
            assert other.tables == chunk.tables, "the executor has another table"
        return received

    def check_order(self, batch, decoding, before, parked):
        """Check who waits for whom; parked: the tokens that were parked before this step."""
        unready = [r for r in self.scheduler.requests.values() if not r.ready]
        assert not any(r.is_running or r.num_computed for r in unready), "one was not ready"
        first = min(self.scheduler.running, key=lambda r: r.rank, default=None)
        if first is not None:
            runs = first.slot in {c.slot for c in batch.chunks}
            restored = first.num_computed > before.get(first.id, 0)
            # A prompt gets what parked chunks and decode rows leave: both are in every step.
            work, most = self.scheduler.work, self.scheduler.max_num_batched_tokens
            full = parked > 0 and parked + work.rows + work.drafts >= most
            assert runs or restored or full, "the first request makes no progress"
        kept = {r.slot for r, preempted in decoding.items() if r.num_preemptions == preempted}
        rows = batch.chunks[: len(kept)]
        assert {c.slot for c in rows} == kept, "a decode row waits behind a prompt"

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
            assert [row.token for row in delta.rows] == delta.tokens
            for row in delta.rows:
                seen = history[-self.window :]
                assert row.logprob == score(seen, row.token)
                assert row.top == top(seen, delta.request.params.logprobs)
                history.append(row.token)
        if delta.finish:
            self.finished[number] = delta.finish
            self.check_finished(delta)

    def check_finished(self, delta):
        request, number = delta.request, delta.request.id
        prompt = request.token_ids[: request.num_prompt]
        limit = output_limit(len(prompt), request.params, self.limits)
        want = reference(prompt, request.params, request.seed, limit, EOS, self.window)
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
            seen = prompt[:i][-self.window :]
            assert row.logprob == score(seen, prompt[i])
            assert row.top == top(seen, num_top)

    @invariant()
    def consistent(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            assert set(self.model.slots) == {r.slot for r in self.scheduler.running}

    @invariant()
    def an_executor_has_what_counts_as_sent(self):
        if not hasattr(self, "scheduler"):
            return
        assert set(self.model.kept) <= {r.slot for r in self.scheduler.running}
        for request in self.scheduler.running:
            kept = self.model.kept.get(request.slot) or [[] for _ in request.tables]
            for table, has in zip(request.tables, kept, strict=True):
                assert table[: table.sent] == has[: table.sent], "a change is not going to be sent"

    @invariant()
    def a_sliding_window_holds_no_more_than_it_covers(self):
        if not hasattr(self, "scheduler") or not self.kv.slides:
            return
        assert set(self.model.kv[self.kv.gone]) == {NOTHING}, "the stand-in was written"
        sliding = [
            (request, table, window)
            for request in self.scheduler.running
            for table, window in zip(request.tables, self.kv.windows, strict=True)
            if window
        ]
        for request, table, window in sliding:
            # what it covers, what is still to be computed, and ends of blocks
            rest = len(request.token_ids) + 1 - request.num_computed
            most = self.kv.blocks_for(window + rest) + 2
            adopted = request.num_computed < request.num_prompt
            assert adopted or len(self.kv.held([table])) <= most

    @invariant()
    def salts_never_share(self):
        if not hasattr(self, "scheduler"):
            return
        owners: dict[int, str | None] = {}
        for request in self.scheduler.running:
            salt = request.params.cache_salt
            for block in self.kv.held(request.tables):
                assert owners.setdefault(block, salt) == salt, "salts share a block"

    def content(self, data, group):
        """The tokens, as bytes, of the block whose content in `group` is `data`."""
        if group < len(self.windows):
            return tokens_of(data, group)
        tokens = tokens_of_state(data)[-self.kv.block_size :]
        return np.array(tokens, np.int32).tobytes()

    @invariant()
    def swapped_content_is_what_its_name_says(self):
        swap = self.tier("swap") if hasattr(self, "scheduler") else None
        if swap is None:
            return
        sizes = self.kv.offload.blocks.sizes
        assert swap.num_bytes == sum(sizes[group] for _, group, _ in swap)
        assert swap.num_bytes <= self.options["swap"] * max(sizes)
        for entry, group, data in swap:
            assert self.content(data, group) == entry.content
            assert entry.blocks[group] == FORGOTTEN, "a block is in the cache and in the swap space"

    @invariant()
    def files_stay_within_their_size(self):
        if hasattr(self, "scheduler") and self.disk is not None:
            assert self.disk.num_bytes <= self.options["disk_bytes"]

    def check_files(self):
        """Every file that loads holds the tokens, and follows the parents, that its name says."""
        for request in self.added.values():
            chain = PrefixChain(request.params.cache_salt or "")
            count = len(request.token_ids) // self.kv.block_size
            self.kv.index.name(chain, request.token_ids, count)
            for index in range(count):
                for group in range(len(self.kv.windows)):
                    loaded = self.disk.load(chain, index, group)
                    content = chain.contents[index]
                    assert loaded is None or self.content(loaded[0], group) == content, (
                        "a file is not what it is named"
                    )

    @invariant()
    def cached_content_is_what_its_name_says(self):
        """Every entry's tokens, and its parents', are what the model wrote into their blocks."""
        if not hasattr(self, "scheduler"):
            return
        owners: dict[int, str] = {}
        for salt in ("", *SALTS):
            for prompt in (TEXT, *(r.token_ids for r in self.added.values())):
                chain = PrefixChain(salt)
                tokens = [*prompt, 0]
                match = self.kv.match_prefix(chain, tokens)
                assert all(owners.setdefault(b, salt) == salt for b in match.blocks)
                if self.kv.has_states and match.entries:
                    slot = match.tables.pop()[-1] - self.kv.gone - 1
                    closed = self.model.states.slots[slot][0]
                    assert closed == tokens[: match.num_tokens], "a state is not what it is"
                for group, table in enumerate(match.tables[: len(self.windows)]):
                    gone = table.count(self.kv.gone)
                    held = [t for block in table[gone:] for t in self.model.kv[block]]
                    named = tokens[gone * self.kv.block_size : match.num_tokens]
                    assert held == [stored(t, group) for t in named], "a block is not what it is"

    @invariant()
    def what_is_remembered_of_a_prefix_is_what_a_search_finds(self):
        """Checked for waiting requests, and for chains that stay and are never adopted."""
        if not hasattr(self, "scheduler") or not self.kv.prefix_caching:
            return
        waiting = [(r.chain, r.token_ids) for r in self.scheduler.waiting if r.reads_prefixes]
        for salt in ("", *SALTS):
            for prompt in (TEXT, *(r.token_ids for r in self.added.values())):
                ids = (*prompt, 0)
                chain = self.watching.setdefault((salt, ids), PrefixChain(salt))
                waiting.append((chain, ids))
        for chain, ids in waiting:
            match = self.kv.match_prefix(chain, ids)
            entries, served = search_afresh(self.kv, chain, (len(ids) - 1) // self.kv.block_size)
            assert chain.found.entries == entries
            assert match.entries == entries[:served]
            assert match.branch == len(entries)
            assert self.kv.num_cached_tokens(chain, ids) == served * self.kv.block_size

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for request in [r for r in self.scheduler.requests.values() if not r.ready]:
            self.scheduler.make_ready(request)
        for _ in range(100_000):
            if not self.scheduler.has_work:
                break
            self.run_step()
        assert set(self.added) == set(self.finished) | self.aborted, "a request never ended"
        assert self.kv.num_free == self.kv.num_blocks, "blocks leak"
        assert self.kv.states.num_free == self.kv.states.num_blocks, "state slots leak"
        assert not self.model.slots, "slots leak"
        if self.disk is not None:
            self.check_files()
            self.kv.offload.close()
        self.directory.cleanup()


class DeepSchedulerMachine(SchedulerMachine):
    """The same, with more examples."""


SchedulerMachine.TestCase.settings = settings(
    max_examples=max(1, EXAMPLES // 10),
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
DeepSchedulerMachine.TestCase.settings = settings(
    SchedulerMachine.TestCase.settings, max_examples=EXAMPLES + EXAMPLES // 10
)
TestSchedulerMachine = SchedulerMachine.TestCase
TestDeepSchedulerMachine = pytest.mark.deep(DeepSchedulerMachine.TestCase)


def test_next_token_depends_on_every_token_of_the_history():
    history = [1, 2, 3, 4]
    changed = [[*history[:i], 9, *history[i + 1 :]] for i in range(4)]
    assert all(next_token(c, 1) != next_token(history, 1) for c in changed)
