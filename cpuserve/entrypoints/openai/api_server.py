"""`python -m cpuserve.entrypoints.openai.api_server`: `cpuserve serve` by the name vLLM has."""

from __future__ import annotations

import sys

from cpuserve.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
