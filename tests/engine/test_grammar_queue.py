"""Which grammars are compiled, in which order, and how many of them are kept."""

import queue
import sys
import threading

import psutil
import pytest

from cpuserve.engine.grammars import client, grammar_queue
from cpuserve.engine.grammars.grammar_queue import (
    MAX_OF_CALLER,
    MAX_WAITING,
    GrammarQueue,
    QueueFull,
)
from cpuserve.engine.grammars.process import Process
from cpuserve.engine.grammars.worker import MAX_CPU_S
from cpuserve.engine.ipc import Abort
from cpuserve.sampling.structured import StructuredOutputs
from tests.engine.test_grammars import SCHEMA, Engine
from tests.helpers.depth import deep_but
from tests.helpers.patience import wait_until


class Gate:
    """Notes the grammars that the process gets, which wait until the gate opens."""

    def __init__(self, monkeypatch):
        self.texts = []
        self.opened = threading.Event()
        compile_ = Process.compile

        def wait_and_compile(process, grammar):
            self.texts.append(grammar.text)
            self.opened.wait()
            return compile_(process, grammar)

        monkeypatch.setattr(Process, "compile", wait_and_compile)


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.core.close()


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def choice(engine, word, caller=""):
    form = StructuredOutputs(choice=[word])
    return engine.add(structured_outputs=form, caller=caller)


def words(texts):
    return [text.strip('["]') for text in texts]


def taken_and_compiled(jobs):
    caller, job = jobs.take()
    jobs.took(caller, 0.0)
    return job


def test_callers_take_turns_and_the_grammars_of_each_keep_their_order():
    jobs = GrammarQueue()
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        jobs.put(name, name[0])
    assert jobs.drop("a2")
    assert not jobs.drop("a2")
    assert [taken_and_compiled(jobs) for _ in range(5)] == ["a1", "b1", "c1", "a3", "b2"]
    jobs.close()
    assert jobs.take() is None


def test_a_turn_costs_the_time_of_its_compilation():
    jobs = GrammarQueue()
    for name in ("slow1", "slow2", "slow3"):
        jobs.put(name, "slow")
    for number in range(6):
        jobs.put(f"quick{number}", "quick")
    order = []
    for _ in range(9):
        caller, job = jobs.take()
        order.append(job)
        jobs.took(caller, 3.0 if caller == "slow" else 1.0)
    assert [name[0] for name in order] == list("sqqqsqqqs")


def test_a_caller_whose_grammar_compiles_leaves_the_other_place_to_others():
    jobs, taken = GrammarQueue(), queue.SimpleQueue()
    for name in ("a1", "a2"):
        jobs.put(name, "a")
    assert jobs.take() == ("a", "a1")
    other = threading.Thread(target=lambda: taken.put(jobs.take()))
    other.start()  # waits: the last free place is not for caller a
    jobs.put("b1", "b")
    assert taken.get() == ("b", "b1")
    other.join()
    jobs.took("a", 0.0)
    assert jobs.take() == ("a", "a2")


def test_the_queue_and_the_share_of_a_caller_are_bounded():
    jobs = GrammarQueue()
    for i in range(MAX_OF_CALLER):
        jobs.check("a")
        jobs.put(i, "a")
    with pytest.raises(QueueFull, match=f"of this client.* limit is {MAX_OF_CALLER}"):
        jobs.check("a")
    for i in range(MAX_OF_CALLER, MAX_WAITING):
        jobs.check("b")
        jobs.put(i, "b")
    for caller in ("a", "b"):
        with pytest.raises(QueueFull, match=f"{MAX_WAITING} other forms"):
            jobs.check(caller)
    for i in range(MAX_WAITING // 3):  # its share, if three callers wait
        jobs.check("c")
        jobs.put(f"c{i}", "c")
    with pytest.raises(QueueFull, match="other forms"):
        jobs.check("c")
    jobs.check("")  # as LLM does, whose lists of prompts have any number of forms


def test_grammars_of_clients_that_left_are_not_compiled(engine, gate):
    first = choice(engine, "first")
    left = [choice(engine, f"left{i}") for i in range(20)]
    shared = [choice(engine, "shared") for _ in range(2)]
    wait_until(lambda: gate.texts)
    engine.core.handle(Abort([*left, shared[0]]))
    last = choice(engine, "last")
    engine.step()
    gate.opened.set()
    engine.run()
    assert words(gate.texts) == ["first", "shared", "last"]
    assert [engine.text(n) for n in (first, shared[1], last)] == ["first", "shared", "last"]
    assert not set(engine.outputs) & {*left, shared[0]}
    engine.check_idle()


def test_the_grammar_that_compiles_is_dropped_too_and_may_come_back(engine, gate):
    left = choice(engine, "word")
    wait_until(lambda: gate.texts)
    engine.core.handle(Abort([left]))
    engine.step()
    back = choice(engine, "word")
    gate.opened.set()
    engine.run()
    assert words(gate.texts) == ["word", "word"]
    assert engine.text(back) == "word"
    engine.check_idle()


# A schema that needs all of the CPU time of a compilation.
ENDLESS = {
    "type": "string",
    "allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"],
}


def test_a_modest_callers_grammar_is_ready_while_a_greedy_ones_compiles(engine):
    greedy = [engine.json({**ENDLESS, "title": str(i)}, caller="greedy") for i in range(2)]
    wait_until(lambda: len(engine.core._grammars._queue) == 1)
    modest = choice(engine, "modest", caller="modest")
    engine.run(lambda: modest in engine.outputs and engine.last(modest).finish)
    assert engine.text(modest) == "modest"
    assert not set(greedy) & set(engine.outputs), "its compilation has ended first"
    engine.core.handle(Abort(greedy))
    engine.step()


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of children")
@pytest.mark.parametrize("begun", deep_but([True], [False, True]))
def test_a_compilation_for_nobody_ends(engine, begun):
    """Others would wait for all of its CPU time."""
    left = engine.json(ENDLESS)
    grammars = engine.core._grammars
    wait_until(lambda: grammars._process is not None and not grammars._queue)
    wait_until(lambda: psutil.Process(engine.process.pid).children() or not begun)
    engine.core.handle(Abort([left]))
    engine.step()
    after = choice(engine, "after")
    engine.run()
    used = psutil.Process(engine.process.pid).cpu_times()
    assert used.children_user + used.children_system < MAX_CPU_S - 1
    assert engine.text(after) == "after"
    assert left not in engine.outputs


def test_a_full_queue_refuses_new_forms_but_no_known_ones(engine, gate, monkeypatch):
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 12)
    taken = [choice(engine, f"taken{i}", caller=f"first{i}") for i in range(2)]
    wait_until(lambda: len(gate.texts) == 2)
    waiting = [choice(engine, f"w{i}", caller=str(i % 3)) for i in range(12)]
    full = choice(engine, "one too many", caller="0")
    known = choice(engine, "w0", caller="another")
    engine.step()
    (output,) = engine.outputs[full]
    assert (output.finish, output.queue_full, output.fault) == ("error", True, None)
    assert output.error.startswith("The queue is full: ")
    gate.opened.set()
    engine.run()
    assert {engine.last(n).finish for n in (*taken, known, *waiting)} == {"stop"}
    engine.check_idle()


def test_grammars_that_nobody_uses_are_dropped_by_their_bytes(engine, monkeypatch):
    for word in ("a", "b", "c"):
        choice(engine, word)
        engine.run()
    grammars = engine.core._grammars
    assert len(grammars._known) == 3
    assert engine.process.memory > 0
    monkeypatch.setattr(client, "MAX_KEPT_BYTES", 1)
    bound = engine.add(structured_outputs=StructuredOutputs(regex="(ab){30}"))
    engine.run()
    assert engine.text(bound) == "ab" * 30
    assert not grammars._known
    dropped = choice(engine, "a")
    assert not engine.core.scheduler.requests[dropped].ready
    engine.run()
    assert engine.text(dropped) == "a"


def test_while_the_grammars_in_use_take_too_much_no_other_is_compiled(engine, monkeypatch):
    for name in ("MAX_KEPT_BYTES", "MAX_USED_BYTES"):
        monkeypatch.setattr(client, name, 1)
    long = engine.add(structured_outputs=StructuredOutputs(regex="(ab){100}"))
    engine.run_to_ready(long)
    for _ in range(5):
        engine.step()
    other = choice(engine, "other")
    engine.run()
    assert (engine.text(long), engine.text(other)) == ("ab" * 100, "other")
    finished = [n for n, outputs in engine.outputs.items() if outputs[-1].finish]
    assert finished == [long, other]
    assert engine.last(long).finish == "stop"


@pytest.mark.deep  # 4 s
def test_many_large_schemas_leave_the_process_small(engine, monkeypatch):
    """40 clients that posted 160 kB each, one after another, left 1 GB."""
    most = 24 << 20
    monkeypatch.setattr(client, "MAX_KEPT_BYTES", most)
    texts = [
        {**SCHEMA, "properties": {**SCHEMA["properties"], **{f"p{k}_{i}": {} for i in range(900)}}}
        for k in range(24)
    ]
    for text in texts:
        engine.json(text, max_tokens=2)
        engine.run()
    choice(engine, "last")
    engine.run()
    # The last one may come on top, and the allocator keeps a part of what is freed.
    assert engine.process.memory < 2 * most
    assert 1 < len(engine.core._grammars._known) < len(texts)


def test_requests_with_different_salts_share_no_grammar(engine, gate):
    gate.opened.set()
    for salt in (None, None, "a", "a", "b", None):
        form = StructuredOutputs(choice=["one"])
        number = engine.add(structured_outputs=form, cache_salt=salt)
        engine.run()
        assert engine.text(number) == "one"
    assert len(gate.texts) == 3
    engine.check_idle()
