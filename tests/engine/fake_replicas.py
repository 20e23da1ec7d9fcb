"""A ReplicaClient over fake engines that the test controls."""

import asyncio
from typing import ClassVar

from cpuserve.base.errors import EngineDead, StartupError
from cpuserve.engine.ipc import AddRequest, Output, Stats
from cpuserve.engine.process import DiedAtStart
from cpuserve.engine.replicas import ReplicaClient, RestartPolicy
from cpuserve.sampling.params import SamplingParams
from tests.helpers.patience import PATIENCE_S

PROMPT = list(range(11, 75))
FAST = RestartPolicy(first_s=0.01, longest_s=0.02)


class Engine:
    """A fake engine that the test controls. starts: True, False, or "dies".

    disk: the fingerprints of adapters by their paths, "" of one that is broken.
    """

    disk: ClassVar[dict[str, str]] = {}

    def __init__(self, starts=True):
        self.adapters = {}
        self._staged = None
        self.info = {}
        self.stats = Stats()
        self.on_step = None
        self.replicas = ()
        self.prompts = []
        self.starts = starts
        self.closed = self.hung = False
        self.trouble = "the engine hangs"
        self.checked = {"ok": True}
        self._death = asyncio.Event()
        self._gate = asyncio.Event()
        self._how = ""

    @property
    def alive(self):
        return bool(self.info) and not self.closed and not self._death.is_set()

    @property
    def ended(self):
        return not self.alive

    async def wait_ready(self):
        if self.starts == "dies":
            msg = "the engine was killed"
            raise DiedAtStart(msg)
        if not self.starts:
            msg = "no memory"
            raise StartupError(msg)
        self.info = {"vocab_size": 1000}

    async def wait_ended(self):
        await self._death.wait()
        return self._how

    async def generate(self, request, **_):
        self.prompts.append(list(request.prompt_ids))
        yield Output(0, [1])
        await self._gate.wait()
        if self._how:
            raise EngineDead(self._how)
        yield Output(0, [2], "stop")

    async def ask(self, what, **details):
        if what.endswith("_adapter"):
            return await self._change(what, **details)
        return self.checked if what == "check" else {"placement": [len(self.prompts)]}

    async def _change(self, what, name, path="", in_place=False):
        await asyncio.sleep(0)
        if self._how:
            raise EngineDead(self._how)
        staged, self._staged = self._staged, None
        if what == "stage_adapter":
            assert in_place or name not in self.adapters
            if not self.disk[path]:
                return {"error": f"adapter {name}: is broken", "fault": True}
            self._staged = name, self.disk[path]
            return {"fingerprint": self.disk[path]}
        if what == "use_adapter":
            assert staged[0] == name
            self.adapters[name] = staged[1]
        elif what == "unload_adapter":
            self.adapters.pop(name, None)
        return {}

    async def close(self):
        self.closed = True

    def kill(self):
        self.closed = True

    def go_on(self):
        self._gate.set()

    def die(self, how="the engine was killed"):
        self._how = how
        self._death.set()
        self._gate.set()

    def count(self, **stats):
        """Report these statistics, as after a step."""
        self.stats = Stats(**stats)
        if self.on_step is not None:
            self.on_step(self.stats)


def with_fakes(body, count=2, starts=lambda index, life: True, block_size=32, policy=FAST):
    """Run `body(client, engines)`; engines[i] are all that have been replica i."""

    async def main():
        engines = [[] for _ in range(count)]

        def spawn(index, on_progress):
            engines[index].append(Engine(starts(index, len(engines[index]))))
            return engines[index][-1]

        client = ReplicaClient(spawn, count, block_size, policy)
        try:
            await asyncio.wait_for(body(client, engines), PATIENCE_S)
        finally:
            await client.close()
        assert all(engine.closed for lives in engines for engine in lives)

    asyncio.run(main())


async def first_of(client, prompt=PROMPT):
    """Return a stream after its first output has been read."""
    stream = client.generate(AddRequest.of(list(prompt), SamplingParams()))
    await anext(stream)
    return stream
