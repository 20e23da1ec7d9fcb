"""The process for grammars ends or stands still: streams go on, and answers with grammars too."""

import os
import signal
from pathlib import Path

import pytest

from cpuserve.engine.core import LATE_S
from cpuserve.engine.grammars import client, process
from cpuserve.engine.grammars.process import Process
from cpuserve.engine.ipc import Abort
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.structured import StructuredOutputs
from tests.engine.test_grammars import PROMPT, Engine
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import reference
from tests.helpers.patience import PATIENCE_S, wait_until

LONG = StructuredOutputs(regex="(ab){100}")
SIGNALS = [signal.SIGSTOP, signal.SIGKILL]


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.core.close()


def running(engine, **params):
    """A request whose answer has begun."""
    number = engine.add(structured_outputs=LONG, **params)
    engine.run(lambda: len(engine.outputs.get(number, ())) == 3)
    return number


def send(engine, number):
    """Send a signal to the process between two fills."""
    pid = engine.process.pid
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize("number", deep_but([signal.SIGKILL], SIGNALS), ids=lambda n: n.name)
def test_streams_go_on_and_the_answer_continues_in_another_process(engine, number):
    bound = running(engine)
    free = engine.add(max_tokens=60, ignore_eos=True)
    pid = send(engine, number)
    engine.run(lambda: len(engine.outputs.get(free, ())) == 60)
    assert engine.tokens(free) == reference(PROMPT, SamplingParams(max_tokens=60), free, 60)
    # One more token may come of a mask that was filled before.
    assert len(engine.outputs[bound]) <= 4 or number == signal.SIGKILL
    engine.run()
    assert engine.text(bound) == "ab" * 100
    assert engine.last(bound).finish == "stop"
    assert engine.process.pid != pid
    engine.check_idle()


@pytest.mark.deep
@pytest.mark.parametrize("number", deep_but([signal.SIGSTOP], SIGNALS), ids=lambda n: n.name)
def test_an_answer_alone_continues_too_and_one_that_has_not_begun_begins(engine, number):
    bound = running(engine)
    send(engine, number)
    after = engine.add(structured_outputs=LONG)  # its grammar is known
    engine.run()
    assert [engine.text(n) for n in (bound, after)] == ["ab" * 100] * 2
    engine.check_idle()


@pytest.mark.deep
def test_prompts_with_and_without_a_form_begin_while_the_process_stands_still(engine):
    bound = running(engine)
    send(engine, signal.SIGSTOP)
    late = engine.add(structured_outputs=LONG)
    free = engine.add(max_tokens=5, ignore_eos=True)
    engine.run(lambda: free in engine.outputs and engine.last(free).finish)
    assert late not in engine.outputs
    assert engine.last(bound).finish is None
    engine.run()
    assert [engine.text(n) for n in (bound, late)] == ["ab" * 100] * 2
    engine.check_idle()


@pytest.mark.deep
def test_steps_that_can_run_nothing_wait_for_the_process(monkeypatch):
    """Also where a request without a form waits for the place of one with a form."""
    engine = Engine(max_num_seqs=1)
    running(engine)
    free = engine.add(max_tokens=5, ignore_eos=True)
    send(engine, signal.SIGSTOP)
    waits, settle = [], client.Grammars.settle

    def noted(grammars, wait_s):
        waits.append(wait_s)
        return settle(grammars, wait_s)

    with monkeypatch.context() as patched:
        patched.setattr(process, "REPLY_S", PATIENCE_S)
        patched.setattr(client.Grammars, "settle", noted)
        engine.run(lambda: engine.core.scheduler.masks_late)
        for _ in range(5):
            waits.clear()
            engine.step()
            assert max(waits) == LATE_S
    engine.run()
    assert len(engine.tokens(free)) == 5
    engine.core.close()


def test_a_process_that_stands_still_while_it_compiles_is_replaced(engine):
    first = engine.add(structured_outputs=LONG)
    engine.run()
    pid = send(engine, signal.SIGSTOP)
    other = engine.add(structured_outputs=StructuredOutputs(choice=["yes"]))
    engine.run()
    assert engine.text(other) == "yes"
    assert engine.process.pid != pid
    assert engine.last(first).finish == "stop"


@pytest.mark.deep
def test_grammars_are_compiled_again_also_where_they_took_too_much_memory(engine, monkeypatch):
    """That may be why the system ended the process."""
    numbers = [running(engine), engine.add(structured_outputs=StructuredOutputs(regex="(cd){99}"))]
    engine.run(lambda: len(engine.outputs.get(numbers[1], ())) == 3)
    for name in ("MAX_KEPT_BYTES", "MAX_USED_BYTES"):
        monkeypatch.setattr(client, name, 0)
    engine.core._grammars._live.memory = 1 << 20
    engine.core._grammars._forget_old()
    assert not engine.core._grammars._room.is_set()
    send(engine, signal.SIGKILL)

    def over():
        engine.step()
        return all(engine.last(n).finish for n in numbers)

    wait_until(over, "they stand still", poll_s=0.0)
    assert [engine.text(n) for n in numbers] == ["ab" * 100, "cd" * 99]
    engine.check_idle()


@pytest.mark.deep
def test_an_answer_survives_one_end_of_the_process_but_no_second_one(engine):
    """Its grammar may be what ends the process."""
    bound = running(engine)
    for _ in range(2):
        pid = send(engine, signal.SIGKILL)
        done = len(engine.outputs[bound])
        engine.run(
            lambda done=done: len(engine.outputs[bound]) > done + 3 or not engine.core.has_work
        )
    assert engine.last(bound).finish == "error"
    assert engine.last(bound).fault is None
    assert engine.last(bound).unavailable
    assert "the process for grammars has ended, as it did before" in engine.last(bound).error
    again = engine.add(structured_outputs=LONG)
    engine.run()
    assert engine.text(again) == "ab" * 100
    assert engine.process.pid != pid
    engine.check_idle()


@pytest.mark.deep
def test_a_grammar_that_cannot_be_compiled_again_ends_its_answers_alone(engine, monkeypatch):
    bound = running(engine)
    free = engine.add(max_tokens=60, ignore_eos=True)
    compile_ = Process.compile
    monkeypatch.setattr(
        Process,
        "compile",
        lambda process, grammar: (compile_(process, grammar) and "") or "no luck",
    )
    send(engine, signal.SIGKILL)
    engine.run()
    assert engine.last(bound).finish == "error"
    assert "no luck" in engine.last(bound).error
    assert engine.last(bound).fault == "structured_outputs"
    assert not engine.last(bound).unavailable
    assert len(engine.tokens(free)) == 60
    engine.check_idle()


@pytest.mark.deep
def test_a_request_that_leaves_while_its_process_stands_still_holds_up_nothing(engine):
    bound = running(engine)
    send(engine, signal.SIGSTOP)
    for _ in range(3):
        engine.step()
    engine.core.handle(Abort([bound]))
    other = engine.add(structured_outputs=StructuredOutputs(choice=["yes"]))
    engine.run()
    assert engine.text(other) == "yes"
    engine.check_idle()


@pytest.mark.deep
def test_preempted_and_waiting_answers_survive_too():
    engine = Engine(kv_blocks=24, max_model_len=96)
    numbers = [engine.add(structured_outputs=LONG, max_tokens=80) for _ in range(6)]
    engine.run(lambda: len(engine.outputs.get(numbers[0], ())) > 20)
    os.kill(engine.process.pid, signal.SIGSTOP)
    engine.run()
    for number in numbers:
        assert ("ab" * 100).startswith(engine.text(number))
        assert engine.last(number).finish in ("stop", "length")
    engine.check_idle()
    engine.core.close()


@pytest.mark.deep
def test_the_stopped_process_is_gone(engine):
    running(engine)
    pid = send(engine, signal.SIGSTOP)
    engine.run()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
