"""A platform and a model family in a package of their own: what a plug-in needs, and no more."""

import os
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from cpuserve.config.engine import Decision, Resolved
from cpuserve.config.options import EngineOptions
from cpuserve.models.decoders import Llama
from cpuserve.platforms import Capabilities, Host, ModelFacts
from cpuserve.platforms.cpu import CpuPlatform


class SamplePlatform:
    """The built-in platform, one request at a time. SAMPLE_PLATFORM=absent makes it unavailable."""

    name = "sample"
    device_type = "cpu"

    def __init__(self) -> None:
        self._cpu = CpuPlatform()

    def probe(self) -> tuple[bool, str]:
        """Whether this platform can run here, and why or why not."""
        if os.environ.get("SAMPLE_PLATFORM") == "absent":
            return False, "the sample device is absent"
        return True, "the sample device is there"

    def host(self) -> Host:
        """The machine."""
        return self._cpu.host()

    def capabilities(self, host: Host) -> Capabilities:
        """What can be asked for on `host`."""
        return self._cpu.capabilities(host)

    def kernels(self, isa: str) -> Mapping[str, str]:
        """Kernel name -> level."""
        return self._cpu.kernels(isa)

    def resolve(
        self, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
    ) -> Resolved:
        """The built-in decisions with one of our own."""
        one = msgspec.structs.replace(options, max_num_seqs=1)
        resolved = self._cpu.resolve(one, sources, facts, host)
        config = msgspec.structs.replace(resolved.config, platform=self.name)
        ours = Decision("platform", options.platform, "plug-in", self.name, "one at a time")
        others = (d for d in resolved.decisions if d.field != "platform")
        return Resolved(config, (ours, *others))


SampleModel = replace(Llama, about="A Llama under another name.")
