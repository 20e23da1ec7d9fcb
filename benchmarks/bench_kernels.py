#!/usr/bin/env python3
"""Rate of every matrix and operation of a model: runs `cpuserve bench kernels --json`."""

import sys

from cpuserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "kernels", "--json", *sys.argv[1:]]))
