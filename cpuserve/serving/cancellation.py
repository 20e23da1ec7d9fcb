"""The exceptions that end a task or the process."""

from __future__ import annotations

import asyncio

# These exceptions must propagate. All others are failures of a request and get an error response,
# even BaseExceptions: a panic in a Rust library raises one.
CANCELLATIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
