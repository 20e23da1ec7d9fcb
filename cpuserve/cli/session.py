"""The engine of `cpuserve chat` and `generate`, in this process."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.cli.terminal import note, say
from cpuserve.errors import ConfigError, RequestError
from cpuserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from cpuserve.engine.inline import InlineClient
    from cpuserve.prepare import Prepared
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded engine and its tokenizer."""

    prepared: Prepared
    client: InlineClient
    tokenizer: Tokenizer
    template: ChatTemplate

    def params(self, args: argparse.Namespace, max_tokens: int | None) -> SamplingParams:
        """Return the model's defaults updated with the flags; answers have at most `max_tokens`."""
        defaults = dict(self.prepared.resolved.config.default_sampling)
        lengths = [n for n in (max_tokens, defaults.pop("max_tokens", None)) if n is not None]
        return sampling_params(args, {"max_tokens": min(lengths, default=None), **defaults})

    async def stream(self, ids: list[int], params: SamplingParams, *, turn: bool = False) -> str:
        """Print the completion of `ids` while it is generated, and return it.

        turn: `ids` are a chat. Of formats with a header for each message, only texts are printed.
        """
        from cpuserve.serving.events import Text
        from cpuserve.serving.text import TextProcessor
        from cpuserve.serving.tools.learn import learn_format

        text = ""
        started = time.perf_counter()
        first, count = 0.0, 0
        processor = TextProcessor(self.tokenizer, ids, params)
        found = learn_format(self.template) if turn else None
        if found is not None and found.whole is not None:
            parser = found.whole.without_calls().parser(0)
            processor.find_calls(parser, found.shown_ids(self.tokenizer))
        async with aclosing(self.client.generate(ids, params)) as outputs:
            async for output in outputs:
                first = first or time.perf_counter()
                events, num_tokens = processor.push(output)
                count += num_tokens
                piece = "".join(event.text for event in events if isinstance(event, Text))
                text += piece
                say(piece, end="")
                if processor.finish is not None:
                    break
        if sys.stderr.isatty() and count > 1:
            rate = (count - 1) / max(1e-9, time.perf_counter() - first)
            say()
            note(f"{len(ids)} prompt tokens in {first - started:.2f} s, then {rate:.1f} tokens/s")
        return text


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, int | float | None]
) -> SamplingParams:
    """Return `defaults` updated with the sampling flags; ConfigError for a value out of range."""
    given = {
        name: getattr(args, name)
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if getattr(args, name) is not None
    }
    try:
        return SamplingParams(**{**defaults, **given})
    except RequestError as e:
        raise ConfigError(str(e)) from None
