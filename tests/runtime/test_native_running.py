"""What the native executor shows of a running step, how it is cancelled, and what it measures."""

from __future__ import annotations

import threading
import time
from collections import Counter

import native_runs
import numpy as np
import pytest
from native_model import Chunk, Model, Native, all_rows, blocks_for, greedy, words
from native_runs import PROMPT, good_words, prompt_logits

from cpuserve import LLM
from cpuserve.runtime import native
from tests.helpers.patience import wait_until
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model

model = native_runs.model  # the fixture


@pytest.mark.parametrize("threads", [1, 2])
def test_tap_shows_each_op_its_own_inputs_and_output(model, threads):
    """Ops recomputed in numpy from the tapped inputs; the last one gives the step's logits."""
    n, s = 11, model.shape
    step = words(Chunk(PROMPT[:n], 0, blocks_for(n), all_rows(n)))

    def use(m):
        e = m.executor
        names = [e.op_name(i) for i in range(e.num_ops())]
        return names, [e.tap(step, i) for i in range(e.num_ops())], e.step_logits(step)

    names, taps, logits = Native(model, threads=threads).run(use)
    assert names[:4] == ["embed", "rms_norm", "linear", "rope_store_kv"]
    assert names[-1] == "logits"
    t = model.tensors
    assert taps[0][0] == []
    assert np.array_equal(taps[0][1], t["embed"][PROMPT[:n]])
    (x,), h = taps[1]
    assert np.allclose(
        h, x / np.sqrt((x**2).mean(-1, keepdims=True) + s.eps) * t["0.norm1"], atol=1e-5
    )
    o = names.index("linear", 3)  # the first linear behind attention adds to x
    (a, before), after = taps[o]
    assert np.allclose(after, before + a @ t["0.o"].T, atol=1e-5)
    assert np.array_equal(taps[-1][1], logits)
    with pytest.raises(ValueError, match="no op"):
        Native(model).run(lambda m: m.executor.tap(step, len(names)))


def test_progress_is_seen_from_another_thread_also_inside_an_op(model):
    """The engine uses this count to tell a long step from a stuck one."""
    step = words(Chunk(PROMPT, 0, blocks_for(700), all_rows(len(PROMPT))))

    def use(m):
        m.executor.admit(0, greedy())
        m.executor.step(step)
        still = {m.executor.progress for _ in range(100)}
        before, seen, done = m.executor.progress, set(), threading.Event()

        def look():
            while not done.is_set():
                seen.add(m.executor.progress)

        def readings_inside_an_op():
            """The most different readings of claims in any one phase."""
            return max(Counter(phase for phase, _ in list(seen)).values(), default=0)

        watcher = threading.Thread(target=look)
        watcher.start()
        # A busy machine may run the two threads in turn.
        steps, deadline = 0, time.monotonic() + 60
        while readings_inside_an_op() < 4 and time.monotonic() < deadline:
            m.executor.step(step)
            steps += 1
        done.set()
        watcher.join()
        phases = m.executor.progress[0] - before[0]
        return still, phases / steps, m.executor.num_ops(), readings_inside_an_op()

    still, phases_a_step, num_ops, inside = Native(model).run(use)
    assert len(still) == 1
    assert phases_a_step >= num_ops
    assert inside >= 4


class WithAdapters(Native):
    """The model with two adapters of q, k and v, of rank 8."""

    def _qkv(self, i, h, qkv):
        super()._qkv(i, h, qkv)
        s, p = self.model.shape, self.program
        if i == 0:
            self.routing = p.value("routing", 2, "f32")
            p.adapter(self.routing, 2, self._vector("scales", np.array([1, 2], np.float32)))
            self.at = p.value("at", s.width, "f32"), p.value("low", 8, "f32")
            self.out = p.value("out", s.q_width + 2 * s.kv_width, "f32")
        rows, low = self.at
        p.dispatch(h, self.routing, rows)
        for side, x, to in (("a", rows, low), ("b", low, self.out)):
            matrices = [self._matrix(f"{i}.{side}{number}") for number in range(2)]
            p.expert_linear(x, self.routing, to, matrices, [], "none", False)
        p.combine(self.out, self.routing, qkv)


def with_adapters(model):
    """The model with further tensors: the matrices A and B of two adapters in every layer."""
    rng, s = np.random.default_rng(3), model.shape
    shapes = {"a": (8, s.width), "b": (s.q_width + 2 * s.kv_width, 8)}
    more = {
        f"{i}.{side}{number}": rng.standard_normal(shape).astype(np.float32)
        for i in range(s.layers)
        for side, shape in shapes.items()
        for number in range(2)
    }
    return Model(s, {**model.tensors, **more})


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_adapters_that_no_sequence_has_cost_no_phase(model, threads):
    """Not a barrier: the threads pass over all operations of adapters but that which routes."""

    def step_of(*adapters):
        chunks = []
        for slot, adapter in enumerate(adapters):
            sequence = Sequence(slot, PROMPT[:20], [slot])
            chunks.append(sequence.chunk())
            chunks[-1].adapter = adapter
        return step(*chunks).words

    def run(m, *steps):
        for slot in range(2):
            m.executor.admit(slot, greedy())
        found = []
        for adapters in steps:
            before = m.executor.progress[0]
            m.executor.step(step_of(*adapters))
            phases = m.executor.progress[0] - before
            found.append((phases, m.executor.step_logits(step_of(*adapters))))
        return found

    none = (-1, -1)
    adapted = WithAdapters(with_adapters(model), threads=threads)
    idle, one, both, again = adapted.run(lambda m: run(m, none, (-1, 1), (0, 1), none))
    # Before each of the two products, and once after the operation that routes.
    added = 2 * model.shape.layers + 1
    assert [phases[0] - idle[0] for phases in (one, both, again)] == [added, added, 0]
    ((_, plain),) = Native(model, threads=threads).run(lambda m: run(m, none))
    assert np.array_equal(idle[1], plain)
    assert np.array_equal(again[1], plain)
    assert np.array_equal(one[1][0], plain[0])
    assert not np.array_equal(one[1][1], plain[1])


def test_progress_is_made_by_the_bandwidth_probe(model):
    def use(m):
        before = m.executor.progress[0]
        m.executor.probe_bandwidth(0.0)
        return m.executor.progress[0] - before

    assert Native(model, threads=2).run(use) > 1


def test_cancel_stops_a_step_and_the_next_one_runs(model):
    def use(m):
        m.executor.admit(0, greedy())
        m.executor.cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            m.executor.step(good_words())
        return m.executor.step(good_words())

    assert Native(model, threads=2).run(use) == 1


def test_cancel_at_any_moment_leaves_the_steps_before_and_after_right(model):
    """A prompt in two steps; the second is cut short at many places, also inside ops."""
    first = words(Chunk(PROMPT[:64], 0, blocks_for(700), []))
    second = words(Chunk(PROMPT[64:], 64, blocks_for(700), all_rows(len(PROMPT) - 64)))

    def use(m):
        m.executor.admit(0, greedy())
        m.executor.step(first)
        want = m.executor.step_logits(second)
        cut = 0
        for i in range(60):
            timer = threading.Timer(0.0002 * i, m.executor.cancel)
            timer.start()
            try:
                got = m.executor.step_logits(second)
                assert np.array_equal(got, want), "a step that was cut short gave results"
            except RuntimeError:
                cut += 1
            timer.join()
            m.executor.cancel(False)
        assert np.array_equal(m.executor.step_logits(second), want)
        return cut

    assert Native(model, threads=2).run(use) > 0


def test_python_threads_run_during_a_step(model):
    """A thread counts while steps run, so the GIL is released."""

    def use(m):
        m.executor.admit(0, greedy())
        stop, count = threading.Event(), [0]

        def counting():
            while not stop.is_set():
                count[0] += 1

        thread = threading.Thread(target=counting)
        before = count[0]
        thread.start()
        for _ in range(3):
            m.executor.step(words(Chunk(PROMPT, 0, blocks_for(700), [(699, -1, -1)])))
        stop.set()
        thread.join()
        return count[0] - before

    assert Native(model).run(use) > 100


def test_profile_times_every_op(model):
    def use(m):
        m.executor.profile(True)
        began = time.perf_counter()
        prompt_logits(m, PROMPT[:100])
        return m.executor.op_times(), time.perf_counter() - began

    times, in_all = Native(model, threads=2).run(use)
    assert (times > 0).all()
    assert times.sum() <= in_all


def test_probes_and_memory_report_what_is_there(model):
    def use(m):
        prompt_logits(m, PROMPT[:10])
        e = m.executor
        assert e.probe_bandwidth(0.01) > 0
        for kind in ("f32", "bf16", "int8"):
            assert e.probe_dot(kind, 0.01) > 0
        with pytest.raises(ValueError, match="'f64'"):
            e.probe_dot("f64", 0.01)
        assert e.probe_barrier(1000) > 0
        return e.memory

    native = Native(model, threads=2)
    memory = native.run(use)
    assert memory["weights"] + memory["vectors"] >= native.program.weight_bytes
    assert memory["kv_reserved"] >= 64 * native.program.kv_block_bytes * 2  # f32 is twice bf16
    assert 0 < memory["kv_resident"] <= memory["kv_reserved"]
    assert memory["weights_resident"] > 0


def test_kv_memory_for_the_next_step_is_got_ready_while_idle(model):
    def use(m):
        e = m.executor
        before = e.memory["kv_committed"]
        while e.grow_kv():
            pass
        ready = e.memory["kv_committed"]
        prompt_logits(m, PROMPT)
        return before, ready, e.memory

    before, ready, memory = Native(model, threads=2).run(use)
    assert before == 0 < ready <= memory["kv_reserved"]
    assert memory["kv_committed"] == ready  # the step took what was ready
    assert memory["kv_resident"] >= ready


def test_a_thread_that_is_not_where_it_was_bound_is_named():
    assert native.misplaced(None, [3, 4]) == ""
    assert native.misplaced([[0], [1]], [0, -1]) == ""
    assert native.misplaced([[0], [1], [2]], [0, 5, 2]) == "thread 1 runs on CPU 5 instead of 1"
    moving = native.misplaced([[0, 1, 2]] * 2, [2, 3])
    assert moving == "thread 1 runs on CPU 3 instead of 0-2"
    many = native.misplaced([[cpu] for cpu in range(8)], list(range(1, 9)))
    assert many.count("instead of") == 3
    assert many.endswith("and 5 more")


def test_a_start_does_not_read_the_mappings_of_the_process(monkeypatch):
    """They take 20 ms in a process that has loaded torch; only reports have the memory in use."""

    def refused(_executor):
        pytest.fail("the start asked for the memory in use")

    monkeypatch.setattr(native.NativeExecutor, "report", refused)
    with LLM(str(tiny_model("llama")), executor="native", max_model_len=64):
        pass


def test_the_time_at_barriers_is_counted(model):
    native = Native(model, threads=2)
    assert native.team.waited_ns() == 0

    def waits(m):
        m.executor.probe_barrier(1000)  # a thread that arrives within a microsecond counts nothing
        return native.team.waited_ns() > 0

    wait_until(lambda: native.run(waits))
    before = native.team.waited_ns()
    native.run(lambda m: m.executor.probe_barrier(1000))
    assert native.team.waited_ns() >= before
