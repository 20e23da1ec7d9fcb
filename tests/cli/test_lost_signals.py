"""A signal that arrives while Python drops exceptions is not lost."""

import subprocess
import sys

import pytest

from cpuserve.base.lost_signals import sent_again
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S

# The signal arrives in a finalizer, twice; then the program waits for it for ever.
PROGRAM = """
import os, signal, sys, time
{setup}

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.{signal})
        for _ in range(1000):
            pass

with context:
    try:
        for _ in range(2):
            Finalized()
        print("it goes on", flush=True)
        time.sleep(1000)
    except BaseException as error:
        print(type(error).__name__, flush=True)
"""
SETUPS = {
    "SIGINT": "from cpuserve.cli.interrupt import interrupts\ncontext = interrupts()",
    "SIGTERM": "from cpuserve.api.lifecycle.serve import _stop_signals_raise\n"
    "context = _stop_signals_raise()",
}


@pytest.mark.parametrize("name", SETUPS)
def test_a_signal_in_a_finalizer_ends_the_program(name):
    program = PROGRAM.format(setup=SETUPS[name], signal=name)
    done = subprocess.run(
        [sys.executable, "-c", program],
        **child_options(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    raised = {"SIGINT": "KeyboardInterrupt", "SIGTERM": "_Stopped"}[name]
    assert done.stdout.splitlines()[-1] == raised
    assert "Exception ignored" not in done.stderr


class Stopped(BaseException):
    """The exception of a handler."""


class Field:
    """An attribute; a signal arrives while its class is made."""

    def __init__(self, error):
        self.error = error

    def __set_name__(self, owner, name):
        raise self.error


@pytest.mark.parametrize("error", [Stopped, ValueError])
def test_python_3_11_wraps_no_exception_of_a_handler_in_another(error):
    # From 3.12 on, Python wraps none. Other exceptions stay as they are.
    number_of = {Stopped: 2}
    with (
        pytest.raises((Stopped, RuntimeError, ValueError)) as found,
        sent_again(lambda raised: number_of.get(type(raised))),
    ):
        type("Made", (), {"field": Field(error())})
    assert isinstance(found.value, Stopped) == (error is Stopped)
