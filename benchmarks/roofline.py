#!/usr/bin/env python3
"""Memory bandwidth, dot-product peaks and barrier latency of this machine; JSON lines.

usage: roofline.py [--isa LEVEL] [--rounds N]
"""

import sys

from cpuserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "roofline", "--json", *sys.argv[1:]]))
