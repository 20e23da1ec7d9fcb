#!/usr/bin/env python3
"""Start time and memory of a server; JSON lines. Runs `cpuserve bench load --json`."""

import sys

from cpuserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "load", "--json", *sys.argv[1:]]))
