"""`python -m tests.api.explore_schema`: schemathesis over /openapi.json of a live server.

It needs the program `schemathesis`, from the package of that name. The server is the app over a
scripted engine, on a free port of 127.0.0.1. Each operation gets --examples generated requests.
The run fails on a 5xx status, and on a response that the schema does not describe. --path REGEX
limits the operations.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.api.live import live

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# It does not end.
ENDLESS = "/models/sse"


async def explore(examples: int, path: str, seed: int) -> int:
    """Run schemathesis and return its exit code."""
    async with live() as server:
        command = [
            *("schemathesis", "run", f"http://127.0.0.1:{server.port}/openapi.json"),
            *("--max-examples", str(examples), "--seed", str(seed), "--checks", ",".join(CHECKS)),
            *("--include-path-regex", path, "--exclude-path", ENDLESS),
            *("--phases", "examples,coverage,fuzzing", "--request-timeout", "60"),
            *("--generation-deterministic", "--suppress-health-check", "all"),
        ]
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait()


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--path", default=".")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return asyncio.run(explore(args.examples, args.path, args.seed))


if __name__ == "__main__":
    sys.exit(main())
