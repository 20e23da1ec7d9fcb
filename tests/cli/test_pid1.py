"""The command as process 1 of a container. The kernel drops signals that it has no handler for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S

AS_ROOT = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
UNSHARE = ["unshare", *AS_ROOT, "--pid", "--fork", "--kill-child"]
# Stops while the command line is imported, which takes most of the time until `serve` installs its
# own handlers.
STAND_STILL = """
import runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "cpuserve.cli.main":
            print("importing", flush=True)
            while True:
                signal.pause()

sys.meta_path.insert(0, Finder())
sys.argv = ["cpuserve", "serve"]
runpy.run_module({module!r}, run_name="__main__")
"""


def child_of(pid):
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
@pytest.mark.parametrize("module", ["cpuserve", "cpuserve.entrypoints.openai.api_server"])
def test_a_signal_ends_process_1_while_it_starts(module, number):
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a PID namespace")
    process = subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", STAND_STILL.format(module=module)],
        **child_options(),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"importing\n"
        os.kill(child_of(process.pid), signal.SIGHUP)  # which ends no server
        os.kill(child_of(process.pid), number)
        assert process.wait(timeout=PATIENCE_S) == 128 + number
    finally:
        process.kill()
        process.communicate()


def test_another_process_is_left_as_it_is():
    code = (
        "import signal; from cpuserve.cli.pid1 import take_signals_as_process_1 as take;"
        "take(); print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert out.stdout == "True\n"
