"""`python -m cpuserve`, and the command `cpuserve`."""

import sys

from cpuserve.cli.interrupt import EXIT_INTERRUPTED, end_at_interrupt, exit_interrupted
from cpuserve.cli.pid1 import ignore_hangups, take_signals_as_process_1


def main() -> int:
    """Run one command and return the exit code."""
    end_at_interrupt()
    if sys.argv[1:2] == ["serve"]:
        ignore_hangups()
    take_signals_as_process_1()
    from cpuserve.cli.main import main as run

    code = run()
    if code == EXIT_INTERRUPTED:
        exit_interrupted()
    return code


if __name__ == "__main__":
    sys.exit(main())
