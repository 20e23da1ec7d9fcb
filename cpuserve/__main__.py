"""`python -m cpuserve`, and the command `cpuserve`."""

import sys

from cpuserve.cli.pid1 import take_signals_as_process_1


def main() -> int:
    """Run one command and return the exit code."""
    take_signals_as_process_1()
    from cpuserve.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
