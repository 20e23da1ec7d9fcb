#!/usr/bin/env python3
"""Time until ready, and memory; JSON lines. The same as `cpuserve bench load --json`."""

import sys

from cpuserve.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "load", "--json", *sys.argv[1:]]))
