"""An engine with a real scheduler and KV cache, and a model that writes the text a test sets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec

from cpuserve.core.step import RowResult
from cpuserve.engine.core import EngineCore
from cpuserve.engine.ipc import AddRequest, Output, Stats
from tests.helpers.fake_executor import FakeExecutor, FakeModel, fake_config

VOCAB = 512
BLOCK = 32


class SayingModel(FakeModel):
    """Writes `saying`; it checks that the cache has the prompt that the sampler got."""

    saying: Sequence[int] = ()

    def _row(self, chunk, row):
        prompt, output = self.slots[chunk.slot].prompt_ids, self.slots[chunk.slot].output_ids
        if not output:
            seen = self._history(chunk, chunk.start + row.index + 1)
            assert seen == prompt, "the cached blocks are those of another prompt"
        token = self.saying[len(output)]
        output.append(token)
        return RowResult(token)


class CachedEngine:
    """An EngineClient over an EngineCore with `num_tokens` tokens of KV cache.

    It runs one request at a time. saying: the ids of the next response, before the id `end`.
    """

    alive, ended, trouble, replicas = True, False, "", ()

    def __init__(self, num_tokens: int, max_model_len: int, end: int) -> None:
        config = fake_config(
            block_size=BLOCK,
            kv_blocks=num_tokens // BLOCK,
            max_model_len=max_model_len,
            max_num_batched_tokens=4096,
        )
        executor = FakeExecutor(config)
        executor.model = SayingModel(config.kv_blocks, BLOCK, config.max_num_seqs, 4096)
        self.core = EngineCore(config, executor, vocab=VOCAB, eos_ids=[end])
        self.end = end
        self.saying: list[int] = []
        self.prompts: list[list[int]] = []
        self._number = 0

    @property
    def info(self) -> dict[str, object]:
        return self.core.info()

    @property
    def stats(self) -> Stats:
        return self.core.stats

    async def wait_ready(self) -> None:
        pass

    async def generate(self, request: AddRequest, **_: object) -> AsyncGenerator[Output, None]:
        self._number += 1
        self.prompts.append(request.prompt_ids.tolist())
        self.core.executor.model.saying = [*self.saying, self.end]
        self.core.handle(msgspec.structs.replace(request, id=self._number))
        finish = None
        while finish is None:
            for output in self.core.step().outputs:
                assert output.id == self._number
                finish = output.finish
                yield output
        self.core.scheduler.check_invariants()

    async def ask(self, what: str, **details: object) -> dict[str, object]:
        return self.core.check()

    async def close(self) -> None:
        self.core.close()
