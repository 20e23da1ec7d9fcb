"""Target: the requests of all dialects that run a model, to a real engine with a tiny model.

Here sampling fields, grammars and token ids reach the scheduler, the grammar process and the
kernels, so a case takes longer than with the scripted engines of `dialects.py`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cpuserve.llm import LLM
from tests.api.fakes import make_context, tokenizer
from tests.api.live import Live
from tests.api.post_routes import HI, RUNS
from tests.api.tools import template
from tests.fuzz.dialects import HttpBench
from tests.fuzz.operations import operations
from tests.helpers.patience import until
from tests.helpers.tiny import tiny_model

CONTEXT = 256


class EngineBench(HttpBench):
    """The operations that generate text, and a server with an engine in this process."""

    most_bytes = 1 << 30

    def __init__(self) -> None:
        some = [each for each in operations() if each.path in RUNS and each.pooling == "none"]
        super().__init__(some)
        model = str(tiny_model("llama"))
        self._llm = LLM(model, max_model_len=CONTEXT, max_num_seqs=4, kv_cache_memory_bytes=1 << 22)

    def close(self) -> None:
        """End the server and the engine."""
        super().close()
        self._llm.close()

    def _context(self) -> Any:
        context = make_context(self._llm._client)
        context.max_model_len = CONTEXT
        context.set_ready(tokenizer(), template())
        return context

    def _speak(self, server: Live, text: str) -> None:
        """Nothing: the model says what it says."""

    async def _is_sane(self, server: Live, path: str) -> None:
        await until(lambda: server.context.active_sequences == 0)
        hi = json.dumps({"messages": HI, "max_tokens": 2}).encode()
        await self._answers(server, "POST", "/v1/chat/completions", hi)
        await until(lambda: not server.engine.stats.running and not server.engine.stats.waiting)
        assert await asyncio.wait_for(server.engine.ask("check"), 60) == {"ok": True}
        self._quiet()
