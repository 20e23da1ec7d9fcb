"""The model of `cpuserve chat` and `generate`, in this process."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve.cli.terminal import note, say, whisper
from cpuserve.errors import ConfigError, RequestError
from cpuserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from cpuserve.serving.call import GenerateCall
    from cpuserve.serving.context import ModelContext


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model, which responds as the endpoints of a server do."""

    name: str
    context: ModelContext

    async def stream(self, call: GenerateCall) -> str:
        """Print the response to `call` while it is generated, and return it.

        Raises:
            RequestError: the call is invalid, or the engine failed.
        """
        from cpuserve.serving.events import Text, Thought
        from cpuserve.serving.generate import prepare
        from cpuserve.serving.registry import Lease, Served

        text, first, thinks = "", 0.0, False
        served = Served(self.context, self.context.model_names[0], None, Lease())
        generation = await prepare(served, call, num_bytes=0)
        started = time.perf_counter()
        async with aclosing(generation.events()) as batches:
            async for events in batches:
                first = first or time.perf_counter()
                for event in events:
                    if isinstance(event, Thought):
                        whisper(event.text)
                        thinks = True
                    elif isinstance(event, Text) and event.text:
                        if thinks and not text:
                            whisper("\n\n")
                        text += event.text
                        say(event.text, end="")
        usage = generation.usage()
        if sys.stderr.isatty() and usage.completion > 1:
            rate = (usage.completion - 1) / max(1e-9, time.perf_counter() - first)
            say()
            note(
                f"{usage.prompt} prompt tokens in {first - started:.2f} s, then {rate:.1f} tokens/s"
            )
        return text


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a call that sampling flags set; ConfigError for one out of range."""
    given = {
        name: getattr(args, name)
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if getattr(args, name) is not None
    }
    try:
        SamplingParams(**given)
    except RequestError as e:
        raise ConfigError(str(e)) from None
    return given
