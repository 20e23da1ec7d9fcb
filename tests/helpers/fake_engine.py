"""An engine process whose model is the FakeExecutor; `config.model` says how it misbehaves.

"fake", "fake:raise:N" (step N raises), "fake:nan:N" (the first row of step N is NaN), "fake:exit:N"
(the process ends in step N), "fake:logs:N" (it logs a failure that it survives, and later ends
without a message), "fake:crash:N" (it segfaults), "fake:abort:N" (it says why and aborts),
"fake:slow" (20 ms a step), "fake:endless" (a step ends when it is cancelled, or after ten minutes),
"fake:startup" (a StartupError), "fake:broken" (a bug while loading), "fake:threads" (no thread is
granted), "fake:hang" (loads for ever), "fake:dies" (the process ends while it loads), "fake:busy"
(a step uses the CPU until it is cancelled), "fake:moving" (like "fake:endless", but the executor
reports progress), "fake:once:FILE" (makes FILE; loads for ever if FILE exists).
"""

import faulthandler
import itertools
import os
import sys
import time
from pathlib import Path

from cpuserve.base.errors import ModelError
from cpuserve.base.log import get_logger
from cpuserve.engine import child
from tests.helpers.fake_executor import fake_core


def build(config, progress, team):
    """An EngineCore over a FakeExecutor."""
    kind, _, number = config.model.removeprefix("fake:").partition(":")
    if kind == "startup":
        msg = "the model is not there"
        raise ModelError(msg)
    if kind == "broken":
        msg = "a bug"
        raise ZeroDivisionError(msg)
    if kind == "threads":
        msg = "can't start new thread"
        raise RuntimeError(msg)
    if kind == "dies":
        os._exit(9)
    if kind == "hang" or (kind == "once" and Path(number).exists()):
        time.sleep(600)
    if kind == "once":
        Path(number).touch()
    get_logger("engine").debug("a debug line of the engine")
    get_logger("engine").warning("a warning of the engine")
    for done in range(0, 101, 10):
        progress("load", done, 100)

    def fault(step, outputs):
        if kind not in ("raise", "nan", "exit", "crash", "abort", "logs") or step != int(number):
            return
        if kind == "raise":
            msg = "step goes wrong"
            raise RuntimeError(msg)
        if kind == "nan":
            outputs.tokens[0] = -1
        if kind == "exit":
            print("a line", file=sys.stderr, flush=True)
            time.sleep(0.05)
            print("going down with code 7", file=sys.stderr, flush=True)
            os._exit(7)
        if kind == "logs":
            try:
                raise ValueError(kind)
            except ValueError:
                get_logger("engine").exception("a failure\nthat it survives")
            os._exit(7)
        if kind == "crash":
            faulthandler._sigsegv()
        if kind == "abort":
            print("free(): invalid pointer", file=sys.stderr, flush=True)
            os.abort()

    delay_s = {"slow": 0.02, "endless": 600.0, "moving": 600.0}.get(kind, 0.0)
    core = fake_core(config, fault=fault, delay_s=delay_s, eos_ids=[9])
    if kind == "moving":
        core.executor.progress = itertools.count().__next__
    if kind == "busy":
        core.executor.step = lambda arrays: spin(core.executor)
    return core


def spin(executor):
    """A step that uses CPU time, but reports no progress."""
    while not executor.cancelled:
        sum(range(1000))
    msg = "the step was cancelled"
    raise RuntimeError(msg)


def main(argv=None):
    """The child's main, with `build` in place of build_engine."""
    return child.main(argv, build)
