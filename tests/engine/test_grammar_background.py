"""Compilation yields to streams, and masks are filled at the engine's priority."""

import os
import select
import sys
import threading

import pytest

from cpuserve.engine.grammars.background import NICE
from cpuserve.engine.grammars.worker import _Compilation
from tests.engine.test_grammars import Engine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads")


def priority():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_process_fills_masks_at_the_priority_and_on_the_cpus_of_the_engine():
    cpus = sorted(os.sched_getaffinity(0))
    engine = Engine(cpus=cpus[-1:], frontend_cpus=cpus[:1])
    engine.json()
    engine.run()
    pid = engine.process.pid
    assert os.sched_getaffinity(pid) == set(cpus[-1:])
    assert os.getpriority(os.PRIO_PROCESS, pid) == priority()
    assert engine.core._grammars._start.background_cpus == cpus[:1]
    engine.core.close()


def test_without_a_front_end_of_its_own_grammars_compile_on_the_cpus_of_the_engine():
    cpus = sorted(os.sched_getaffinity(0))
    for given, want in (({"cpus": cpus[:1]}, cpus[:1]), ({}, None)):
        engine = Engine(frontend_cpus=None, **given)
        engine.json()
        assert engine.core._grammars._start.background_cpus == want
        engine.core.close()


def test_the_process_starts_at_the_engines_priority_beside_its_cpus(tmp_path, monkeypatch):
    """The first form waits for that. The module is replaced by one that notes its thread's."""
    note = tmp_path / "note"
    name = "notes_its_priority"
    (tmp_path / f"{name}.py").write_text(
        "import os, pathlib, threading\n"
        "nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
        "cpus = sorted(os.sched_getaffinity(0))\n"
        "def main():\n"
        f"    pathlib.Path({str(note)!r}).write_text(f'{{nice}} {{cpus}}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("cpuserve.engine.grammars.process.MODULE", name)
    cpus = sorted(os.sched_getaffinity(0))
    engine = Engine(cpus=cpus[-1:], frontend_cpus=cpus[:1])
    number = engine.json()
    engine.run()
    assert engine.last(number).finish == "error"
    engine.core.close()
    assert note.read_text() == f"{priority()} {cpus[:1]}"


class FakeCompiler:
    """Notes the priority and the CPUs with which it compiles."""

    words = 1

    def compile(self, prepared):
        self.seen = priority(), os.sched_getaffinity(0)
        return self

    def deep_copy(self):
        return self

    def fill(self, matcher, mask, stop_ids):
        return False


def test_what_passed_the_trial_is_compiled_in_the_background():
    compiler, cpus = FakeCompiler(), sorted(os.sched_getaffinity(0))[:1]
    job = _Compilation(compiler, 1, "a grammar", cpus)
    select.select([job.pipe], [], [])
    assert job.is_over()
    assert job.matcher is compiler
    assert compiler.seen == (min(priority() + NICE, 19), set(cpus))
