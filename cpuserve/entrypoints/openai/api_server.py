"""Run `cpuserve serve` as a module with the name of the server module in vLLM."""

from __future__ import annotations

import sys

from cpuserve.cli.pid1 import ignore_hangups, take_signals_as_process_1

if __name__ == "__main__":
    ignore_hangups()
    take_signals_as_process_1()
    from cpuserve.cli.main import main

    sys.exit(main(["serve", *sys.argv[1:]]))
