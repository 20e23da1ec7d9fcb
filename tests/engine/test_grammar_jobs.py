"""Several grammars that compile at the same time: the order of forks and threads, and losses."""

import os
import select
import socket
import threading

import pytest

from cpuserve.engine.grammars import worker
from cpuserve.engine.grammars.messages import Compile, Drop, outbound_frames
from cpuserve.engine.grammars.process import Process
from cpuserve.engine.grammars.worker import NOT_WANTED, Worker
from cpuserve.sampling.structured import StructuredOutputs
from tests.engine.test_grammars import Engine
from tests.helpers.patience import PATIENCE_S, wait_until


class Job:
    """A compilation that is over when the test says so."""

    jobs: dict[str, "Job"]
    error, matcher = "", None

    def __init__(self, number):
        self.number, self.over = number, False
        self.pipe, self._theirs = os.pipe()
        self.jobs[f"{type(self).__name__} {number}"] = self

    def is_over(self):
        if self.over:
            self.close()
        return self.over

    def close(self):
        os.close(self._theirs)
        os.close(self.pipe)

    def result(self):
        return worker._Outcome(prepared="prepared")

    def cancel(self):
        self.error = NOT_WANTED


class Fork(Job):
    def __init__(self, _compiler, wanted, *_rest):
        super().__init__(wanted.number)


class Thread(Job):
    def __init__(self, _compiler, number, *_rest):
        super().__init__(number)


class Served:
    """A Worker with jobs of the test. `begun` has its forks and threads in their order."""

    def __init__(self):
        pairs = [socket.socketpair() for _ in range(2)]
        self.sockets = [*pairs[0], *pairs[1]]
        self.ours = pairs[0][0]
        self.worker = Worker(pairs[0][1], pairs[1][1], -1)
        self.worker._error, self.worker._compiler = "", None
        self.worker._background_cpus = None
        self.worker._memory_of = worker.Memory()
        self.frames = outbound_frames()

    @property
    def begun(self):
        return list(Job.jobs)

    def ask(self, *messages):
        for message in messages:
            self.worker._handle(message)
        self.worker._advance_jobs()

    def end(self, name):
        Job.jobs[name].over = True
        self.worker._advance_jobs()

    def replies(self):
        if not select.select([self.ours], [], [], 0)[0]:
            return []
        return [
            reply.number for reply in self.frames.arrived(self.ours.recv_into(self.frames.space))
        ]


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(Job, "jobs", {}, raising=False)
    monkeypatch.setattr(worker, "_Trial", Fork)
    monkeypatch.setattr(worker, "_Compilation", Thread)
    made = Served()
    yield made
    for job in Job.jobs.values():
        if not job.over:
            job.close()
    made.worker._selector.close()
    for sock in made.sockets:
        sock.close()


def asked(number):
    return Compile(number, "regex", "a")


def test_a_fork_waits_for_no_fork_and_a_thread_for_no_thread(served):
    served.ask(asked(1), asked(2))
    assert served.begun == ["Fork 1", "Fork 2"]
    served.end("Fork 2")
    served.end("Fork 1")
    assert served.begun[2:] == ["Thread 2", "Thread 1"]
    served.end("Thread 1")
    assert served.replies() == [1]
    served.end("Thread 2")
    assert served.replies() == [2]


def test_nothing_forks_while_a_thread_compiles_and_then_forks_are_first(served):
    served.ask(asked(1), asked(2))
    served.end("Fork 1")
    served.ask(asked(3))
    served.end("Fork 2")
    assert served.begun == ["Fork 1", "Fork 2", "Thread 1"]
    served.end("Thread 1")
    assert served.begun[3:] == ["Fork 3", "Thread 2"]


def test_a_grammar_that_waits_for_its_thread_can_be_dropped(served):
    served.ask(asked(1), asked(2))
    served.end("Fork 1")
    served.ask(asked(3))
    served.end("Fork 2")
    served.ask(Drop([2], []))
    assert served.replies() == [2]
    served.end("Thread 1")
    assert served.begun[3:] == ["Fork 3"]


def test_a_grammar_of_a_process_that_another_thread_has_replaced_compiles_again(monkeypatch):
    engine, ready, compile_ = Engine(), threading.Event(), Process.compile
    late, processes = [], []

    def compile_beside(process, grammar):
        processes.append(process)
        if "late" in grammar.text and not late:
            late.append(grammar)
            error = compile_(process, grammar)
            assert ready.wait(PATIENCE_S)
            return error
        if len(processes) == 2:
            process.end()
        return compile_(process, grammar)

    monkeypatch.setattr(Process, "compile", compile_beside)
    form = StructuredOutputs(choice=["late"])
    first = engine.add(structured_outputs=form, caller="a")
    wait_until(lambda: late)
    other = StructuredOutputs(choice=["other"])
    second = engine.add(structured_outputs=other, caller="b")
    engine.run(lambda: second in engine.outputs and engine.last(second).finish)
    ready.set()
    engine.run()
    assert [engine.text(number) for number in (first, second)] == ["late", "other"]
    assert len(processes) == 4
    assert engine.process is processes[-1] is processes[-2]
    engine.core.close()
