"""Ctrl-C, which a terminal sends to every process of a command, prints no traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpuserve.base.children import python_command, start_child
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny import tiny_model

INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
TAKES = "from cpuserve.base.held_signals import take_signals\n"


def ended(code):
    child = start_child(python_command(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=PATIENCE_S)
    return out.decode(), err.decode(), child.returncode


def test_signals_wait_while_a_child_starts():
    assert ended(INTERRUPTED + "print('started')") == ("started\n", "", 0)
    reset = "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    out, err, code = ended(INTERRUPTED + reset + TAKES + "take_signals(); print('started')")
    assert (out, err, code) == ("", "", -signal.SIGINT)


def command(name, model):
    return {
        "serve": ["serve", model, "--port", "0"],
        "generate": ["generate", model, "--prompt", "hello", "--max-tokens", "900"],
        "bench": ["bench", "throughput", model, "--output-len", "16"],
    }[name]


# Python itself prints a traceback if Ctrl-C arrives before it runs a line of the command.
MAIN = """
import sys
from cpuserve.__main__ import main
from cpuserve.cli.interrupt import end_at_interrupt
end_at_interrupt()
print("begins", flush=True)
sys.exit(main())
"""


@pytest.mark.deep
@pytest.mark.parametrize("name", ["serve", "generate", "bench"])
def test_an_interrupt_at_any_moment_of_a_start_prints_no_traceback(name):
    for moment in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *command(name, str(tiny_model("llama")))],
            **child_options(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout.readline() == "begins\n"
            time.sleep(0.05 + 0.2 * moment)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode in (0, 130, -signal.SIGINT), err
        assert "Traceback" not in err
        assert "KeyboardInterrupt" not in err
