"""An engine process whose model is the FakeExecutor; `config.model` says how it misbehaves.

"fake", "fake:raise:N" (step N raises), "fake:nan:N" (the first row of step N is NaN), "fake:exit:N"
(the process ends in step N), "fake:crash:N" (it segfaults), "fake:abort:N" (it says why and
aborts), "fake:slow" (20 ms a step), "fake:endless" (a step ends when it is cancelled, and not
before ten minutes), "fake:startup" (a StartupError), "fake:broken" (a bug while loading),
"fake:threads" (no thread is granted), "fake:hang" (loads for ever).
"""

import faulthandler
import os
import sys
import time

from cpuserve.engine import child
from cpuserve.engine.child import exit_now
from cpuserve.errors import ModelError
from tests.helpers.fake_executor import fake_core

__all__ = ["exit_now", "main"]


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
    if kind == "hang":
        time.sleep(600)
    for done in range(0, 101, 10):
        progress("load", done, 100)

    def fault(step, outputs):
        if kind not in ("raise", "nan", "exit", "crash", "abort") or step != int(number):
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
        if kind == "crash":
            faulthandler._sigsegv()
        if kind == "abort":
            print("free(): invalid pointer", file=sys.stderr, flush=True)
            os.abort()

    delay_s = {"slow": 0.02, "endless": 600.0}.get(kind, 0.0)
    return fake_core(config, fault=fault, delay_s=delay_s, eos_ids=[9])


def main(argv=None):
    """The child's main, with `build` in place of build_engine."""
    return child.main(argv, build)
