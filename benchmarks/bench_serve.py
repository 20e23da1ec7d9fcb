#!/usr/bin/env python3
"""Load an OpenAI-compatible server; JSON lines. Runs `cpuserve bench serve --json`."""

import sys

from cpuserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", "--json", *sys.argv[1:]]))
