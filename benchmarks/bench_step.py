#!/usr/bin/env python3
"""Rates of engine steps without HTTP; JSON lines. Runs `cpuserve bench step --json`."""

import sys

from cpuserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", "--json", *sys.argv[1:]]))
