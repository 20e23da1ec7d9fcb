#!/usr/bin/env python3
"""Every matrix and operation of a model against its roof: `cpuserve bench kernels --json`."""

import sys

from cpuserve.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "kernels", "--json", *sys.argv[1:]]))
