"""The exceptions that end a task or the process."""

from __future__ import annotations

import asyncio

# These exceptions must propagate. All other exceptions are failures of a request
# and get an error response, even a BaseException: a panic in a Rust library raises a BaseException.
CANCELLATIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
